"""Sequential stopping: alpha is split, and the interval covers however the seeds fall."""

from __future__ import annotations

import numpy as np
import pytest

from ternary_probe.studies.sequential import LOOKS, confidence_at, look_at, planned_looks


def test_the_error_of_all_looks_adds_up_to_five_percent():
    for looks in (1, 2, 5):
        assert sum(1 - confidence_at(k, looks) for k in range(1, looks + 1)) == pytest.approx(0.05)
    assert confidence_at(1, 1) == pytest.approx(0.95)
    assert confidence_at(1, 5) < confidence_at(2, 5) < confidence_at(5, 5)


def test_looks_double_up_to_128_where_a_precision_is_asked_for():
    assert planned_looks(8, None) == (8,)
    assert planned_looks(8, 0.1) == LOOKS
    assert planned_looks(20, 0.1) == (20, 32, 64, 128)


def test_tight_values_stop_and_wide_ones_do_not():
    assert look_at([1.0, 1.01, 0.99, 1.0], 1, 5, 0.1).precise
    assert not look_at([1.0, 3.0, 0.2, 1.4], 1, 5, 0.1).precise
    assert not look_at([1.0, 1.0, 1.0], 1, 1, None).precise


@pytest.mark.parametrize(("precision", "highest"), [(0.1, 1.0), (0.2, 0.99), (0.4, 0.99)])
def test_the_stopped_interval_covers_the_truth(precision, highest):
    """Lognormal responses, as flips give them: coverage of the 95 % interval, above it only where all looks are used up."""
    rng = np.random.Generator(np.random.Philox(key=7))
    sigma = 0.4
    truth = np.exp(sigma**2 / 2)
    covered = 0
    for _ in range(600):
        values = np.exp(sigma * rng.standard_normal(LOOKS[-1]))
        for number, upto in enumerate(LOOKS, start=1):
            looked = look_at(values[:upto], number, len(LOOKS), precision)
            if looked.precise or upto == LOOKS[-1]:
                break
        covered += looked.interval.low <= truth <= looked.interval.high
    assert 0.90 <= covered / 600 <= highest
