"""Text to token windows, together with the protocol that made them.

A perplexity is a property of a model *and* of the way its text was cut, so the cutting is recorded field by field and
travels with the tokens. Torch is imported when windows are made, not when this module is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict

from ternary_probe._text_source import WIKITEXT_LABEL, Text, read_text
from ternary_probe.errors import ProbeError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

__all__ = ["Bos", "Protocol", "ProtocolName", "Text", "Windows", "calibration_windows", "make_windows", "read_text"]

ProtocolName = Literal["disjoint", "rolling", "strided", "dong2026"]
Bos = Literal["none", "once", "every_window"]

_DEFAULT_WINDOW = 512
_DONG_WINDOW = 2048
_DONG_WINDOWS = 10
_NO_TARGET = -1
_MOST_UNKNOWN = 0.5
_FEW_TOKENS = 32


class Protocol(BaseModel):
    """How a text became scored tokens: everything a figure needs to be comparable with another.

    Attributes:
        name: The cutting rule, see `make_windows`.
        tokenizer: Name or path of the tokenizer.
        text: Label of the text: a file path, a data set, or ``sample``.
        text_sha256: SHA-256 of the text as it was read, UTF-8.
        window: Positions in a window, a BOS token included.
        stride: Text tokens from the start of a window to the start of the next.
        bos: Where a BOS (or prefix) token really stands.
        joining: How the text was put together from files, rows or lines.
        windows: Number of windows.
        tokens_scored: Number of predicted tokens, the denominator of the mean NLL.
        tokens_total: Tokens in the whole text, no special tokens counted.
        words: Words of the text that is scored, counted as lm-eval does (split at runs of white space).
        bytes: UTF-8 bytes of the text that is scored.
        skip: Text tokens before the first one used.
        notes: Sentences on what a reader would not expect.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ProtocolName
    tokenizer: str
    text: str
    text_sha256: str
    window: int
    stride: int
    bos: Bos
    joining: str
    windows: int
    tokens_scored: int
    tokens_total: int
    words: int
    bytes: int
    skip: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Windows:
    """Token windows of equal length, ready to be scored.

    Attributes:
        inputs: Token ids, int64 ``[n, L]``.
        targets: The token that follows each position, int64 ``[n, L]``; 0 where none is known.
        scored: Bool ``[n, L]``: the logits at position t count as a prediction of ``targets[:, t]``.
        protocol: How they were made.
        span: Text tokens ``[first, end)`` that occur in any window, as input or as target.
    """

    inputs: Tensor
    targets: Tensor
    scored: Tensor
    protocol: Protocol
    span: tuple[int, int]

    @property
    def distinct_tokens(self) -> int:
        """Number of different token ids among the inputs."""
        return int(np.unique(self.inputs.cpu().numpy()).size)


def make_windows(
    text: Text,
    tokenizer: PreTrainedTokenizerBase,
    *,
    protocol: ProtocolName = "disjoint",
    window: int | None = None,
    stride: int | None = None,
    windows: int | None = None,
    skip_windows: int = 0,
    bos: Bos = "none",
    vocab_size: int | None = None,
    prefix_token: int | None = None,
) -> Windows:
    """Tokenize a text once, as a whole, and cut it into windows.

    The protocols, for a window of L positions:

    - ``disjoint``: consecutive windows; in each, every token but its first is predicted (all of them after a BOS). A
      last, incomplete window is dropped, and a note says how many tokens that cost.
    - ``rolling``: lm-eval's rolling log-likelihood of one document (context length 1): a prefix token, then every token
      predicted once, L a window. The last window is filled up with earlier tokens, which are context only. A text of
      fewer than L tokens gives one shorter window. Equals lm-eval run with ``add_bos_token=False``.
    - ``strided``: a window starts every ``stride`` tokens and only the tokens no earlier window has predicted are
      scored, so all but the first token are scored once. The last window is aligned with the end of the text, so it
      keeps its length and has more context than in the common recipe, which shortens it.
    - ``dong2026``: the protocol of arXiv 2605.18933: non-blank lines joined by a blank line, the tokenizer's own
      special tokens, disjoint windows of 2048, the first 10. What differs from that is noted.

    Except under ``dong2026`` the tokenizer adds no special tokens: BOS stands where ``bos`` says.

    Args:
        text: What to cut.
        tokenizer: A Hugging Face tokenizer.
        protocol: The rule, see above.
        window: Positions a window, BOS included; default 512, under ``dong2026`` 2048.
        stride: Under ``strided``, new tokens a window; default half of the window. An error elsewhere.
        windows: Number of windows; default all that the text gives, under ``dong2026`` 10.
        skip_windows: Windows to leave out at the start of the text.
        bos: Put a BOS nowhere, before the text, or at the start of every window. ``rolling`` has its one prefix token
            and ``dong2026`` what the tokenizer adds, so there only ``none`` (and ``once`` for ``rolling``) is accepted.
        vocab_size: Size of the model's vocabulary, to refuse a tokenizer that does not fit it.
        prefix_token: Token id to use for BOS, or for the prefix of ``rolling`` (default there: BOS, else EOS, as
            lm-eval does).

    Returns:
        The windows, with their protocol.

    Raises:
        ProbeError: If an argument is out of range, the text is too short, the tokenizer has no BOS to place, or a token
            id is not in the vocabulary.
    """
    length = window if window is not None else (_DONG_WINDOW if protocol == "dong2026" else _DEFAULT_WINDOW)
    if complaint := _complaint(protocol, length, stride, windows, skip_windows, bos, prefix_token):
        raise ProbeError(complaint)
    wanted = windows if windows is not None or protocol != "dong2026" else _DONG_WINDOWS
    stream = _tokenize(text, tokenizer, protocol, bos, prefix_token)
    stream.check_vocabulary(vocab_size)
    content = length - (stream.bos == "every_window")
    step = _step(protocol, content, stride, stream.bos)
    layout = _lay_out(stream, protocol, content, step, skip_windows, wanted)
    notes = [*stream.notes, *layout.notes]
    if protocol == "dong2026":
        notes += _departures_from_dong(text, length, wanted, skip_windows)
    return _build(stream, layout, protocol, length, step, notes)


def calibration_windows(
    text: Text,
    tokenizer: PreTrainedTokenizerBase,
    scored: Windows,
    *,
    windows: int | None = None,
    vocab_size: int | None = None,
) -> Windows:
    """Cut windows from the part of a text that follows the scored windows, so that no token is in both.

    Choosing outlier columns on the text that is scored afterwards flatters them; these windows are for the choosing.
    They are disjoint, of the length of the scored ones, and carry a BOS only if every scored window does.

    Args:
        text: The text the scored windows were cut from.
        tokenizer: The tokenizer they were cut with.
        scored: The windows to stay clear of.
        windows: Number of windows; default as many as are scored.
        vocab_size: Size of the model's vocabulary, to refuse a tokenizer that does not fit it.

    Returns:
        Windows that share no token with the scored ones.

    Raises:
        ProbeError: If too few tokens follow the scored ones, or the text is another one.
    """
    if text.sha256 != scored.protocol.text_sha256:
        raise ProbeError(
            f"text '{text.label}' is not the scored text '{scored.protocol.text}': calibrate on the scored text, "
            "or cut windows from the other text with make_windows"
        )
    if windows is not None and windows < 1:
        raise ProbeError(f"{windows} calibration windows measure nothing: ask for at least 1")
    count = windows if windows is not None else scored.protocol.windows
    every = scored.protocol.bos == "every_window"
    stream = _tokenize(
        text,
        tokenizer,
        "dong2026" if scored.protocol.name == "dong2026" else "disjoint",
        "every_window" if every else "none",
        int(scored.inputs[0, 0]) if every else None,
    )
    stream.check_vocabulary(vocab_size)
    length = int(scored.inputs.shape[1])
    content = length - every
    start = scored.span[1]
    available = max(stream.total - start, 0)
    if available < count * content:
        raise ProbeError(
            f"text '{text.label}' has {stream.total} tokens, of which {available} follow the scored ones, but {count} "
            f"calibration windows of {content} need {count * content} ({start + count * content} in all): ask for "
            "fewer or shorter windows (--windows, --window) or give a longer text"
        )
    starts = stream.lead + start + content * np.arange(count)
    layout = _Layout(starts, starts, content, content, ("calibration: cut from the text after the scored windows",))
    # The BOS the tokenizer put before the whole text is not in these windows.
    stream = stream._replace(bos="every_window" if every else "none")
    return _build(stream, layout, "disjoint", length, content, [*stream.notes, *layout.notes])


class _Stream(NamedTuple):
    """A tokenized text: ``lead`` special tokens, ``total`` of the text; ``pieces[i]`` is the character span of id i."""

    text: Text
    content: str
    joining: str
    tokenizer: Any
    ids: NDArray[np.int64]
    lead: int
    total: int
    bos: Bos
    bos_id: int | None
    pieces: NDArray[np.int64] | None
    notes: tuple[str, ...]

    def check_vocabulary(self, vocab_size: int | None) -> None:
        highest = int(self.ids.max(initial=-1))
        if self.bos_id is not None:
            highest = max(highest, self.bos_id)
        if vocab_size is not None and highest >= vocab_size:
            raise ProbeError(
                f"tokenizer '{_name(self.tokenizer)}' gives token id {highest}, but the model's vocabulary has "
                f"{vocab_size} entries: use the tokenizer that belongs to the model"
            )

    def scored_text(self, positions: NDArray[np.int64]) -> str:
        """Return the characters of the tokens at these stream positions, which are sorted and unique."""
        first, end = self.lead, self.lead + self.total
        if positions.size >= self.total and np.isin(np.arange(first, end), positions).all():
            return self.content
        if self.pieces is not None:
            runs = self.pieces[positions]
            return "".join(self.content[a:b] for a, b in runs.tolist())
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        return "".join(
            self.tokenizer.decode(self.ids[run].tolist(), clean_up_tokenization_spaces=False)
            for run in np.split(positions, breaks)
        )


class _Layout(NamedTuple):
    """Windows in a stream: window i reads ``content`` ids from ``starts[i]`` and scores targets from ``fresh[i]``."""

    starts: NDArray[np.int64]
    fresh: NDArray[np.int64]
    content: int
    reach: int  # ids a window knows, inputs and targets: content, or one more where its last input has a target too
    notes: tuple[str, ...] = ()


def _complaint(
    protocol: str,
    window: int,
    stride: int | None,
    windows: int | None,
    skip_windows: int,
    bos: str,
    prefix_token: int | None,
) -> str | None:
    if protocol not in get_args(ProtocolName):
        return f"protocol '{protocol}' is unknown: choose one of {', '.join(get_args(ProtocolName))}"
    if bos not in get_args(Bos):
        return f"bos '{bos}' is unknown: choose one of {', '.join(get_args(Bos))}"
    if window < 2:
        return f"a window of {window} tokens predicts nothing: give a --window of at least 2"
    if stride is not None and protocol != "strided":
        return f"protocol '{protocol}' has no stride of its own (--stride {stride}): use --protocol strided"
    if windows is not None and windows < 1:
        return f"{windows} windows leave nothing to score: give --windows of at least 1"
    if skip_windows < 0:
        return f"cannot skip {skip_windows} windows: give a number of at least 0"
    if protocol == "rolling" and bos == "every_window":
        return "protocol 'rolling' has one prefix token before the text: --bos every_window needs another --protocol"
    if protocol == "dong2026" and bos != "none":
        return f"protocol 'dong2026' leaves BOS to the tokenizer: --bos {bos} needs another --protocol"
    if prefix_token is not None and (protocol == "dong2026" or (bos == "none" and protocol != "rolling")):
        return f"prefix token {prefix_token} would not be used: give --bos once or every_window, or --protocol rolling"
    if prefix_token is not None and prefix_token < 0:
        return f"prefix token {prefix_token} is no token id: give a number of at least 0"
    return None


def _step(protocol: ProtocolName, content: int, stride: int | None, bos: Bos) -> int:
    if protocol != "strided":
        return content
    # Without a BOS in it, a window predicts one token fewer than it reads.
    most = content if bos == "every_window" else content - 1
    step = stride if stride is not None else max(content // 2, 1)
    if not 1 <= step <= most:
        raise ProbeError(
            f"a stride of {step} does not fit a window that predicts {most} tokens: give a --stride from 1 to {most}"
        )
    return step


def _tokenize(
    text: Text, tokenizer: PreTrainedTokenizerBase, protocol: ProtocolName, bos: Bos, prefix_token: int | None
) -> _Stream:
    content, joining = text.content, text.joining
    if protocol == "dong2026":
        content = "\n\n".join(line for line in re.split(r"\r?\n", content) if line.strip())
        joining = f"{text.joining}; then non-blank lines joined by a blank line"
    own_specials = protocol == "dong2026"
    ids, pieces = _encode(tokenizer, content, special=own_specials)
    total = ids.size
    lead, bos_id = 0, None
    notes: list[str] = []
    if own_specials:
        lead, total, bos, notes = _own_specials(tokenizer, content, ids)
    elif protocol == "rolling":
        bos_id = _prefix(tokenizer, prefix_token)
        bos = "once"
        notes.append(f"prefix token {bos_id} ({tokenizer.convert_ids_to_tokens(bos_id)!r}) before the text")
    elif bos != "none":
        bos_id = prefix_token if prefix_token is not None else tokenizer.bos_token_id
        if bos_id is None:
            raise ProbeError(f"tokenizer '{_name(tokenizer)}' has no BOS token to place: use --bos none")
    if bos == "once" and bos_id is not None:
        lead = 1
        ids = np.concatenate([[bos_id], ids])
        pieces = None if pieces is None else np.concatenate([[[0, 0]], pieces])
    return _Stream(text, content, joining, tokenizer, ids, lead, total, bos, bos_id, pieces, tuple(notes))


def _own_specials(
    tokenizer: PreTrainedTokenizerBase, content: str, ids: NDArray[np.int64]
) -> tuple[int, int, Bos, list[str]]:
    bare, _ = _encode(tokenizer, content, special=False)
    added = ids.size - bare.size
    leads = [lead for lead in range(added + 1) if np.array_equal(ids[lead : lead + bare.size], bare)]
    if not leads:
        raise ProbeError(
            f"tokenizer '{_name(tokenizer)}' changes the tokens of the text when it adds its special tokens: "
            "use --protocol disjoint"
        )
    lead = leads[0]
    before = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(ids[:lead].tolist()))) or "none"
    notes = [f"special tokens of the tokenizer: {before} before the whole text, {added - lead or 'none'} after it"]
    return lead, bare.size, "once" if lead else "none", notes


def _encode(
    tokenizer: PreTrainedTokenizerBase, content: str, *, special: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return ids ``[t]`` and, from a fast tokenizer, the character span ``[t, 2]`` of each."""
    fast = bool(tokenizer.is_fast)
    # verbose=False: a whole text is longer than the model's context on purpose.
    encoded = tokenizer(
        content, add_special_tokens=special, return_offsets_mapping=fast, return_attention_mask=False, verbose=False
    )
    ids = np.asarray(encoded["input_ids"], dtype=np.int64)
    if not fast:
        return ids, None
    # Offsets may leave out white space, and the tokens of one multi-byte character share theirs. A token is given all
    # that lies between the end of the one before and its own end, so that the pieces tile the text.
    ends = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 1]
    ends = np.maximum.accumulate(ends) if ends.size else ends
    if ends.size:
        ends[ends == ends[-1]] = len(content)
    return ids, np.stack([np.concatenate([[0], ends])[:-1], ends], axis=1)


def _prefix(tokenizer: PreTrainedTokenizerBase, prefix_token: int | None) -> int:
    for candidate in (prefix_token, tokenizer.bos_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    raise ProbeError(
        f"tokenizer '{_name(tokenizer)}' has neither a BOS nor an EOS token to predict the first token from: "
        "use --protocol disjoint or strided"
    )


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)


def _lay_out(
    stream: _Stream, protocol: ProtocolName, content: int, step: int, skip: int, wanted: int | None
) -> _Layout:
    size = stream.ids.size
    notes: list[str] = []
    if protocol == "rolling":
        if stream.total == 0:
            raise _too_short(stream, content, 1, 1)
        if stream.total < content:
            notes.append(f"the text has fewer tokens than a window: one window of {stream.total}")
            content = stream.total
        reach = content + 1
        ends = np.minimum(1 + content * np.arange(1, -(-stream.total // content) + 1), size)
        starts = ends - reach
        fresh = np.concatenate([[1], ends[:-1]])
        if starts.size > 1 and stream.total % content:
            notes.append(f"last window filled up with {content - stream.total % content} earlier tokens as context")
    else:
        reach = content
        if size < content:
            raise _too_short(stream, content, content - stream.lead, 1)
        whole = 1 + (size - content) // step
        starts = step * np.arange(whole)
        left = size - (int(starts[-1]) + content)
        if protocol == "strided":
            if left:
                starts = np.append(starts, size - content)
                notes.append(f"last window aligned with the end of the text: it scores {left} tokens")
            fresh = np.concatenate([[0], starts[:-1] + content])
        else:
            fresh = starts
            if left and wanted is None:
                notes.append(f"{left} tokens at the end of the text do not fill a window and are left out")
    available = starts.size
    last = available if wanted is None else skip + wanted
    if last > available or skip >= available:
        asked = max(last, skip + 1)
        needed = {
            "rolling": content * (asked - 1) + 1,
            "strided": content + step * (asked - 2) + 1 - stream.lead,
        }.get(protocol, content * asked - stream.lead)
        raise _too_short(stream, content, needed, asked, skip)
    if last < available:
        notes = [note for note in notes if not note.startswith("last window")]
    if skip and stream.lead:
        notes.append("the one BOS before the text lies in a skipped window")
    return _Layout(starts[skip:last], fresh[skip:last], content, reach, tuple(notes))


def _too_short(stream: _Stream, content: int, needed: int, windows: int, skipped: int = 0) -> ProbeError:
    what = f"one window of {content} needs" if windows == 1 else f"{windows} windows of {content} need"
    also = f" ({skipped} of the windows are skipped)" if skipped else ""
    fewer = "" if windows == 1 else "fewer --windows, "
    return ProbeError(
        f"text '{stream.text.label}' has {stream.total} tokens, but {what} {max(needed, 1)}{also}: "
        f"use {fewer}a smaller --window or a longer text"
    )


def _departures_from_dong(text: Text, window: int, windows: int | None, skip: int) -> list[str]:
    notes = []
    if text.label != WIKITEXT_LABEL:
        notes.append("not the paper's text, which is the test split of WikiText-2 raw")
    if window != _DONG_WINDOW:
        notes.append(f"not the paper's window, which is {_DONG_WINDOW}")
    if windows != _DONG_WINDOWS or skip:
        notes.append(f"not the paper's windows, which are the first {_DONG_WINDOWS}")
    return notes


def _build(
    stream: _Stream, layout: _Layout, protocol: ProtocolName, window: int, stride: int, notes: list[str]
) -> Windows:
    import torch

    starts, content = layout.starts[:, None], layout.content
    read = starts + np.arange(content)
    inputs = stream.ids[read]
    # Stream position each input position predicts; _NO_TARGET where the window ends before knowing it.
    predicted = np.full((len(layout.starts), layout.reach - 1 + (stream.bos == "every_window")), _NO_TARGET)
    if stream.bos == "every_window":
        inputs = np.concatenate([np.full((len(inputs), 1), stream.bos_id), inputs], axis=1)
        predicted[:] = starts + np.arange(predicted.shape[1])
    else:
        predicted[:] = starts + 1 + np.arange(predicted.shape[1])
    open_end = inputs.shape[1] - predicted.shape[1]
    predicted = np.pad(predicted, ((0, 0), (0, open_end)), constant_values=_NO_TARGET)
    scored = predicted >= np.maximum(layout.fresh[:, None], 0)
    targets = np.where(predicted == _NO_TARGET, 0, stream.ids[predicted])

    distinct = int(np.unique(inputs).size)
    unknown = getattr(stream.tokenizer, "unk_token_id", None)
    share = float((inputs == unknown).mean()) if unknown is not None else 0.0
    if share > _MOST_UNKNOWN:
        raise ProbeError(
            f"{share:.0%} of text '{stream.text.label}' is unknown to tokenizer '{_name(stream.tokenizer)}': give text in "
            "a script it knows"
        )
    if distinct < min(_FEW_TOKENS, inputs.size // 8):
        notes = [*notes, f"the text has only {distinct} different tokens"]
    fragment = stream.scored_text(np.unique(predicted[scored]))
    first = max(int(layout.starts.min()) - stream.lead, 0)
    end = min(int(layout.starts.max()) + layout.reach - stream.lead, stream.total)
    described = Protocol(
        name=protocol,
        tokenizer=_name(stream.tokenizer),
        text=stream.text.label,
        text_sha256=stream.text.sha256,
        window=window,
        stride=stride,
        bos=stream.bos,
        joining=stream.joining,
        windows=len(inputs),
        tokens_scored=int(scored.sum()),
        tokens_total=stream.total,
        words=len(re.split(r"\s+", fragment)),
        bytes=len(fragment.encode()),
        skip=first,
        notes=tuple(notes),
    )
    return Windows(
        torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(scored), described, (first, end)
    )
