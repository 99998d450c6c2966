"""Recipes as text and as JSON: both read back to the same recipe, and what cannot be read says why in one sentence."""

from __future__ import annotations

import json
import string

import pytest
import torch
import zoo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ternary_probe import anatomy
from ternary_probe.errors import ProbeError
from ternary_probe.perturb import (
    ColumnFlip,
    Columns,
    Composed,
    Magnitude,
    OutlierColumns,
    SignFlip,
    from_description,
    parse,
)

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
shares = st.floats(0, 1, exclude_min=True, exclude_max=True)
seeds = st.integers(0, 2**70)
patterns = st.lists(
    st.text(string.ascii_letters + string.digits + "._*?[]-", min_size=1, max_size=12), max_size=3, unique=True
).map(tuple)
column_lists = st.lists(st.integers(0, 10_000), min_size=1, max_size=5).map(tuple)
measured = st.dictionaries(st.text(min_size=1, max_size=8), column_lists, min_size=1, max_size=3)
shared = {"seed": seeds, "include": patterns, "exclude": patterns}


@st.composite
def column_choices(draw, *, resolved=False):
    select = draw(st.sampled_from(["all", "outlier", "other", "listed"]))
    listed = draw(column_lists) if select == "listed" else ()
    outlier = draw(st.none() | measured) if resolved else None
    by = draw(st.sampled_from(["energy", "mean_abs"]))
    return Columns(select=select, fraction=draw(shares), by=by, listed=listed, outlier=outlier)


def random_entries(kind, *, resolved):
    counts = st.none() | st.dictionaries(st.text(max_size=8), st.integers(0, 10**12), max_size=3)
    return st.builds(
        kind,
        rate=shares | st.just(1.0),
        columns=column_choices(resolved=resolved),
        matching=st.sampled_from(["count", "rate", "energy"]),
        counts=counts if resolved else st.none(),
        **shared,
    )


def recipes(*, resolved):
    simple = st.one_of(
        random_entries(SignFlip, resolved=resolved),
        random_entries(Magnitude, resolved=resolved),
        st.builds(ColumnFlip, columns=column_choices(resolved=resolved), **shared),
        st.builds(
            OutlierColumns,
            k=st.floats(1e-6, 1e20).filter(lambda k: k != 1),
            number=st.integers(1, 10_000),
            columns=st.just(()) | column_lists,
            mode=st.sampled_from(["preserving", "raw"]),
            **shared,
        ),
    )
    composed = st.builds(Composed, parts=st.lists(simple, min_size=2, max_size=3).map(tuple))
    return st.one_of(simple, composed)


@few
@given(recipes(resolved=True))
def test_a_description_reads_back_to_an_equal_recipe_through_json(recipe):
    assert from_description(recipe.describe()) == recipe
    assert from_description(json.loads(json.dumps(recipe.describe()))) == recipe


@few
@given(recipes(resolved=False))
def test_the_text_of_an_unresolved_recipe_reads_back_to_an_equal_recipe(recipe):
    assert parse(str(recipe)) == recipe


def test_every_option_is_read():
    assert parse("sign_flip:rate=0.005,columns=outlier,seed=3") == SignFlip(
        rate=0.005, columns=Columns(select="outlier"), seed=3
    )
    assert parse(
        " magnitude : rate = 1e-3 , columns=3;17, matching=rate, fraction=0.1, by=mean_abs,"
        " include=*q_proj*;*up*, exclude=*.0.* "
    ) == Magnitude(
        rate=0.001,
        columns=Columns(select="listed", listed=(3, 17), fraction=0.1, by="mean_abs"),
        include=("*q_proj*", "*up*"),
        exclude=("*.0.*",),
    )
    assert parse("column_flip") == ColumnFlip()
    assert parse("column_flip").columns.select == "outlier"
    assert parse("column_flip:columns=other,fraction=0.2").columns == Columns(select="other", fraction=0.2)
    assert parse("outlier_columns:k=4,columns=1;2,mode=raw") == OutlierColumns(k=4, columns=(1, 2), mode="raw")
    assert parse("outlier_columns:k=1e+3,number=2 + sign_flip:rate=0.1") == Composed(
        parts=(OutlierColumns(k=1000, number=2), SignFlip(rate=0.1))
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sign_flop:rate=0.1", "did you mean sign_flip"),
        ("", "unknown recipe"),
        ("sign_flip:rat=0.1", "did you mean rate"),
        ("sign_flip:rate=0.1,colums=all", "did you mean columns"),
        ("outlier_columns:k=2,fraction=0.1", "unknown option 'fraction'"),
        ("sign_flip:rate=0.1,counts=3", "unknown option 'counts'"),
        ("sign_flip:rate=0.1,kind=magnitude", "unknown option 'kind'"),
        ("sign_flip", "rate"),
        ("sign_flip:rate=0", "rate"),
        ("sign_flip:rate=-0.1", "rate"),
        ("sign_flip:rate=1.5", "rate"),
        ("sign_flip:rate=nan", "rate"),
        ("sign_flip:rate=inf", "rate"),
        ("sign_flip:rate=", "rate"),
        ("sign_flip:rate=lots", "rate"),
        ("sign_flip:rate", "not of the form name=value"),
        ("sign_flip:rate=0.1,rate=0.2", "given twice"),
        ("sign_flip:rate=0.1,seed=-1", "seed"),
        ("sign_flip:rate=0.1,seed=1.5", "seed"),
        ("sign_flip:rate=0.1,columns=foo", "columns=foo is neither all, outlier, other nor a list"),
        ("sign_flip:rate=0.1,columns=", "neither all, outlier, other nor a list"),
        ("sign_flip:rate=0.1,columns=listed", "neither all, outlier, other nor a list"),
        ("sign_flip:rate=0.1,columns=1;x2", "not a list of column numbers"),
        ("sign_flip:rate=0.1,columns=-1", "negative"),
        ("sign_flip:rate=0.1,fraction=0", "fraction"),
        ("sign_flip:rate=0.1,fraction=1", "fraction"),
        ("sign_flip:rate=0.1,fraction=nan", "fraction"),
        ("sign_flip:rate=0.1,by=size", "by"),
        ("sign_flip:rate=0.1,matching=fair", "matching"),
        ("outlier_columns:k=0", "k"),
        ("outlier_columns:k=-2", "k"),
        ("outlier_columns:k=1", "k=1 plants nothing"),
        ("outlier_columns:k=inf", "k"),
        ("outlier_columns:k=2,number=0", "number"),
        ("outlier_columns:k=2,columns=-3", "negative"),
        ("outlier_columns:k=2,mode=wild", "mode"),
        ("outlier_columns:k=2+", "unknown recipe"),
        ("outlier_columns:k=2+sign_flip:rate=2", "rate"),
    ],
)
def test_text_that_cannot_be_read_is_refused_in_one_sentence(text, named):
    with pytest.raises(ProbeError) as raised:
        parse(text)
    message = str(raised.value)
    assert named in message
    assert "\n" not in message
    assert len(message) < 300
    assert "pydantic" not in message


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({}, "kind None"),
        ({"kind": "sign_flop", "rate": 0.1}, "sign_flop"),
        ({"kind": "sign_flip"}, "rate"),
        ({"kind": "sign_flip", "rate": 0}, "rate"),
        ({"kind": "sign_flip", "rate": float("nan")}, "rate"),
        ({"kind": "sign_flip", "rate": 0.1, "extra": 1}, "extra"),
        ({"kind": "sign_flip", "rate": 0.1, "columns": {"select": "foo"}}, "columns.select"),
        ({"kind": "sign_flip", "rate": 0.1, "columns": {"select": "all", "listed": [1]}}, "columns"),
        ({"kind": "composed", "parts": []}, "parts"),
        ({"kind": "composed", "parts": [{"kind": "composed", "parts": []}]}, "parts"),
        ([{"kind": "sign_flip"}], "must be an object"),
        ("sign_flip:rate=0.1", "must be an object"),
    ],
    ids=str,
)
def test_json_that_is_no_recipe_is_refused_in_one_sentence(data, named):
    with pytest.raises(ProbeError) as raised:
        from_description(data)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.fixture(scope="module")
def found():
    return anatomy.examine(zoo.build("llama"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sign_flip:rate=0.1,columns=outlier", "recipe.resolve"),
        ("sign_flip:rate=0.1,columns=other", "recipe.resolve"),
        ("sign_flip:rate=0.1,matching=count", "recipe.resolve"),
        ("magnitude:rate=0.1,columns=outlier", "recipe.resolve"),
        ("column_flip", "recipe.resolve"),
        ("outlier_columns:k=2+column_flip", "recipe.resolve"),
        ("sign_flip:rate=0.1,include=*nothing*", "'*nothing*' matches no weight matrix"),
        ("sign_flip:rate=0.1,include=*q_proj*;*typo*", "'*typo*' matches no weight matrix"),
        ("sign_flip:rate=0.1,exclude=*typo*", "'*typo*' matches no weight matrix"),
        ("sign_flip:rate=0.1,include=*q_proj*,exclude=*attn*", "matches no weight matrix"),
        ("sign_flip:rate=0.1,columns=32,include=*q_proj*", "column 32 does not exist"),
        ("outlier_columns:k=2,columns=32", "column 32 does not exist"),
        ("outlier_columns:k=2,number=33", "number=33"),
    ],
)
def test_a_recipe_that_does_not_fit_the_model_is_refused_and_nothing_moves(found, text, named):
    before = {name: p.clone() for name, p in found.model.named_parameters()}
    with pytest.raises(ProbeError) as raised, parse(text).applied(found):
        pass
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)
    assert all(torch.equal(p, before[name]) for name, p in found.model.named_parameters())


def test_a_frozen_recipe_of_another_model_is_refused(found):
    foreign = SignFlip(rate=0.1, columns=Columns(select="outlier", outlier={"some.other.weight": (1, 2)}))
    with pytest.raises(ProbeError, match=r"do not name model\.layers\.0"), foreign.applied(found):
        pass
    wide = SignFlip(
        rate=0.1,
        columns=Columns(select="outlier", outlier={"model.layers.0.self_attn.q_proj.weight": (40,)}),
        include=("model.layers.0.self_attn.q_proj.weight",),
    )
    with pytest.raises(ProbeError, match="column 40 does not exist"), wide.applied(found):
        pass
