"""The Fisher pass against explicit per-window gradients and exhaustive flips."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import zoo
from small_study import cut

from ternary_probe.anatomy import examine
from ternary_probe.errors import ProbeError
from ternary_probe.measure import Evaluator
from ternary_probe.measure import fisher as fisher_module
from ternary_probe.measure.fisher import _Labels, fisher_screen
from ternary_probe.perturb import EntryFlip, sha256_weights

KINDS = ("llama", "llama_tied", "gpt2", "gpt_neox", "gemma2", "mixtral", "gpt_oss")


def some_windows(*, count=3, length=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, zoo.VOCABULARY, (count, length + 1), generator=generator)
    scored = torch.ones(count, length, dtype=torch.bool)
    scored[0, :5] = False
    return replace(cut(), inputs=ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous(), scored=scored)


def dense_screen(anatomy, windows, draws, seed):
    """First order, diagonal Fisher and whole-column Fisher from full gradients, one window and one label set at a time."""
    model = anatomy.model
    sampler = _Labels(anatomy, windows, draws, seed, 1 << 20)
    tokens = int(windows.scored.sum())
    names = [m.name for m in anatomy.block_matrices]
    first = dict.fromkeys(names, 0.0)
    fisher = {n: [0.0] * draws for n in names}
    joint = {n: [0.0] * draws for n in names}
    flags = [p.requires_grad for p in model.parameters()]
    try:
        for p in model.parameters():
            p.requires_grad_(True)
        for index, (inputs, targets, scored) in enumerate(
            zip(windows.inputs, windows.targets, windows.scored, strict=True)
        ):
            for draw in [None, *range(draws)]:
                model.zero_grad()
                logits = model(inputs[None], use_cache=False).logits[0].float()
                if draw is None:
                    labels = targets
                else:
                    cumulative = logits.detach().softmax(-1).cumsum(-1)
                    u = sampler._uniform(index, draw, len(inputs)).float()[:, None] * cumulative[:, -1:]
                    labels = (cumulative <= u).sum(-1)
                torch.nn.functional.cross_entropy(logits[scored], labels[scored], reduction="sum").backward()
                for m in anatomy.block_matrices:
                    gradient = m.view_of(model.get_parameter(m.parameter_name).grad)
                    product = m.view().double() * gradient.double()
                    if draw is None:
                        first[m.name] = first[m.name] - 2 / tokens * product.sum(0).numpy()
                    else:
                        fisher[m.name][draw] = fisher[m.name][draw] + 2 / tokens * product.square().numpy()
                        joint[m.name][draw] = joint[m.name][draw] + 2 / tokens * product.sum(0).square().numpy()
    finally:
        model.zero_grad()
        for p, flag in zip(model.parameters(), flags, strict=True):
            p.requires_grad_(flag)
    return first, fisher, joint


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_dense_gradients(kind):
    found = examine(zoo.build(kind))
    windows = some_windows()
    screen = fisher_screen(found, windows, draws=2, seed=3, tail=1e9, head_bytes=8 * 16 * zoo.VOCABULARY)
    first, fisher, joint = dense_screen(found, windows, 2, 3)
    for matrix in found.block_matrices:
        name, scores = matrix.name, screen.columns[matrix.name]
        scale = np.abs(first[name]).max() + 1e-12
        np.testing.assert_allclose(scores.first, first[name], rtol=1e-3, atol=1e-4 * scale)
        for draw in range(2):
            entries = fisher[name][draw]
            expected = entries.sum(0) if isinstance(entries, np.ndarray) else np.zeros(matrix.in_features)
            np.testing.assert_allclose(scores.fisher[draw], expected, rtol=1e-3, atol=1e-5 * (expected.max() + 1e-12))
            whole = joint[name][draw]
            np.testing.assert_allclose(scores.joint[draw], whole, rtol=2e-3, atol=1e-4 * (np.max(whole) + 1e-12))


def test_every_entry_above_the_bound_is_named_with_its_own_prediction():
    found = examine(zoo.build("llama"))
    windows = some_windows()
    _, fisher, _ = dense_screen(found, windows, 2, 0)
    exact = {n: np.mean(draws, 0) for n, draws in fisher.items()}
    bound = float(np.quantile(np.concatenate([e.ravel() for e in exact.values()]), 0.999))
    screen = fisher_screen(found, windows, draws=2, tail=bound)
    named = {(e.matrix, e.row, e.column): e for e in screen.tail}
    clear = {(n, int(i), int(j)) for n, e in exact.items() for i, j in zip(*np.nonzero(e > 1.15 * bound), strict=True)}
    assert clear
    assert clear <= set(named)
    for (name, row, column), entry in named.items():
        assert entry.predicted == pytest.approx(exact[name][row, column], rel=0.15)
        assert entry.predicted <= exact[name][row, column] * 1.001
    assert [e.predicted for e in screen.tail] == sorted((e.predicted for e in screen.tail), reverse=True)


def test_the_bulk_leaves_the_tail_out_of_the_chosen_columns_only():
    found = examine(zoo.build("llama"))
    screen = fisher_screen(found, some_windows(), draws=3, tail=1e-3)
    assert screen.tail
    name = screen.tail[0].matrix
    width = screen.columns[name].first.size
    everything = {name: range(width)}
    gone = sum(e.predicted for e in screen.tail if e.matrix == name)
    assert screen.slope(everything).value - screen.slope(everything, bulk=True).value == pytest.approx(gone)
    spared = {name: [j for j in range(width) if all(e.column != j for e in screen.tail if e.matrix == name)]}
    assert screen.slope(spared).value == screen.slope(spared, bulk=True).value
    assert screen.slope(everything).standard_error > 0
    for matrix, entries in screen.tail_by_matrix().items():
        size = screen.columns[matrix].first.size
        assert {divmod(e, size) for e in entries} == {(e.row, e.column) for e in screen.tail if e.matrix == matrix}


def test_small_flips_respond_as_predicted():
    """Exhaustive single flips on a tiny model: the sum of KL over all entries of a column is its Fisher sum."""
    model = zoo.build("llama")
    found = examine(model)
    matrix = found.block_matrices[0]
    with torch.no_grad():
        matrix.view().mul_(0.05)  # small weights: the second order is all there is
    windows = some_windows(count=2, length=32)
    screen = fisher_screen(found, windows, [matrix], draws=64, tail=1e9)
    evaluator = Evaluator(found, windows)
    reference = evaluator.reference()
    column = int(screen.columns[matrix.name].second.argmax())
    total = 0.0
    for row in range(matrix.out_features):
        with EntryFlip(entries={matrix.name: ((row, column),)}).applied(found):
            total += evaluator.response(reference).kl.mean
    draws = screen.columns[matrix.name].fisher[:, column]
    error = draws.std(ddof=1) / np.sqrt(len(draws))
    assert draws.mean() == pytest.approx(total, rel=0.1, abs=4 * error)
    with EntryFlip(entries={matrix.name: tuple((r, column) for r in range(matrix.out_features))}).applied(found):
        whole = evaluator.response(reference).kl.mean
    joint = screen.columns[matrix.name].joint[:, column]
    assert joint.mean() == pytest.approx(whole, rel=0.1, abs=4 * joint.std(ddof=1) / 8)


def test_labels_follow_the_models_own_distribution():
    found = examine(zoo.build("llama"))
    windows = some_windows(count=1, length=16)
    draws = 400
    labels = _Labels(found, windows, draws, 0, 1 << 22)
    states = found.head.states(windows.inputs[:1])[0]
    logits = found.head.logits(states).float()
    mean = torch.stack(labels.gradients(0, states)[1:]).mean(0)
    weight = found.model.lm_head.weight
    spread = torch.stack(labels.gradients(0, states)[1:]).std(0) / draws**0.5
    # The gradient p - onehot has mean zero under the model's own labels.
    assert (mean[windows.scored[0]].abs() <= 5.5 * spread[windows.scored[0]] + 1e-6).all()
    assert mean[~windows.scored[0]].abs().max() == 0
    assert logits.shape[-1] == weight.shape[0]


def test_nothing_of_the_model_is_left_changed():
    model = zoo.build("llama_tied")
    marked = dict(model.named_parameters())["model.norm.weight"]
    marked.requires_grad_(True)
    marked.grad = torch.ones_like(marked)
    before = sha256_weights(model)
    fisher_screen(examine(model), some_windows(), draws=1)
    assert sha256_weights(model) == before
    assert torch.equal(marked.grad, torch.ones_like(marked))
    assert marked.requires_grad
    assert [n for n, p in model.named_parameters() if p.requires_grad or p.grad is not None] == ["model.norm.weight"]
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_the_same_seed_gives_the_same_scores_and_another_others():
    found = examine(zoo.build("llama"))
    name = found.block_matrices[0].name
    one, two, other = (fisher_screen(found, some_windows(), draws=1, seed=s).columns[name].fisher for s in (0, 0, 1))
    assert np.array_equal(one, two)
    assert not np.array_equal(one, other)


def test_more_draws_keep_the_first_ones():
    found = examine(zoo.build("llama"))
    name = found.block_matrices[0].name
    few, many = (fisher_screen(found, some_windows(), draws=d).columns[name].fisher for d in (1, 3))
    np.testing.assert_allclose(few[0], many[0], rtol=1e-6)


def test_what_cannot_be_screened_is_refused():
    model = zoo.build("llama")
    found = examine(model)
    with pytest.raises(ProbeError, match=r"lm_head.*outside every block"):
        fisher_screen(found, some_windows(), [found.matrix("lm_head.weight")])
    with pytest.raises(ProbeError, match="at least one"):
        fisher_screen(found, some_windows(), draws=0)
    with torch.no_grad():
        found.block_matrices[0].view()[0, 0] = torch.inf
    with pytest.raises(ProbeError):
        fisher_screen(found, some_windows(), draws=1)


def test_a_single_draw_has_no_standard_error():
    assert fisher_module.standard_error(np.array([1.0])) is None
    assert fisher_module.standard_error(np.array([1.0, 3.0])) == pytest.approx(1.0)


def test_the_demo_model_agrees_with_dense_gradients_of_one_matrix(demo_model):
    found = examine(demo_model.model)
    windows = some_windows(count=1, length=48)
    matrix = found.matrix("model.layers.9.mlp.down_proj.weight")
    screen = fisher_screen(found, windows, [matrix], draws=1)
    parameter = demo_model.model.get_parameter(matrix.parameter_name)
    parameter.requires_grad_(True)
    try:
        logits = demo_model.model(windows.inputs, use_cache=False).logits[0].float()
        scored = windows.scored[0]
        loss = torch.nn.functional.cross_entropy(logits[scored], windows.targets[0][scored], reduction="sum")
        (gradient,) = torch.autograd.grad(loss, parameter)
    finally:
        parameter.requires_grad_(False)
    expected = -2 / int(scored.sum()) * (parameter.detach().double() * gradient.double()).sum(0).numpy()
    scale = np.abs(expected).max()
    np.testing.assert_allclose(screen.columns[matrix.name].first, expected, rtol=1e-3, atol=1e-5 * scale)


@pytest.mark.cuda
def test_cuda_scores_equal_the_cpus():
    windows = some_windows()
    on_cpu = fisher_screen(examine(zoo.build("llama")), windows, draws=1)
    on_gpu = fisher_screen(examine(zoo.build("llama").to("cuda")), windows, draws=1)
    for name, scores in on_cpu.columns.items():
        np.testing.assert_allclose(on_gpu.columns[name].first, scores.first, rtol=1e-2, atol=1e-5)
