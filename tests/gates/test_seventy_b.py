"""A checkpoint of 70B shape is judged by its headers and gains: the bytes read are counted, torch is not imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates.checkpoints import sparse_shard

WIDTH, INNER, KEYS, VOCABULARY, DEPTH, SHARDS = 8192, 28672, 1024, 128256, 80, 30
ROOT = Path(__file__).parents[2]
MATRICES = {
    "self_attn.q_proj.weight": (WIDTH, WIDTH),
    "self_attn.k_proj.weight": (KEYS, WIDTH),
    "self_attn.v_proj.weight": (KEYS, WIDTH),
    "self_attn.o_proj.weight": (WIDTH, WIDTH),
    "mlp.gate_proj.weight": (INNER, WIDTH),
    "mlp.up_proj.weight": (INNER, WIDTH),
    "mlp.down_proj.weight": (WIDTH, INNER),
}
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")


def layout() -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in the order in which shards are filled."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for block in range(DEPTH):
        found |= {f"model.layers.{block}.{name}": (WIDTH,) for name in NORMS}
        found |= {f"model.layers.{block}.{name}": shape for name, shape in MATRICES.items()}
    return found | {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}


@pytest.fixture(scope="module")
def giant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """141 GB of holes in 30 shards, with real gains in bf16."""
    folder = tmp_path_factory.mktemp("giant")
    generator = np.random.default_rng(0)
    shapes = layout()
    total = sum(2 * int(np.prod(shape)) for shape in shapes.values())
    parts: list[dict[str, tuple[str, tuple[int, ...], int]]] = [{} for _ in range(SHARDS)]
    real: list[dict[str, bytes]] = [{} for _ in range(SHARDS)]
    weight_map, filled = {}, 0
    for name, shape in shapes.items():
        number = min(SHARDS - 1, filled * SHARDS // total)
        filled += 2 * int(np.prod(shape))
        parts[number][name] = ("BF16", shape, 2)
        weight_map[name] = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        if len(shape) == 1:
            gain = generator.lognormal(-1, 0.3, WIDTH).astype(np.float32)
            real[number][name] = (gain.view(np.uint32) >> 16).astype("<u2").tobytes()
    for number, part in enumerate(parts):
        sparse_shard(folder / f"model-{number + 1:05}-of-{SHARDS:05}.safetensors", part, real[number])
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def gate(folder: Path) -> tuple[int, dict[str, Any], str]:
    """Run the command; returns exit code, record and which slow imports were made."""
    code = (
        "import sys\n"
        "from ternary_probe.cli import main\n"
        f"sys.argv = ['ternary-probe', 'gate', {str(folder)!r}, '--parameters-only', '--json', '-']\n"
        "try:\n    main()\n"
        "finally:\n    print([name for name in ('torch', 'scipy.stats') if name in sys.modules], file=sys.stderr)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert answer.stdout.startswith("{"), answer.stderr[-2000:]
    return answer.returncode, json.loads(answer.stdout), answer.stderr.splitlines()[-1]


def test_less_than_a_ten_thousandth_of_the_bytes_is_read_and_torch_is_not_imported(giant: Path) -> None:
    code, record, imported = gate(giant)

    total = sum(file.stat().st_size for file in giant.iterdir())
    assert total > 140e9
    assert len(list(giant.glob("*.safetensors"))) == SHARDS
    assert 0 < record["bytes_read"] < 1e-4 * total
    assert imported == "[]"
    assert code == 0
    assert record["verdict"] == "pass"


def test_every_gain_was_looked_at_and_the_holes_are_a_warning(giant: Path) -> None:
    _, record, _ = gate(giant)

    findings = {one["check"]: one for one in record["findings"]}
    assert len(findings["norm-gain"]["details"]["norms"]) == 2 * DEPTH + 1
    assert findings["norm-gain"]["status"] == findings["tensors"]["status"] == "pass"
    assert findings["files"]["status"] == "warn"
    assert "stand-in" in findings["files"]["message"]


def test_a_shard_cut_short_is_named(giant: Path, tmp_path: Path) -> None:
    for file in giant.iterdir():
        (tmp_path / file.name).symlink_to(file)
    victim = "model-00017-of-00030.safetensors"
    (tmp_path / victim).unlink()
    with (giant / victim).open("rb") as whole, (tmp_path / victim).open("wb") as cut:
        cut.write(whole.read(1 << 16))
        cut.truncate((giant / victim).stat().st_size - 1)

    code, record, _ = gate(tmp_path)

    failed = [one for one in record["findings"] if one["status"] == "fail" and one["check"] == "files"]
    assert code == 1
    assert [(one["subject"], one["details"]["fault"]) for one in failed] == [(victim, "truncated")]
