"""``ternary_probe_nll``: NLL and perplexities of a text, by a named protocol, with standard errors.

The figures are those of ``ternary-probe perplexity`` under the same options. The standard error is that of a ratio of sums
over windows (delta method), which takes windows as independent and so speaks of other text of this kind. lm-eval shows a
standard error only for its own ``mean``; a metric named ``X_stderr`` after ``X`` takes the place of its ``N/A``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask

from ternary_probe.cli.session import cut_text
from ternary_probe.loading import require_tokenizer
from ternary_probe.measure import Evaluator, NonFiniteError, perplexity
from ternary_probe.text import calibration_windows
from ternary_probe_lm_eval import registration  # noqa: F401  # naming a task's YAML by path is enough to find the model
from ternary_probe_lm_eval.document import DocumentLogLikelihood, WindowNll
from ternary_probe_lm_eval.task_options import TextRequest
from ternary_probe_lm_eval.task_recipes import handle_with, remember

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from ternary_probe.text import Windows
    from ternary_probe_lm_eval.model import TernaryProbeLM

log = logging.getLogger(__name__)

NLL_TASK = "ternary_probe_nll"
Metrics = dict[str, float | None]


class NllTask(ConfigurableTask):  # type: ignore[misc]  # lm-eval has no types
    """The task ``ternary_probe_nll``, or one that includes its YAML under another name.

    Args:
        config: The YAML, as lm-eval hands it over.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        settings = {name: value for name, value in config.items() if name != "class"}
        super().__init__(config=settings)
        handle_with(settings["task"], score_texts)

    def build_all_requests(self, **options: Any) -> None:
        """Build the request, never from lm-eval's request cache, whose key does not name the text.

        Args:
            options: As lm-eval gives them.
        """
        super().build_all_requests(**uncached(options))


def uncached(options: Mapping[str, Any]) -> dict[str, Any]:
    """Switch lm-eval's request cache off.

    Args:
        options: Arguments of ``build_all_requests``.

    Returns:
        The arguments to use.
    """
    return {**options, "cache_requests": False, "rewrite_requests_cache": False}


def load_text(**metadata: Any) -> dict[str, Dataset]:
    """Make the data set of the task: one document, which says what to score.

    Args:
        metadata: ``--metadata`` and ``--model_args``; other tasks' options are passed over.

    Returns:
        The split ``test``.
    """
    request = TextRequest.from_metadata(metadata, NLL_TASK)
    return {"test": Dataset.from_list([{"request": request.encode()}])}


def score_texts(lm: TernaryProbeLM, requests: list[Instance]) -> list[float]:
    """Score texts under the recipe in effect, cut exactly as ``ternary-probe perplexity`` cuts them.

    Args:
        lm: The model.
        requests: Encoded `TextRequest`s.

    Returns:
        One `DocumentLogLikelihood` each, NaN where the model's logits are not finite.
    """
    return [_score(lm, str(request.task_name), TextRequest.decode(request.args[0])) for request in requests]


def _score(lm: TernaryProbeLM, task: str, request: TextRequest) -> DocumentLogLikelihood:
    request.read()  # an error if the text has changed
    text, windows = cut_text(lm.loaded, request.cutting())
    remember(lm, task, {"protocol": windows.protocol.model_dump(mode="json")})
    # Outlier columns are measured where the command measures them.
    with lm.in_effect(lambda: calibration_windows(text, require_tokenizer(lm.loaded), windows)):
        score = lm.score_windows(windows) if lm.mixed_precision_dtype is not None else _as_the_command(lm, windows)
    if not math.isfinite(score):
        lm.note(f"{task}: no figure, because the model's logits are not finite on {windows.protocol.text}")
    return score


def _as_the_command(lm: TernaryProbeLM, windows: Windows) -> DocumentLogLikelihood:
    """Score with the command's own evaluator."""
    # The model's scorer takes torch's log-softmax, to agree with lm-eval's hf model. On a CPU that adds a vocabulary of
    # 49,000 exponentials up in float32, and is off by 5e-6 of the NLL.
    words, size = windows.protocol.words, windows.protocol.bytes
    try:
        result = Evaluator(lm.anatomy, windows, head_bytes=lm.arguments.head_bytes).nll(keep_tokens=True)
    except NonFiniteError as error:
        log.error("%s", error)
        return DocumentLogLikelihood(
            [WindowNll(math.nan, windows.protocol.tokens_scored, math.nan)], words=words, bytes=size
        )
    squares = [float(np.square(tokens, dtype=np.float64).sum()) for tokens in result.tokens or ()]
    found = zip(result.sums.tolist(), result.counts.tolist(), squares, strict=True)
    return DocumentLogLikelihood((WindowNll(*window) for window in found), words=words, bytes=size)


def text_figures(doc: Mapping[str, Any], results: Sequence[float]) -> Metrics:
    """Turn the scored text into metrics.

    Args:
        doc: The document.
        results: Its one result.

    Returns:
        NLL per token, perplexities, bits per byte and standard errors; None for what could not be measured.
    """
    del doc
    (score,) = results
    if not isinstance(score, DocumentLogLikelihood):
        log.error("%s: no figure: this task cuts its text itself and needs --model ternary_probe", NLL_TASK)
        return dict.fromkeys(("nll", "token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"))
    figures: Metrics = {}
    error = standard_error(score)
    for name, units in (("token", score.tokens), ("word", score.words), ("byte", score.bytes)):
        rate = score.nll / units if units else math.nan
        each = None if error is None or not units else error * score.tokens / units
        if name == "token":
            figures |= _with_error("nll", rate if math.isfinite(rate) else None, each)
        value = perplexity(rate) if math.isfinite(rate) else None
        figures |= _with_error(f"{name}_perplexity", value, None if each is None or value is None else value * each)
        if name == "byte":
            bits = rate / math.log(2) if math.isfinite(rate) else None
            figures |= _with_error("bits_per_byte", bits, None if each is None else each / math.log(2))
    return figures


def standard_error(score: DocumentLogLikelihood) -> float | None:
    """Return the standard error of the NLL per token, windows taken as independent.

    Of a ratio of sums ``r = S / T`` over ``n`` windows: ``sqrt(n / (n - 1) * sum (s_i - r t_i)^2) / T``. With equal counts it
    is the standard error of the mean of the windows.

    Args:
        score: A scored text.

    Returns:
        Nats per token; None with fewer than two windows or a value that is not finite.
    """
    n = len(score.windows)
    if n < 2 or not math.isfinite(score.nll):
        return None
    rate = score.nll / score.tokens
    residuals = math.fsum((window.nll - rate * window.tokens) ** 2 for window in score.windows)
    return math.sqrt(n / (n - 1) * residuals) / score.tokens


def only(items: Sequence[Any]) -> Any:
    """Aggregate the values of one document.

    Args:
        items: A list of one.

    Returns:
        It.
    """
    (item,) = items
    return item


def _with_error(name: str, value: float | None, error: float | None) -> Metrics:
    """Name a figure and, where there is one, its standard error, which lm-eval's table takes from right behind it."""
    return {name: value} if value is None or error is None else {name: value, f"{name}_stderr": error}
