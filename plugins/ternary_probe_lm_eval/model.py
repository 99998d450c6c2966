"""The model class: lm-eval's own for Hugging Face models, loaded our way, perturbed while it is scored, and scored lean."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ternary_probe.anatomy import Anatomy, examine
from ternary_probe.errors import ProbeError
from ternary_probe.loading import LoadedModel, require_tokenizer, vocabulary_size, wrap
from ternary_probe.measure import Activations, measure_activations
from ternary_probe.measure.nll import check_windows
from ternary_probe.perturb import Application, Composed, Perturbation
from ternary_probe.text import Text, Windows
from ternary_probe_lm_eval import watch
from ternary_probe_lm_eval.arguments import Arguments, command_line_text, read_arguments, read_recipe, refuse_repeated
from ternary_probe_lm_eval.calibration import find_calibration
from ternary_probe_lm_eval.cutting import Cutter, adds_bos, require_prefix
from ternary_probe_lm_eval.document import DocumentLogLikelihood
from ternary_probe_lm_eval.heads import find_head
from ternary_probe_lm_eval.opening import open_model, read_softmax_dtype, with_present_device
from ternary_probe_lm_eval.protection import CacheError, guard_cache, ties_kept, weights_checksum
from ternary_probe_lm_eval.quantized import packed_modules, refuse_packed
from ternary_probe_lm_eval.requests import (
    RequestGroup,
    Tokenized,
    by_task,
    group_answers,
    group_requests,
    read_answers,
)
from ternary_probe_lm_eval.results import describe_model, describe_protocol, digest
from ternary_probe_lm_eval.scoring import Scorer, Span, SpanScores, document_of, largest_batch, spans_of

logger = logging.getLogger(__name__)

_MOST_SEQUENCES = 64  # in a batch of automatic size
_CHATTER = "`pretrained`"  # in both of lm-eval's warnings about being handed a model, which is how this works


class TernaryProbeLM(HFLM):  # type: ignore[misc]  # lm-eval is not typed
    """Any MODEL of ternary_probe as an lm-eval model, optionally perturbed whenever something is scored.

    The weights are perturbed for the length of each scoring call only, with proof of effect and of exact undo; between
    calls the model is clean. Documents are scored by the protocols of `ternary_probe.text`, lm-eval's ``rolling`` unless
    told otherwise, without ever holding full logits.

    Args:
        pretrained: ``demo``, a hub id, a folder, a ``.gguf`` file, or a model in memory (see `as_lm`).
        **options: See `ternary_probe_lm_eval.arguments.Arguments`: ``perturb``, ``seed``, ``calibration``, ``protocol``,
            ``bos``, ``window``, ``stride``, ``softmax_dtype``, ``head_mib``, ``quant``, ``dtype``, ``device``, ….

    Attributes:
        loaded: Model, tokenizer and source.
        arguments: The checked arguments.
        recipe: What is done to the weights while scoring, as given; None for the clean model.
        last_proof: What the latest perturbation did, with its checksums.
        notes: Sentences a reader of the results must know, in the order they came up.

    Raises:
        ProbeError: If an argument is unknown or does not fit, or the model cannot be loaded or perturbed so.
    """

    loaded: LoadedModel
    arguments: Arguments
    recipe: Perturbation | None
    last_proof: Application | None

    def __init__(self, pretrained: str | PreTrainedModel | LoadedModel, **options: Any) -> None:
        notes: list[str] = []
        arguments = read_arguments(with_present_device(options, notes))
        self.arguments = arguments
        self.loaded = open_model(pretrained, arguments)
        self.recipe = arguments.recipe
        self.last_proof = None
        self.notes = notes
        self._active: Application | None = None
        self.warnings: dict[str, list[str]] = {}
        self.scored: dict[str, int] = {}
        self._resolved: dict[str, Perturbation] = {}
        self.calibration_label: str | None = None
        self._cache_state: str | None = None
        model, tokenizer = self.loaded.model, require_tokenizer(self.loaded)
        require_prefix(tokenizer, arguments.harness.get("prefix_token_id"), vocabulary_size(model))
        self.scorer_dtype = read_softmax_dtype(arguments.softmax_dtype)
        with ties_kept(model), _without_warnings_about_models_in_memory():
            super().__init__(
                pretrained=model, tokenizer=tokenizer, softmax_dtype=self.scorer_dtype, **arguments.harness
            )
        if self.backend != "causal":
            raise ProbeError(f"{self.loaded.source.name} is no causal language model: only these are supported")
        self.pretrained, self.revision = self.loaded.source.name, self.loaded.source.revision
        self._packed = packed_modules(model)
        self._join_processes()
        # What cannot be scored or perturbed is refused now, not after the tasks are built.
        self.scorer = self._make_scorer()
        if self.recipe is not None:
            refuse_packed(self.recipe, self._packed)
            if not self.recipe.needs_measurement:
                self.recipe.touched(self.anatomy)

    # ---- construction by lm-eval

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> TernaryProbeLM:
        """Make the model from ``simple_evaluate(model_args="…")``.

        Args:
            arg_string: ``name=value`` pairs separated by commas.
            additional_config: Batch sizes and device.

        Returns:
            The model.
        """
        refuse_repeated(arg_string)
        made: TernaryProbeLM = super().create_from_arg_string(arg_string, additional_config)
        return made

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> TernaryProbeLM:
        """Make the model from the command line or ``simple_evaluate(model_args={…})``.

        Args:
            arg_dict: The arguments.
            additional_config: Batch sizes and device.

        Returns:
            The model.
        """
        if "perturb" in arg_dict and str(arg_dict["perturb"]) in (text := command_line_text(sys.argv)):
            refuse_repeated(text)
        made: TernaryProbeLM = super().create_from_arg_obj(arg_dict, additional_config)
        return made

    # ---- the model and what is done to it

    @cached_property
    def anatomy(self) -> Anatomy:
        """The model's anatomy, examined once."""
        return examine(self.loaded.model)

    @cached_property
    def cutter(self) -> Cutter:
        """How documents are cut into windows."""
        return Cutter(
            tokenizer=self.tokenizer,
            protocol=self.arguments.protocol,
            bos=self.arguments.bos,
            window=self.window,
            stride=self.arguments.stride,
            vocab_size=vocabulary_size(self.loaded.model),
            prefix_token=self.custom_prefix_token_id,
        )

    @property
    def window(self) -> int:
        """Positions in a window of a document."""
        return self.arguments.window or self.max_length

    @property
    def window_inherited(self) -> bool:
        """Whether nobody chose the window, so that it is all the positions the model takes."""
        return self.arguments.window is None and "max_length" not in self.arguments.harness

    def cut(self, text: Text, *, windows: int | None = None) -> Windows:
        """Cut a text by this model's protocol, exactly as ``ternary-probe perplexity`` would.

        Args:
            text: The text.
            windows: Number of windows; all if None.

        Returns:
            The windows.
        """
        return self.cutter.windows(text, windows=windows)

    def resolve(
        self, recipe: str | Mapping[str, Any] | Perturbation, calibration: Windows | Activations | None = None
    ) -> Perturbation:
        """Freeze what a recipe measures: its outlier columns.

        Args:
            recipe: A recipe, its string or its JSON.
            calibration: Where to measure; by default `calibration_windows`.

        Returns:
            The recipe as pure data.
        """
        wanted = read_recipe(recipe)
        refuse_packed(wanted, self._packed)
        if not wanted.needs_measurement:
            return wanted
        if calibration is not None:
            return wanted.resolve(self.anatomy, calibration)
        key = json.dumps(wanted.describe(), sort_keys=True)
        if key not in self._resolved:
            # Planting moves the activations, and matrices outside blocks are not in the shared measurement.
            shared = not isinstance(wanted, Composed) and not wanted.include
            self._resolved[key] = wanted.resolve(
                self.anatomy, self._activations if shared else self.calibration_windows
            )
        return self._resolved[key]

    @cached_property
    def calibration_windows(self) -> Windows:
        """Windows outlier columns are measured on unless others are given, see `find_calibration`."""
        found = find_calibration(self.cutter, self.arguments.calibration)
        self.calibration_label = found.label
        return found.windows

    @cached_property
    def _activations(self) -> Activations:
        if self._active is not None:
            raise ProbeError(
                "outlier columns are measured on the clean model: resolve the recipe before another is applied"
            )
        return measure_activations(self.anatomy, self.calibration_windows)

    @contextmanager
    def perturbed(
        self, recipe: str | Mapping[str, Any] | Perturbation, *, calibration: Windows | Activations | None = None
    ) -> Iterator[Application]:
        """Perturb the weights for the length of a block; every bit is restored after it.

        Args:
            recipe: A recipe, its string or its JSON.
            calibration: Where its outlier columns are measured; see `resolve`.

        Yields:
            What was done; ``checksum_after`` is filled in on exit.

        Raises:
            ProbeError: If another perturbation is in effect, the recipe does not fit the model, had no effect, or could
                not be undone.
        """
        if self._active is not None:
            raise ProbeError(f"recipe {self._active.recipe} is in effect: only one at a time, join two with '+'")
        ready = self.resolve(recipe, calibration)
        with ready.applied(self.anatomy) as done:
            self._active = self.last_proof = done
            try:
                yield done
            finally:
                self._active = None

    @property
    def recipe_now(self) -> Perturbation | None:
        """The perturbation in effect, or the one that every scoring call applies."""
        return self._active.recipe if self._active is not None else self.recipe

    @contextmanager
    def in_effect(self, calibration: Callable[[], Windows] | None = None) -> Iterator[None]:
        """Apply the model's own recipe for the length of a block, if it has one and none is in effect already.

        Args:
            calibration: Makes the windows on which a recipe's outlier columns are measured, unless the user named a file:
                those after the scored text, say. Where that text is too short, `calibration_windows` are used, and a note
                says so.

        Yields:
            Nothing.
        """
        if self._active is not None or self.recipe is None:
            yield
            return
        with self.perturbed(self.recipe, calibration=self._chosen(self.recipe, calibration)):
            yield

    def _chosen(self, recipe: Perturbation, calibration: Callable[[], Windows] | None) -> Windows | None:
        if calibration is None or not recipe.needs_measurement or self.arguments.calibration is not None:
            return None
        try:
            windows = calibration()
        except ProbeError:
            self.note(
                "too little text follows what is scored to choose outlier columns on: they are chosen on the second half "
                "of the sample text, and flattered where that is scored too; score fewer windows, or give calibration=FILE"
            )
            return None
        self.calibration_label = f"{windows.protocol.text}, {len(windows.inputs)} windows from token {windows.span[0]}"
        return windows

    # ---- scoring

    def _make_scorer(self) -> Scorer:
        """Return what scores token sequences with bounded memory."""
        found = find_head(self.loaded.model, lambda: self.anatomy)
        if found.note is not None:
            self.note(found.note)
        return Scorer(
            found.head,
            device=found.device,
            vocab_size=found.vocab_size,
            head_bytes=self.arguments.head_bytes,
            softmax_dtype=self.scorer_dtype,
            autocast=self.mixed_precision_dtype,
        )

    def request_groups(self, requests: Sequence[Instance]) -> list[RequestGroup]:
        """Sort requests by who answers them: a task's own handler, or the plain way for all others.

        Args:
            requests: Requests of one type, of any tasks.

        Returns:
            The groups, in the order of their first request.
        """
        return group_requests(requests)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        """Score documents, each by itself.

        Args:
            requests: Their texts.
            disable_tqdm: No progress bar.

        Returns:
            One `DocumentLogLikelihood` each, in order; what a task's own handler returns for its requests.
        """
        return self._dispatch(requests, lambda plain: self.plain_loglikelihood_rolling(plain, disable_tqdm))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        """Score continuations of contexts.

        Args:
            requests: Contexts and continuations.
            disable_tqdm: No progress bar.

        Returns:
            Log-likelihood and whether greedy decoding gives the continuation, in order.
        """
        return self._dispatch(requests, lambda plain: self.plain_loglikelihood(plain, disable_tqdm))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate from the perturbed model, as lm-eval does.

        Args:
            requests: Contexts and generation arguments.
            disable_tqdm: No progress bar.

        Returns:
            The texts.
        """
        self._require_own_cache()
        with self.in_effect():
            texts: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
        return texts

    def _dispatch(self, requests: list[Instance], plain: Callable[[list[Instance]], list[Any]]) -> list[Any]:
        answers: list[Any] = [None] * len(requests)
        self._require_own_cache()
        groups = self.request_groups(requests)
        for group in groups:
            if group.handler is not None and self.cache_hook.dbdict is not None:
                raise CacheError(
                    f"task {group.requests[0].task_name} scores one text under several perturbations, which a response cache "
                    "cannot tell apart: run it without --use_cache"
                )
        for group in groups:
            if group.handler is None:
                found = plain(group.requests)
            else:
                found = group.handler(self, group.requests)
                self._look_at(group.requests, found)
            for place, answer in zip(group.places, found, strict=True):
                answers[place] = answer
        return answers

    def _look_at(self, requests: list[Instance], answers: Sequence[Any]) -> None:
        """Look for signs of a broken model among documents' log-likelihoods."""
        for task, values in by_task(requests, answers).items():
            documents = [value for value in values if isinstance(value, DocumentLogLikelihood)]
            self.scored[task] = sum(document.tokens for document in documents)
            self._warn(task, watch.describe_not_finite(task, documents) + watch.describe_perplexity(task, documents))

    def plain_loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[DocumentLogLikelihood]:
        """Score documents under the perturbation in effect, or the model's own recipe.

        Args:
            requests: Their texts.
            disable_tqdm: No progress bar.

        Returns:
            Their log-likelihoods, in order.
        """
        windows = [self._windows_of(request) for request in requests]
        self._check_longest([cut for cut in windows if cut is not None])
        with self._equally_in_effect():
            documents = self._score_documents(windows, disable_tqdm=disable_tqdm)
        for request, document in zip(requests, documents, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, document)
        self._look_at(requests, documents)
        self._note_documents()
        return documents

    def score_windows(self, windows: Windows, *, disable_tqdm: bool = True) -> DocumentLogLikelihood:
        """Score windows with the weights as they are, perturbed or not.

        Args:
            windows: From `cut`.
            disable_tqdm: No progress bar.

        Returns:
            Their log-likelihood as one document.
        """
        self._check_longest([windows])
        return self._score_documents([windows], disable_tqdm=disable_tqdm)[0]

    def _windows_of(self, request: Instance) -> Windows | None:
        text = request.args[0]
        label = f"document {request.doc_id} of task {request.task_name}"
        cut = self.cutter.cut(text, label)
        for note in cut.notes:
            self.note(f"a document of task {request.task_name} {note if ' ' in note and cut.windows else 'is ' + note}")
        return cut.windows

    def _check_longest(self, windows: Sequence[Windows]) -> None:
        """Refuse windows longer than a table of learned positions, before an index error does."""
        for cut in sorted(windows, key=lambda cut: -cut.inputs.shape[1]):
            if torch.unique(cut.targets[cut.scored]).numel() > 1:  # of one token repeated it would only say that
                check_windows(cast("Anatomy", SimpleNamespace(model=self.loaded.model)), cut)
                return

    def _score_documents(self, windows: Sequence[Windows | None], *, disable_tqdm: bool) -> list[DocumentLogLikelihood]:
        spans = [[] if cut is None else spans_of(cut) for cut in windows]
        flat = [span for document in spans for span in document]
        scores = self._score(flat, every_greedy=False, disable_tqdm=disable_tqdm, label="documents")
        documents, done = [], 0
        for cut, own in zip(windows, spans, strict=True):
            protocol = None if cut is None else cut.protocol
            documents.append(
                document_of(
                    scores[done : done + len(own)],
                    words=protocol.words if protocol else 0,
                    bytes=protocol.bytes if protocol else 0,
                )
            )
            done += len(own)
        return documents

    def plain_loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations under the perturbation in effect, or the model's own recipe.

        Args:
            requests: Contexts and continuations.
            disable_tqdm: No progress bar.

        Returns:
            Log-likelihood and whether greedy decoding gives the continuation, in order.

        Raises:
            ProbeError: If a continuation is empty.
        """
        for request in requests:
            if not request.args[1]:
                raise ProbeError(
                    f"task {request.task_name} has an empty answer in document {request.doc_id}: nothing to score"
                )
        with self._equally_in_effect():
            answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        values = [value for value, _ in answers]
        documents = by_task(requests, [request.doc_id for request in requests])
        for task, scores in by_task(requests, values).items():
            self.scored[task] = len(scores)
            self._warn(
                task, watch.describe_not_finite(task, scores) + watch.describe_choices(task, documents[task], scores)
            )
        return answers

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Score tokenized continuations; only their rows go through the head, and equal inputs are run once."""
        del override_bs
        tokenized = [Tokenized(*request) for request in requests]
        if any(len(t.context) + len(t.continuation) > self.max_length + 1 for t in tokenized):
            self.note(f"contexts longer than {self.max_length} tokens are cut at their beginning")
        every = group_answers(tokenized, self.max_length)
        scores = self._score([a.span for a in every], every_greedy=True, disable_tqdm=disable_tqdm, label="answers")
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for answers, score in zip(every, scores, strict=True):
            for owner, result in zip(answers.owners, read_answers(answers, score, tokenized), strict=True):
                results[owner] = result
                if tokenized[owner].name is not None:
                    self.cache_hook.add_partial("loglikelihood", tokenized[owner].name, result)
        return results

    def _score(self, spans: list[Span], *, every_greedy: bool, disable_tqdm: bool, label: str) -> list[SpanScores]:
        """Score spans in batches, longest first so that memory runs out at once or never."""
        order = sorted(range(len(spans)), key=lambda i: -len(spans[i].inputs))
        results: list[Any] = [None] * len(spans)
        size = self._batch_size(max((len(span.inputs) for span in spans), default=1))
        bar = tqdm(total=len(spans), disable=disable_tqdm or self.rank != 0, desc=f"Scoring {label}")
        with bar:
            for start in range(0, len(order), size):
                places = order[start : start + size]
                for place, score in zip(
                    places, self.scorer.score([spans[i] for i in places], every_greedy=every_greedy), strict=True
                ):
                    results[place] = score
                bar.update(len(places))
        token = watch.constant_argmax([s.greedy for s in results], [s.log_likelihoods for s in results])
        if token is None:
            self.warnings.pop(label, None)
        else:
            text = self.tokenizer.decode([token])
            self._warn(
                label, [f"the most likely token is {token} ({text!r}) at every position looked at: the model is broken"]
            )
        return results

    def _batch_size(self, length: int) -> int:
        if self.batch_size != "auto":
            return max(1, int(self.batch_size))
        return largest_batch(self.scorer, length, int(self.max_batch_size or _MOST_SEQUENCES))

    # ---- what the results say

    def note(self, sentence: str) -> None:
        """Log a sentence once and keep it for the results.

        Args:
            sentence: What a reader of the results must know.
        """
        if sentence not in self.notes:
            self.notes.append(sentence)
            logger.warning("%s", sentence)

    def _warn(self, key: str, sentences: list[str]) -> None:
        """Keep the signs of a broken model for the results; a later clean run of the same task takes them back."""
        for sentence in sentences:
            logger.warning("%s", sentence)
        if sentences:
            self.warnings[key] = sentences
        else:
            self.warnings.pop(key, None)

    def _note_documents(self) -> None:
        if self.window_inherited:
            self.note(
                f"the window of {self.window} tokens is the most this model takes, and perplexity moves with it: "
                "give window= to compare models"
            )
        if self.arguments.protocol == "rolling" and adds_bos(self.tokenizer):
            self.note(
                "this tokenizer puts its BOS before a text by itself: it stands once before each document here, where "
                "lm-eval's hf model puts it twice; bos=every_window puts it before every window"
            )

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval adds to ``results['config']``.

        Returns:
            JSON-able data, see `ternary_probe_lm_eval.results`.
        """
        return describe_model(self)

    # ---- response cache

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Accept a response cache only if its answers are this model's, perturbed as it is now.

        Args:
            cache_hook: lm-eval's.
        """
        if cache_hook.dbdict is not None:
            recipe = self.recipe_now
            resolved = None if recipe is None else self.resolve(recipe)
            guard_cache(
                cache_hook.dbdict,
                {
                    "recipe": None if recipe is None else str(recipe),
                    "recipe in full": None if resolved is None else digest(resolved.describe()),
                    "weights": weights_checksum(self.loaded.model),
                    "model": self.loaded.source.config_sha256,
                    "tokenizer": digest(sorted(self.tokenizer.get_vocab().items())),
                    "protocol": describe_protocol(self),
                },
            )
        self._cache_state = self._recipe_key()
        super().set_cache_hook(cache_hook)

    def _recipe_key(self) -> str:
        return "none" if self.recipe_now is None else json.dumps(self.recipe_now.describe(), sort_keys=True)

    def _require_own_cache(self) -> None:
        if self.cache_hook.dbdict is not None and self._cache_state != self._recipe_key():
            raise CacheError(
                f"a response cache was attached before the recipe changed to {self.recipe_now}: attach one of its own, by "
                "simple_evaluate(..., use_cache=...) inside `perturbed`"
            )

    # ---- several processes

    def _join_processes(self) -> None:
        """Take this process's share of the documents under ``accelerate launch`` or ``torchrun``."""
        if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
            return
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=self.device.type == "cpu")
        if accelerator.num_processes > 1:
            self.accelerator = accelerator
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes

    @contextmanager
    def _equally_in_effect(self) -> Iterator[None]:
        """As `in_effect`, and the perturbed weights are the same in all processes."""
        with self.in_effect():
            if self.world_size > 1 and self._active is not None:
                self._require_equal_processes(self._active.checksum_during)
            yield

    def _require_equal_processes(self, digest: str) -> None:
        halves = torch.tensor([[int(digest[:8], 16), int(digest[8:], 16)]], device=self.device)
        every = self.all_gather(halves).tolist()
        if any(other != every[0] for other in every):
            raise ProbeError(
                f"the perturbed weights differ between the {self.world_size} processes: load one model in all"
            )


def as_lm(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **options: Any) -> TernaryProbeLM:
    """Wrap a model in memory as an lm-eval model; its weights stay bit for bit as they are.

    Args:
        model: The model; it is put in eval mode.
        tokenizer: Its tokenizer.
        **options: As for `TernaryProbeLM`, but for those that concern loading.

    Returns:
        The lm-eval model.
    """
    return TernaryProbeLM(wrap(model, tokenizer), **options)


@contextmanager
def _without_warnings_about_models_in_memory() -> Iterator[None]:
    def wanted(record: logging.LogRecord) -> bool:
        return _CHATTER not in record.getMessage()

    theirs = logging.getLogger("lm_eval.models.huggingface")
    theirs.addFilter(wanted)
    try:
        yield
    finally:
        theirs.removeFilter(wanted)
