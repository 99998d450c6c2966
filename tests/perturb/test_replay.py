"""A resolved recipe is pure data: replayed from its JSON in a new process it flips the same entries."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import zoo
from weight_oracle import changed, logical_all, text_of, tokens

from ternary_probe import anatomy
from ternary_probe.perturb import Composed, OutlierColumns, SignFlip, parse

CASES = {
    "counted": ("llama", "sign_flip:rate=0.02,columns=outlier,fraction=0.1,matching=count,seed=3"),
    "rescaled": ("gpt2", "sign_flip:rate=0.02,columns=other,fraction=0.1,matching=energy,by=mean_abs,seed=3"),
    "composed": ("llama", "outlier_columns:k=3,number=4+magnitude:rate=0.1,columns=outlier,fraction=0.2,seed=1"),
}
REPLAY = """
import json, sys
import torch, zoo
from test_replay import fingerprint
from ternary_probe.perturb import from_description
torch.manual_seed(99)  # a global state of its own
print(json.dumps({k: fingerprint(from_description(r), zoo.build(name)) for k, (name, r) in json.load(sys.stdin).items()}))
"""


def fingerprint(recipe, model):
    """Which entries changed, matrix by matrix, and the checksum while they were."""
    found = anatomy.examine(model)
    before = logical_all(model, [m.name for m in found.block_matrices])
    with recipe.applied(found) as done:
        hit = changed(model, before)
    digests = {name: hashlib.sha256(entries.astype(np.int64).tobytes()).hexdigest() for name, entries in hit.items()}
    return {"positions": digests, "during": done.checksum_during, "entries": done.entries}


def test_json_replayed_in_a_new_process_changes_the_same_entries():
    models = {name: zoo.build(name) for name, _ in CASES.values()}
    recipes = {case: parse(text).resolve(models[name], text_of(tokens())) for case, (name, text) in CASES.items()}
    assert not any(recipe.needs_measurement for recipe in recipes.values())
    tests = Path(__file__).parent.parent
    path = os.pathsep.join([str(tests.parent), str(tests), str(tests / "perturb")])
    ran = subprocess.run(
        [sys.executable, "-c", REPLAY],
        input=json.dumps({case: (CASES[case][0], recipe.describe()) for case, recipe in recipes.items()}),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "5"},
    )
    here = {case: fingerprint(recipe, models[CASES[case][0]]) for case, recipe in recipes.items()}
    assert json.loads(ran.stdout.splitlines()[-1]) == here


def test_resolving_keeps_columns_that_are_frozen_already():
    found = anatomy.examine(zoo.build("llama"))
    planted = OutlierColumns(k=4, columns=(2, 9)).planted(found)
    include = tuple(planted)
    frozen = SignFlip(rate=0.1, include=include).columns.model_copy(update={"select": "outlier", "outlier": planted})
    recipe = SignFlip(rate=0.1, matching="count", columns=frozen, include=include)
    ready = recipe.resolve(found, text_of(tokens()))
    assert ready.columns.outlier == dict.fromkeys(planted, (2, 9))
    rows = {matrix.name: matrix.out_features for matrix in found.block_matrices}
    assert ready.counts == {name: round(0.1 * rows[name] * 2) for name in planted}


def test_a_resolved_recipe_is_returned_as_it_is():
    found = anatomy.examine(zoo.build("llama"))
    recipe = parse("sign_flip:rate=0.1,columns=outlier").resolve(found, text_of(tokens()))
    assert recipe.resolve(found, text_of(tokens(seed=8))) is recipe
    plain = SignFlip(rate=0.1)
    assert plain.resolve(found, text_of(tokens())) is plain
    composed = Composed(parts=(plain, recipe))
    assert composed.resolve(found, text_of(tokens())) == composed
