"""What ``--metadata`` says to the plugin's own tasks, and how it travels inside a request.

lm-eval merges ``--model_args`` and ``--metadata`` and hands everything to every task, typed by guesswork: names that are
not ours are ignored (with a hint where one is nearly ours), values are cast here. A request carries all that its answer
depends on, because lm-eval's caches know it by its text alone.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ternary_probe.cli.options import split, split_rates
from ternary_probe.cli.session import TextOptions
from ternary_probe.errors import ProbeError
from ternary_probe.studies.plan import DEFAULT_SEEDS, POOLS, LeverageOptions
from ternary_probe.studies.published import DONG2026_RATES
from ternary_probe.text import Bos, ProtocolName, Text, read_text

log = logging.getLogger(__name__)

_DEFAULT_RATES = (0.001, 0.005)
_DEFAULT_WINDOWS = 4
_OTHERS = (  # of the model's arguments and the harness's own: known here only so as not to be taken for misspelt ones
    "config_source",
    "device",
    "device_map",
    "dtype",
    "head_mib",
    "max_length",
    "pretrained",
    "quant",
    "register",
    "revision",
    "softmax_dtype",
    "tokenizer",
    "version",
)


def _words(value: Any) -> Any:
    """Read ``a;b`` as a list; a list stays one."""
    return split(value) if isinstance(value, str) else value


def _rates(value: Any) -> Any:
    """Read ``0.001;0.5%``, a list of numbers, or one number as rates."""
    if isinstance(value, str):
        return split_rates(value)
    return (value,) if isinstance(value, int | float) else value


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]


class TextRequest(BaseModel):
    """A text and how to cut it: the options of ``ternary-probe perplexity``, with its defaults.

    Attributes:
        text_file: A UTF-8 file; the sample text if None.
        dataset: A data set instead of a file, see `ternary_probe.text.read_text`.
        text_sha256: SHA-256 of the text when the task was built.
        protocol: Cutting rule; ``strided`` where only a stride is given, else ``disjoint``.
        window: Positions a window, or None for the protocol's own.
        stride: New tokens a window under ``strided``.
        windows: Number of windows, or None for all (leverage: the command's default).
        bos: Where a BOS stands.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    text_file: str | None = None
    dataset: str | None = None
    text_sha256: str = ""
    protocol: ProtocolName = "disjoint"
    window: int | None = Field(None, ge=2)
    stride: int | None = Field(None, ge=1)
    windows: int | None = Field(None, ge=1)
    bos: Bos = "none"

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], task: str) -> Self:
        """Pick, cast and check what concerns this task, and read its text.

        Args:
            metadata: All that lm-eval hands to the task.
            task: The task, for messages.

        Returns:
            The request.

        Raises:
            ProbeError: If a value does not fit or the text cannot be read.
        """
        known = [name for name in cls.model_fields if name != "text_sha256"]
        for name in metadata:
            close = difflib.get_close_matches(name, [*known, *_OTHERS], n=1, cutoff=0.8)
            if close and close[0] in known and name not in {*known, *_OTHERS}:
                log.warning("%s: --metadata %s is not used (did you mean %s?)", task, name, close[0])
        given = {name: metadata[name] for name in known if metadata.get(name) is not None}
        if "stride" in given:
            given.setdefault("protocol", "strided")
        try:
            request = cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else "metadata"
            raise ProbeError(f"{task}: --metadata {name}={metadata.get(name)}: {first['msg'].lower()}") from error
        return request.model_copy(update={"text_sha256": request.read().sha256})

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read a request back.

        Args:
            text: What `encode` wrote.

        Returns:
            The request.
        """
        return cls.model_validate_json(text)

    def encode(self) -> str:
        """Return the request as text, equal for equal requests."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)

    def read(self) -> Text:
        """Read the text.

        Returns:
            The text.

        Raises:
            ProbeError: If it cannot be read, or is another than when the task was built.
        """
        text = read_text(self.text_file, dataset=self.dataset)
        if self.text_sha256 not in {"", text.sha256}:
            raise ProbeError(
                f"text '{text.label}' changed after its task was built: run again, and leave it alone meanwhile"
            )
        return text

    def cutting(self) -> TextOptions:
        """Return the options of the command line that cut this text."""
        return TextOptions(
            text=self.text_file,
            dataset=self.dataset,
            protocol=self.protocol,
            window=self.window,
            stride=self.stride,
            windows=self.windows,
            bos=self.bos,
        )


class LeverageRequest(TextRequest):
    """A leverage study: the options of ``ternary-probe leverage``, with its defaults.

    Attributes:
        rates: Flip rates; None for the command's default under the protocol.
        seeds: Number of seeds.
        seed: The first of them.
        arms: Of `ternary_probe.studies.plan.ARMS`.
        matching: How arms are made comparable.
        fraction: Share of input columns that are outliers.
        by: What ranks columns; None for the command's default under the protocol.
        include: Matrix name patterns.
        exclude: Patterns taken out again.
        calibration: Text file to choose outlier columns on; the part after the scored text if None.
        out: Folder for the report, the record and finished cells, to continue after an interruption.
        part: What of the study is asked: ``clean``, ``ratio`` or an arm.
    """

    rates: Annotated[tuple[float, ...] | None, BeforeValidator(_rates)] = None
    seeds: int = Field(DEFAULT_SEEDS, ge=1)
    seed: int = Field(0, ge=0)
    arms: Words = POOLS
    matching: Words = ("count",)
    fraction: float = 0.05
    by: Literal["energy", "mean_abs"] | None = None
    include: Words = ()
    exclude: Words = ()
    calibration: str | None = None
    out: str | None = None
    part: str = ""

    @property
    def study(self) -> Self:
        """The whole study, whatever part of it is asked."""
        return self.model_copy(update={"part": ""})

    def cutting(self) -> TextOptions:
        """Return the options of the command line that cut this text."""
        options = super().cutting()
        if self.windows is None and self.protocol != "dong2026":
            return options._replace(windows=_DEFAULT_WINDOWS)
        return options

    def options(self) -> LeverageOptions:
        """Return the study's options.

        Returns:
            What ``ternary-probe leverage`` makes of the same options.
        """
        paper = self.protocol == "dong2026"
        return LeverageOptions(
            rates=self.rates if self.rates is not None else (DONG2026_RATES if paper else _DEFAULT_RATES),
            seeds=tuple(range(self.seed, self.seed + self.seeds)),
            arms=self.arms,
            matchings=self.matching,  # type: ignore[arg-type]  # checked by the options themselves
            fraction=self.fraction,
            by=self.by if self.by is not None else ("mean_abs" if paper else "energy"),
            include=self.include,
            exclude=self.exclude,
            paper_counts=paper,
        )
