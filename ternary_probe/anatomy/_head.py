"""Backbone and head, found in the call tree; the head applied to chunks of hidden states by the model itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ternary_probe.anatomy._blocks import Block
from ternary_probe.anatomy._trace import Call, Trace, call_options, logits_of
from ternary_probe.errors import ProbeError

if TYPE_CHECKING:
    from ternary_probe.anatomy._anatomy import Anatomy


class HeadError(ProbeError):
    """The model has no language-model head that could be told from its backbone."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """The module whose output the head receives.

    Attributes:
        name: Qualified name.
        head: Storage name of the matrix that makes the logits.
    """

    name: str
    head: str


def find_backbone(trace: Trace, blocks: tuple[Block, ...]) -> Backbone | None:
    """Find the outermost call that holds every block and not the head.

    Args:
        trace: A recorded forward.
        blocks: The blocks found in it.

    Returns:
        The backbone, or None if the head cannot be told from it.
    """
    if not blocks or not trace.products:
        return None
    head = trace.products[-1]
    call: Call | None = blocks[0].call.parent
    found = None
    while call is not None and not head.call.within(call):
        if all(block.call.within(call) for block in blocks):
            found = call
        call = call.parent
    return None if found is None else Backbone(found.name, head.contraction.weight.slab.name)


def stored_as_integers(model: nn.Module) -> str | None:
    """Return the integer dtype a quantized model's weights are stored in, or None for a floating model."""
    found = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if not p.is_floating_point()}
    return ", ".join(sorted(found)) or None


def _no_head(anatomy: Anatomy) -> str:
    kind = type(anatomy.model).__name__
    stored = stored_as_integers(anatomy.model)
    if stored is not None:
        return f"the weights of {kind} are stored as {stored}: dequantize the model first"
    if not anatomy.blocks:
        return f"{kind} has no chain of two or more blocks, by which its head is found: it is not supported"
    return f"{kind} has no language-model head after its blocks: load a causal language model"


class _ReachedError(BaseException):
    """Carries the backbone's output out of the model's forward; no user ever sees it."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class ChunkedHead:
    """The model's own head, applied to any rows of hidden states: soft caps, scalings and biases stay the model's business.

    Args:
        anatomy: The model's anatomy.

    Attributes:
        vocab_size: Number of logits a row gets.

    Raises:
        HeadError: If the model has no head that could be told from its backbone.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        if anatomy.backbone is None:
            raise HeadError(_no_head(anatomy))
        self._model = anatomy.model
        self._backbone = anatomy.model.get_submodule(anatomy.backbone.name)
        self._options = call_options(anatomy.model)
        self._template: Any = None
        self.vocab_size = anatomy.vocab_size

    def states(self, input_ids: Tensor) -> Tensor:
        """Run the model up to its head.

        Args:
            input_ids: Token ids, ``[batch, tokens]``.

        Returns:
            What the head would receive, ``[batch, tokens, width]``, in the model's dtype.
        """

        def stop(_module: nn.Module, _args: object, output: Any) -> None:
            raise _ReachedError(output)

        handle = self._backbone.register_forward_hook(stop)
        try:
            self._model(input_ids, **self._options)
        except _ReachedError as reached:
            output = reached.output
        finally:
            handle.remove()
        self._template = _emptied(output)
        return _state(output)

    def logits(self, states: Tensor) -> Tensor:
        """Apply the model's head to rows of hidden states.

        Args:
            states: Rows as `states` returns them, ``[rows, width]``.

        Returns:
            Logits ``[rows, vocab_size]``, as the model computes them.
        """
        rows = states.shape[0]
        if rows == 1:  # one row would take another kernel, with another rounding
            states = states.expand(2, -1)
        if self._template is None:
            self._template = self._learn_template(states.device)
        output = _filled(self._template, states.unsqueeze(0))
        ids = torch.zeros((1, states.shape[0]), dtype=torch.long, device=states.device)
        with replaced_forward(self._backbone, lambda *_args, **_kwargs: output):
            logits = logits_of(self._model(ids, **self._options))
        return logits[0, :rows]

    @torch.no_grad()
    def _learn_template(self, device: torch.device) -> Any:
        self.states(torch.zeros((1, 2), dtype=torch.long, device=device))
        return self._template


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module run another forward inside the context; its hooks stay."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


class _Slot:
    """Marks where the hidden states stand in a backbone's output."""


_SLOT = _Slot()


def _state(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    return next(value for value in values if isinstance(value, Tensor))


def _emptied(output: Any) -> Any:
    """Return an output's form without its tensors: the states marked, everything else None."""
    if isinstance(output, Tensor):
        return _SLOT
    if isinstance(output, Mapping):
        first = next(key for key, value in output.items() if isinstance(value, Tensor))
        return type(output), {key: (_SLOT if key == first else None) for key in output}
    first_index = next(index for index, value in enumerate(output) if isinstance(value, Tensor))
    return tuple, [_SLOT if index == first_index else None for index in range(len(output))]


def _filled(template: Any, states: Tensor) -> Any:
    if template is _SLOT:
        return states
    kind, parts = template
    if isinstance(parts, dict):
        return kind(**{key: (states if part is _SLOT else None) for key, part in parts.items()})
    return kind(states if part is _SLOT else None for part in parts)
