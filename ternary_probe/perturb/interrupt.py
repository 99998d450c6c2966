"""Ctrl-C must never leave a weight changed.

Two guards. While weights are being written an interrupt waits (`interrupts_deferred`). While a recipe is applied an interrupt
first takes the change back and is raised then (`undone_on_interrupt`): a ``with`` statement alone would not do, for an
interrupt that falls just after ``__enter__`` or just before ``__exit__`` leaves the block without running its ``finally``.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold back SIGINT while the body runs, then deliver it. A no-op outside the main thread, which gets no signals.

    Yields:
        Nothing; keep the body short (milliseconds a matrix).
    """
    if not _can_handle():
        yield
        return
    pending: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        del frame
        pending.append(number)

    previous = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pending:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def undone_on_interrupt(take_back: Callable[[], None]) -> Iterator[None]:
    """While the body runs, let SIGINT call ``take_back`` before it is raised; nested bodies are taken back innermost first.

    A handler of the caller's that does not raise (one that sets a flag) takes nothing back. An interrupt that the body
    swallows is raised again at its end, because the rest of the body ran on restored weights.

    Args:
        take_back: Undoes everything; does nothing the second time.

    Yields:
        Nothing.
    """
    previous = signal.getsignal(signal.SIGINT) if _can_handle() else None
    if not callable(previous):
        yield
        return
    handler = _TakeBack(take_back, previous)
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, previous)
    if handler.raised is not None:
        raise handler.raised


class _TakeBack:
    """The signal handler of `undone_on_interrupt`: asks the caller's handler, and undoes before passing its exception on."""

    def __init__(self, take_back: Callable[[], None], previous: Callable[[int, FrameType | None], Any]) -> None:
        self.outer = previous if isinstance(previous, _TakeBack) else None
        self.foreign: Callable[[int, FrameType | None], Any] = self.outer.foreign if self.outer else previous
        self.take_back = take_back
        self.raised: BaseException | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.foreign(number, frame)
        except BaseException as error:
            handler: _TakeBack | None = self
            with interrupts_deferred():
                while handler is not None:
                    handler.raised = error
                    handler.take_back()
                    handler = handler.outer
            if isinstance(signal.getsignal(signal.SIGINT), _TakeBack):
                signal.signal(signal.SIGINT, self.foreign)  # nothing is left to take back
            raise


def _can_handle() -> bool:
    """Tell whether this thread gets SIGINT, and the handler in place is one that Python can put back."""
    return threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not None
