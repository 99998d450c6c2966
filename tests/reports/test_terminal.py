"""The terminal views say what the record says, in 120 columns, without colour, with every status and reason."""

from __future__ import annotations

import io
import re

import pytest
from reports.factory import (
    COVERS_ZERO,
    SPREAD,
    arms,
    curves,
    inspect_record,
    leverage_record,
    leverages,
    mean,
    means,
    perplexity_record,
    published,
    ratio,
)
from rich.console import Console
from scipy import stats

from ternary_probe.reports.terminal import inspect_view, leverage_view, perplexity_view


def shown(view: object, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(view)
    return console.file.getvalue()


def flat(view: object, width: int = 120) -> str:
    return " ".join(shown(view, width).split())


def row(text: str, *starts: str) -> str:
    """The one line that begins with these cells."""
    pattern = r"^\s*" + r"\s\s+".join(map(re.escape, starts)) + r"\s\s"
    found = [line for line in text.splitlines() if re.match(pattern, line)]
    assert len(found) == 1, (starts, found)
    return found[0]


def test_the_headline_is_the_answer_with_both_responses_and_their_intervals():
    first = flat(leverage_view(leverage_record()))

    assert first.startswith(
        "Flipping the sign of 0.5 % of the entries in outlier columns hurts 28× (95 % interval 20 to 41) as much as "
        "flipping as many entries in other columns, measured in ΔNLL, and 31.1× (95 % interval 25.9 to 37.4) "
        "measured in KL."
    )


def test_the_headline_prefers_the_largest_rate_that_is_still_linear():
    entries = (ratio(0.001, "kl", "other", 33.43, 26.12, 42.31), ratio(0.005, "kl", "other", 31.11, 25.9, 37.4))
    short = tuple(c.model_copy(update={"linear_up_to": 0.001}) for c in curves())

    text = flat(leverage_view(leverage_record(leverage=entries, curves=short)))

    assert text.startswith("Flipping the sign of 0.1 % of")
    assert "0.1 % is the largest conclusive rate at which both arms are still linear" in text


def test_the_headline_says_that_one_response_is_inconclusive_and_why():
    entries = tuple(e for e in leverages() if e.rate == 0.001)

    text = flat(leverage_view(leverage_record(leverage=entries)))

    assert "hurts 33.4× (95 % interval 26.1 to 42.3) as much" in text
    assert f"In ΔNLL it is inconclusive: {COVERS_ZERO}." in text


def test_no_leverage_is_claimed_when_nothing_is_conclusive():
    entries = (ratio(0.001, "nll", "other", 38.5, None, None, status="inconclusive", reason=COVERS_ZERO),)

    text = flat(leverage_view(leverage_record(leverage=entries, status="inconclusive")))

    assert text.startswith(f"No leverage can be stated: {COVERS_ZERO}.")
    assert "status INCONCLUSIVE" in text


def test_an_interval_around_one_is_not_sold_as_a_difference():
    entries = (ratio(0.005, "nll", "other", 1.2, 0.7, 2.1), ratio(0.005, "kl", "other", 1.9, 1.5, 2.4))

    assert "The interval in ΔNLL covers 1: no difference is shown there." in flat(
        leverage_view(leverage_record(leverage=entries))
    )


def test_every_figure_of_the_leverage_table_is_the_records_own():
    text = shown(leverage_view(leverage_record()))

    assert row(text, "0.5 %", "outlier ÷ other").split()[-1] == "ok"
    assert "28 [20, 41]" in row(text, "0.5 %", "outlier ÷ other")
    assert "31.1 [25.9, 37.4]" in row(text, "0.5 %", "outlier ÷ other")
    assert "22.2 (18.1)" in row(text, "0.5 %", "outlier ÷ other"), "predictions beside the measurement"
    assert "10.9 (8.73)" in row(text, "0.5 %", "outlier ÷ all")


def test_every_figure_of_the_damage_table_is_the_records_own():
    text = shown(leverage_view(leverage_record()))

    line = row(text, "0.5 %", "other", "25,950")
    assert "0.0109 ± 0.0027" in line
    assert "0.0096 ± 0.0011" in line
    assert "ΔNLL below floor" in row(text, "0.1 %", "other", "5,160")


def test_the_perplexity_change_is_averaged_over_seeds_with_scipys_interval():
    record = leverage_record()
    values = [20.125 * (0.3049 + step * 0.0531) for step in SPREAD]
    low, high = stats.t.interval(0.95, len(values) - 1, loc=sum(values) / len(values), scale=stats.sem(values))

    line = row(shown(leverage_view(record)), "0.5 %", "outlier", "25,950")

    assert f"{sum(values) / 8:.2f} ± {(high - low) / 2:.2f}" in line


def test_an_inconclusive_ratio_is_bracketed_named_and_explained():
    text = shown(leverage_view(leverage_record()))

    assert "(38.5)" in text
    assert re.search(r"0\.1 %  outlier ÷ other .*ΔNLL: inconclusive \[a\]", text), "the row points to its reason"
    assert text.count(COVERS_ZERO) == 1
    assert f"[a] {COVERS_ZERO}" in text


def test_a_failed_arm_is_named():
    broken = arms()[0].model_copy(update={"delta_nll": None, "kl": None, "delta_ppl": None, "status": "non_finite"})
    gone = mean(0.001, "outlier", "nll", None, None, status="non_finite")
    text = flat(leverage_view(leverage_record(arms=(broken, *arms()[1:]), means=(gone, *means()[1:]))))

    assert "Not measured: 0.1 % outlier seed 0: non finite." in text
    assert "ΔNLL non finite" in text


def test_published_figures_are_marked_as_the_papers():
    text = shown(leverage_view(leverage_record(published=published())))

    assert "9.90" in row(text, "0.5 %", "paper’s ÷ other")
    assert "0.0304" in row(text, "0.5 %", "paper’s outlier", "241,387")
    assert "0.00307" in row(text, "0.5 %", "paper’s other", "241,387")
    assert "1.35" in row(text, "5 %", "paper’s outlier", "2,413,875")
    assert "not measured here" in text
    assert "paper" not in shown(leverage_view(leverage_record()))


def test_every_matching_is_named_when_a_study_has_several():
    energy = tuple(a.model_copy(update={"matching": "energy"}) for a in arms())
    entries = (*leverages(), ratio(0.005, "nll", "other", 1267.0, 900.0, 1700.0, matching="energy"))

    text = shown(leverage_view(leverage_record(arms=(*arms(), *energy), leverage=entries)))

    assert "1270 [900, 1700]" in row(text, "0.5 %", "outlier ÷ other, energy")
    assert "28 [20, 41]" in row(text, "0.5 %", "outlier ÷ other, count")
    assert "energy-matched" in text


def test_slope_and_linear_range_are_shown():
    line = row(shown(leverage_view(leverage_record())), "other", "1.085 ± 0.051")

    assert line.count("0.5 %") == 2


def test_notes_and_counts_of_zero_entries_are_shown():
    touched = arms()[0].model_copy(update={"zeros": 321})
    text = flat(leverage_view(leverage_record(arms=(touched, *arms()[1:]))))

    assert "The weights already lie on a 4-bit grid." in text
    assert "Up to 321 of an arm's flips hit entries that are exactly 0" in text


def test_the_baseline_and_the_noise_floor_carry_units():
    text = flat(leverage_view(leverage_record()))

    assert "baseline NLL 3.0021 nats/token, perplexity 20.13" in text
    assert "noise floor ΔNLL 0.0021, KL 0.00031 nats/token" in text


def test_perplexity_shows_figures_interval_and_protocol():
    text = flat(perplexity_view(perplexity_record()))

    assert text.startswith(
        "Token perplexity 20.1 (95 % interval [18.5, 21.9] over windows of this text); NLL 3.00211 nats/token."
    )
    assert "NLL 3.002 [2.918, 3.086] nats per scored token" in text
    assert "word perplexity 61.23" in text
    assert "byte perplexity 2.012" in text
    assert "protocol disjoint: 4 × 512 tokens, 2,044 scored" in text


def test_what_is_missing_from_a_perplexity_is_a_dash_with_a_reason():
    record = perplexity_record(token_perplexity=None, word_perplexity=None, ci_low=None, ci_high=None, nll=800.0)
    text = flat(perplexity_view(record))

    assert text.startswith("Token perplexity cannot be stated: it overflows at an NLL of 800.00 nats/token.")
    assert "–: too large for a number" in text
    assert "No interval: it takes at least two windows." in text


def test_a_matrix_outside_the_blocks_is_not_counted_into_them():
    record = inspect_record()
    head = record.matrices[0].model_copy(update={"matrix": "lm_head", "role": "lm_head", "block": None})

    text = flat(inspect_view(inspect_record(matrices=(*record.matrices, head))))

    assert text.startswith("43 weight matrices can be perturbed, 42 of them in 6 blocks")


def test_the_sign_preserving_control_is_not_called_flips():
    control = arms()[0].model_copy(update={"arm": "magnitude_outlier"})

    assert "flips" in shown(leverage_view(leverage_record())).split("Damage")[1]
    assert "changed" in shown(leverage_view(leverage_record(arms=(*arms(), control)))).split("Damage")[1]


def test_inspect_groups_matrices_and_lists_what_it_cannot_handle():
    text = shown(inspect_view(inspect_record()))

    assert re.search(r"down_proj\s+6\s+0–5\s+576 × 1,536\s+5,308,416\s+float32", text)
    assert re.search(r"1\s+model.odd_scale\s+never meets an activation", text)
    assert re.search(r"rms norm\s+pre\s+6\s+3\s+yes", text)


def test_inspect_names_the_result_of_every_self_check():
    text = shown(inspect_view(inspect_record()))

    assert re.search(r"forward repeats\s+passed\s+0\s", text)
    assert re.search(r"chunked head\s+FAILED\s+1.5e-06\s+one row takes another kernel", text)
    assert re.search(r"causality\s+not run\s+–\s+not asked for", text)


def test_almost_all_parameters_never_reads_as_all():
    assert "99.9 % of all parameters" in flat(inspect_view(inspect_record(accounted=0.99999)))
    assert "100 % of all parameters" in flat(inspect_view(inspect_record(accounted=1.0)))


VIEWS = {
    "leverage": lambda: leverage_view(leverage_record(published=published())),
    "perplexity": lambda: perplexity_view(perplexity_record()),
    "inspect": lambda: inspect_view(inspect_record()),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_fits_120_columns_without_a_wrapped_table_row(view):
    # In a wider terminal the same lines come out: nothing was squeezed.
    narrow = [line.rstrip() for line in shown(view(), 120).splitlines() if re.match(r"\s*[\d.]+ %", line)]
    wide = [line.rstrip() for line in shown(view(), 400).splitlines() if re.match(r"\s*[\d.]+ %", line)]

    assert max(map(len, shown(view(), 120).splitlines())) <= 120
    assert narrow == wide


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_nothing_is_cut_off_at_80_columns(view):
    assert "…" not in shown(view(), 80).replace(" … ", "")
    letters = [sorted(re.sub(r"[\s─]", "", shown(view(), width))) for width in (80, 400)]
    assert letters[0] == letters[1]


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_no_colour_codes_and_no_nan_reach_a_file(view):
    text = shown(view())

    assert "\x1b" not in text
    assert not re.search(r"\b(NaN|nan|[iI]nf|infinity|None)\b", text)


def test_colour_adds_nothing_to_the_words():
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="truecolor")
    console.print(leverage_view(leverage_record()))

    assert re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue()) == shown(leverage_view(leverage_record()))


def test_brackets_in_a_name_are_not_read_as_markup():
    record = perplexity_record()
    record = record.model_copy(update={"model": record.model.model_copy(update={"name": "me/[bold]odd[/bold]"})})

    assert "me/[bold]odd[/bold]" in shown(perplexity_view(record))
