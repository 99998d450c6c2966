"""``--model_args``: recipes survive lm-eval's two parsers, and nothing unknown, lost or ill-typed passes."""

from __future__ import annotations

import pytest
import torch
from lm_eval._cli.utils import key_val_to_dict
from lm_eval.utils import simple_parse_args_string
from ternary_probe_lm_eval.arguments import command_line_text, read_arguments, refuse_repeated
from ternary_probe_lm_eval.opening import with_present_device

from ternary_probe.errors import ProbeError
from ternary_probe.perturb import KINDS, Composed, parse

PARSERS = [
    pytest.param(key_val_to_dict, id="command line"),
    pytest.param(simple_parse_args_string, id="simple_evaluate"),
]
RECIPES = [
    "sign_flip:rate=0.005,columns=outlier",
    "sign_flip:rate=1e-3,columns=other,fraction=0.1,by=mean_abs,matching=count,seed=7",
    "sign_flip:rate=0.1,columns=17",
    "sign_flip:rate=0.1,columns=3;17;99,include=*q_proj;*k_proj,exclude=*layers.0*",
    "magnitude:rate=0.01,columns=all",
    "column_flip:columns=outlier",
    "outlier_columns:k=4,number=2,mode=raw",
    "outlier_columns:k=1e+16,columns=1;2",
    "ternarize",
    "ternarize:scheme=absmean+ls@row,blocks=0-3;7,roles=up_proj;down_proj",
    "outlier_columns:k=4,number=2+sign_flip:rate=0.05,columns=outlier",
    "entry_flip:entries=a.b.weight@1@2;a.b.weight@3@4,to=zero",
    "ternarize:scheme=absmean+ls+sign_flip:rate=0.05",
]


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_survives_both_parsers(parser, recipe):
    assert read_arguments(parser(f"pretrained=demo,perturb={recipe},dtype=float32")).recipe == parse(recipe)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("recipe", [r for r in RECIPES if "," in r])
def test_semicolons_join_a_recipes_options_as_well(parser, recipe):
    assert read_arguments(parser(f"perturb={recipe.replace(',', ';')}")).recipe == parse(recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_recipe_says_of_itself_can_be_given_back(recipe):
    text = str(parse(recipe))
    if text.count("seed=") == 1:
        assert read_arguments(key_val_to_dict(f"perturb={text}")).recipe == parse(recipe)
    assert read_arguments({"perturb": text.replace(",", ";")}).recipe == parse(recipe)


def test_every_kind_of_recipe_is_tested_here():
    assert {recipe.partition(":")[0] for recipe in RECIPES} == set(KINDS)


def test_options_may_stand_before_the_recipe_and_far_behind_it():
    options = key_val_to_dict("columns=outlier,perturb=sign_flip,dtype=float32,rate=0.1")
    assert read_arguments(options).recipe == parse("sign_flip:rate=0.1,columns=outlier")


@pytest.mark.parametrize("parser", PARSERS)
def test_the_models_seed_is_the_recipes_unless_it_has_one(parser):
    assert read_arguments(parser("seed=4,perturb=sign_flip:rate=0.1")).recipe == parse("sign_flip:rate=0.1,seed=4")
    assert read_arguments(parser("perturb=sign_flip:rate=0.1,seed=4")).recipe == parse("sign_flip:rate=0.1,seed=4")
    both = read_arguments(parser("seed=4,perturb=sign_flip:rate=0.1+magnitude:rate=0.1;seed=2")).recipe
    assert isinstance(both, Composed)
    assert [part.seed for part in both.parts] == [4, 2]


def test_a_recipe_may_be_json_or_an_object():
    recipe = parse("sign_flip:rate=0.1,columns=3;17")
    assert read_arguments({"perturb": recipe.describe()}).recipe == recipe
    assert read_arguments({"perturb": recipe, "seed": 5}).recipe == recipe.model_copy(update={"seed": 5})
    with pytest.raises(ProbeError, match="columns="):
        read_arguments({"perturb": recipe, "columns": "all"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prturb=sign_flip:rate=0.1", "unknown argument 'prturb': did you mean perturb"),
        ("softmax_dtyp=float32", "did you mean softmax_dtype"),
        ("perturb=sign_flip:rate=0.1,colums=outlier", "'colums': did you mean columns"),
        ("zzz=1", "known are pretrained, dtype"),
        ("load_in_4bit=True", "use quant=nf4"),
        ("peft=x", "merge the adapter"),
        ("gguf_file=x.gguf", "as pretrained="),
        ("backend=seq2seq", "only causal"),
        ("parallelize=True", "device_map=auto"),
        ("quant=nf5", "choose one of nf4, int8"),
        ("perturb=sign_filp:rate=0.1", "did you mean sign_flip"),
        ("perturb=sign_flip:rate=2", "less than or equal to 1"),
        ("perturb=sign_flip:rate=nan", "finite number"),
        ("columns=outlier", "columns=outlier is an option of a recipe"),
        ("seed=3", "seed=3 is an option of a recipe"),
        ("perturb=ternarize,seed=-1", "seed=-1"),
        ("window=1", "window=1 is no whole number of at least 2"),
        ("window=64.5", "window=64.5"),
        ("bos=twice", "bos=twice is not known"),
        ("protocol=dong2026", "protocol=dong2026 is not known"),
        ("protocol=rolling,bos=every_window", "needs protocol=disjoint"),
        ("protocol=disjoint,stride=8", "stride=8 needs protocol=strided"),
        ("trust_remote_code=maybe", "neither True nor False"),
    ],
)
@pytest.mark.parametrize("parser", PARSERS)
def test_what_cannot_be_meant_is_refused_in_one_sentence(parser, text, message):
    with pytest.raises(ProbeError, match=message):
        read_arguments(parser(text))


def test_a_list_cut_by_the_second_parser_is_refused_and_the_first_reads_it():
    text = "perturb=sign_flip:rate=0.1,columns=[3,17]"
    assert read_arguments(key_val_to_dict(text)).recipe == parse("sign_flip:rate=0.1,columns=3;17")
    with pytest.raises(ProbeError, match="separated by ';'"):
        read_arguments(simple_parse_args_string(text))


@pytest.mark.parametrize(
    ("text", "protocol", "bos"),
    [
        ("", "rolling", "once"),
        ("bos=once", "rolling", "once"),
        ("bos=none", "disjoint", "none"),
        ("bos=every_window", "disjoint", "every_window"),
        ("stride=8", "strided", "none"),
        ("stride=8,bos=once", "strided", "once"),
        ("protocol=disjoint", "disjoint", "none"),
        ("protocol=disjoint,bos=once", "disjoint", "once"),
    ],
)
@pytest.mark.parametrize("parser", PARSERS)
def test_the_protocol_follows_from_bos_and_stride(parser, text, protocol, bos):
    found = read_arguments(parser(text))
    assert (found.protocol, found.bos) == (protocol, bos)


def test_numbers_are_cast_whatever_the_parser_made_of_them():
    found = read_arguments({"window": 64.0, "stride": "32", "head_mib": 2.0, "max_length": 128.0, "prefix_token_id": 0})
    assert (found.window, found.stride, found.head_bytes) == (64, 32, 2 << 20)
    assert found.harness["max_length"] == 128
    assert found.harness["prefix_token_id"] == 0
    assert all(isinstance(value, int) for value in found.harness.values())


def test_an_option_given_twice_is_refused_because_lm_eval_would_lose_one():
    lost = "pretrained=demo,perturb=magnitude:rate=0.01,seed=1+sign_flip:rate=0.02,seed=2"
    assert read_arguments(key_val_to_dict(lost)).recipe == parse("magnitude:rate=0.01,seed=2")  # the trap
    with pytest.raises(ProbeError, match="seed= stands twice"):
        refuse_repeated(lost)
    refuse_repeated(lost.replace(",seed=", ";seed="))
    refuse_repeated('{"pretrained": "demo", "perturb": "a=1,a=2"}')


@pytest.mark.parametrize(
    "argv",
    [
        ["lm_eval", "--model_args", "a=1,b=2", "c=3", "--tasks", "x"],
        ["lm_eval", "run", "--model", "y", "--model_args=a=1,b=2", "c=3"],
        ["lm_eval", "-a", "a=1", "b=2,c=3"],
    ],
)
def test_the_command_lines_model_args_are_found(argv):
    assert command_line_text(argv) == "a=1,b=2,c=3"


def test_lm_evals_default_device_is_what_there_is():
    notes: list[str] = []
    found = with_present_device({"device": "cuda:0", "dtype": "float32"}, notes)
    if torch.cuda.is_available():
        assert (found["device"], notes) == ("cuda:0", [])
    else:
        assert found == {"device": "cpu", "dtype": "float32"}
        assert "no CUDA device" in notes[0]
    assert with_present_device({"device": "cpu"}, []) == {"device": "cpu"}
    assert with_present_device({"device": "cuda:0", "device_map": "auto"}, []) == {"device_map": "auto"}
