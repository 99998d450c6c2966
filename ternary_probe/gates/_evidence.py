"""What checks read: a subject's files, model, text and forward pass, each made when first asked for, and once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ternary_probe.errors import ProbeError

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy
    from ternary_probe.gates._comparison import Comparison
    from ternary_probe.gates._forward import ForwardEvidence
    from ternary_probe.gates._parameters import ParameterEvidence
    from ternary_probe.loading import LoadedModel
    from ternary_probe.measure.nll import Evaluator, Reference
    from ternary_probe.text import Text, Windows


@dataclass(frozen=True)
class GateOptions:
    """How a gate runs.

    Attributes:
        loading: Keyword arguments of `ternary_probe.loading.load`, without the source.
        text: File to score; the sample text if None.
        dataset: Data set to score instead.
        protocol: How text is cut.
        window: Tokens a window.
        windows: Windows to score; None for as many as `tokens` needs.
        tokens: Tokens the forward checks read, where `windows` is None.
        bos: Where a BOS token stands.
        seed: First seed of everything drawn.
        random_init: Judge freshly initialised weights of the same config beside the trained ones.
        head_bytes: Largest chunk of logits; None for the library's default.
        sample_logs: Folders of lm-eval ``--log_samples`` output: base and candidate.
    """

    loading: dict[str, Any] = field(default_factory=dict)
    text: str | None = None
    dataset: str | None = None
    protocol: str = "disjoint"
    window: int | None = None
    windows: int | None = None
    tokens: int = 4096
    bos: str = "none"
    seed: int = 0
    random_init: bool = False
    head_bytes: int | None = None
    sample_logs: tuple[Path, Path] | None = None


class Subject:
    """One model under judgement.

    Args:
        source: MODEL as the user gave it, or a loaded model.
        options: How the gate runs.
    """

    def __init__(self, source: str | LoadedModel, options: GateOptions) -> None:
        self.source = source
        self.options = options

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.source if isinstance(self.source, str) else self.source.source.name

    @property
    def files(self) -> str | None:
        """Where its files are, as `read_parameters` takes it; None for a model that was never on disk."""
        if isinstance(self.source, str):
            return self.source
        return self.source.source.path

    @cached_property
    def parameters(self) -> ParameterEvidence:
        """Files, headers, config and norm gains, read without building a model and without torch.

        Raises:
            ProbeError: If the subject was never on disk.
        """
        from ternary_probe.gates._parameters import read_parameters

        if self.files is None:
            raise ProbeError(f"{self.name} is a model in memory and has no files: pass the folder it came from")
        return read_parameters(self.files, revision=self.options.loading.get("revision"))

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model in eval mode."""
        if not isinstance(self.source, str):
            return self.source
        from ternary_probe.loading import load

        return load(self.source, **self.options.loading)

    @cached_property
    def anatomy(self) -> Anatomy:
        """Its anatomy."""
        from ternary_probe.anatomy import examine

        return examine(self.loaded.model)

    @cached_property
    def _cut(self) -> tuple[Text, Windows]:
        from ternary_probe.loading import require_tokenizer, vocabulary_size
        from ternary_probe.text import make_windows, read_text

        options = self.options
        text = read_text(options.text, dataset=options.dataset)
        count = options.windows
        length = options.window or 512
        if count is None and options.protocol == "disjoint":
            count = -(-options.tokens // length)
        return text, make_windows(
            text,
            require_tokenizer(self.loaded),
            protocol=options.protocol,  # type: ignore[arg-type]  # an enum's value
            window=options.window,
            windows=count,
            bos=options.bos,  # type: ignore[arg-type]
            vocab_size=vocabulary_size(self.loaded.model),
        )

    @property
    def text(self) -> Text:
        """The text, whole."""
        return self._cut[0]

    @property
    def windows(self) -> Windows:
        """The windows scored."""
        return self._cut[1]

    @cached_property
    def evaluator(self) -> Evaluator:
        """Scores `windows` on the live model."""
        from ternary_probe.measure.nll import HEAD_BYTES, Evaluator

        return Evaluator(self.anatomy, self.windows, head_bytes=self.options.head_bytes or HEAD_BYTES)

    @cached_property
    def reference(self) -> Reference:
        """The clean model on `windows`."""
        return self.evaluator.reference()

    @cached_property
    def forward(self) -> ForwardEvidence:
        """Covariances and residual streams of one forward pass over `windows`."""
        from ternary_probe.gates._forward import observe_forward

        return observe_forward(self.anatomy, self.windows)

    @cached_property
    def random_init(self) -> Subject | None:
        """The same config with fresh weights, or None where that was not asked for.

        The tokenizer is the subject's own, and so is the text.
        """
        if not self.options.random_init:
            return None
        from ternary_probe.gates._forward import freshly_initialised

        return Subject(freshly_initialised(self.loaded, seed=self.options.seed), self.options)


@dataclass
class Evidence:
    """What a check is called with.

    Attributes:
        subject: The model judged: the candidate where there is one.
        base: What it is compared with, or None.
        options: How the gate runs.
        family: Number of statistical decisions of all checks that will run, for the joint error rate.
        alpha: Error rate of the whole family.
    """

    subject: Subject
    base: Subject | None
    options: GateOptions
    family: int = 1
    alpha: float = 0.05

    @cached_property
    def comparison(self) -> Comparison:
        """Subject against base, token by token, on the same text.

        Raises:
            ProbeError: If there is no base.
        """
        from ternary_probe.gates._comparison import compare

        if self.base is None:
            raise ProbeError("a comparison needs a base: give the candidate with --candidate")
        return compare(self.base, self.subject)
