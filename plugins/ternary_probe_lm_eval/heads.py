"""Where the rows of logits come from: the model's own head in chunks, or, where it cannot be told apart, whole logits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from ternary_probe.anatomy import Anatomy, ChunkedHead, HeadError
from ternary_probe.errors import ProbeError

_PROBE_TOKENS = 24


class NotCausalError(ProbeError):
    """The model sees the tokens it is to predict."""


class Head(Protocol):
    """What turns token ids into rows, and rows into logits."""

    def states(self, input_ids: Tensor) -> Tensor:
        """Return one row a position, ``[batch, length, width]``."""

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of rows, ``[rows, vocabulary]``."""


class WholeLogits:
    """A head for models whose own cannot be told from the backbone: the rows are the logits, all held at once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def states(self, input_ids: Tensor) -> Tensor:
        """Return all logits, ``[batch, length, vocabulary]``."""
        logits: Tensor = self._model(input_ids, use_cache=False).logits
        return logits

    def logits(self, states: Tensor) -> Tensor:
        """Return the rows as they are."""
        return states


class FoundHead(NamedTuple):
    """A head, and what goes with it."""

    head: Head
    vocab_size: int
    device: torch.device
    """Where token ids must be."""
    note: str | None = None
    """Why the logits are held whole."""


def find_head(model: nn.Module, examined: Callable[[], Anatomy]) -> FoundHead:
    """Find the leanest head that gives the model's own logits.

    A model whose blocks cannot be examined, a quantized one, still says by transformers' convention what its backbone is;
    that is believed only if chunked logits turn out to be the model's own.

    Args:
        model: The model.
        examined: Gives its anatomy.

    Returns:
        The head.

    Raises:
        NotCausalError: If the model is not causal.
    """
    try:
        anatomy = examined()
        return FoundHead(_of_anatomy(anatomy), anatomy.vocab_size, anatomy.input_device)
    except NotCausalError:
        raise
    except ProbeError as error:
        reason = str(error)
    place, logits = _probe(model)
    claimed = _by_convention(model, place, logits)
    if claimed is not None:
        return FoundHead(claimed, logits.shape[-1], place.device)
    note = f"full logits are held, since the head cannot be applied in chunks: {reason}"
    return FoundHead(WholeLogits(model), logits.shape[-1], place.device, note)


def _of_anatomy(anatomy: Anatomy) -> Head:
    causal = anatomy.checks.get("causal")
    if causal is not None and causal.passed is False:
        raise NotCausalError(
            f"{type(anatomy.model).__name__} sees the tokens it is to predict: load a causal language model"
        )
    check = anatomy.checks.get("chunked_head")
    if check is not None and check.passed is False:
        raise HeadError(check.note or "chunked logits differ from the model's own")
    return anatomy.head


@torch.no_grad()
def _probe(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return a few token ids and the model's logits for them."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    ids = (torch.arange(_PROBE_TOKENS) * 7 + 3) % embedding.weight.shape[0]
    ids = ids[None].to(embedding.weight.device)
    logits: Tensor = model(ids, use_cache=False).logits
    return ids, logits


@torch.no_grad()
def _by_convention(model: nn.Module, ids: Tensor, logits: Tensor) -> Head | None:
    name = getattr(model, "base_model_prefix", "")
    if not name or not isinstance(getattr(model, name, None), nn.Module):
        return None
    parts = SimpleNamespace(model=model, backbone=SimpleNamespace(name=name), vocab_size=logits.shape[-1])
    head = ChunkedHead(cast("Anatomy", parts))
    try:
        chunked = torch.cat([head.logits(rows) for rows in torch.split(head.states(ids)[0], _PROBE_TOKENS // 2 - 1)])
    except (TypeError, AttributeError, StopIteration, RuntimeError, ValueError):  # the convention does not hold here
        return None
    tolerance = 8 * torch.finfo(logits.dtype).eps * float(logits.abs().max())
    return head if bool((chunked - logits[0]).abs().max() <= tolerance) else None
