"""The view of a quantizer study: the answer in plain words, then every figure of the record."""

from __future__ import annotations

import io
import re
from statistics import fmean
from typing import Any

import pytest
from reports.factory import environment, model, protocol
from rich.console import Console
from scipy import stats

from ternary_probe.records import (
    Baseline,
    Kinship,
    MatrixQuantization,
    NormEnergy,
    PlantedOutliers,
    QuantizedArm,
    QuantizeRecord,
)
from ternary_probe.reports.markdown import to_markdown
from ternary_probe.reports.terminal import quantize_view

SCHEME = "absmean@tensor"
SEEDS = 4
LEVELS = {"sign_flip": 0.82, "magnitude": 0.21}
STEPS = (-0.03, -0.01, 0.015, 0.025)


def arm(kind: str, seed: int | None, nll: float | None, **changes: Any) -> QuantizedArm:
    fields: dict[str, Any] = {
        "scheme": SCHEME,
        "arm": kind,
        "seed": seed,
        "relative_norm": 0.5132,
        "delta_nll": nll,
        "ci_low": None if nll is None else nll - 0.05,
        "ci_high": None if nll is None else nll + 0.05,
        "delta_ppl": None if nll is None else 20 * nll,
        "kl": None if nll is None else 0.9 * nll,
        "kl_reverse": None if nll is None else 1.1 * nll,
        "kl_quantiles": () if nll is None else (0.5, 1.5, 4.25, 6.0, 7.0),
        "kl_reverse_quantiles": (),
        "top1_agreement": None if nll is None else 0.6123,
        "checksum_before": "1f",
        "checksum_during": "2f",
        "checksum_after": "1f",
        "recipe": kind,
    }
    return QuantizedArm(**(fields | changes))


def arms() -> tuple[QuantizedArm, ...]:
    controls = [arm(kind, seed, level + STEPS[seed]) for seed in range(SEEDS) for kind, level in LEVELS.items()]
    return (arm("ternary", None, 0.7514), *controls)


def verdict(response: str, acts_like: str, ternary: float | None = 0.7514, **changes: Any) -> Kinship:
    fields: dict[str, Any] = {
        "scheme": SCHEME,
        "response": response,
        "ternary": ternary,
        "sign_flip": 0.82,
        "magnitude": 0.21,
        "acts_like": acts_like,
    }
    return Kinship(**(fields | changes))


def matrix(role: str, block: int, **changes: Any) -> MatrixQuantization:
    fields: dict[str, Any] = {
        "matrix": f"model.layers.{block}.{role}.weight",
        "role": role,
        "block": block,
        "scheme": SCHEME,
        "cos2": 0.75 + 0.01 * block,
        "cos2_gaussian": 0.787,
        "relative_error": 0.31,
        "relative_error_gaussian": 0.2634,
        "sparsity": 0.314,
        "radial_fraction": 0.4 + 0.1 * block if role == "down_proj" else None,
        "radial_note": "" if role == "down_proj" else "does not write to the residual stream",
        "bits_per_weight": 2.0001,
        "grid": "4-bit grid, groups of 32" if role == "down_proj" else None,
    }
    return MatrixQuantization(**(fields | changes))


def energies() -> tuple[NormEnergy, ...]:
    made = []
    for kind, level in (("ternary", 0.1), ("sign_flip", 0.2), ("sign_flip", 0.4)):
        for block in range(6):
            for name in ("first", "second"):
                value = level * (1 + block) * (1.0 if name == "second" else 100.0)
                made.append(
                    NormEnergy(
                        scheme=SCHEME,
                        arm=kind,
                        norm=f"layers.{block}.{name}",
                        block=block,
                        position="pre",
                        total=2 * value,
                        transverse=value,
                        radial_fraction=0.5,
                    )
                )
        made.append(
            NormEnergy(
                scheme=SCHEME,
                arm=kind,
                norm="norm",
                block=None,
                position="final",
                total=0.0,
                transverse=0.0,
                radial_fraction=None,
            )
        )
    return tuple(made)


def quantize_record(**changes: Any) -> QuantizeRecord:
    fields: dict[str, Any] = {
        "model": model(),
        "protocol": protocol(),
        "environment": environment(),
        "status": "ok",
        "notes": ("12 of 24 matrices lie on a grid already",),
        "baseline": Baseline(nll=3.00211, perplexity=20.1279),
        "quantized": arms(),
        "kinship": (verdict("nll", "sign_flip"), verdict("kl", "sign_flip")),
        "matrices": tuple(matrix(role, block) for role in ("q_proj", "down_proj") for block in range(2)),
        "energies": energies(),
        "planted": tuple(
            PlantedOutliers(
                k=k, scheme=SCHEME, baseline_shift=-2e-7, relative_error=0.26 * k, delta_nll=0.7 * k, kl=0.6 * k
            )
            for k in (1.0, 8.0)
        ),
        "saved": "/models/out",
    }
    return QuantizeRecord(**(fields | changes))


def shown(record: QuantizeRecord, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(quantize_view(record))
    return console.file.getvalue()


def flat(record: QuantizeRecord) -> str:
    return " ".join(shown(record).split())


def test_the_headline_answers_once_where_both_responses_agree():
    assert flat(quantize_record()).startswith(
        "absmean@tensor: in ΔNLL and KL its error acts like the harmful kind, sign flips of equal norm (ΔNLL 0.751, sign "
        "flips 0.820, magnitude 0.210; KL 0.751, sign flips 0.820, magnitude 0.210)."
    )


@pytest.mark.parametrize(
    ("acts_like", "ternary", "words"),
    [
        ("magnitude", 0.22, "acts like the harmless kind, noise of equal norm that keeps the signs"),
        ("between", 0.5, "lies between the harmless and the harmful kind"),
        ("beyond", 0.9, "hurts more than either kind of noise of its norm"),
        ("beyond", 0.1, "hurts less than either kind of noise of its norm"),
    ],
)
def test_each_verdict_has_its_plain_words(acts_like, ternary, words):
    text = flat(quantize_record(kinship=(verdict("nll", acts_like, ternary), verdict("kl", "sign_flip"))))

    assert f"in ΔNLL its error {words}" in text
    assert "but in KL its error acts like the harmful kind" in text


def test_an_undecided_verdict_gives_its_reason_and_no_kinship():
    reason = "a verdict needs two seeds of both controls, all finite"
    bare = {"ternary": None, "sign_flip": None, "magnitude": None, "reason": reason}
    text = flat(quantize_record(kinship=(verdict("nll", "undecided", **bare),)))

    assert text.startswith(f"absmean@tensor: in ΔNLL its error cannot be likened to either kind of noise: {reason}.")
    assert "acts like" not in text


def test_controls_in_the_wrong_order_are_said_aloud():
    text = flat(quantize_record(kinship=(verdict("kl", "between", magnitude=0.9),)))

    assert "Here noise that keeps the signs hurts no less than sign flips do (in KL)." in text


def test_every_scheme_has_its_own_answer():
    other = verdict("nll", "magnitude", 0.2, scheme="planes:2@g128")
    text = flat(quantize_record(kinship=(verdict("nll", "sign_flip"), other)))

    assert "planes:2@g128: in ΔNLL its error acts like the harmless kind" in text


def test_the_ternary_row_has_the_interval_over_windows():
    line = next(row for row in shown(quantize_record()).splitlines() if re.match(rf"{SCHEME}\s+ternary\s+0\.513", row))

    assert "0.751 ± 0.050" in line
    assert re.search(r"15\.0\s+0\.676\s+0\.827\s+0\.500, 4\.25\s+61\.2 %", line)


@pytest.mark.parametrize(("kind", "label"), [("sign_flip", "sign flips"), ("magnitude", "magnitude")])
def test_the_controls_rows_are_means_with_scipys_interval_over_seeds(kind, label):
    values = [LEVELS[kind] + step for step in STEPS]
    low, high = stats.t.interval(0.95, SEEDS - 1, loc=fmean(values), scale=stats.sem(values))
    line = next(row for row in shown(quantize_record()).splitlines() if re.match(rf"{SCHEME}\s+{label}\s+0\.513", row))

    assert f"{fmean(values):.3f} ± {(high - low) / 2:.3f}" in line
    assert f"{0.9 * fmean(values):.3f} ± {0.9 * (high - low) / 2:.3f}" in line
    assert f"{1.1 * fmean(values):.3f} ± {1.1 * (high - low) / 2:.3f}" in line


def test_a_broken_arm_is_dashes_and_is_named():
    broken = arm("ternary", None, None, status="non_finite")
    text = shown(quantize_record(quantized=(broken, *arms()[1:]), status="non_finite"))

    assert re.search(rf"{SCHEME}\s+ternary\s+0\.513(\s+–){{6}}\s*$", text, re.MULTILINE)
    assert "Not measured: absmean@tensor ternary: non finite." in text
    assert "NON-FINITE" in text


def test_matrices_are_summarised_by_role_beside_the_gaussian():
    text = shown(quantize_record())

    row = rf"{SCHEME}\s+q_proj\s+2\s+0\.755 \(0\.787\)\s+0\.310 \(0\.263\)\s+31\.4 %\s+–\s+2\.00\s+no"
    assert re.search(row, text)
    assert re.search(rf"{SCHEME}\s+down_proj\s+2\s.*\s0\.450\s+2\.00\s+4-bit grid, groups of 32", text)


def test_a_grid_that_only_some_matrices_lie_on_is_counted():
    mixed = (matrix("down_proj", 0), matrix("down_proj", 1, grid=None))
    assert "1 of 2" in shown(quantize_record(matrices=mixed))


def test_energies_are_of_the_last_norm_in_first_middle_and_last_block_and_of_the_final_norm():
    text = shown(quantize_record())

    assert re.search(r"block 0\s+block 3\s+block 5\s+final norm", text)
    assert re.search(rf"{SCHEME}\s+ternary\s+0\.100 \(0\.50\)\s+0\.400 \(0\.50\)\s+0\.600 \(0\.50\)\s+0 \(–\)", text)
    assert re.search(rf"{SCHEME}\s+sign flips\s+0\.300 \(0\.50\)\s+1\.20 \(0\.50\)", text)


def test_planted_outliers_and_the_saved_folder_are_shown():
    text = shown(quantize_record())

    assert re.search(rf"{SCHEME}\s+8\s+-2\.0e-07\s+2\.08\s+5\.60\s+4\.80\s+ok", text)
    assert re.search(r"saved\s+/models/out", text)
    assert "12 of 24 matrices lie on a grid already" in text


def test_without_controls_energies_or_planting_the_tables_are_absent():
    record = quantize_record(quantized=arms()[:1], kinship=(), energies=(), planted=(), saved=None)
    text = shown(record)

    assert text.startswith("No scheme was measured against noise of equal norm.")
    assert "Energy at the norms" not in text
    assert "Planted" not in text
    assert re.search(r"controls\s+none", text)


def test_the_view_fits_120_columns_and_loses_nothing_at_80():
    record = quantize_record()
    assert max(map(len, shown(record).splitlines())) <= 120
    letters = [sorted(re.sub(r"[\s─]", "", shown(record, width))) for width in (80, 400)]
    assert letters[0] == letters[1]
    assert not re.search(r"\b(NaN|nan|inf|None)\b", shown(record))


def test_the_markdown_report_has_the_same_headline_and_figures():
    text = to_markdown(quantize_record())

    assert "acts like the harmful kind, sign flips of equal norm" in text
    for figure in ("0.751 ± 0.050", "0.755 (0.787)", "0.100 (0.50)", "/models/out"):
        assert figure in text
