"""KL of two sets of logits, against fp64 log-softmaxes, where it is easy and where exponentials leave their range."""

from __future__ import annotations

import pytest
import torch

from ternary_probe.measure._kl import careful_divergence, log_partition, quick_divergence, safe_log_partition


def dense(clean: torch.Tensor, perturbed: torch.Tensor) -> torch.Tensor:
    p, q = clean.double().log_softmax(-1), perturbed.double().log_softmax(-1)
    return torch.where(p.isinf(), 0.0, p.exp() * (p - q)).sum(-1)


def logits(rows: int, scale: float, change: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    clean = scale * torch.randn(rows, 700, generator=generator)
    return clean, clean + change * torch.randn(rows, 700, generator=generator)


@pytest.mark.parametrize("rows", [1, 8, 13, 40])
@pytest.mark.parametrize("change", [1e-3, 0.1, 3.0])
def test_quick_and_careful_agree_with_fp64(rows, change):
    clean, perturbed = logits(rows, 3.0, change)
    log_z = safe_log_partition(clean, log_partition(clean))

    quick = quick_divergence(clean.clone(), perturbed.clone(), log_z)
    careful = careful_divergence(clean.clone(), perturbed.clone())

    assert quick is not None
    for found in (quick, careful):
        torch.testing.assert_close(found.kl.double(), dense(clean, perturbed), rtol=1e-4, atol=0)
        torch.testing.assert_close(found.log_z.double(), perturbed.double().logsumexp(-1), rtol=1e-6, atol=0)


def test_equal_rows_diverge_by_exactly_nothing():
    clean, _ = logits(20, 5.0, 0.0)
    log_z = log_partition(clean)

    found = quick_divergence(clean.clone(), clean.clone(), log_z)

    assert found is not None
    assert (found.kl == 0).all()
    assert torch.equal(found.log_z, log_z)


def test_a_row_with_a_token_too_unlikely_for_fp32_is_left_to_the_careful_way():
    clean, perturbed = logits(3, 1.0, 0.1)
    clean[1, 5] = -200.0  # probability 0 in fp32 …
    perturbed[1, 5] = 20.0  # … and nearly 1 afterwards
    log_z = safe_log_partition(clean, log_partition(clean))

    assert log_z.isnan().tolist() == [False, True, False]
    assert quick_divergence(clean.clone(), perturbed.clone(), log_z) is None
    found = careful_divergence(clean.clone(), perturbed.clone())
    torch.testing.assert_close(found.kl.double(), dense(clean, perturbed), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.log_z, perturbed.logsumexp(-1))


def test_a_change_that_overflows_is_left_to_the_careful_way():
    clean, perturbed = logits(2, 1.0, 0.1)
    perturbed[0, 7] += 500.0
    log_z = safe_log_partition(clean, log_partition(clean))

    assert quick_divergence(clean.clone(), perturbed.clone(), log_z) is None
    found = careful_divergence(clean.clone(), perturbed.clone())
    torch.testing.assert_close(found.kl.double(), dense(clean, perturbed), rtol=1e-4, atol=0)


def test_a_broken_model_gives_no_plausible_figure():
    clean, perturbed = logits(2, 1.0, 0.1)
    perturbed[1] = torch.nan
    log_z = safe_log_partition(clean, log_partition(clean))

    assert quick_divergence(clean.clone(), perturbed.clone(), log_z) is None
    assert careful_divergence(clean, perturbed).kl.isnan().tolist() == [False, True]


@pytest.mark.parametrize("rows", [1, 8, 21])
def test_log_partition_is_torch_logsumexp(rows):
    clean, _ = logits(rows, 4.0, 0.0)

    torch.testing.assert_close(log_partition(clean), clean.logsumexp(-1))
