"""Proof that a perturbation took effect, and that it was undone.

The commonest silent failure of robustness studies is a perturbation that never reached the weights (meta tensors, re-tied
heads, caches): the model then looks perfectly robust. So every arm carries checksums of the touched matrices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from ternary_probe.errors import ProbeError

_WORD = 8  # bytes
_COLUMNS = 512
_ROWS = {"cpu": 256}  # a piece and its mix stay in a core's cache; accelerators take larger ones to amortise launches
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, 2^64 over the golden ratio, as a signed 64-bit integer
_MASK = (1 << 64) - 1


class NoEffectError(ProbeError):
    """A perturbation left the weights as they were."""


class NotRestoredError(ProbeError):
    """Undoing a perturbation did not bring every bit back."""


def checksum_tensor(tensor: torch.Tensor) -> int:
    """Return a position-weighted sum of a tensor's bits, modulo 2^64.

    The bytes in memory order are read as signed 64-bit words ``w``, the last one padded with zeros; the word at 1-based
    position ``p`` adds ``p * (w + c * (w >> 32))`` with an odd constant ``c``: a changed, moved or swapped value changes
    the sum. Without the shifted half the topmost bit, the sign of every other fp32 weight, would weigh the same at every
    position. Exact integer arithmetic, so the same on every device.

    Args:
        tensor: Any floating or integer tensor; dense or transposed.

    Returns:
        An integer in ``[0, 2^64)``.
    """
    dense = tensor.detach()
    if not dense.is_contiguous():
        dense = dense.t() if dense.ndim == 2 and dense.t().is_contiguous() else dense.contiguous()
    flat = dense.reshape(-1)
    per_word = _WORD // flat.element_size()
    if flat.storage_offset() % per_word:  # no view as words from here
        flat = flat.clone()
    whole = flat.numel() // per_word * per_word
    words, rest = flat[:whole].view(torch.int64), flat[whole:]
    if rest.numel():
        padded = torch.cat([rest, rest.new_zeros(per_word - rest.numel())])
        return (_sum_words(words) + (len(words) + 1) * int(_mix(padded.view(torch.int64)))) & _MASK
    return _sum_words(words) & _MASK


def _mix(words: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.add(words, torch.bitwise_right_shift(words, 32, out=out), alpha=_MIX, out=out)


def _sum_words(words: torch.Tensor) -> int:
    """Sum the mixed words times their positions, each word read once."""
    # Position r * C + c + 1 splits into a part that only the row's sum sees and one that only the column's sum does.
    device = words.device
    tail = len(words) // _COLUMNS * _COLUMNS
    table, rest = words[:tail].view(-1, _COLUMNS), _mix(words[tail:])
    size = min(len(table), _ROWS.get(device.type, 1 << 14))
    mixed = table.new_empty((size, _COLUMNS))
    rows, columns = table.new_empty(len(table)), table.new_zeros(_COLUMNS)
    for start in range(0, len(table), size or 1):
        piece = table[start : start + size]
        part = _mix(piece, out=mixed[: len(piece)])
        torch.sum(part, 1, out=rows[start : start + size])
        columns += part.sum(0)
    total = (rows * (torch.arange(len(table), device=device) * _COLUMNS)).sum()
    total += (columns * torch.arange(1, _COLUMNS + 1, device=device)).sum()
    total += (rest * torch.arange(tail + 1, len(words) + 1, device=device)).sum()
    return int(total)


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
