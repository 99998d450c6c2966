"""From a record to something a person reads: terminal, Markdown, figures. Importing this package costs nothing.

``terminal`` needs rich, ``figures`` needs matplotlib; both are imported only when their module is. What is shown is
decided once, in ``leverage_sheet``, ``perplexity_sheet`` and ``inspect_sheet``; the renderers only lay it out.
"""

from __future__ import annotations
