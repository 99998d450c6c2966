"""Which tensors a checkpoint holds and what they are called there: tied ones once, fused ones as their authors store them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from ternary_probe.saving.folder import SavingError

logger = logging.getLogger(__name__)

Rename = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the live tensors a checkpoint must hold, by the model's own names.

    Args:
        model: The model, wholly in memory.

    Returns:
        Views onto the model; of tensors that the config ties, only the one that loading expects.

    Raises:
        SavingError: If tensors share storage in a way the model does not declare: they would load as random weights.
    """
    state = dict(model.state_dict())
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    try:
        kept: dict[str, Tensor] = remove_tied_weights_from_state_dict(state, model)
    except RuntimeError as error:
        raise SavingError(
            f"tensors of this {type(model).__name__} share storage though it does not declare them tied: clone one first"
        ) from error
    return kept


def renaming(model: PreTrainedModel, pieces: Iterable[dict[str, Tensor]]) -> Rename:
    """Find how to turn the model's names and layouts into those of its published checkpoints, piece by piece.

    Transformers fuses and renames while loading, and undoes that on the whole state at once, which would need a second
    copy of the model. Here it is undone for each piece alone, if that provably comes to the same (tried without data).

    Args:
        model: The model.
        pieces: What will be written, in pieces, on the meta device.

    Returns:
        A function of one piece; the identity where pieces cannot be converted alone (the model's own names load too).
    """
    whole: dict[str, Tensor] = {}
    apart: dict[str, Tensor] = {}
    try:
        for piece in pieces:
            whole |= piece
            apart |= revert_weight_conversion(model, dict(piece))
        together = revert_weight_conversion(model, dict(whole))
    except Exception as error:  # a conversion that needs several tensors raises whatever it runs into
        logger.debug("the names of %s cannot be reverted piece by piece: %s", type(model).__name__, error)
        together = {}
    if _shapes(together) == _shapes(apart) and together:
        return lambda piece: revert_weight_conversion(model, piece)
    logger.warning(
        "%s is saved under transformers' own names: its published ones need several tensors at once",
        type(model).__name__,
    )
    return lambda piece: piece


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
