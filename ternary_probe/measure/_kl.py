"""KL divergence of two sets of logits, row by row, in one sweep through cache-sized pieces.

With ``t`` the change of a logit less its mean under the clean model, ``KL = log E[e^t] = log1p(E[e^t - 1 - t])``: a sum
without negative terms, right to a relative error where the difference of two log-softmaxes has an absolute one of about
1e-6 and can turn negative. The perturbed log-partition follows from it, without a sweep of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_ROWS = 8  # rows of logits at a time that stay in a core's cache
_DEPTH = 80.0  # nats below the log-partition at which an fp32 probability is still a normal number


class Divergence(NamedTuple):
    """Per row: KL(clean || perturbed) and the perturbed log-partition, nats, shape ``[rows]`` each."""

    kl: torch.Tensor
    log_z: torch.Tensor


def log_partition(logits: torch.Tensor) -> torch.Tensor:
    """Return ``logsumexp`` of each row, without the temporary of the logits' size that torch's makes.

    Args:
        logits: ``[rows, vocabulary]``.

    Returns:
        ``[rows]``.
    """
    return torch.cat([piece.logsumexp(-1) for piece in torch.split_with_sizes(logits, _pieces(logits))])


def _pieces(logits: torch.Tensor) -> list[int]:
    rows = len(logits)
    block = _ROWS if logits.device.type == "cpu" else max(1, rows)
    return [min(block, rows - start) for start in range(0, rows, block)]


def safe_log_partition(logits: torch.Tensor, log_z: torch.Tensor) -> torch.Tensor:
    """Return the clean log-partition for `quick_divergence`, NaN in rows it must not be used for.

    Args:
        logits: Clean logits ``[rows, vocabulary]``.
        log_z: Their log-partition ``[rows]``.

    Returns:
        ``log_z`` where every token's probability is a normal number, so that none whose logit rises is lost; NaN elsewhere.
    """
    return torch.where(logits.amin(-1) > log_z - _DEPTH, log_z, torch.nan)


def quick_divergence(clean: torch.Tensor, perturbed: torch.Tensor, clean_log_z: torch.Tensor) -> Divergence | None:
    """Return the divergence of rows whose clean log-partition is known; both logits are used up.

    Args:
        clean: Clean logits ``[rows, vocabulary]``.
        perturbed: Perturbed logits, alike.
        clean_log_z: From `safe_log_partition`, ``[rows]``.

    Returns:
        The divergence, exactly 0 for equal rows; ``None`` where a row is not safe or something overflowed, to be done again
        from fresh logits with `careful_divergence`.
    """
    if not torch.isfinite(clean_log_z).all():
        return None
    kls, means = [], []
    pieces = _pieces(clean)
    spare = torch.empty_like(clean[: pieces[0]])
    sides = (torch.split_with_sizes(side, pieces) for side in (clean, perturbed, clean_log_z))
    for weight, change, log_z in zip(*sides, strict=True):
        change.sub_(weight)
        weight.sub_(log_z[:, None]).exp_()
        mean = torch.linalg.vecdot(weight, change)
        change.sub_(mean[:, None])
        excess = torch.expm1(change, out=spare[: len(change)]).sub_(change)
        kls.append(torch.linalg.vecdot(weight, excess).clamp_min_(0).log1p_())
        means.append(mean)
    kl = torch.cat(kls)
    perturbed_log_z = clean_log_z + torch.cat(means) + kl
    return Divergence(kl, perturbed_log_z) if torch.isfinite(perturbed_log_z).all() else None


def careful_divergence(clean: torch.Tensor, perturbed: torch.Tensor) -> Divergence:
    """Return the divergence of any rows, those with infinite or far apart logits included; both logits are used up.

    Where the precise form and the difference of the log-softmaxes disagree by more than rounding, an exponential over- or
    underflowed and the latter is taken.

    Args:
        clean: Clean logits ``[rows, vocabulary]``.
        perturbed: Perturbed logits, alike.

    Returns:
        The divergence; not finite where the perturbed model is broken.
    """
    sides = (torch.split_with_sizes(side, _pieces(side)) for side in (clean, perturbed))
    parts = [_careful(*pair) for pair in zip(*sides, strict=True)]
    return Divergence(torch.cat([part.kl for part in parts]), torch.cat([part.log_z for part in parts]))


def _careful(clean: torch.Tensor, perturbed: torch.Tensor) -> Divergence:
    log_z = perturbed.logsumexp(-1)
    change = perturbed.sub_(clean)
    top = clean.amax(-1, keepdim=True)
    weight = clean.sub_(top).exp_()
    total = weight.sum(-1)
    mean = torch.linalg.vecdot(weight, change) / total
    if not torch.isfinite(mean).all():  # a token that both models rule out changes by inf - inf
        mean = torch.linalg.vecdot(weight, change.masked_fill_(weight == 0, 0)) / total
    clean_log_z = top[:, 0] + total.log()
    direct = log_z - clean_log_z - mean
    change.sub_(mean[:, None])
    precise = (torch.linalg.vecdot(weight, torch.expm1(change).sub_(change)) / total).clamp_min_(0).log1p()
    rounding = 16 * torch.finfo(clean.dtype).eps * (1 + log_z.abs() + clean_log_z.abs() + mean.abs())
    return Divergence(torch.where((precise - direct).abs() <= rounding, precise, direct), log_z)
