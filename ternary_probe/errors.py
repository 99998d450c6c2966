"""The one exception users are meant to read: a sentence that names the input and the mend."""

from __future__ import annotations


class ProbeError(Exception):
    """A user's input cannot be used; the message names the input and what to do about it.

    The command line prints it as one line and exits with code 2. Library users can catch it as the common base class.
    """
