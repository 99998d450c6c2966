"""A repository on the Hub is judged by ranged reads: nothing is downloaded whole, and what is read is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gates.checkpoints import judge, tensors, write
from range_server import serve_ranges

ROOT = Path(__file__).parents[2]
PARAMETERS = ("files", "tensors", "norm-gain")
SCAN = ("weight-scan", "weight-grid")
SCRIPT = """
import json, sys
from ternary_probe.errors import ProbeError
from ternary_probe.gates import Evidence, GateOptions, Subject, all_checks, load_policy

answers = []
for source, revision, checks in json.loads(sys.argv[1]):
    options = GateOptions(loading={"revision": revision})
    subject = Subject(source, options)
    evidence, policy = Evidence(subject, None, options), load_policy()
    try:
        findings = [one.model_dump(mode="json") for name in checks
                    for one in all_checks()[name].body(evidence, policy.checks[name].limits)]
    except ProbeError as error:
        answers.append({"error": str(error)})
        continue
    answers.append({"findings": findings, "bytes_read": subject.parameters.bytes_read, "torch": "torch" in sys.modules})
print(json.dumps(answers))
"""


def ask(
    requests: list[tuple[str, str | None, tuple[str, ...]]], home: Path, **environment: str
) -> list[dict[str, Any]]:
    """Judge in a process of its own: the Hub's address is read when its library is imported."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "plugins")])
    answer = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(requests)],
        env=kept | {"HF_HOME": str(home), "PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(answer.stdout.splitlines()[-1])
    return found


def large(folder: Path, shards: int) -> Path:
    """4 MB of matrices and a few gains, the matrices not zero."""
    content = {name: value for name, value in tensors().items() if "norm" in name}
    generator = torch.Generator().manual_seed(0)
    for block in range(4):
        content[f"model.layers.{block}.mlp.up_proj.weight"] = torch.randn(32_000, 8, generator=generator)
    content["model.embed_tokens.weight"] = torch.randn(12, 8, generator=generator)
    return write(folder, content, shards=shards)


def stripped(findings: list[dict[str, Any]], source: str) -> list[dict[str, Any]]:
    return [json.loads(json.dumps(one).replace(source, "SOURCE")) for one in findings]


@pytest.mark.parametrize("redirects", [False, True], ids=["direct", "redirected"])
def test_the_hub_gives_the_findings_of_the_folder_for_a_fraction_of_its_bytes(tmp_path: Path, redirects: bool) -> None:
    folders = {"org/single": large(tmp_path / "single", 1), "org/sharded": large(tmp_path / "sharded", 3)}
    requests = [(name, revision, PARAMETERS) for name in folders for revision in (None, "v1")]

    with serve_ranges(folders, redirects=redirects) as served:
        answers = ask(requests, tmp_path / "home", HF_ENDPOINT=served.endpoint)

    local = {name: [one.model_dump(mode="json") for check in PARAMETERS for one in judge(check, folder)]
             for name, folder in folders.items()}  # fmt: skip
    for (name, _, _), answer in zip(requests, answers, strict=True):
        assert stripped(answer["findings"], name) == stripped(local[name], str(folders[name]))
        assert {one["status"] for one in answer["findings"]} == {"pass"}
        assert answer["torch"] is False
    assert sum(served.sent.values()) == sum(answer["bytes_read"] for answer in answers)
    for name, folder in folders.items():
        weights = [file for file in folder.iterdir() if file.suffix == ".safetensors"]
        total = sum(file.stat().st_size for file in weights)
        shards = [file.name for file in weights]
        assert sum(served.sent.get(shard, 0) for shard in shards) < 0.1 * total, name
    assert not [path for path in (tmp_path / "home").rglob("*") if path.suffix == ".safetensors"]


def test_a_broken_shard_on_the_hub_is_named(tmp_path: Path) -> None:
    folder = large(tmp_path / "broken", 3)
    shard = folder / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])

    with serve_ranges({"org/broken": folder}) as served:
        (answer,) = ask([("org/broken", None, ("files",))], tmp_path / "home", HF_ENDPOINT=served.endpoint)

    assert [one["status"] for one in answer["findings"]] == ["fail"]
    assert answer["findings"][0]["subject"] == shard.name
    assert answer["findings"][0]["details"]["fault"] == "truncated"


def test_the_scan_tier_reads_a_repository_too_and_equals_the_folder(tmp_path: Path) -> None:
    folder = large(tmp_path / "model", 2)

    with serve_ranges({"org/model": folder}) as served:
        (answer,) = ask([("org/model", None, SCAN)], tmp_path / "home", HF_ENDPOINT=served.endpoint)

    local = [one.model_dump(mode="json") for check in SCAN for one in judge(check, folder)]
    assert stripped(answer["findings"], "org/model") == stripped(local, str(folder))


def test_a_server_that_ignores_ranges_is_refused_before_it_sends_the_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {"model.norm.weight": torch.ones(8), "x.weight": torch.ones(8_000_000, 4)})

    with serve_ranges({"org/model": folder}, ignores_ranges=True) as served:
        (answer,) = ask([("org/model", None, PARAMETERS)], tmp_path / "home", HF_ENDPOINT=served.endpoint)

    assert "ignores ranges" in answer["error"]
    assert served.sent.get("model.safetensors", 0) < 0.2 * (folder / "model.safetensors").stat().st_size


def test_a_passing_failure_of_the_server_is_tried_again(tmp_path: Path) -> None:
    folder = large(tmp_path / "model", 1)

    with serve_ranges({"org/model": folder}, fails_once=True) as served:
        (answer,) = ask([("org/model", None, PARAMETERS)], tmp_path / "home", HF_ENDPOINT=served.endpoint)

    assert {one["status"] for one in answer["findings"]} == {"pass"}


def test_what_the_hub_does_not_have_is_told_in_one_sentence(tmp_path: Path) -> None:
    folder = large(tmp_path / "model", 1)
    with serve_ranges({"org/model": folder}) as served:
        unknown, revision = ask(
            [("org/unknown", None, PARAMETERS), ("org/model", "v9", PARAMETERS)],
            tmp_path / "home",
            HF_ENDPOINT=served.endpoint,
        )
    (away,) = ask([("org/model", None, PARAMETERS)], tmp_path / "home", HF_ENDPOINT=served.endpoint)

    assert "neither a folder here nor a model on the Hub" in unknown["error"]
    assert revision["error"] == "org/model has no revision 'v9'"
    assert "org/model" in away["error"]
    assert "\n" not in away["error"]
