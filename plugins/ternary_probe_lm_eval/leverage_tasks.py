"""``ternary_probe_leverage``: a group of tasks that are the arms of one leverage study on one loaded model.

The study is that of ``ternary-probe leverage``, run once; each task shows its part of the record. So the figures agree with
the command's to the last bit, and no statistic is computed here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import WeakKeyDictionary

from datasets import Dataset
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask

from ternary_probe.cli.leverage import run
from ternary_probe.errors import ProbeError
from ternary_probe.perturb import sha256_weights
from ternary_probe.records import LeverageRecord
from ternary_probe.studies.summary import RESPONSES
from ternary_probe_lm_eval import registration  # noqa: F401  # naming the group's YAML by path is enough to find the model
from ternary_probe_lm_eval.task_options import LeverageRequest
from ternary_probe_lm_eval.task_recipes import handle_with, remember
from ternary_probe_lm_eval.text_tasks import Metrics, only, uncached

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from ternary_probe_lm_eval.model import TernaryProbeLM

log = logging.getLogger(__name__)

LEVERAGE_GROUP = "ternary_probe_leverage"
CLEAN, RATIO = "clean", "ratio"


class Study(NamedTuple):
    """A finished study and the weights it was made on."""

    weights: str
    record: LeverageRecord


_studies: WeakKeyDictionary[Any, dict[str, Study]] = WeakKeyDictionary()


class LeverageGroup(Group):  # type: ignore[misc]  # lm-eval has no types
    """The group ``ternary_probe_leverage``: a task for the clean model, one for each arm, one for the ratios.

    A class, because the arms are the user's to choose, and because lm-eval 0.4.13 cannot build a group's own tasks from a
    YAML that is named by path.

    Args:
        config: The YAML, as lm-eval hands it over.

    Raises:
        ProbeError: If the study's options do not fit.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        metadata = {name: value for name, value in config["metadata"].items() if not callable(value)}
        request = LeverageRequest.from_metadata(metadata, config["task"])
        request.options()  # refuses what could not be run
        super().__init__(name=config["task"], metadata=metadata)
        for part in (CLEAN, *request.arms, RATIO):
            self.add(LeverageTask(config["task"], request.model_copy(update={"part": part}), metadata))


class LeverageTask(ConfigurableTask):  # type: ignore[misc]  # lm-eval has no types
    """One part of the study, as a task of one document.

    Args:
        group: Name of the group.
        request: The study and the part.
        metadata: Of the group, for the results file.
    """

    def __init__(self, group: str, request: LeverageRequest, metadata: Mapping[str, Any]) -> None:
        name = f"{group}_{request.part}"
        metrics = list(_metric_names(request))

        def document(**_: Any) -> dict[str, Dataset]:
            return {"test": Dataset.from_list([{"request": request.encode()}])}

        def figures(doc: Mapping[str, Any], results: Sequence[float]) -> Metrics:
            del doc
            return _figures(results[0], metrics)

        super().__init__(
            config={
                "task": name,
                "task_alias": request.part,
                "custom_dataset": document,
                "output_type": "loglikelihood_rolling",
                "test_split": "test",
                "num_fewshot": 0,
                "doc_to_text": "",
                "doc_to_target": "request",
                "process_results": figures,
                "metric_list": [{"metric": m, "aggregation": only, "higher_is_better": False} for m in metrics],
                "metadata": dict(metadata),
            }
        )
        handle_with(name, answer)

    def build_all_requests(self, **options: Any) -> None:
        """Build the request, never from lm-eval's request cache, whose key does not name the study.

        Args:
            options: As lm-eval gives them.
        """
        super().build_all_requests(**uncached(options))


class PartOfStudy(float):
    """A part's first figure, with all the others; it survives lm-eval's filters and pickling.

    Attributes:
        figures: Metrics of the part.
    """

    figures: Metrics

    def __new__(cls, figures: Metrics) -> Self:
        """Take the first figure as the number."""
        first = next(iter(figures.values()), None)
        self = super().__new__(cls, math.nan if first is None else first)
        self.figures = figures
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return PartOfStudy, (self.figures,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def answer(lm: TernaryProbeLM, requests: list[Instance]) -> list[float]:
    """Run the study, or take it from the task before, and pick each part.

    Args:
        lm: The model.
        requests: Encoded `LeverageRequest`s.

    Returns:
        One `PartOfStudy` each.
    """
    answers: list[float] = []
    for instance in requests:
        request = LeverageRequest.decode(instance.args[0])
        record = _study(lm, request.study)
        facts = {"protocol": record.protocol, "calibration": record.calibration}
        named = {name: info.model_dump(mode="json") for name, info in facts.items() if info is not None}
        reasons = {item.reason for item in record.leverage if item.reason}
        remember(lm, str(instance.task_name), {**named, "notes": [*record.notes, *sorted(reasons)]})
        answers.append(PartOfStudy(dict(_parts(record, request))))
    return answers


def _study(lm: TernaryProbeLM, request: LeverageRequest) -> LeverageRecord:
    if lm.recipe is not None:
        raise ProbeError(f"{LEVERAGE_GROUP} perturbs the model itself: leave perturb={lm.recipe} out of --model_args")
    request.read()  # an error if the text has changed
    kept = _studies.setdefault(lm, {})
    key, weights = request.encode(), sha256_weights(lm.loaded.model)
    if key not in kept or kept[key].weights != weights:
        out = None if request.out is None else Path(request.out)
        record = run(lm.loaded, request.cutting(), request.calibration, request.options(), out, quiet=True)
        kept[key] = Study(weights, record)
    return kept[key].record


def _parts(record: LeverageRecord, request: LeverageRequest) -> Iterator[tuple[str, float | None]]:
    """Yield the metrics of a part of the record."""
    label = _labels(request)
    if request.part == CLEAN:
        yield "nll", record.baseline.nll
        yield "token_perplexity", record.baseline.perplexity
        yield "noise_floor_nll", record.noise_floor.nll
        yield "noise_floor_kl", record.noise_floor.kl
    elif request.part == RATIO:
        for item in record.leverage:
            name = f"{item.numerator}/{item.denominator}_{item.response}{label(item.rate, item.matching)}"
            yield name, item.ratio
            yield f"{name}_low", item.ci_low
            yield f"{name}_high", item.ci_high
            yield f"{name}_conclusive", float(item.status == "ok")
    else:
        for mean in record.means:
            if mean.arm != request.part:
                continue
            name = f"{_response_name(mean.response)}{label(mean.rate, mean.matching)}"
            yield name, mean.mean
            if mean.mean is not None and mean.sd is not None:
                yield f"{name}_stderr", mean.sd / math.sqrt(mean.seeds)


def _metric_names(request: LeverageRequest) -> Iterator[str]:
    """Yield every name `_parts` may give, so that lm-eval knows how to aggregate it."""
    label = _labels(request)
    options = request.options()
    if request.part == CLEAN:
        yield from ("nll", "token_perplexity", "noise_floor_nll", "noise_floor_kl")
        return
    for matching, rate, response in product(options.matchings, options.rates, RESPONSES):
        where = label(rate, matching)
        if request.part != RATIO:
            yield from (f"{_response_name(response)}{where}{end}" for end in ("", "_stderr"))
            continue
        for over, under in product(options.arms, options.arms):
            if over != under:
                name = f"{over}/{under}_{response}{where}"
                yield from (f"{name}{end}" for end in ("", "_low", "_high", "_conclusive"))


def _response_name(response: str) -> str:
    return "delta_nll" if response == "nll" else response


def _labels(request: LeverageRequest) -> Callable[[float, str], str]:
    """Return what names a cell behind a metric; the matching is named only where there are several."""
    several = len(request.matching) > 1
    return lambda rate, matching: f"@{rate:g}{f'_{matching}' if several else ''}"


def _figures(part: float, names: Sequence[str]) -> Metrics:
    """Return the metrics of a part; none of them without a study."""
    if isinstance(part, PartOfStudy):
        return part.figures
    log.error("%s: no figure: the group needs --model ternary_probe", LEVERAGE_GROUP)
    return {name: None for name in names if not name.endswith("_stderr")}
