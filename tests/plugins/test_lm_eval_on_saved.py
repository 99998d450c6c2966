"""A saved dense checkpoint is an ordinary one: the harness's own command line runs on it, offline."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny import tiny_llama_folder

from ternary_probe.anatomy import examine
from ternary_probe.loading import load
from ternary_probe.measure import Evaluator
from ternary_probe.perturb import Ternarize
from ternary_probe.saving import save_quantized
from ternary_probe.text import Text, make_windows

TEXT = "The ferry leaves at nine, and nobody has ever seen it leave at ten."
TASK = {
    "task": "local_text",
    "dataset_path": "json",
    "output_type": "loglikelihood_rolling",
    "test_split": "test",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}],
    "metadata": {"version": 0},
}


def lm_eval_bits_per_byte(folder: Path, work: Path) -> float:
    text = work / "text.jsonl"
    text.write_text(json.dumps({"text": TEXT}) + "\n")
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(text)}}}
    (work / "task.yaml").write_text(yaml.safe_dump(task))
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", str(work / "task.yaml"), "--device", "cpu"]
    command += ["--model_args", f"pretrained={folder},dtype=float32,max_length=64", "--output_path", str(work / "out")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(work / "cache"), "PYTHONPATH": ""}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    results = next((work / "out").rglob("results_*.json"))
    value: float = json.loads(results.read_text())["results"]["local_text"]["bits_per_byte,none"]
    return value


@pytest.mark.slow
def test_the_harness_scores_the_quantized_weights_of_a_saved_dense_folder(tmp_path):
    recipe = Ternarize(scheme="sign")
    loaded = load(str(tiny_llama_folder(tmp_path)))
    saved = save_quantized(loaded, recipe, tmp_path / "ternary", format="dense")
    windows = make_windows(Text(TEXT, "test", "none"), loaded.tokenizer, protocol="rolling", window=64)
    found = examine(loaded.model)
    with recipe.applied(found):
        total = Evaluator(found, windows).nll().sums.sum()
    expected = total / math.log(2) / len(TEXT.encode())
    assert lm_eval_bits_per_byte(saved, tmp_path) == pytest.approx(expected, rel=1e-6)
