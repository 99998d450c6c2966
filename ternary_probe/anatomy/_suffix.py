"""Re-run only what lies behind a change: the model's own forward, with the blocks before it answered from a recording.

Blocks are never called one by one with captured arguments: that is exact on the clean model and silently wrong under a
change in several architectures. Here the model itself runs, and only block modules that come before the change return what
they returned when the clean model was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ternary_probe.anatomy._head import replaced_forward
from ternary_probe.anatomy._matrix import WeightMatrix
from ternary_probe.errors import ProbeError

if TYPE_CHECKING:
    from ternary_probe.anatomy._anatomy import Anatomy


class Recording:
    """What every block call of the clean model returned on some tokens; made by `record_blocks`.

    Attributes:
        input_ids: The tokens, ``[batch, tokens]``.
        states: The final hidden states, ``[batch, tokens, width]``.
    """

    def __init__(self, anatomy: Anatomy, input_ids: Tensor) -> None:
        self._anatomy, self.input_ids = anatomy, input_ids
        self._outputs: list[Any] = []
        with _watched(anatomy, self._outputs.append):
            self.states = anatomy.head.states(input_ids)
        if len(self._outputs) != len(anatomy.blocks):
            raise ProbeError(
                f"{type(anatomy.model).__name__} called {len(self._outputs)} blocks on this text where "
                f"{len(anatomy.blocks)} were examined: it takes another path, examine it on such text"
            )

    def resume(self, start: int, *, copies: int = 1) -> Tensor:
        """Run the model as it is now from block call ``start`` on; the calls before it return what was recorded.

        Args:
            start: Block call, in execution order; 0 runs everything.
            copies: Run the tokens that many times side by side, as batch entries ``[copies * batch]``; a hook on a module
                can then treat each copy in its own way.

        Returns:
            The final hidden states, ``[copies * batch, tokens, width]``.
        """
        ids = self.input_ids.repeat(copies, 1) if copies > 1 else self.input_ids
        with _answered(self._anatomy, self._outputs[:start], copies, len(self.input_ids)):
            return self._anatomy.head.states(ids)


@torch.no_grad()
def record_blocks(anatomy: Anatomy, input_ids: Tensor) -> Recording:
    """Run the model on some tokens and keep what every block call returned.

    Args:
        anatomy: The model's anatomy; the model must be clean.
        input_ids: Token ids, ``[batch, tokens]``.

    Returns:
        The recording; memory ``blocks * batch * tokens * width``.

    Raises:
        ProbeError: If the model takes another path through its blocks than when it was examined.
    """
    return Recording(anatomy, input_ids.to(anatomy.input_device))


def first_affected(anatomy: Anatomy, matrices: Iterable[WeightMatrix]) -> int:
    """Return the first block call that can behave differently once some matrices are changed.

    Args:
        anatomy: The model's anatomy.
        matrices: The matrices to be changed.

    Returns:
        Its index; 0 where a matrix lies outside the blocks, and where a part of it does.
    """
    first = len(anatomy.blocks)
    for matrix in matrices:
        if matrix.block is None or matrix.also_lookup:
            return 0
        first = min(first, matrix.block)
    return min(first, max(0, len(anatomy.blocks) - 1))


@contextmanager
def _watched(anatomy: Anatomy, keep: Callable[[Any], None]) -> Iterator[None]:
    def hook(_module: nn.Module, _args: object, output: Any) -> None:
        keep(_copied(output))

    with ExitStack() as stack:
        for module in _modules(anatomy):
            stack.callback(module.register_forward_hook(hook).remove)
        yield


@contextmanager
def _answered(anatomy: Anatomy, answers: list[Any], copies: int, batch: int) -> Iterator[None]:
    """Let the first block calls return recorded outputs instead of running."""
    called = 0

    def stub(own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal called
            here, called = called, called + 1
            if here >= len(answers):
                return own(*args, **kwargs)
            return _copied(answers[here], copies, batch)

        return forward

    if not answers:
        yield
        return
    with ExitStack() as stack:
        for module in _modules(anatomy):
            stack.enter_context(replaced_forward(module, stub(module.forward)))
        yield


def _modules(anatomy: Anatomy) -> list[nn.Module]:
    return list({id(block.module): block.module for block in anatomy.blocks}.values())


def _copied(output: Any, copies: int = 1, batch: int = 0) -> Any:
    """Return an output with its tensors copied: what comes after may write to them."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if copies > 1 and leaf.dim() > 1 and leaf.shape[0] == batch:
            return leaf.repeat(copies, *(1 for _ in leaf.shape[1:]))
        return leaf.clone()

    return pytree.tree_map(copy, output)
