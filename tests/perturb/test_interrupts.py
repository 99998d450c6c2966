"""Ctrl-C at any moment: the weights are back before anyone sees the exception."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time

import pytest
import torch
import zoo
from weight_oracle import assert_bit_identical, snapshot

from ternary_probe import anatomy
from ternary_probe.perturb import ColumnFlip, Columns, Composed, Magnitude, OutlierColumns, SignFlip
from ternary_probe.perturb.interrupt import interrupts_deferred

RECIPES = {
    "sign_flip": SignFlip(rate=0.02),
    "sign_flip_dense": SignFlip(rate=0.4),
    "magnitude": Magnitude(rate=0.1),
    "column_flip": ColumnFlip(columns=Columns(select="listed", listed=(1, 5))),
    "planted_then_flipped": Composed(parts=(OutlierColumns(k=3), SignFlip(rate=0.05))),
}


@pytest.fixture(scope="module")
def llama():
    return zoo.build("llama")


@pytest.fixture(scope="module")
def found(llama):
    return anatomy.examine(llama)


@pytest.fixture(autouse=True)
def handler_is_left_as_it_was():
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def no_collections():
    """hypothesis watches every garbage collection; a SIGINT that lands in its callback is swallowed, and pytest objects."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_real_sigint_at_random_moments_leaves_every_bit_as_it_was(llama, found, recipe):
    before = snapshot(llama)
    started = time.perf_counter()
    for _ in range(3):
        with recipe.applied(found):
            pass
    typical = (time.perf_counter() - started) / 3
    moments = random.Random(0)
    interrupted = 0
    for _ in range(50):
        timer = threading.Timer(moments.uniform(0, 1.3 * typical), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            for _ in range(3):
                with recipe.applied(found):
                    pass
            timer.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            interrupted += 1
            assert_bit_identical(llama, before)
        finally:
            timer.join()
    assert interrupted == 50
    assert_bit_identical(llama, before)


@pytest.mark.parametrize(("kind", "samples"), [("sign_flip", 150), ("planted_then_flipped", 60)])
def test_a_sigint_at_any_instruction_leaves_every_bit_as_it_was(llama, found, kind, samples):
    """Deliver the signal just before the n-th bytecode of applying, body and undoing, for n all over the range."""
    recipe = RECIPES[kind].model_copy(update={"include": ("*layers.0.self_attn.q_proj*",)})
    if kind == "planted_then_flipped":
        few = {"include": ("*layers.0.self_attn.[qkv]_proj*",)}
        recipe = Composed(parts=tuple(part.model_copy(update=few) for part in RECIPES[kind].parts))
    before = snapshot(llama)
    library = os.sep + "ternary_probe" + os.sep
    state = {"count": 0, "at": -1}

    def trace(frame, event, _argument):
        file = frame.f_code.co_filename
        if not (library in file or file.endswith("contextlib.py") or file == __file__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            state["count"] += 1
            if state["count"] == state["at"]:
                signal.raise_signal(signal.SIGINT)
        return trace

    def run(at):
        state.update(count=0, at=at)
        previous = sys.gettrace()
        try:
            sys.settrace(trace)
            use(recipe, found)
        except KeyboardInterrupt as error:
            sys.settrace(previous)
            assert_bit_identical(llama, before)  # while the traceback still holds every frame
            return error is not None
        finally:
            sys.settrace(previous)
        assert_bit_identical(llama, before)
        return False

    for _ in range(2):  # what a first use remembers for the later ones is not counted
        run(-1)
    total = state["count"]
    # All over the range, and every instruction of the last stretch, where the `with` statements end.
    chosen = {*range(1, total, max(1, total // samples)), *range(total - samples, total - 2)}
    raised = [run(at) for at in sorted(chosen)]
    assert total > 1000
    assert sum(raised) > 0.95 * len(raised)


def use(recipe, found):
    with recipe.applied(found) as done:
        done.entries += 0
    return done


@pytest.mark.parametrize("kind", ["sign_flip", "planted_then_flipped"])
def test_a_sigint_inside_nested_recipes_takes_the_inner_one_back_first(llama, found, kind):
    before = snapshot(llama)

    def nested():
        outer, inner = OutlierColumns(k=4), Magnitude(rate=0.3, seed=1)
        with outer.applied(found), RECIPES[kind].applied(found), inner.applied(found):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)

    with pytest.raises(KeyboardInterrupt):
        nested()
    assert_bit_identical(llama, before)


def test_a_swallowed_interrupt_is_raised_again_because_the_weights_are_back(llama, found):
    before = snapshot(llama)
    seen = []

    def swallowing():
        with SignFlip(rate=0.1).applied(found):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                assert_bit_identical(llama, before)
                seen.append("swallowed")

    with pytest.raises(KeyboardInterrupt):
        swallowing()
    assert seen == ["swallowed"]


def test_a_handler_that_only_sets_a_flag_keeps_the_recipe_applied(llama, found):
    before, flags = snapshot(llama), []
    signal.signal(signal.SIGINT, lambda number, frame: flags.append(number))
    try:
        with SignFlip(rate=0.1).applied(found) as done:
            signal.raise_signal(signal.SIGINT)
            weight = llama.get_parameter(done.matrices[0])
            moved = weight.view(torch.int32) != before[done.matrices[0]]
            assert int(moved.sum()) == round(0.1 * weight.numel())
        assert_bit_identical(llama, before)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert flags == [signal.SIGINT]


def test_deferred_interrupts_arrive_at_the_end_even_when_the_body_fails():
    steps = []

    def deferred(error):
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            steps.append("kept going")
            if error is not None:
                raise error

    with pytest.raises(KeyboardInterrupt):
        deferred(None)
    with pytest.raises(KeyboardInterrupt) as raised:
        deferred(ValueError("the body's own"))
    assert steps == ["kept going"] * 2
    assert isinstance(raised.value.__context__, ValueError)


def test_recipes_can_be_applied_in_another_thread(llama, found):
    before, outcome = snapshot(llama), []

    def work():
        with SignFlip(rate=0.1).applied(found) as done:
            outcome.append(done.entries)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert outcome == [1536]
    assert_bit_identical(llama, before)


def test_an_edit_that_fails_half_way_is_taken_back(llama, found, monkeypatch):
    before = snapshot(llama)
    flip, calls = anatomy.WeightMatrix.flip_signs, []

    def failing(self, entries):
        calls.append(self.name)
        if len(calls) == 5:
            raise MemoryError
        flip(self, entries)

    monkeypatch.setattr(anatomy.WeightMatrix, "flip_signs", failing)
    with pytest.raises(MemoryError), SignFlip(rate=0.1).applied(found):
        pass
    assert len(calls) == 9  # four flips, the failure, four undone
    assert_bit_identical(llama, before)


def test_one_undo_that_fails_does_not_keep_the_others_from_running(llama, found):
    before = snapshot(llama)
    layer = llama.model.layers[1].mlp
    original = layer.down_proj.weight
    with pytest.raises(anatomy.StorageError), SignFlip(rate=0.1).applied(found):
        layer.down_proj.weight = torch.nn.Parameter(torch.zeros(3, 3), requires_grad=False)
    layer.down_proj.weight = original
    after = snapshot(llama)
    assert [name for name in before if not torch.equal(before[name], after[name])] == [
        "model.layers.1.mlp.down_proj.weight"
    ]
    with torch.no_grad():
        original.view(torch.int32).copy_(before["model.layers.1.mlp.down_proj.weight"])
