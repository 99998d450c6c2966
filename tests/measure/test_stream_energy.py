from __future__ import annotations

import pytest
import torch
from tiny import tiny_llama, tiny_tokenizer

from ternary_probe import anatomy
from ternary_probe.measure.stream_energy import StreamEnergy
from ternary_probe.perturb import SignFlip
from ternary_probe.text import Text, make_windows

TEXT = "A bicycle stays up because it steers itself under its own weight, most of the time at least. " * 8


@pytest.fixture(scope="module")
def subject():
    model = tiny_llama()
    windows = make_windows(Text(TEXT, "test", "none"), tiny_tokenizer(), window=32, windows=2)
    return anatomy.examine(model), windows


def norm_inputs(model, name, windows):
    seen = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _m, args: seen.append(args[0].double()))
    with torch.no_grad():
        for row in windows.inputs:
            model(input_ids=row[None])
    handle.remove()
    return torch.cat([s.reshape(-1, s.shape[-1]) for s in seen])


def test_energies_equal_an_explicit_projection(subject):
    found, windows = subject
    energy = StreamEnergy.of(found, windows)
    names = [site.name for site in energy.sites]
    assert found.final_norm.name in names
    before = {name: norm_inputs(found.model, name, windows) for name in names}
    with SignFlip(rate=0.1, seed=2).applied(found):
        measured = energy.measure()
        after = {name: norm_inputs(found.model, name, windows) for name in names}
    for name in names:
        y, change = before[name], after[name] - before[name]
        unit = y / y.norm(dim=-1, keepdim=True)
        along = (unit * change).sum(-1, keepdim=True) * unit
        across = change - along
        size = y.square().sum()
        assert measured[name].transverse == pytest.approx(float(across.square().sum() / size), rel=1e-9, abs=1e-15)
        assert measured[name].radial == pytest.approx(float(along.square().sum() / size), rel=1e-9, abs=1e-15)


def test_a_pure_scaling_is_all_radial(subject):
    found, windows = subject
    energy = StreamEnergy.of(found, windows)
    first = energy.sites[0].name
    embedding = found.model.get_input_embeddings().weight
    with torch.no_grad():
        embedding.mul_(1.5)
    try:
        changed = energy.measure()[first]
    finally:
        with torch.no_grad():
            embedding.div_(1.5)
    assert changed.radial_fraction == pytest.approx(1, abs=1e-9)
    assert changed.total == pytest.approx(0.25, rel=1e-5)


def test_an_unchanged_model_has_no_radial_fraction(subject):
    found, windows = subject
    for change in StreamEnergy.of(found, windows).measure().values():
        assert change.total == 0
        assert change.radial_fraction is None
