"""The paper's own leverage figures, for its own model and protocol: printed beside ours, never mixed with them."""

from __future__ import annotations

from ternary_probe.records import Published

_SOURCE = (
    "arXiv 2605.18933: TinyLlama-1.1B-intermediate-step-1431k-3T, fp16, WikiText-2 test, 10 x 2048 tokens, "
    "baseline PPL 7.383"
)

DONG2026_RATES = (0.05, 0.005, 0.001, 0.0005, 0.0001)

DONG2026 = tuple(
    Published(rate=rate, flips=flips, delta_nll_outlier=outlier, delta_nll_other=other, ratio=ratio, source=_SOURCE)
    for rate, flips, outlier, other, ratio in (
        (0.05, 2_413_875, 1.3451, 0.03123, 43.1),
        (0.005, 241_387, 0.03043, 0.00307, 9.9),
        (0.001, 48_277, 0.00496, 0.00047, 10.5),
        (0.0005, 24_138, 0.00263, 0.00023, 11.4),
        (0.0001, 4_827, 0.00045, 0.00012, 3.7),
    )
)
