"""The group ``ternary_probe_leverage`` shows the record of ``ternary-probe leverage``, to the last bit."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from pathlib import Path

import pytest
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table
from lm_eval_runs import LEVERAGE_YAML, rolling_yaml, run_tasks, tiny_lm
from small_study import bits, differing, speaking_llama, tokenizer
from ternary_probe_lm_eval import TernaryProbeLM, leverage_tasks
from ternary_probe_lm_eval.console import TASKS
from ternary_probe_lm_eval.leverage_tasks import LEVERAGE_GROUP, PartOfStudy
from ternary_probe_lm_eval.task_options import LeverageRequest

import ternary_probe.cli.leverage as command
from ternary_probe.cli import main
from ternary_probe.errors import ProbeError
from ternary_probe.loading import load
from ternary_probe.records import LeverageRecord

STUDY = {"rates": [0.05, 0.2], "seeds": 3, "fraction": 0.1, "window": 32, "windows": 3}
OPTIONS = ["--rates", "0.05,0.2", "--seeds", "3", "--fraction", "0.1", "--window", "32", "--windows", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("checkpoint") / "speaking-llama"
    speaking_llama().save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


def of_the_command(folder: Path, monkeypatch, tmp_path: Path, *options: str) -> LeverageRecord:
    file = tmp_path / "record.json"
    monkeypatch.setattr(
        sys, "argv", ["ternary-probe", "leverage", str(folder), *options, "--json", str(file), "--quiet"]
    )
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code in {0, None, 3}
    return LeverageRecord.model_validate(json.loads(file.read_text()))


def metrics(results, part: str) -> dict[str, float | None]:
    found = results["results"][f"{LEVERAGE_GROUP}_{part}"]
    return {key.removesuffix(",none"): value for key, value in found.items() if "," in key and value != "N/A"}


def test_the_group_agrees_exactly_with_the_leverage_command(folder, monkeypatch, tmp_path):
    record = of_the_command(folder, monkeypatch, tmp_path, *OPTIONS)
    lm = TernaryProbeLM(load(str(folder)))
    before = bits(lm.loaded.model)
    results = run_tasks(lm, LEVERAGE_GROUP, **STUDY)

    clean = metrics(results, "clean")
    assert clean["nll"] == record.baseline.nll
    assert (clean["noise_floor_nll"], clean["noise_floor_kl"]) == (record.noise_floor.nll, record.noise_floor.kl)
    assert record.means
    for mean in record.means:
        name = f"{'delta_nll' if mean.response == 'nll' else 'kl'}@{mean.rate:g}"
        assert metrics(results, mean.arm)[name] == mean.mean
        assert metrics(results, mean.arm)[f"{name}_stderr"] == pytest.approx(mean.sd / 3**0.5, rel=1e-12)
    ratios = metrics(results, "ratio")
    assert len(ratios) == 4 * len(record.leverage) == 4 * 8
    for item in record.leverage:
        name = f"{item.numerator}/{item.denominator}_{item.response}@{item.rate:g}"
        assert ratios[name] == item.ratio
        assert (ratios[f"{name}_low"], ratios[f"{name}_high"]) == (item.ci_low, item.ci_high)
        assert ratios[f"{name}_conclusive"] == (item.status == "ok")
    assert {item.status for item in record.leverage} == {"ok", "inconclusive"}, "both kinds must be compared"
    facts = lm.get_model_info()["ternary_probe"]["tasks"][f"{LEVERAGE_GROUP}_ratio"]
    assert facts["calibration"]["skip"] == record.calibration.skip
    assert facts["protocol"]["tokens_scored"] == record.protocol.tokens_scored
    assert not differing(lm.loaded.model, before)


def test_one_run_makes_one_study_whatever_the_number_of_arms_and_a_second_run_uses_it(monkeypatch):
    runs = []
    monkeypatch.setattr(leverage_tasks, "run", lambda *a, **k: runs.append(a) or command.run(*a, **k))
    lm = tiny_lm()
    first = run_tasks(lm, LEVERAGE_GROUP, **STUDY)
    assert len(runs) == 1
    assert run_tasks(lm, LEVERAGE_GROUP, **STUDY)["results"] == first["results"]
    assert len(runs) == 1
    with lm.perturbed("sign_flip:rate=0.3"):  # other weights are another study
        assert run_tasks(lm, LEVERAGE_GROUP, **STUDY)["results"] != first["results"]
    assert len(runs) == 2


def test_the_arms_are_the_users_and_each_is_a_task_of_the_group(tmp_path):
    results = run_tasks(
        tiny_lm(),
        LEVERAGE_YAML,
        rolling_yaml(tmp_path),
        rates="20%",
        seeds=2,
        arms="outlier;magnitude_outlier",
        matching="count;energy",
        window=32,
        windows=2,
        fraction=0.1,
        out=str(tmp_path / "study"),
    )
    parts = ["clean", "outlier", "magnitude_outlier", "ratio"]
    assert results["group_subtasks"][LEVERAGE_GROUP] == [f"{LEVERAGE_GROUP}_{part}" for part in parts]
    assert "outlier/magnitude_outlier_kl@0.2_energy" in metrics(results, "ratio")
    assert results["results"]["local_documents"]["bits_per_byte,none"] > 0
    table = make_table(results)
    assert "delta_nll@0.2_count" in table
    assert (tmp_path / "study" / "report.md").is_file()
    assert " at 0x" not in json.dumps(results["configs"], default=str), "a memory address makes two equal runs differ"


def test_a_perturbed_model_is_refused_because_the_group_makes_its_own_arms():
    with pytest.raises(ProbeError, match="leave perturb="):
        run_tasks(tiny_lm(perturb="sign_flip:rate=0.05"), LEVERAGE_GROUP, **STUDY)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rates": 2}, "not in"),
        ({"rates": "many"}, "not a number"),
        ({"arms": "outliers"}, "unknown arm"),
        ({"seeds": 0}, "seeds=0"),
        ({"by": "size"}, "by=size"),
        ({"matching": "weight"}, "unknown matching"),
    ],
    ids=str,
)
def test_a_study_that_cannot_be_run_is_refused_when_the_group_is_built(metadata, message):
    with pytest.raises(ProbeError, match=message):
        TaskManager(include_defaults=False, include_path=[str(TASKS)], metadata=metadata).load([LEVERAGE_GROUP])


@pytest.mark.parametrize(
    ("options", "metadata"),
    [
        ([], {}),
        (["--protocol", "dong2026"], {"protocol": "dong2026"}),
        (["--rates", "0.1%,0.02", "--seeds", "4", "--seed", "7"], {"rates": "0.1%;0.02", "seeds": 4, "seed": 7.0}),
        (["--arms", "outlier,other", "--by", "mean_abs"], {"arms": ["outlier", "other"], "by": "mean_abs"}),
        (["--include", "*q_proj,*k_proj", "--exclude", "*0*"], {"include": "*q_proj;*k_proj", "exclude": "*0*"}),
        (["--matching", "rate,energy", "--fraction", "0.2"], {"matching": "rate;energy", "fraction": 0.2}),
        (["--protocol", "strided", "--stride", "9", "--bos", "once"], {"stride": 9, "bos": "once"}),
        (["--window", "64", "--windows", "7"], {"window": 64, "windows": 7}),
    ],
    ids=lambda value: " ".join(value) or "defaults" if isinstance(value, list) else "",
)
def test_options_mean_what_they_mean_to_the_command(folder, monkeypatch, options, metadata):
    seen = {}

    def caught(loaded, cutting, calibration, chosen, out, **kwargs):
        seen.update(cutting=cutting, options=chosen, calibration=calibration)
        raise SystemExit(0)

    monkeypatch.setattr(command, "run", caught)
    monkeypatch.setattr(sys, "argv", ["ternary-probe", "leverage", str(folder), *options, "--quiet"])
    with pytest.raises(SystemExit):
        main()
    request = LeverageRequest.from_metadata(metadata, LEVERAGE_GROUP)
    assert request.options() == seen["options"]
    assert request.cutting() == seen["cutting"]
    assert request.calibration is seen["calibration"] is None


def test_another_model_class_gets_no_figure(caplog):
    plain = HFLM(pretrained=speaking_llama(), tokenizer=tokenizer())
    results = run_tasks(plain, LEVERAGE_GROUP, rates=[0.1], window=32)
    assert set(metrics(results, "ratio").values()) == {None}
    assert "--model ternary_probe" in caplog.text
    make_table(results)


@pytest.mark.parametrize("way", [lambda part: pickle.loads(pickle.dumps(part)), copy.deepcopy], ids=["pickle", "copy"])
def test_a_part_of_the_study_survives_what_lm_eval_does_to_results(way):
    part = way(PartOfStudy({"nll": 3.5, "kl": None}))
    assert part == 3.5
    assert part.figures == {"nll": 3.5, "kl": None}
    assert json.dumps(part) == "3.5"
