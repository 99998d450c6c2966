"""The view of closed forms beside simulation: the record's own figures, verdict first, nothing measured invented."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from reports.factory import environment, model, protocol
from rich.console import Console

from ternary_probe.records import DepthRatio, GaussianQuantizer, NoiseShape, Simulated, TheoryRecord, TwoLayerRatio
from ternary_probe.reports.markdown import to_markdown
from ternary_probe.reports.terminal import theory_view


def simulated(value: float, exact: float, **changes: Any) -> Simulated:
    fields: dict[str, Any] = {
        "simulated": value,
        "standard_error": 0.001,
        "ci_low": value - 0.002,
        "ci_high": value + 0.002,
        "exact": exact + 0.01,
        "exact_width": exact,
        "z": (value - exact) / 0.001,
        "agrees": True,
    }
    return Simulated(**(fields | changes))


def ratio(rate: float = 0.01, **changes: Any) -> TwoLayerRatio:
    fields: dict[str, Any] = {
        "rate": rate,
        "ratio_simulated": 2.6453,
        "standard_error": 0.0052,
        "ci_low": 2.6347,
        "ci_high": 2.6559,
        "ratio_exact": 2.6683,
        "ratio_exact_width": 2.6441,
        "ratio_authors": 2.6101,
        "ratio_paper": 2.639,
        "ratio_paper_spread": 0.012,
        "allowance": 0.0001,
        "z": 0.22,
        "agrees": True,
        "radial_sign": simulated(0.01562, 0.01538),
        "radial_magnitude": simulated(0.64398, 0.64422),
    }
    return TwoLayerRatio(**(fields | changes))


def quantizer(scheme: str, **changes: Any) -> GaussianQuantizer:
    figures = {
        "cos2": 0.6366,
        "error_energy": 0.3634,
        "radial_pre": 0.3633,
        "radial_post": 0.3649,
        "output_cos2": 0.6814,
        "nonzero": 1.0,
    }
    found = {name: simulated(value - 0.0003, value) for name, value in figures.items()}
    return GaussianQuantizer(**({"scheme": scheme, "simulated": found, **figures} | changes))


def depth(layers: int, *, residual: bool, **changes: Any) -> DepthRatio:
    fields = simulated(3.59 - layers / 10, 3.6 - layers / 10).model_dump()
    fields |= {"weights": "random", "residual": residual, "layers": layers, "rate": 0.01, "published": 3.617}
    return DepthRatio(**(fields | {"published_source": "random weights, arXiv 2605.18933"} | changes))


def theory_record(**changes: Any) -> TheoryRecord:
    noise = simulated(1.6292, 1.6269).model_dump()
    fields: dict[str, Any] = {
        "model": model(name="random Gaussian weights", path=None, weights_sha256=None),
        "protocol": None,
        "environment": environment(),
        "status": "ok",
        "notes": ("Quantizers have one scale for the whole matrix, the limit of large groups.",),
        "width": 512,
        "inputs": 256,
        "seeds": tuple(range(32)),
        "confidence": 0.95,
        "family_alpha": 0.01,
        "comparisons": 73,
        "verdict": "pass",
        "two_layer": (ratio(0.001, ratio_paper=None, ratio_paper_spread=None), ratio()),
        "noise_shapes": (
            NoiseShape(rate=0.01, noise="half_normal", **noise),
            NoiseShape(rate=0.01, noise="multiplicative", **simulated(0.9805, 0.9804).model_dump()),
        ),
        "quantizers": (quantizer("sign", published={"radial_post": 0.365}), quantizer("absmean")),
        "depth": tuple(depth(layers, residual=residual) for layers in (1, 2) for residual in (False, True)),
    }
    return TheoryRecord(**(fields | changes))


def shown(record: TheoryRecord, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(theory_view(record))
    return console.file.getvalue()


def flat(record: TheoryRecord) -> str:
    return " ".join(shown(record).split())


def line(text: str, pattern: str) -> str:
    found = [row for row in text.splitlines() if re.match(pattern, row)]
    assert len(found) == 1, (pattern, found)
    return found[0]


def test_the_headline_is_the_verdict_and_one_ratio_with_its_interval():
    text = flat(theory_record())

    assert text.startswith("Simulation bears out every closed form (73 comparisons).")
    assert "At a rate of 1 %, sign flips leave 2.645 ± 0.011 times" in text
    assert "closed form 2.644 at this width, 2.668 for infinite width; the paper measured 2.639 at width 2,048" in text


def test_a_missed_form_leads_and_its_row_says_no():
    record = theory_record(
        verdict="fail",
        status="failed",
        reason="missed by more than its interval allows: ratio at rate 0.01",
        two_layer=(ratio(agrees=False),),
    )
    text = shown(record)

    assert " ".join(text.split()).startswith(
        "A closed form is wrong here: missed by more than its interval allows: ratio"
    )
    assert "status" in text
    assert "FAILED" in text
    assert line(text, r"\s+1 %\s+2\.645").rstrip().endswith("NO")


def test_an_untested_form_is_not_a_pass():
    alone = {"standard_error": None, "ci_low": None, "ci_high": None, "z": None, "agrees": None}
    radial = simulated(0.01562, 0.01538, **alone)
    row = ratio(**alone, radial_sign=radial, radial_magnitude=radial)
    record = theory_record(
        verdict="inconclusive", status="inconclusive", reason="an interval takes two seeds or more", two_layer=(row,)
    )
    text = shown(record)

    assert text.startswith("The closed forms are not tested: an interval takes two seeds or more.")
    assert line(text, r"\s+1 %\s+2\.65").rstrip().endswith("untested")
    assert "2.65 (no interval)" in text


def test_every_figure_of_the_ratio_table_is_the_records_own():
    text = shown(theory_record())

    cells = line(text, r"\s+1 %\s+2\.645")
    for cell in (
        "2.645 ± 0.011",
        "2.644",
        "2.668",
        "2.610",
        "2.639 ± 0.012",
        "0.0156 (0.0154)",
        "0.6440 (0.6442)",
        "yes",
    ):
        assert cell in cells
    assert re.search(r"2\.610\s+–\s", line(text, r"0\.1 %\s+2\.645"))  # nothing published at this rate


def test_noise_shapes_quantizers_and_depth_are_shown_with_their_forms():
    text = shown(theory_record())

    assert re.search(r"1 %\s+1\.6292 ± 0\.0020\s+1\.627\s+0\.9805 ± 0\.0020\s+0\.9804\s+yes", text)
    assert re.search(r"absmean\s+0\.6363 \(0\.6366\)\s+0\.3631 \(0\.3634\)\s+0\.3630 \(0\.3633\)", text)
    assert "sign: R after ReLU is 0.365 in arXiv 2605.18933" in text
    assert re.search(r"1\s+3\.4900 ± 0\.0020\s+3\.500\s+3\.617\s+3\.4900 ± 0\.0020\s+3\.500\s+3\.617\s+yes", text)


def test_a_real_models_stack_has_its_own_table_without_closed_forms():
    bare = {"exact": None, "exact_width": None, "z": None, "agrees": None, "weights": "up_proj"}
    rows = tuple(depth(1, residual=r, **bare, published=None, published_source=None) for r in (False, True))
    record = theory_record(model=model(), protocol=protocol(), depth=(*theory_record().depth, *rows))
    text = shown(record)

    assert "Depth, the model's up_proj matrices" in text
    assert re.search(r"1\s+3\.4900 ± 0\.0020\s+–\s+3\.4900 ± 0\.0020\s+–\s*$", text, re.MULTILINE)
    assert "SmolLM2-135M-Instruct" in text


def test_without_depth_there_is_no_depth_table():
    assert "Depth" not in shown(theory_record(depth=()))


def test_the_view_fits_120_columns_and_loses_nothing_at_80():
    record = theory_record()
    assert max(map(len, shown(record).splitlines())) <= 120
    letters = [sorted(re.sub(r"[\s─]", "", shown(record, width))) for width in (80, 400)]
    assert letters[0] == letters[1]
    assert not re.search(r"\b(NaN|nan|inf|None)\b", shown(record))


@pytest.mark.parametrize("figure", ["2.645 ± 0.011", "0.6363 (0.6366)", "1.6292 ± 0.0020", "3.4900 ± 0.0020"])
def test_the_markdown_report_has_the_same_figures(figure):
    assert figure in to_markdown(theory_record())
