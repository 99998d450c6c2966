from __future__ import annotations

import builtins
import hashlib
import json
import logging
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ternary_probe.data import sample_text
from ternary_probe.errors import ProbeError
from ternary_probe.text import Protocol, Text, Windows, calibration_windows, make_windows, read_text

if TYPE_CHECKING:
    from pathlib import Path

PROSE = (
    "The ferry left at six, and nobody waved. Later, über den Fluss, a naïve café owner wrote: \u201cno signal\u201d.\n"
    "Three gulls followed us 😀 past the lighthouse; the fourth had better things to do.\n\n"
    "By noon the wind had gone round to the west, and the harbour master changed his mind twice.\n"
)


def byte_tokenizer(*, bos: bool = True, eos: bool = True, adds_bos: bool = False, longest: int = 10**9) -> Any:
    """A byte-level BPE, so any text is representable; ids 0 and 1 are ``<s>`` and ``</s>``."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [PROSE] * 3,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    names = {"bos_token": "<s>"} if bos else {}
    names |= {"eos_token": "</s>"} if eos else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=longest, clean_up_tokenization_spaces=False, **names
    )


def as_text(content: str) -> Text:
    return Text(content, "test", "as is")


def ids_of(tokenizer: Any, content: str) -> list[int]:
    return tokenizer.backend_tokenizer.encode(content, add_special_tokens=False).ids


def words_of(content: str) -> int:
    return len(re.split(r"\s+", content))


def pairs(windows: Windows) -> list[list[tuple[int, int]]]:
    """Per window, the scored (input, target) pairs, by a loop over positions."""
    rows = []
    for inputs, targets, scored in zip(
        windows.inputs.tolist(), windows.targets.tolist(), windows.scored.tolist(), strict=True
    ):
        rows.append([(i, t) for i, t, s in zip(inputs, targets, scored, strict=True) if s])
    return rows


LONG = PROSE * 6


# --- disjoint ---------------------------------------------------------------------------------------------------------


def test_disjoint_windows_cut_the_tokens_end_to_end_and_predict_all_but_the_first() -> None:
    tokenizer = byte_tokenizer()
    ids = ids_of(tokenizer, LONG)
    made = make_windows(as_text(LONG), tokenizer, window=16)
    assert made.inputs.dtype == made.targets.dtype == torch.int64
    assert made.scored.dtype == torch.bool
    assert len(made.inputs) == len(ids) // 16
    for row, inputs in enumerate(made.inputs.tolist()):
        expected = ids[16 * row : 16 * row + 16]
        assert inputs == expected
        assert pairs(made)[row] == list(pairwise(expected))
    assert not made.scored[:, -1].any()
    assert made.protocol.tokens_scored == 15 * len(made.inputs)
    assert made.protocol.tokens_total == len(ids)
    dropped = len(ids) % 16
    assert dropped
    assert any(note.startswith(f"{dropped} tokens") for note in made.protocol.notes)


def test_bos_in_every_window_lets_every_text_token_be_predicted() -> None:
    tokenizer = byte_tokenizer()
    ids = ids_of(tokenizer, LONG)
    made = make_windows(as_text(LONG), tokenizer, window=16, bos="every_window")
    assert len(made.inputs) == len(ids) // 15
    for row, inputs in enumerate(made.inputs.tolist()):
        expected = [tokenizer.bos_token_id, *ids[15 * row : 15 * row + 15]]
        assert inputs == expected
        assert pairs(made)[row] == list(pairwise(expected))
    assert made.protocol.stride == 15
    assert made.protocol.window == 16


def test_bos_once_stands_before_the_text_only() -> None:
    tokenizer = byte_tokenizer()
    ids = [tokenizer.bos_token_id, *ids_of(tokenizer, LONG)]
    made = make_windows(as_text(LONG), tokenizer, window=16, bos="once")
    assert [token for row in made.inputs.tolist() for token in row] == ids[: made.inputs.numel()]
    assert (made.inputs == tokenizer.bos_token_id).sum() == 1
    skipping = make_windows(as_text(LONG), tokenizer, window=16, bos="once", skip_windows=1, windows=1)
    assert skipping.inputs.tolist() == [ids[16:32]]
    assert any("skipped window" in note for note in skipping.protocol.notes)


def test_skipped_windows_are_left_out_and_recorded() -> None:
    tokenizer = byte_tokenizer()
    whole = make_windows(as_text(LONG), tokenizer, window=16)
    part = make_windows(as_text(LONG), tokenizer, window=16, windows=2, skip_windows=3)
    assert torch.equal(part.inputs, whole.inputs[3:5])
    assert torch.equal(part.scored, whole.scored[3:5])
    assert part.protocol.skip == 48
    assert part.span == (48, 80)


def test_a_prefix_token_replaces_bos() -> None:
    tokenizer = byte_tokenizer(bos=False)
    made = make_windows(as_text(LONG), tokenizer, window=16, bos="every_window", prefix_token=7)
    assert set(made.inputs[:, 0].tolist()) == {7}


# --- rolling ----------------------------------------------------------------------------------------------------------


def harness_rows(ids: list[int], prefix: int, window: int) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """What lm-eval feeds its model: inputs, scored targets, and how many are scored, by lm-eval's own functions."""
    inputs, targets, counts = [], [], []
    for context, predicted in map(make_disjoint_window, get_rolling_token_windows(ids, prefix, window, 1)):
        inputs.append((context + predicted)[-(window + 1) :][:-1])
        targets.append(predicted)
        counts.append(len(predicted))
    return inputs, targets, counts


@settings(max_examples=60, deadline=None, database=None)
@given(length=st.integers(1, 130), window=st.integers(2, 40))
def test_rolling_windows_equal_those_of_lm_eval_token_by_token(length: int, window: int) -> None:
    tokenizer = byte_tokenizer_cached()
    content = LONG[:length]
    inputs, targets, counts = harness_rows(ids_of(tokenizer, content), tokenizer.bos_token_id, window)
    made = make_windows(as_text(content), tokenizer, protocol="rolling", window=window)
    assert made.inputs.tolist() == inputs
    for row in range(len(inputs)):
        scored = made.scored[row]
        assert made.targets[row][scored].tolist() == targets[row]
        assert scored.tolist() == [False] * (len(scored) - counts[row]) + [True] * counts[row]
    # The whole document is scored, so its words and bytes are lm-eval's.
    assert made.protocol.words == words_of(content)
    assert made.protocol.bytes == len(content.encode())
    assert made.protocol.tokens_scored == len(ids_of(tokenizer, content))


_CACHE: list[Any] = []


def byte_tokenizer_cached() -> Any:
    if not _CACHE:
        _CACHE.append(byte_tokenizer())
    return _CACHE[0]


def test_rolling_predicts_from_bos_else_eos_else_refuses() -> None:
    text = as_text(LONG)
    for tokenizer, prefix in [(byte_tokenizer(), 0), (byte_tokenizer(bos=False), 1)]:
        made = make_windows(text, tokenizer, protocol="rolling", window=16)
        assert made.inputs[0, 0] == prefix
        assert made.protocol.bos == "once"
    assert make_windows(text, byte_tokenizer(), protocol="rolling", window=16, prefix_token=5).inputs[0, 0] == 5
    with pytest.raises(ProbeError, match="neither a BOS nor an EOS"):
        make_windows(text, byte_tokenizer(bos=False, eos=False), protocol="rolling", window=16)


def test_rolling_first_windows_are_the_head_of_the_whole() -> None:
    tokenizer = byte_tokenizer()
    whole = make_windows(as_text(LONG), tokenizer, protocol="rolling", window=16)
    head = make_windows(as_text(LONG), tokenizer, protocol="rolling", window=16, windows=3)
    assert torch.equal(head.inputs, whole.inputs[:3])
    assert head.protocol.tokens_scored == 48
    assert not any("last window" in note for note in head.protocol.notes)


def test_rolling_scores_a_text_shorter_than_the_window_in_one_window_and_says_so() -> None:
    tokenizer = byte_tokenizer()
    made = make_windows(as_text(PROSE), tokenizer, protocol="rolling", window=4096)
    ids = ids_of(tokenizer, PROSE)
    assert made.inputs.tolist() == [[0, *ids[:-1]]]
    assert made.targets.tolist() == [ids]
    assert made.scored.all()
    assert any("one window" in note for note in made.protocol.notes)


# --- strided ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, database=None)
@given(
    length=st.integers(60, 200),
    window=st.integers(3, 24),
    data=st.data(),
    bos=st.sampled_from(["none", "once", "every_window"]),
)
def test_strided_scores_every_token_once_but_the_first_with_growing_context(
    length: int, window: int, data: st.DataObject, bos: Any
) -> None:
    tokenizer = byte_tokenizer_cached()
    ids = ids_of(tokenizer, LONG[:length])
    stride = data.draw(st.integers(1, window - 1))
    made = make_windows(as_text(LONG[:length]), tokenizer, protocol="strided", window=window, stride=stride, bos=bos)
    scored_targets = [target for row in pairs(made) for _, target in row]
    # A BOS predicts the first text token, too.
    assert scored_targets == (ids[1:] if bos == "none" else ids)
    assert made.protocol.tokens_scored == len(scored_targets)
    assert made.inputs.shape[1] == window
    counts = made.scored.sum(dim=1).tolist()
    assert all(count == stride for count in counts[1:-1])
    assert all(1 <= count <= stride for count in counts[1:])
    for inputs, targets, scored in zip(made.inputs, made.targets, made.scored, strict=True):
        known = scored[:-1]
        assert torch.equal(targets[:-1][known], inputs[1:][known])
        assert not scored[-1]


def test_strided_defaults_to_half_a_window() -> None:
    assert make_windows(as_text(LONG), byte_tokenizer(), protocol="strided", window=16).protocol.stride == 8


# --- dong2026 ---------------------------------------------------------------------------------------------------------


def test_dong2026_joins_non_blank_lines_by_a_blank_line_and_keeps_the_tokenizers_own_bos() -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    content = " = Title = \n\n\n a b \r\n   \n" + LONG
    joined = "\n\n".join([" = Title = ", " a b ", *[line for line in LONG.split("\n") if line]])
    ids = [0, *ids_of(tokenizer, joined)]
    made = make_windows(as_text(content), tokenizer, protocol="dong2026", window=8, windows=5)
    assert made.inputs.tolist() == [ids[8 * i : 8 * i + 8] for i in range(5)]
    assert made.protocol.bos == "once"
    assert made.protocol.tokens_total == len(ids) - 1
    assert made.protocol.text_sha256 == hashlib.sha256(content.encode()).hexdigest()
    assert "non-blank lines joined by a blank line" in made.protocol.joining


def test_dong2026_defaults_to_ten_windows_of_2048_and_notes_what_is_not_the_papers() -> None:
    tokenizer = byte_tokenizer()
    long = "\n".join(f"{i} {PROSE.splitlines()[0]}" for i in range(500))
    paper = make_windows(Text(long, "Salesforce/wikitext:wikitext-2-raw-v1:test", ""), tokenizer, protocol="dong2026")
    assert tuple(paper.inputs.shape) == (10, 2048)
    assert paper.protocol.bos == "none"
    assert not any("not the paper" in note for note in paper.protocol.notes)
    other = make_windows(as_text(long), tokenizer, protocol="dong2026", window=64, windows=3)
    assert sum("not the paper's" in note for note in other.protocol.notes) == 3


def test_dong2026_on_too_short_a_text_refuses_instead_of_giving_fewer_windows() -> None:
    with pytest.raises(ProbeError, match=r"has \d+ tokens, but 10 windows .* need 640"):
        make_windows(as_text(PROSE), byte_tokenizer(), protocol="dong2026", window=64)


# --- calibration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["disjoint", "rolling", "strided", "dong2026"])
@pytest.mark.parametrize("bos", ["none", "once", "every_window"])
def test_calibration_windows_start_where_the_scored_tokens_end(protocol: Any, bos: Any) -> None:
    if (protocol, bos) in {("rolling", "every_window"), ("dong2026", "once"), ("dong2026", "every_window")}:
        with pytest.raises(ProbeError, match=f"protocol '{protocol}'"):
            make_windows(as_text(LONG), byte_tokenizer(), protocol=protocol, window=16, windows=3, bos=bos)
        return
    tokenizer = byte_tokenizer(adds_bos=protocol == "dong2026")
    scored = make_windows(as_text(LONG), tokenizer, protocol=protocol, window=16, windows=3, bos=bos)
    chosen = calibration_windows(as_text(LONG), tokenizer, scored, windows=4)
    content = LONG
    if protocol == "dong2026":
        content = "\n\n".join(line for line in LONG.split("\n") if line)
    ids = ids_of(tokenizer, content)
    seen = max_text_token(scored, ids, tokenizer.bos_token_id)
    flat = [token for row in chosen.inputs.tolist() for token in row if token != tokenizer.bos_token_id]
    assert flat == ids[seen : seen + len(flat)]
    assert chosen.span == (seen, seen + len(flat))
    assert tuple(chosen.inputs.shape) == (4, 16)
    assert (chosen.inputs[:, 0] == tokenizer.bos_token_id).all() == (bos == "every_window")


def max_text_token(scored: Windows, ids: list[int], bos: int) -> int:
    """Text tokens up to the last one that any scored window knows, found by matching the last window with the text."""
    row = [token for token in scored.inputs[-1].tolist() if token != bos]
    if scored.protocol.name == "rolling":
        row.append(int(scored.targets[-1, -1]))
    start = next(i for i in range(scored.protocol.skip, len(ids)) if ids[i : i + len(row)] == row)
    # LONG repeats PROSE, so the first match is the window only when windows lie in the first copy.
    assert start + len(row) < len(ids) // 6
    return start + len(row)


def test_calibration_without_room_says_how_many_tokens_there_are_and_are_needed() -> None:
    tokenizer = byte_tokenizer()
    total = len(ids_of(tokenizer, LONG))
    scored = make_windows(as_text(LONG), tokenizer, window=16)
    with pytest.raises(ProbeError, match=rf"has {total} tokens, of which {total % 16} follow .* need 32"):
        calibration_windows(as_text(LONG), tokenizer, scored, windows=2)
    with pytest.raises(ProbeError, match="is not the scored text"):
        calibration_windows(as_text(PROSE), tokenizer, scored)
    with pytest.raises(ProbeError, match="0 calibration windows"):
        calibration_windows(as_text(LONG), tokenizer, scored, windows=0)


# --- words and bytes --------------------------------------------------------------------------------------------------


def test_words_and_bytes_are_those_of_the_scored_tokens_only() -> None:
    tokenizer = byte_tokenizer()
    made = make_windows(as_text(LONG), tokenizer, window=16, windows=4)
    encoding = tokenizer.backend_tokenizer.encode(LONG, add_special_tokens=False)
    vocabulary = {index: piece for piece, index in tokenizer.get_vocab().items()}
    # Every character of a byte-level piece stands for one byte.
    per_token = [len(vocabulary[index]) for index in encoding.ids]
    scored = [i for i in range(64) if i % 16]
    exact = sum(per_token[i] for i in scored)
    # A multi-byte character cut by a window's edge counts whole on one side.
    assert abs(made.protocol.bytes - exact) <= 3 * 4
    fragments = tokenizer.backend_tokenizer.decode([encoding.ids[i] for i in scored])
    assert abs(made.protocol.words - words_of(fragments)) <= 1


def test_a_tokenizer_without_offsets_counts_as_one_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ascii_text = as_text("Some plain words, and then some more of them, without any accent at all. " * 20)
    fast = byte_tokenizer()
    expected = make_windows(ascii_text, fast, window=16, windows=7, skip_windows=2).protocol
    slow = byte_tokenizer()
    monkeypatch.setattr(type(slow), "is_fast", False)
    assert make_windows(ascii_text, slow, window=16, windows=7, skip_windows=2).protocol == expected


def test_offsets_that_leave_out_white_space_still_tile_the_text() -> None:
    trimming = byte_tokenizer()
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    plain = byte_tokenizer()
    cut = {"window": 16, "windows": 5, "bos": "every_window"}
    assert (
        make_windows(as_text(LONG), trimming, **cut).protocol.bytes
        == make_windows(as_text(LONG), plain, **cut).protocol.bytes
    )


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 1}, "window of 1 .* --window of at least 2"),
        ({"window": -3}, "window of -3"),
        ({"windows": 0, "window": 8}, "0 windows"),
        ({"skip_windows": -1, "window": 8}, "skip -1"),
        ({"stride": 4, "window": 8}, "use --protocol strided"),
        ({"protocol": "strided", "window": 8, "stride": 8}, "--stride from 1 to 7"),
        ({"protocol": "strided", "window": 8, "stride": 9}, "--stride from 1 to 7"),
        ({"protocol": "strided", "window": 8, "stride": 0}, "--stride from 1 to 7"),
        ({"protocol": "strided", "window": 8, "stride": 8, "bos": "every_window"}, "--stride from 1 to 7"),
        ({"protocol": "sliding"}, "'sliding' is unknown: choose one of disjoint, rolling"),
        ({"bos": "twice"}, "'twice' is unknown"),
        ({"protocol": "rolling", "bos": "every_window"}, "one prefix token"),
        ({"protocol": "dong2026", "bos": "once"}, "leaves BOS to the tokenizer"),
        ({"prefix_token": 3}, "would not be used"),
        ({"prefix_token": -3, "bos": "once"}, "no token id"),
    ],
)
def test_an_argument_out_of_range_is_named_with_its_mend(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        make_windows(as_text(LONG), byte_tokenizer_cached(), **arguments)


@pytest.mark.parametrize("protocol", ["disjoint", "strided"])
def test_a_text_shorter_than_a_window_is_refused_with_both_numbers(protocol: Any) -> None:
    tokenizer = byte_tokenizer()
    have = len(ids_of(tokenizer, PROSE))
    with pytest.raises(ProbeError, match=rf"has {have} tokens, but one window of 4096 need.* 4096: .*--window"):
        make_windows(as_text(PROSE), tokenizer, protocol=protocol, window=4096)


@pytest.mark.parametrize("protocol", ["disjoint", "rolling", "strided"])
@pytest.mark.parametrize("bos", ["none", "once", "every_window"])
def test_the_tokens_said_to_be_needed_are_exactly_enough(protocol: Any, bos: Any) -> None:
    if (protocol, bos) == ("rolling", "every_window"):
        bos = "once"
    tokenizer = byte_tokenizer()

    # Digits separated by spaces: the length in tokens is known, and one more digit is one more token.
    def numbered(count: int) -> Text:
        content = "x" * count
        assert len(ids_of(tokenizer, content)) == count
        return as_text(content)

    cut = {"protocol": protocol, "bos": bos, "window": 10, "windows": 4, "skip_windows": 1}
    with pytest.raises(ProbeError) as caught:
        make_windows(numbered(12), tokenizer, **cut)
    needed = int(re.search(r"need (\d+)", str(caught.value))[1])
    assert len(make_windows(numbered(needed), tokenizer, **cut).inputs) == 4
    with pytest.raises(ProbeError, match="has "):
        make_windows(numbered(needed - 1), tokenizer, **cut)


def test_a_tokenizer_without_bos_is_refused_when_bos_is_asked_for() -> None:
    for bos in ("once", "every_window"):
        with pytest.raises(ProbeError, match="has no BOS token to place: use --bos none"):
            make_windows(as_text(LONG), byte_tokenizer(bos=False), window=16, bos=bos)


def test_token_ids_outside_the_models_vocabulary_are_refused() -> None:
    tokenizer = byte_tokenizer()
    highest = max(ids_of(tokenizer, LONG))
    make_windows(as_text(LONG), tokenizer, window=16, vocab_size=highest + 1)
    with pytest.raises(ProbeError, match=rf"token id {highest}, but the model's vocabulary has {highest} entries"):
        make_windows(as_text(LONG), tokenizer, window=16, vocab_size=highest)
    with pytest.raises(ProbeError, match="token id 9999"):
        make_windows(as_text(LONG), tokenizer, window=16, vocab_size=highest + 1, bos="every_window", prefix_token=9999)


def test_a_text_longer_than_the_models_context_raises_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("transformers").propagate = True
    with caplog.at_level(logging.WARNING):
        make_windows(as_text(LONG), byte_tokenizer(longest=20), window=16)
    assert not caplog.records


# --- results ----------------------------------------------------------------------------------------------------------


def test_distinct_tokens_counts_different_input_ids() -> None:
    made = make_windows(as_text(LONG), byte_tokenizer(), window=16)
    assert made.distinct_tokens == len({token for row in made.inputs.tolist() for token in row})


def test_a_protocol_is_frozen_and_survives_json() -> None:
    protocol = make_windows(as_text(LONG), byte_tokenizer(), window=16).protocol
    assert Protocol.model_validate(json.loads(protocol.model_dump_json())) == protocol
    with pytest.raises(ValueError, match="frozen"):
        protocol.window = 3
    with pytest.raises(FrozenInstanceError):
        as_text("a").label = "b"


def test_importing_text_does_not_import_torch() -> None:
    code = "import sys, ternary_probe.text; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- reading ----------------------------------------------------------------------------------------------------------


def test_no_source_reads_the_sample() -> None:
    assert read_text() == read_text("sample") == Text(sample_text(), "sample", "as is")


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    content = "é one\r\n\r\n two \n"
    path.write_bytes(content.encode())
    text = read_text(path)
    assert text.content == content
    assert text.label == str(path)
    assert text.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(b"\xef\xbb\xbfabc")
    assert read_text(path).content == "abc"
    assert "byte order mark" in read_text(path).joining


def test_an_unreadable_file_is_an_error_that_says_why(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with pytest.raises(ProbeError, match=r"a\.txt' cannot be read \(No such file"):
        read_text(path)
    with pytest.raises(ProbeError, match="cannot be read"):
        read_text(tmp_path)
    path.write_bytes(b"abc\xff")
    with pytest.raises(ProbeError, match="byte 0xff at byte offset 3"):
        read_text(path)
    for blank in (b"", b" \n\t\n"):
        path.write_bytes(blank)
        with pytest.raises(ProbeError, match="empty or only white space"):
            read_text(path)
    with pytest.raises(ProbeError, match="pass only one"):
        read_text(path, dataset="wikitext")


def rows_file(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the caches of the datasets package inside the test's folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("hub_cache")
def test_a_local_data_set_is_read_by_its_text_column(tmp_path: Path) -> None:
    import datasets

    rows = [{"text": "one", "n": 1}, {"text": "", "n": 2}, {"text": "two\n", "n": 3}]
    from_json = read_text(dataset=rows_file(tmp_path / "rows.jsonl", rows))
    assert from_json.content == "one\n\n\n\ntwo\n"
    assert from_json.label.endswith("rows.jsonl:train")
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(tmp_path / "saved")
    assert read_text(dataset=str(tmp_path / "saved")).content == from_json.content
    other = datasets.Dataset.from_list([{"text": "no"}])
    datasets.DatasetDict(train=other, test=saved).save_to_disk(tmp_path / "splits")
    splits = read_text(dataset=str(tmp_path / "splits"))
    assert splits.content == from_json.content
    assert splits.label.endswith(":test")


@pytest.mark.usefixtures("hub_cache")
def test_a_data_set_that_does_not_fit_is_an_error_that_says_why(tmp_path: Path) -> None:
    import datasets

    with pytest.raises(ProbeError, match="no column 'text', only body"):
        read_text(dataset=rows_file(tmp_path / "a.jsonl", [{"body": "x"}]))
    with pytest.raises(ProbeError, match="holds a NoneType in row 1"):
        read_text(dataset=rows_file(tmp_path / "b.jsonl", [{"text": "x"}, {"text": None}]))
    with pytest.raises(ProbeError, match="empty or only white space"):
        read_text(dataset=rows_file(tmp_path / "c.jsonl", [{"text": ""}]))
    (tmp_path / "d.xml").write_text("<a/>")
    with pytest.raises(ProbeError, match="unknown ending"):
        read_text(dataset=str(tmp_path / "d.xml"))
    one = datasets.Dataset.from_list([{"text": "x"}])
    datasets.DatasetDict(train=one, dev=one).save_to_disk(tmp_path / "splits")
    with pytest.raises(ProbeError, match="no split 'test' but train, dev"):
        read_text(dataset=str(tmp_path / "splits"))


def test_wikitext_is_the_raw_test_split_and_its_failure_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def stub(*arguments: str, **keywords: str) -> Any:
        asked.append((arguments, keywords))
        if len(asked) > 1:
            raise ConnectionError("no route\nto the hub")
        return datasets.Dataset.from_list([{"text": " = A = \n"}, {"text": ""}, {"text": " b \n"}])

    monkeypatch.setattr(datasets, "load_dataset", stub)
    assert read_text(dataset="wikitext").content == " = A = \n\n\n\n\n b \n"
    assert asked == [(("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "test"})]
    with pytest.raises(ProbeError, match=r"'wikitext' cannot be loaded \(no route\): give a local file") as caught:
        read_text(dataset="wikitext")
    assert "\n" not in str(caught.value)


def test_without_the_datasets_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refusing(name: str, *rest: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(ProbeError, match=re.escape("pip install ternary-probe[datasets]")):
        read_text(dataset="wikitext")


# --- the sample text --------------------------------------------------------------------------------------------------


def test_the_sample_is_long_varied_prose_without_repeated_paragraphs() -> None:
    words = sample_text().split()
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", sample_text()) if part.strip()]
    # A word is at least one token of any subword tokenizer.
    assert len(words) >= 6000
    assert len({word.lower().strip(".,;:?!()\u201c\u201d\"'") for word in words}) >= 1500
    assert len(set(paragraphs)) == len(paragraphs)
    assert len(paragraphs) >= 80
