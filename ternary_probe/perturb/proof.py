"""Proof that a perturbation took effect, and that it was undone.

The commonest silent failure of robustness studies is a perturbation that never reached the weights (meta tensors, re-tied
heads, caches): the model then looks perfectly robust. So every arm carries checksums of the touched matrices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from ternary_probe.errors import ProbeError

# Never wider than 32 bits: modulo 2^64 the sign bit of a 64-bit word weighs the same, or nothing, at every position.
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_COLUMNS = 1024
_ROWS = {"cpu": 256}  # a piece stays in a core's cache; accelerators take larger ones to amortise launches
_MASK = (1 << 64) - 1


class NoEffectError(ProbeError):
    """A perturbation left the weights as they were."""


class NotRestoredError(ProbeError):
    """Undoing a perturbation did not bring every bit back."""


def checksum_tensor(tensor: torch.Tensor) -> int:
    """Return the position-weighted sum of a tensor's bits, modulo 2^64.

    Each element, read as a signed integer of its own width (64-bit ones as two of 32 bits), is weighted with its 1-based
    position in memory order: a changed, moved or swapped value changes the sum. Exact integer arithmetic, so the same on
    every device.

    Args:
        tensor: Any floating or integer tensor; dense or transposed.

    Returns:
        An integer in ``[0, 2^64)``.
    """
    dense = tensor.detach()
    if not dense.is_contiguous():
        dense = dense.t() if dense.ndim == 2 and dense.t().is_contiguous() else dense.contiguous()
    bits = dense.reshape(-1).view(_INTEGER[dense.element_size()])
    tail = bits.numel() // _COLUMNS * _COLUMNS
    table, rest = bits[:tail].view(-1, _COLUMNS), bits[tail:].long()
    total = int((rest * torch.arange(tail + 1, bits.numel() + 1, device=bits.device)).sum())
    # Position r * C + c + 1 splits into a part that only the row's sum sees and one that only the column's sum does, so
    # the elements are read twice and never widened into a copy.
    size = _ROWS.get(bits.device.type, 1 << 14)
    down = torch.arange(size, device=bits.device) * _COLUMNS
    across = torch.arange(1, _COLUMNS + 1, device=bits.device)
    for start in range(0, len(table), size):
        piece = table[start : start + size]
        rows, columns = piece.sum(1), piece.sum(0)
        total += int((rows * (down[: len(piece)] + start * _COLUMNS)).sum() + (columns * across).sum())
    return total & _MASK


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """Return one checksum over several tensors, in the order given.

    Args:
        tensors: The touched weights.

    Returns:
        16 hexadecimal digits.
    """
    total = 0
    for tensor in tensors:
        total = (total * 0x9E3779B97F4A7C15 + checksum_tensor(tensor)) & _MASK  # odd factor: order matters
    return f"{total:016x}"


def sha256_weights(model: torch.nn.Module) -> str:
    """Return SHA-256 over every parameter and persistent buffer of a model, in name order, tied storage once.

    Args:
        model: Any module with materialised weights.

    Returns:
        64 hexadecimal digits, independent of the device.
    """
    digest = hashlib.sha256()
    seen: dict[tuple[int, int, torch.Size, tuple[int, ...]], str] = {}
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        if tensor.device.type == "meta":
            digest.update(b"|meta")
            continue
        place = (tensor.data_ptr(), tensor.numel(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            digest.update(f"|tied to {seen[place]}".encode())
            continue
        seen[place] = name
        flat = tensor.detach().contiguous().reshape(-1)
        for start in range(0, flat.numel(), 1 << 24):
            piece = flat[start : start + (1 << 24)].cpu()
            digest.update(piece.view(torch.uint8).numpy().data)
    return digest.hexdigest()
