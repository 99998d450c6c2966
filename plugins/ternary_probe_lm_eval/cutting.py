"""Documents to windows, by the same rules as ``ternary-probe perplexity``, each document by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from ternary_probe.errors import ProbeError
from ternary_probe.text import Bos, Text, Windows, make_windows
from ternary_probe_lm_eval.arguments import ProtocolChoice


class CutDocument(NamedTuple):
    """A document in windows, or None where nothing of it can be scored."""

    windows: Windows | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cutter:
    """How documents are cut.

    Attributes:
        tokenizer: The model's.
        protocol: The rule, see `ternary_probe.text.make_windows`.
        bos: Where a BOS stands.
        window: Positions a window.
        stride: New tokens a window under ``strided``.
        vocab_size: Ids the model accepts.
        prefix_token: Token to use for BOS, or None for the tokenizer's own.
    """

    tokenizer: PreTrainedTokenizerBase
    protocol: ProtocolChoice
    bos: Bos
    window: int
    stride: int | None
    vocab_size: int
    prefix_token: int | None

    def cut(self, content: str, label: str = "document") -> CutDocument:
        """Cut one document. A document shorter than a window gets one window of its own length.

        Args:
            content: Its text.
            label: What messages call it.

        Returns:
            Its windows, or none and the reason.
        """
        if not content:
            return CutDocument(None, ("empty",))
        tokens = self._tokens(content)
        lead = self.bos != "none"
        if tokens + lead < 2:
            return CutDocument(None, ("too short to predict a token",))
        window, stride = self.window, self.stride
        if self.protocol != "rolling":
            window = max(2, min(window, tokens + lead))
        if self.protocol == "strided" and stride is not None:
            stride = min(stride, window - 1)
        text = Text(content, label, "one document")
        return self._checked(self.windows(text, window=window, stride=stride), tokens)

    def windows(
        self, text: Text, *, window: int | None = None, stride: int | None = None, windows: int | None = None
    ) -> Windows:
        """Cut a text exactly as ``ternary-probe perplexity`` does.

        Args:
            text: The text.
            window: Another window than usual.
            stride: Another stride than usual.
            windows: Number of windows; all if None.

        Returns:
            The windows.
        """
        return make_windows(
            text,
            self.tokenizer,
            protocol=self.protocol,
            window=window or self.window,
            stride=(stride or self.stride) if self.protocol == "strided" else None,
            windows=windows,
            bos="none" if self.protocol == "rolling" else self.bos,
            vocab_size=self.vocab_size,
            prefix_token=self.prefix_token if self.protocol == "rolling" or self.bos != "none" else None,
        )

    def _tokens(self, content: str) -> int:
        return len(
            self.tokenizer(content, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        )

    def _checked(self, windows: Windows, tokens: int) -> CutDocument:
        notes = []
        first = windows.inputs[0]
        if self.bos != "none" and len(first) > 1 and first[0] == first[1]:
            notes.append("begins with the prefix token itself, which therefore stands twice")
        left = tokens - windows.protocol.tokens_scored
        if self.protocol == "disjoint" and left:
            notes.append("has tokens that are not scored: the first of a window without BOS, or the end")
        return CutDocument(windows, tuple(notes))


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether a tokenizer puts its BOS before a text by itself.

    Args:
        tokenizer: The tokenizer.

    Returns:
        Whether it does.
    """
    bos = tokenizer.bos_token_id
    ids = tokenizer("a")["input_ids"]
    return bos is not None and len(ids) > 0 and ids[0] == bos


def require_prefix(tokenizer: PreTrainedTokenizerBase, prefix_token: int | None, vocab_size: int) -> None:
    """Refuse a prefix token the model has no embedding for.

    Args:
        tokenizer: The tokenizer.
        prefix_token: The user's choice, or None.
        vocab_size: Ids the model accepts.

    Raises:
        ProbeError: If there is none.
    """
    if prefix_token is not None and prefix_token >= vocab_size:
        raise ProbeError(
            f"prefix_token_id={prefix_token} is not in the model's vocabulary of {vocab_size} entries "
            f"(tokenizer {tokenizer.name_or_path or type(tokenizer).__name__})"
        )
