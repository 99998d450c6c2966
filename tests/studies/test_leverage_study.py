"""The leverage study end to end on a tiny model: what it measures, what it leaves behind, what it refuses."""

from __future__ import annotations

import json
import math
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from small_study import (
    bits,
    calibration,
    changed,
    cut,
    differing,
    loaded_llama,
    speaking_llama,
    study,
    tokenizer,
)
from tiny import tiny_llama

from ternary_probe.anatomy import StorageError, examine
from ternary_probe.errors import ProbeError
from ternary_probe.loading import LoadedModel, LoadingError, wrap
from ternary_probe.perturb import NoEffectError, NotRestoredError, OutlierColumns, SignFlip, checksum
from ternary_probe.records import Arm, LeverageRecord
from ternary_probe.studies.leverage import run_leverage
from ternary_probe.studies.plan import ARMS
from ternary_probe.text import make_windows, read_text

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def comparable(record: LeverageRecord) -> dict[str, Any]:
    """A record without what may differ from run to run."""
    return record.model_dump(mode="json", exclude={"environment", "timing"})


def by_cell(record: LeverageRecord) -> dict[tuple[str, str, float, int], Arm]:
    return {(a.matching, a.arm, a.rate, a.seed): a for a in record.arms}


@pytest.fixture(scope="module")
def record() -> LeverageRecord:
    return study()


# --- what is measured ----------------------------------------------------------------------------------------------


def test_the_record_has_every_key_that_scripts_rely_on(record):
    data = json.loads(record.model_dump_json())

    top = {"schema_version", "command", "model", "protocol", "environment", "status"}
    assert top | {"baseline", "noise_floor", "arms", "leverage", "amplitude"} <= data.keys()
    assert {"nll", "perplexity"} <= data["baseline"].keys()
    arm = {"rate", "arm", "matching", "seed", "flips", "delta_nll", "delta_ppl", "kl"}
    for item in data["arms"]:
        assert arm | {"checksum_before", "checksum_after"} <= item.keys()
    for item in data["leverage"]:
        assert {"rate", "matching", "response", "ratio", "ci_low", "ci_high", "status"} <= item.keys()
    for item in data["amplitude"]:
        assert {"matrix", "role", "n_outliers", "n_alpha2_outlier"} <= item.keys()
    assert {item["response"] for item in data["leverage"]} == {"nll", "kl"}
    assert data["command"] == "leverage"
    assert data["status"] in {"ok", "inconclusive"}


def test_the_record_survives_json(record):
    assert LeverageRecord.model_validate_json(record.model_dump_json()) == record


def test_every_arm_is_what_flipping_by_hand_gives(record):
    """The oracle: dense logits in fp64, before and after an XOR written here."""
    loaded, scored = loaded_llama(), cut(3)
    model = loaded.model
    anatomy = examine(model)

    def log_probabilities() -> torch.Tensor:
        with torch.no_grad():
            return model(scored.inputs, use_cache=False).logits.double().log_softmax(-1)

    def nll(log_p: torch.Tensor) -> float:
        picked = log_p.gather(-1, scored.targets[..., None])[..., 0]
        return -float(picked[scored.scored].mean())

    clean = log_probabilities()
    assert record.baseline.nll == pytest.approx(nll(clean), rel=1e-6)
    assert record.baseline.perplexity == pytest.approx(math.exp(nll(clean)), rel=1e-5)
    for arm in record.arms[::3]:
        recipe = SignFlip(rate=arm.rate, seed=arm.seed, matching=arm.matching, columns={"select": arm.arm})
        recipe = recipe.resolved_with(list(anatomy.block_matrices), record.outlier_columns)
        saved = {m.name: m.view().clone() for m in anatomy.block_matrices}
        flips = 0
        with torch.no_grad():
            for matrix in anatomy.block_matrices:
                dense = matrix.view().contiguous().view(-1)
                entries = recipe.draw(matrix)
                dense[entries] = -dense[entries]
                matrix.view().copy_(dense.view(matrix.shape))
                flips += len(entries)
        perturbed = log_probabilities()
        with torch.no_grad():
            for matrix in anatomy.block_matrices:
                matrix.view().copy_(saved[matrix.name])
        kl = float((clean.exp() * (clean - perturbed)).sum(-1)[scored.scored].mean())
        assert arm.flips == flips
        assert arm.delta_nll == pytest.approx(nll(perturbed) - nll(clean), abs=2e-6)
        assert arm.kl == pytest.approx(kl, rel=1e-4)
        assert arm.delta_ppl == pytest.approx(math.exp(nll(perturbed)) - math.exp(nll(clean)), rel=1e-3)
        changed_by = sum(
            float((2 * saved[m.name].view(-1)[recipe.draw(m)]).double().square().sum()) for m in anatomy.block_matrices
        )
        energy = sum(float(s.double().square().sum()) for s in saved.values())
        assert arm.relative_norm == pytest.approx(math.sqrt(changed_by / energy), rel=1e-6)


def test_windows_of_an_arm_average_to_its_figures(record):
    for arm in record.arms:
        assert np.mean(arm.delta_nll_windows) == pytest.approx(arm.delta_nll, rel=1e-9, abs=1e-12)
        assert np.mean(arm.kl_windows) == pytest.approx(arm.kl, rel=1e-9)
        assert all(value >= 0 for value in arm.kl_windows)


def test_every_cell_proves_effect_and_restore(record):
    for arm in record.arms:
        assert arm.checksum_before == arm.checksum_after != arm.checksum_during
        assert arm.flips > 0
    assert len({arm.checksum_before for arm in record.arms}) == 1
    assert len({arm.checksum_during for arm in record.arms}) == len(record.arms)


def test_the_noise_floor_is_the_largest_of_its_parts(record):
    floor = record.noise_floor

    assert floor.nll == max(floor.repeat_nll, floor.rechunk_nll, floor.tiny_flip_nll_sd)
    assert floor.kl == max(floor.rechunk_kl, floor.tiny_flip_kl_sd)
    assert floor.repeat_nll == 0  # the same computation on a CPU
    assert floor.tiny_flip_nll_sd > 0
    assert floor.tiny_flip_rate == pytest.approx(0.005)
    assert floor.tiny_flip_seeds == 2


def test_the_noise_floor_really_cuts_the_head_into_other_chunks():
    loaded = loaded_llama()
    rows: list[int] = []
    loaded.model.lm_head.register_forward_hook(lambda _module, _args, output: rows.append(output.shape[1]))

    study(loaded, changed(rates=(0.05,)))

    # Of windows of 32 tokens, 5 clean rows beside 5 perturbed ones at a time, and 2 beside 2 at the end.
    assert (rows.count(10), rows.count(4)) == (3 * 6, 3)


def test_evaluations_are_counted_and_none_is_wasted(record):
    # clean, repeat, other chunk; one for each cell and for each cell of the noise floor
    assert record.timing is not None
    assert record.timing.evaluations == 3 + 12 + 2


def test_progress_counts_up_to_its_total():
    seen: list[tuple[int, int]] = []
    study(options=changed(rates=(0.05,)), progress=lambda done, total, _label: seen.append((done, total)))

    done = [d for d, _ in seen]
    assert done == sorted(done)
    assert seen[-1] == (3 + 6 + 2, 3 + 6 + 2)
    assert {total for _, total in seen} == {11}


def test_columns_are_chosen_on_text_that_is_not_scored(record):
    assert record.calibration is not None
    assert record.protocol is not None
    first, last = record.protocol.skip, record.protocol.skip + 3 * 32
    assert record.calibration.skip >= last > first


def test_targets_are_named_when_they_are_not_all_block_matrices(record):
    chosen = study(options=changed(include=("*mlp*",), exclude=("*up_proj*",)))

    assert record.targets == ()
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in chosen.targets} == {"gate_proj", "down_proj"}
    assert set(chosen.outlier_columns) == {a.matrix for a in chosen.amplitude} == set(chosen.targets)
    for arm in chosen.arms:
        assert arm.flips < by_cell(record)[arm.matching, arm.arm, arm.rate, arm.seed].flips


@pytest.mark.parametrize("matching", ["count", "rate", "energy"])
def test_every_matching_runs_every_arm(matching):
    found = study(options=changed(matchings=(matching,), arms=ARMS, rates=(0.05,)))

    cells = by_cell(found)
    assert len(cells) == 2 * len(ARMS)
    flips = {arm: cells[matching, arm, 0.05, 0].flips for arm in ("outlier", "other", "all")}
    if matching == "count":
        assert flips["outlier"] == flips["other"] == flips["all"]
    else:
        assert flips["outlier"] < flips["other"] < flips["all"]
    norms = {arm: cells[matching, arm, 0.05, 0].relative_norm for arm in ARMS}
    if matching == "energy":
        assert norms["outlier"] == pytest.approx(norms["all"], rel=1e-6)
        assert norms["other"] == pytest.approx(norms["all"], rel=1e-6)
    pairs = {(item.numerator, item.denominator) for item in found.leverage}
    assert pairs == {
        ("outlier", "other"),
        ("outlier", "all"),
        *((p, f"magnitude_{p}") for p in ("outlier", "other", "all")),
    }


@pytest.mark.parametrize("matching", ["count", "rate", "energy"])
@pytest.mark.parametrize("pool", ["outlier", "other", "all"])
def test_a_magnitude_control_has_the_norm_of_its_flip(matching, pool):
    found = study(options=changed(matchings=(matching,), arms=(pool, f"magnitude_{pool}"), rates=(0.05,)))

    cells = by_cell(found)
    for seed in (0, 1):
        flip, control = (cells[matching, arm, 0.05, seed] for arm in (pool, f"magnitude_{pool}"))
        assert control.relative_norm == pytest.approx(flip.relative_norm, rel=1e-5)


def test_cells_that_change_the_same_entries_are_measured_once():
    found = study(options=changed(rates=(0.05,), matchings=("count", "rate")))

    cells = by_cell(found)
    for seed in (0, 1):
        count, rate = cells["count", "outlier", 0.05, seed], cells["rate", "outlier", 0.05, seed]
        assert count.model_copy(update={"matching": "rate", "recipe": rate.recipe}) == rate
        assert count.recipe != rate.recipe
    assert found.timing is not None
    assert found.timing.evaluations == 3 + 2 * (2 * 3 - 1) + 2


def test_the_order_of_arms_rates_and_seeds_does_not_matter(record):
    other = study(options=changed(arms=("all", "outlier", "other"), rates=(0.2, 0.05), seeds=(1, 0)))

    assert by_cell(other) == by_cell(record)


def test_a_study_does_not_depend_on_random_numbers_drawn_elsewhere(record):
    torch.manual_seed(1234)
    torch.rand(17)
    np.random.seed(7)  # noqa: NPY002 - the global generator must not matter

    assert comparable(study()) == comparable(record)


def test_the_command_is_kept(record):
    assert study(options=changed(rates=(0.05,)), command="demo").command == "demo"
    assert record.command == "leverage"


# --- what is left behind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_parameter_is_bit_identical_after_a_study(dtype):
    loaded = loaded_llama(dtype)
    before = bits(loaded.model)

    found = study(loaded, changed(matchings=("count", "energy"), arms=ARMS, plant=OutlierColumns(k=3, number=2)))

    assert differing(loaded.model, before) == []
    assert all(arm.checksum_during != arm.checksum_before for arm in found.arms)


class StrikesDuringAnArm:
    """Interrupts the nth forward that runs while the weights are perturbed."""

    def __init__(self, model: torch.nn.Module, strike: Any, nth: int) -> None:
        self.weights = [m.view() for m in examine(model).block_matrices]
        self.clean = checksum(self.weights)
        self.strike, self.left, self.caught = strike, nth, False
        model.register_forward_pre_hook(self)

    def __call__(self, *_: object) -> None:
        if checksum(self.weights) != self.clean:
            self.left -= 1
            if self.left == 0:
                self.caught = True
                self.strike()


def _raise_keyboard_interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["exception", "signal"])
def test_every_parameter_is_bit_identical_after_ctrl_c_inside_an_arm(dtype, how, tmp_path):
    loaded = loaded_llama(dtype)
    before = bits(loaded.model)
    strike = _raise_keyboard_interrupt if how == "exception" else lambda: os.kill(os.getpid(), signal.SIGINT)
    hook = StrikesDuringAnArm(loaded.model, strike, nth=20)

    with pytest.raises(KeyboardInterrupt):
        study(loaded, changed(matchings=("energy",), arms=ARMS), out=tmp_path)

    assert hook.caught
    assert differing(loaded.model, before) == []


def test_ctrl_c_under_a_planted_model_takes_the_planting_out_too():
    loaded = loaded_llama()
    before = bits(loaded.model)
    calls = 0

    def progress(_done: int, _total: int, label: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 8:
            assert differing(loaded.model, before), "nothing was planted"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(loaded, changed(plant=OutlierColumns(k=4, number=2, mode="raw")), progress=progress)

    assert differing(loaded.model, before) == []


def test_an_interrupted_study_continues_with_fewer_evaluations_and_the_same_record(record, tmp_path):
    calls = 0

    def progress(_done: int, _total: int, _label: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(out=tmp_path, progress=progress)
    resumed = study(out=tmp_path)

    assert comparable(resumed) == comparable(record)
    assert resumed.timing is not None
    assert record.timing is not None
    assert 1 < resumed.timing.evaluations < record.timing.evaluations - 5


def test_a_finished_study_is_read_back_with_one_evaluation(tmp_path):
    first = study(out=tmp_path)
    again = study(out=tmp_path)

    assert comparable(again) == comparable(first)
    assert again.timing is not None
    assert again.timing.evaluations == 1  # the clean model


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seeds": (0, 1, 2)}, "seeds"),
        ({"rates": (0.05, 0.06)}, "rates"),
        ({"fraction": 0.2}, "columns, outlier columns"),
        ({"by": "mean_abs"}, "columns"),
        ({"plant": OutlierColumns(k=2, number=1)}, "planted"),
        ({"exclude": ("*up_proj*",)}, "columns"),
        ({"paper_counts": True}, "columns"),
    ],
    ids=lambda v: "" if isinstance(v, dict) else v,
)
def test_other_options_in_the_same_folder_are_refused_by_name(tmp_path, change, named):
    study(options=changed(), out=tmp_path)

    with pytest.raises(ProbeError, match="holds another study") as refused:
        study(options=changed(**change), out=tmp_path)
    assert named in str(refused.value)


def test_other_weights_text_or_dtype_in_the_same_folder_are_refused_by_name(tmp_path):
    study(out=tmp_path)

    with pytest.raises(ProbeError, match=r"different: .*weights"):
        study(loaded_llama(seed=1), out=tmp_path)
    with pytest.raises(ProbeError, match=r"different: .*text"):
        study(windows=2, out=tmp_path)
    with pytest.raises(ProbeError, match="different: dtype"):
        study(loaded_llama(torch.bfloat16), out=tmp_path)


def test_a_weight_changed_by_someone_else_during_the_study_is_an_error():
    loaded = loaded_llama()

    def progress(done: int, total: int, _label: str) -> None:
        if done == total:
            with torch.no_grad():
                loaded.model.model.embed_tokens.weight[0, 0] += 1

    with pytest.raises(NotRestoredError, match="weights differ after the study"):
        study(loaded, progress=progress)


# --- what cannot be concluded --------------------------------------------------------------------------------------


def test_denominators_of_noise_make_the_study_inconclusive():
    """A tiny model on random labels: dNLL of the other columns is of either sign; a single seed has no interval."""
    found = study(options=changed(rates=(0.02,), seeds=(0,)))

    assert found.status == "inconclusive"
    for item in found.leverage:
        assert item.status == "inconclusive"
        assert item.reason


def test_a_ratio_over_noise_is_inconclusive_while_kl_still_speaks():
    found = study(loaded_llama(seed=3), changed(rates=(0.003,), seeds=(0, 1, 2)), windows=2)

    nll = [item for item in found.leverage if item.response == "nll" and item.denominator == "other"]
    low_high = [m for m in found.means if (m.arm, m.response) == ("other", "nll")]
    assert low_high[0].ci_low < 0 < low_high[0].ci_high
    assert [item.status for item in nll] == ["inconclusive"]
    assert "covers 0" in nll[0].reason


@torch.no_grad()
def overflowing_llama() -> LoadedModel:
    """An fp16 model in which two huge terms cancel: it is finite until a sign is flipped."""
    model = speaking_llama(torch.float16)
    mlp = model.model.layers[0].mlp
    for projection in (mlp.gate_proj, mlp.up_proj):
        projection.weight[:2] = 8 * projection.weight[:1].abs()
    mlp.down_proj.weight[:, 0] = 6e4
    mlp.down_proj.weight[:, 1] = -6e4
    return wrap(model, tokenizer())


def test_arms_that_overflow_are_recorded_as_non_finite_and_the_rest_kept(tmp_path):
    loaded = overflowing_llama()
    before = bits(loaded.model)

    found = study(loaded, changed(rates=(0.05,), seeds=(0, 1, 2)), out=tmp_path)

    broken = [arm for arm in found.arms if arm.status == "non_finite"]
    assert "outlier" in {arm.arm for arm in broken}
    assert any(arm.status == "ok" for arm in found.arms)
    for arm in broken:
        assert (arm.delta_nll, arm.delta_ppl, arm.kl, arm.delta_nll_windows) == (None, None, None, ())
        assert arm.checksum_before == arm.checksum_after != arm.checksum_during
    assert {item.status for item in found.leverage if item.numerator == "outlier"} == {"non_finite"}
    assert found.status == "inconclusive"
    json.loads(found.model_dump_json(), parse_constant=lambda name: pytest.fail(f"{name} in the record"))
    assert differing(loaded.model, before) == []
    assert comparable(study(loaded, changed(rates=(0.05,), seeds=(0, 1, 2)), out=tmp_path)) == comparable(found)


def test_kl_is_null_when_an_arm_edits_the_head():
    found = study(options=changed(include=("*lm_head*", "*down_proj*")))

    assert all(arm.kl is None for arm in found.arms)
    assert all(arm.kl_windows == () for arm in found.arms)
    assert all(arm.delta_nll is not None for arm in found.arms)
    assert {item.response for item in found.leverage} == {"nll"}
    assert {item.response for item in found.means} == {"nll"}
    assert any("KL was not measured" in note for note in found.notes)
    assert "lm_head.weight" in found.targets


def test_few_seeds_are_said_to_be_few(record):
    assert any("2 seeds" in note for note in record.notes)


# --- planted outliers ----------------------------------------------------------------------------------------------


def test_function_preserving_planting_moves_amplitude_and_not_the_function(record):
    found = study(options=changed(plant=OutlierColumns(k=8, number=2, mode="preserving")))

    assert found.baseline.nll == pytest.approx(record.baseline.nll, abs=1e-6)
    assert found.prediction.n_alpha2_outlier > 1.2 * record.prediction.n_alpha2_outlier
    assert all(arm.recipe.startswith("outlier_columns:k=8,number=2") for arm in found.arms)
    assert any("planted" in note for note in found.notes)
    assert found.model.weights_sha256 == record.model.weights_sha256


def test_raw_planting_makes_another_model(record):
    found = study(options=changed(plant=OutlierColumns(k=8, number=2, mode="raw")))

    assert abs(found.baseline.nll - record.baseline.nll) > 1e-3


# --- the paper's protocol ------------------------------------------------------------------------------------------


def test_the_papers_protocol_scores_its_calibration_text_and_prints_its_figures():
    loaded = loaded_llama()
    scored = make_windows(read_text(), tokenizer(), protocol="dong2026", window=32, windows=3)

    found = run_leverage(loaded, scored, scored, changed(by="mean_abs", paper_counts=True))

    assert found.selected_by == "mean_abs"
    assert found.calibration == found.protocol
    assert [p.rate for p in found.published] == [0.05, 0.005, 0.001, 0.0005, 0.0001]
    assert found.published[1].ratio == 9.9
    totals = {(a.rate, a.seed): set() for a in found.arms}
    for arm in found.arms:
        totals[arm.rate, arm.seed].add(arm.flips)
    assert all(len(flips) == 1 for flips in totals.values()), "one total for all arms"
    assert any("scored text itself" in note for note in found.notes)
    assert any("float16" in note for note in found.notes)


def test_other_protocols_carry_no_published_figures(record):
    assert record.published == ()


# --- what is refused -----------------------------------------------------------------------------------------------


def test_no_outlier_column_selected_is_an_error_that_names_the_mend():
    with pytest.raises(ProbeError, match=r"no outlier column selected: 0.001.*raise --fraction"):
        study(options=changed(fraction=0.001))


def test_a_rate_that_rounds_to_no_flip_is_an_error_and_not_a_robust_model():
    done = []
    with pytest.raises(ProbeError, match="rate 1e-06 rounds to no flip at all"):
        study(options=changed(rates=(0.2, 1e-6)), progress=lambda *step: done.append(step))
    assert not done, "refused before the first evaluation"


def test_weights_that_are_all_zero_are_an_error_and_not_a_robust_model():
    loaded = loaded_llama()
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "mlp" in name:
                parameter.zero_()

    with pytest.raises(NoEffectError, match="look perfectly robust"):
        study(loaded, changed(include=("*mlp*",)))


def test_patterns_that_match_nothing_are_an_error():
    with pytest.raises(ProbeError, match=r"\*nothing\*.*matches no weight matrix"):
        study(options=changed(include=("*nothing*",)))


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = tiny_llama()

    with pytest.raises(LoadingError, match="meta device"):
        wrap(model, tokenizer())
    with pytest.raises(StorageError, match="meta device"):
        examine(model)


@torch.no_grad()
def packed_llama() -> Any:
    """A Llama whose MLP weights are stored as uint8 codes and unpacked in the forward, as 4- and 8-bit formats do."""

    class Packed(torch.nn.Module):
        def __init__(self, linear: torch.nn.Linear) -> None:
            super().__init__()
            self.scale = float(linear.weight.abs().max()) / 127
            codes = (linear.weight / self.scale).round() + 128
            self.weight = torch.nn.Parameter(codes.to(torch.uint8), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, (self.weight.float() - 128) * self.scale)

    model = speaking_llama()
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, Packed(getattr(layer.mlp, name)))
    return model


def test_quantized_weights_are_refused_or_named_never_flipped():
    model = packed_llama()
    before = bits(model)

    found = study(wrap(model, tokenizer()))
    with pytest.raises(ProbeError, match=r"matches no weight matrix|uint8"):
        study(wrap(model, tokenizer()), changed(include=("*mlp*",)))

    assert not any("mlp" in amplitude.matrix for amplitude in found.amplitude)
    unseen = [note for note in found.notes if "mlp.gate_proj" in note]
    assert unseen, "the study did not say what it left out"
    assert "uint8" in unseen[0]
    assert differing(model, before) == []


def test_a_clean_model_that_is_not_finite_is_refused():
    loaded = loaded_llama()
    with torch.no_grad():
        loaded.model.model.layers[1].mlp.up_proj.weight[3, 4] = math.nan

    with pytest.raises(ProbeError, match=r"layers.1.mlp.up_proj.weight holds nan at \[3, 4\]") as refused:
        study(loaded)
    assert "\n" not in str(refused.value)


def test_experts_that_no_token_reached_are_left_out_and_named():
    """Their outlier columns cannot be known; flipping them would look perfectly robust."""
    model = zoo.build("mixtral", num_local_experts=8, num_experts_per_tok=1)
    loaded = wrap(model, tokenizer())
    scored = cut(1, window=4)

    found = run_leverage(loaded, scored, calibration(scored), changed(rates=(0.3,)))

    missing = {m.name for m in examine(model).block_matrices} - set(found.outlier_columns)
    assert missing, "every expert was reached: the test shows nothing"
    assert any(f"{len(missing)} matrices met no token" in note for note in found.notes)
    assert set(found.targets) == set(found.outlier_columns)
    for arm in found.arms:
        assert arm.checksum_before == arm.checksum_after != arm.checksum_during


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "gemma2", "opt", "mixtral"])
def test_other_architectures_are_studied_and_restored(name):
    model = zoo.build(name)
    before = bits(model)

    found = study(wrap(model, tokenizer()), changed(rates=(0.05,)))

    assert differing(model, before) == []
    assert all(arm.kl > 0 for arm in found.arms)
