"""Records built by hand, with known numbers, for everything that only needs a record.

``leverage_record(**changes)`` and its siblings return a complete, valid record; keyword arguments replace top-level
keys.
"""

from __future__ import annotations

from typing import Any

from ternary_probe.records import (
    Amplitude,
    Arm,
    Baseline,
    CheckInfo,
    Curve,
    Environment,
    InspectRecord,
    Leverage,
    LeverageRecord,
    MatrixInfo,
    Mean,
    ModelInfo,
    NoiseFloor,
    NormInfo,
    PerplexityRecord,
    Prediction,
    ProtocolInfo,
    Published,
    Timing,
)

RATES = (0.001, 0.005)
SEEDS = 8
ROLES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BLOCKS = 6
MEANS = {
    # (rate, arm): (dNLL, half width, KL, half width, flips)
    (0.001, "outlier"): (0.0731, 0.0182, 0.0702, 0.0121, 5160),
    (0.001, "other"): (0.0019, 0.0024, 0.0021, 0.0003, 5160),
    (0.001, "all"): (0.0071, 0.0031, 0.0068, 0.0012, 5160),
    (0.005, "outlier"): (0.3049, 0.0531, 0.2987, 0.0412, 25950),
    (0.005, "other"): (0.0109, 0.0027, 0.0096, 0.0011, 25950),
    (0.005, "all"): (0.0283, 0.0052, 0.0301, 0.0038, 25950),
}
T_8 = 2.364624251592785  # Student's t, 97.5 %, 7 degrees of freedom
SPREAD = (-1.5, -1.1, -0.6, -0.2, 0.2, 0.6, 1.1, 1.5)  # sums to 0


def model(**changes: Any) -> ModelInfo:
    fields: dict[str, Any] = {
        "name": "SmolLM2-135M-Instruct",
        "kind": "llama",
        "path": "/tmp/smollm2",
        "dtype": "float32",
        "device": "cpu",
        "parameters": 134515008,
        "weights_sha256": "ab" * 32,
    }
    return ModelInfo(**(fields | changes))


def environment() -> Environment:
    return Environment(
        ternary_probe="0.1.0",
        python="3.12.3",
        platform="Linux-test",
        packages={"torch": "2.13.0", "transformers": "5.24.0"},
        threads=1,
    )


def protocol(**changes: Any) -> ProtocolInfo:
    fields: dict[str, Any] = {
        "name": "disjoint",
        "tokens_scored": 2044,
        "tokenizer": "/tmp/smollm2",
        "text": "sample",
        "text_sha256": "cd" * 32,
        "window": 512,
        "stride": 512,
        "bos": "none",
        "joining": "as it is",
        "windows": 4,
        "notes": (),
    }
    return ProtocolInfo(**(fields | changes))


def arms() -> tuple[Arm, ...]:
    """Eight seeds a cell whose dNLL and KL have exactly the means of MEANS."""
    made = []
    for (rate, arm), (nll, nll_half, kl, kl_half, flips) in MEANS.items():
        for seed, step in enumerate(SPREAD):
            delta = nll + step * nll_half
            made.append(
                Arm(
                    rate=rate,
                    arm=arm,
                    matching="count",
                    seed=seed,
                    flips=flips,
                    delta_nll=delta,
                    delta_ppl=20.125 * delta,
                    kl=kl + step * kl_half / 2,
                    checksum_before="1f",
                    checksum_during="2f",
                    checksum_after="1f",
                    recipe=f"sign_flip:rate={rate},columns={arm},seed={seed}",
                )
            )
    return tuple(made)


def mean(rate: float, arm: str, response: str, value: float | None, half: float | None, **changes: Any) -> Mean:
    fields: dict[str, Any] = {
        "rate": rate,
        "arm": arm,
        "matching": "count",
        "response": response,
        "seeds": SEEDS,
        "mean": value,
        "sd": None if half is None else half * SEEDS**0.5 / T_8,
        "ci_low": None if value is None or half is None else value - half,
        "ci_high": None if value is None or half is None else value + half,
        "above_floor": True,
    }
    return Mean(**(fields | changes))


def means() -> tuple[Mean, ...]:
    made = []
    for (rate, arm), (nll, nll_half, kl, kl_half, _) in MEANS.items():
        made.append(mean(rate, arm, "nll", nll, nll_half, above_floor=nll > nll_half))
        made.append(mean(rate, arm, "kl", kl, kl_half))
    return tuple(made)


def ratio(rate: float, response: str, denominator: str, *figures: float | None, **changes: Any) -> Leverage:
    value, low, high = figures
    fields: dict[str, Any] = {
        "rate": rate,
        "matching": "count",
        "response": response,
        "denominator": denominator,
        "ratio": value,
        "ci_low": low,
        "ci_high": high,
        "bootstrap_low": None if low is None else low * 1.05,
        "bootstrap_high": None if high is None else high * 0.95,
        "status": "ok",
    }
    return Leverage(**(fields | changes))


COVERS_ZERO = "the interval of the denominator covers 0"


def leverages() -> tuple[Leverage, ...]:
    return (
        ratio(0.001, "nll", "other", 38.5, None, None, status="inconclusive", reason=COVERS_ZERO),
        ratio(0.001, "kl", "other", 33.43, 26.12, 42.31),
        ratio(0.001, "nll", "all", 10.3, 5.21, 20.14),
        ratio(0.001, "kl", "all", 10.32, 7.91, 13.42),
        ratio(0.005, "nll", "other", 27.97, 20.21, 41.13),
        ratio(0.005, "kl", "other", 31.11, 25.9, 37.4),
        ratio(0.005, "nll", "all", 10.77, 8.13, 14.22),
        ratio(0.005, "kl", "all", 9.92, 8.03, 12.11),
    )


def curves() -> tuple[Curve, ...]:
    return tuple(
        Curve(arm=arm, matching="count", response=response, slope=slope, slope_se=0.051, linear_up_to=0.005)
        for arm, slope in (("outlier", 0.887), ("other", 1.085), ("all", 0.93))
        for response in ("nll", "kl")
    )


def amplitudes() -> tuple[Amplitude, ...]:
    made = []
    for block in range(BLOCKS):
        for index, role in enumerate(ROLES):
            width = 1536 if role == "down_proj" else 576
            level = 4.0 + 2 * index + 0.5 * block
            ranks = sorted({round(width ** (i / 63)) for i in range(64)})
            alphas = tuple(level**0.5 * width**-0.5 * rank**-0.4 for rank in ranks)
            made.append(
                Amplitude(
                    matrix=f"model.layers.{block}.{role}",
                    role=role,
                    block=block,
                    in_features=width,
                    n_outliers=width // 20,
                    n_alpha2_outlier=level,
                    n_alpha2_other=0.5,
                    energy_share=level / 20,
                    weighted_outlier=level * 0.8,
                    weighted_other=0.6,
                    alpha_sorted=alphas,
                    alpha_rank=tuple(ranks),
                )
            )
    return tuple(made)


def published() -> tuple[Published, ...]:
    return (
        Published(
            rate=0.005,
            flips=241387,
            delta_nll_outlier=0.03043,
            delta_nll_other=0.00307,
            ratio=9.9,
            source="ratio of means",
        ),
        Published(
            rate=0.05, flips=2413875, delta_nll_outlier=1.3451, delta_nll_other=0.03123, ratio=43.1, source="Table 2"
        ),
    )


def leverage_record(**changes: Any) -> LeverageRecord:
    """A study of two rates, three arms and eight seeds, with one inconclusive leverage."""
    fields: dict[str, Any] = {
        "model": model(),
        "protocol": protocol(),
        "calibration": protocol(tokens_scored=4088, windows=8),
        "environment": environment(),
        "timing": Timing(seconds=312.4, evaluations=52),
        "status": "ok",
        "notes": ("The weights already lie on a 4-bit grid.",),
        "fraction": 0.05,
        "selected_by": "energy",
        "baseline": Baseline(nll=3.00211, perplexity=20.1279, nll_windows=(2.9, 3.1, 3.0, 3.008)),
        "noise_floor": NoiseFloor(
            nll=0.00213,
            kl=0.00031,
            repeat_nll=0.0,
            rechunk_nll=1e-7,
            rechunk_kl=1e-9,
            tiny_flip_rate=0.0001,
            tiny_flip_seeds=4,
            tiny_flip_nll_sd=0.00213,
            tiny_flip_kl_sd=0.00031,
        ),
        "arms": arms(),
        "means": means(),
        "leverage": leverages(),
        "curves": curves(),
        "amplitude": amplitudes(),
        "prediction": Prediction(
            n_alpha2_outlier=10.91,
            ratio_outlier_other=22.2,
            weighted_outlier_all=8.73,
            weighted_outlier_other=18.1,
        ),
        "outlier_columns": {a.matrix: tuple(range(a.n_outliers)) for a in amplitudes()},
    }
    return LeverageRecord(**(fields | changes))


def perplexity_record(**changes: Any) -> PerplexityRecord:
    """A measured perplexity with an interval over four windows."""
    fields: dict[str, Any] = {
        "model": model(),
        "protocol": protocol(),
        "environment": environment(),
        "status": "ok",
        "nll": 3.00211,
        "token_perplexity": 20.1279,
        "word_perplexity": 61.234,
        "byte_perplexity": 2.01234,
        "ci_low": 18.51,
        "ci_high": 21.88,
        "tokens_scored": 2044,
        "nll_windows": (2.9, 3.1, 3.0, 3.008),
    }
    return PerplexityRecord(**(fields | changes))


def inspect_record(**changes: Any) -> InspectRecord:
    """A six-block model with one thing that cannot be handled."""
    matrices = tuple(
        MatrixInfo(
            matrix=f"model.layers.{b}.{role}",
            role=role,
            block=b,
            out_features=576,
            in_features=1536 if role == "down_proj" else 576,
            dtype="float32",
        )
        for b in range(BLOCKS)
        for role in ROLES
    )
    norms = tuple(
        NormInfo(norm=f"model.layers.{b}.{n}", kind="rms_norm", position="pre", block=b, readers=r, plantable=True)
        for b in range(BLOCKS)
        for n, r in (("input_layernorm", 3), ("post_attention_layernorm", 2))
    )
    final = NormInfo(norm="model.norm", kind="rms_norm", position="final", block=None, readers=1, plantable=False)
    fields: dict[str, Any] = {
        "model": model(),
        "protocol": None,
        "environment": environment(),
        "status": "ok",
        "blocks": tuple(f"model.layers.{b}" for b in range(BLOCKS)),
        "skip": "identity",
        "backbone": "model",
        "head": "lm_head",
        "final_norm": "model.norm",
        "matrices": matrices,
        "norms": (*norms, final),
        "unhandled": {"model.odd_scale": "never meets an activation"},
        "accounted": 0.99963,
        "checks": (
            CheckInfo(check="forward repeats", passed=True, difference=0.0),
            CheckInfo(check="chunked head", passed=False, difference=1.5e-6, note="one row takes another kernel"),
            CheckInfo(check="causality", passed=None, difference=None, note="not asked for"),
        ),
    }
    return InspectRecord(**(fields | changes))
