"""Where outlier columns are measured when a recipe asks for them and nobody says where."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ternary_probe.text import Windows, calibration_windows, make_windows, read_text
from ternary_probe_lm_eval.cutting import Cutter

_MOST_WINDOWS = 32
_MOST_TOKENS = 512


class Calibration(NamedTuple):
    """Windows to measure on, and what results call them."""

    windows: Windows
    label: str


def find_calibration(cutter: Cutter, file: str | None) -> Calibration:
    """Cut calibration windows.

    Args:
        cutter: How this model's documents are cut.
        file: A text file, of which at most 32 windows of at most 512 tokens are taken; None for the second half of the
            sample text, exactly the windows ``ternary-probe perplexity`` takes when it scores the first half.

    Returns:
        The windows.
    """
    tokenizer = cutter.tokenizer
    text = read_text(file)
    if file is not None:
        window = min(cutter.window, _MOST_TOKENS)
        every = make_windows(text, tokenizer, window=window, vocab_size=cutter.vocab_size)
        windows = replace(every, inputs=every.inputs[:_MOST_WINDOWS])
        return Calibration(windows, f"{text.label}, {len(windows.inputs)} windows of {window}")
    length = len(tokenizer(text.content, add_special_tokens=False, verbose=False)["input_ids"])
    window = min(cutter.window, length // 2)
    scored = cutter.windows(text, window=window, windows=max(1, length // window // 2))
    windows = calibration_windows(text, tokenizer, scored, vocab_size=cutter.vocab_size)
    label = (
        f"sample text, {len(windows.inputs)} windows of {windows.inputs.shape[1]} after the first {len(scored.inputs)}"
    )
    return Calibration(windows, label)
