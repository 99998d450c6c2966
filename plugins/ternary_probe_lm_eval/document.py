"""The log-likelihood of a document, as lm-eval wants it: a float, that remembers its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

_LARGEST_EXPONENT = math.log(1.7976931348623157e308)


class WindowNll(NamedTuple):
    """One window of a document."""

    nll: float
    """Sum over its scored tokens, nats, float64."""
    tokens: int
    squares: float
    """Sum of the squares of its tokens' NLL."""


class DocumentLogLikelihood(float):
    """``log p(document)``, nats, with what a token perplexity and its standard error need.

    It survives pickling, copying and JSON (there as a plain number), and lm-eval's filters. lm-eval adds such values up,
    divides by words or bytes and exponentiates without a guard, which ends a run in an ``OverflowError`` after all the
    work; sums of these overflow to an infinite perplexity instead.

    Attributes:
        windows: The document's windows, in order; none for an empty document.
        words: Words of the text that was scored, counted as lm-eval does.
        bytes: Its UTF-8 bytes.
    """

    windows: tuple[WindowNll, ...]
    words: int
    bytes: int

    def __new__(cls, windows: Iterable[WindowNll] = (), *, words: int = 0, bytes: int = 0) -> Self:  # noqa: A002
        """Sum the windows up."""
        kept = tuple(WindowNll(*window) for window in windows)
        self = super().__new__(cls, -math.fsum(window.nll for window in kept) if kept else 0.0)
        self.windows, self.words, self.bytes = kept, words, bytes
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.windows, self.words, self.bytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @property
    def nll(self) -> float:
        """Negative log-likelihood of the document, nats."""
        return -float(self)

    @property
    def tokens(self) -> int:
        """Number of scored tokens."""
        return sum(window.tokens for window in self.windows)

    @property
    def squares(self) -> float:
        """Sum of the squares of the tokens' NLL."""
        return math.fsum(window.squares for window in self.windows)

    def __add__(self, other: float) -> _Total:
        return _Total(float(self) + float(other))

    __radd__ = __add__


class _Total(float):
    """A sum of documents' log-likelihoods."""

    def __add__(self, other: float) -> _Total:
        return _Total(float(self) + float(other))

    __radd__ = __add__

    def __truediv__(self, other: float) -> _Mean:
        return _Mean(float(self) / float(other))


class _Mean(float):
    """Mean log-likelihood; its negation is infinite where ``exp`` of it would overflow, for lm-eval takes that next."""

    def __neg__(self) -> float:
        value = -float(self)
        return math.inf if value > _LARGEST_EXPONENT else value


def _rebuild(
    kind: type[DocumentLogLikelihood], windows: tuple[WindowNll, ...], words: int, bytes_: int
) -> DocumentLogLikelihood:
    return kind(windows, words=words, bytes=bytes_)
