"""Ternarize against quantizers written again in numpy, and everything a perturbation promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import zoo

from ternary_probe import anatomy, perturb
from ternary_probe.errors import ProbeError
from ternary_probe.perturb import Composed, NoEffectError, SignFlip, Ternarize, from_description, parse

MLP = ("gate", "up", "down")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_bit_identical(model: Any, before: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach().view(torch.uint8), before[name].view(torch.uint8)), name


def absmean(w: torch.Tensor, group: int | None = None) -> torch.Tensor:
    """BitNet b1.58 by its formula, in float64, per tensor or per group of a row of ``[out, in]``."""
    values = w.double().numpy()
    if group is None:
        scale = np.full_like(values, np.abs(values).mean())
    else:
        scale = np.empty_like(values)
        for start in range(0, values.shape[1], group):
            part = values[:, start : start + group]
            scale[:, start : start + group] = np.abs(part).mean(axis=1, keepdims=True)
    codes = np.rint(np.clip(values / scale, -1, 1))  # numpy rounds 0.5 to even: to 0, as the scheme does
    scale = torch.from_numpy(scale).float().to(w.dtype)
    return torch.from_numpy(codes).to(w.dtype) * scale


def assert_same_grid(actual: torch.Tensor, expected: torch.Tensor, name: object = "") -> None:
    """The same codes, and scales equal but for the last place."""
    assert torch.equal(actual.sign(), expected.sign()), name
    torch.testing.assert_close(actual, expected, rtol=torch.finfo(actual.dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [None, 7, 16])
def test_every_block_matrix_holds_the_formulas_values_and_nothing_else_changes(dtype, group):
    model = zoo.build("llama", dtype)
    before = weights_of(model)
    recipe = Ternarize(scheme="absmean" if group is None else f"absmean@g{group}")

    with recipe.applied(model) as applied:
        for name, parameter in model.named_parameters():
            if ".layers." in name and parameter.dim() == 2:
                assert_same_grid(parameter.detach(), absmean(before[name], group), name)
            else:
                assert torch.equal(parameter, before[name]), name

    assert applied.changed > 0
    assert len(applied.matrices) == 14
    assert_bit_identical(model, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_interrupt_restores_every_bit(dtype):
    model = zoo.build("llama_tied", dtype)
    before = weights_of(model)

    with pytest.raises(KeyboardInterrupt), Ternarize(scheme="planes:2@g16").applied(model) as applied:
        raise KeyboardInterrupt

    assert applied.checksum_during != applied.checksum_before == applied.checksum_after
    assert_bit_identical(model, before)


def test_groups_run_along_input_features_in_transposed_storage():
    model = zoo.build("gpt2")
    before = weights_of(model)

    with Ternarize(scheme="absmean@g10", include=("*c_fc*",)).applied(model):
        stored = model.get_parameter("transformer.h.0.mlp.c_fc.weight").detach()
        # Conv1D holds [in, out]; 32 input features leave a last group of 2
        expected = absmean(before["transformer.h.0.mlp.c_fc.weight"].t(), 10).t()
        assert_same_grid(stored, expected)


def test_every_expert_has_its_own_scale():
    model = zoo.build("mixtral")
    name = "model.layers.0.mlp.experts.down_proj"
    before = weights_of(model)

    with Ternarize(include=("*experts.down_proj*",)).applied(model) as applied:
        stored = model.get_parameter(name).detach()
        for expert in range(4):
            assert_same_grid(stored[expert], absmean(before[name][expert]), expert)

    assert f"{name}[3]" in applied.matrices
    assert_bit_identical(model, before)


def test_tied_storage_is_quantized_once():
    model = zoo.build("llama_tied")
    table = model.model.embed_tokens.weight
    expected = absmean(table.detach())

    with Ternarize(include=("*embed_tokens*", "*lm_head*")).applied(model) as applied:
        assert applied.entries == table.numel()
        assert_same_grid(model.lm_head.weight.detach(), expected)
        assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"roles": ("down_proj",)}, {"model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"}),
        ({"roles": ("?_proj",), "blocks": "1"}, {f"model.layers.1.self_attn.{c}_proj.weight" for c in "qkvo"}),
        ({"blocks": "0", "exclude": ("*self_attn*",)}, {f"model.layers.0.mlp.{r}_proj.weight" for r in MLP}),
        ({"blocks": "0;1", "include": ("*up_proj*", "lm_head*")}, {f"model.layers.{b}.mlp.up_proj.weight" for b in (0, 1)}),
        ({"include": ("lm_head*",)}, {"lm_head.weight"}),
    ],
    ids=["role", "role pattern and block", "block less a pattern", "no head among blocks", "head"],
)  # fmt: skip
def test_patterns_blocks_and_roles_select(options, expected):
    with Ternarize(**options).applied(zoo.build("llama")) as applied:
        assert set(applied.matrices) == expected


def test_the_change_is_counted_exactly():
    model = zoo.build("llama", torch.bfloat16)
    name = "model.layers.0.mlp.up_proj.weight"
    with torch.no_grad():
        model.get_parameter(name)[3] = 0
    before = weights_of(model)[name]
    after = absmean(before)

    with Ternarize(include=(name,)).applied(model) as applied:
        pass

    assert applied.entries == before.numel()
    assert applied.zeros == int((after == before).sum()) > 0
    assert applied.delta_energy == pytest.approx(float((after.double() - before.double()).square().sum()), rel=1e-6)


@pytest.mark.parametrize("scheme", ["optimal", "twn", "absmean+ls", "sign", "optimal@g8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_model_on_the_grid_already_is_no_arm(scheme, dtype):
    model = zoo.build("llama", dtype)
    recipe = Ternarize(scheme=scheme)
    examined = anatomy.examine(model)
    for matrix in recipe.targets(examined):
        matrix.view().copy_(recipe.values(matrix))
    before = weights_of(model)

    with pytest.raises(NoEffectError), recipe.applied(examined):
        pass
    assert_bit_identical(model, before)


def test_one_matrix_on_the_grid_is_left_alone_among_others():
    model = zoo.build("llama")
    recipe = Ternarize(scheme="optimal", roles=("up_proj",))
    examined = anatomy.examine(model)
    first, second = recipe.targets(examined)
    first.view().copy_(recipe.values(first))

    with recipe.applied(examined) as applied:
        assert applied.entries == first.numel + second.numel
        assert applied.zeros >= first.numel


def test_a_scale_that_underflows_makes_the_unit_zero():
    model = zoo.build("llama", torch.float16)
    name = "model.layers.0.mlp.up_proj.weight"
    with torch.no_grad():
        model.get_parameter(name).zero_()[0, 0] = 2.0**-24  # the smallest half; its mean over the tensor is none
    before = weights_of(model)

    with Ternarize(include=(name,)).applied(model) as applied:
        assert not bool(model.get_parameter(name).any())
        assert applied.changed == 1
    assert_bit_identical(model, before)


def test_values_that_overflow_the_storage_are_refused_and_undone():
    model = zoo.build("llama", torch.float16)
    name = "model.layers.1.mlp.up_proj.weight"
    examined = anatomy.examine(model)
    with torch.no_grad():
        weight = model.get_parameter(name)
        weight.fill_(60000)
        weight[:, ::2] = 65504
    before = weights_of(model)
    matrix = examined.matrix(name)
    recipe = Ternarize(scheme="sign")
    quantized = recipe.quantized(matrix)

    class Doubled(Ternarize):
        def quantized(self, matrix: Any) -> Any:
            found = super().quantized(matrix)
            return type(found)(found.codes, found.scale * 2, found.scheme) if matrix.name == name else found

    assert float(quantized.scale.max()) > 60000
    with (
        pytest.raises(ProbeError, match=r"layers\.1\.mlp\.up_proj.*overflows"),
        Doubled(scheme="sign").applied(examined),
    ):
        pass
    assert_bit_identical(model, before)


def test_a_weight_that_is_not_finite_is_named():
    model = zoo.build("llama")
    examined = anatomy.examine(model)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[2, 5] = torch.nan
    before = weights_of(model)

    where = r"model\.layers\.1\.mlp\.up_proj\.weight: weight \[2, 5\] is nan"
    with pytest.raises(ProbeError, match=where), Ternarize().applied(examined):
        pass
    assert_bit_identical(model, before)


def test_eight_bit_floats_are_refused():
    model = zoo.build("llama")
    examined = anatomy.examine(model)
    name = "model.layers.0.mlp.up_proj.weight"
    model.get_submodule("model.layers.0.mlp.up_proj").weight = torch.nn.Parameter(
        model.get_parameter(name).to(torch.float8_e4m3fn), requires_grad=False
    )
    with pytest.raises(ProbeError, match="is stored as float8_e4m3fn: load the model with --dtype"):
        Ternarize().quantized(examined.matrix(name))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ternarize:scheme=absmaen", "no ternary scheme 'absmaen'"),
        ("ternarize:scheme=sign@g0", "no ternary scheme"),
        ("ternarize:blocks=3-1", "no selection of blocks"),
        ("ternarize:blocks=first", "no selection of blocks"),
        ("ternarize:columns=outlier", "unknown option 'columns'"),
        ("ternarise", "did you mean ternarize"),
    ],
)
def test_a_recipe_that_means_nothing_is_refused_when_it_is_made(text, message):
    with pytest.raises(ProbeError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": "0-2"}, "names block 2, and this model has 2 blocks"),
        ({"roles": ("up_proj", "up_prj")}, "roles=up_prj matches no targeted matrix"),
        ({"include": ("lm_head*",), "blocks": "0"}, "matches no weight matrix"),
        ({"include": ("nothing",)}, "matches no weight matrix"),
    ],
)
def test_a_recipe_that_does_not_fit_the_model_is_refused(options, message):
    with pytest.raises(ProbeError, match=message), Ternarize(**options).applied(zoo.build("llama")):
        pass


@pytest.mark.parametrize(
    "text",
    [
        "ternarize",
        "ternarize:scheme=absmean@g128,include=*down_proj*;*up_proj*,roles=down_proj,blocks=0-3;7",
        "ternarize:scheme=planes:2@g64,exclude=*k_proj*",
        "ternarize:scheme=absmean+ls",
        "ternarize:scheme=absmean+ls@row + sign_flip:rate=0.01,seed=2",
    ],
)
def test_strings_and_json_are_inverses(text):
    recipe = parse(text)
    assert parse(str(recipe)) == recipe
    assert from_description(recipe.describe()) == recipe


def test_a_scheme_is_spelled_out():
    assert Ternarize(scheme="absmean_group") == parse("ternarize:scheme=absmean@g128")
    assert Ternarize().describe()["scheme"] == "absmean@tensor"
    assert "Ternarize" in perturb.__all__


def test_a_flip_after_ternarizing_flips_ternary_values():
    model = zoo.build("llama")
    before = weights_of(model)
    name = "model.layers.0.mlp.up_proj.weight"
    recipe = parse(f"ternarize:include={name}+sign_flip:rate=1,include={name}")
    assert isinstance(recipe, Composed)
    assert [type(part) for part in recipe.parts] == [Ternarize, SignFlip]

    with recipe.applied(model):
        assert_same_grid(model.get_parameter(name).detach(), -absmean(before[name]))
    assert_bit_identical(model, before)


@pytest.mark.cuda
@pytest.mark.parametrize("scheme", ["absmean", "optimal@g8", "planes:2@g16"])
def test_cuda_and_cpu_hold_the_same_codes(scheme):
    recipe = Ternarize(scheme=scheme, roles=("up_proj",))
    here = [recipe.quantized(m).codes for m in recipe.targets(anatomy.examine(zoo.build("llama")))]
    there = [recipe.quantized(m).codes for m in recipe.targets(anatomy.examine(zoo.build("llama").cuda()))]
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a, b.cpu())
