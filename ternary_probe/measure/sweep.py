"""Many small experiments on one text: each re-runs only the blocks behind its change.

The text is walked window by window: the clean model's block outputs of one window are recorded, every experiment's suffix
runs on it, then they are dropped. On a model whose suffix re-runs do not equal full runs (its self-check says so) every
experiment runs in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ternary_probe.anatomy import Recording, first_affected, negate_each, record_blocks
from ternary_probe.errors import ProbeError
from ternary_probe.measure.nll import NllResult, Response
from ternary_probe.perturb.proof import NoEffectError, checksum

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, WeightMatrix
    from ternary_probe.measure.nll import Evaluator, Reference
    from ternary_probe.perturb.recipe import Perturbation

Progress = Callable[[int, int], None]


@dataclass
class _Tally:
    """Sums of one experiment, window by window."""

    nll: NDArray[np.float64]
    kl: NDArray[np.float64]


class Sweep:
    """Runs experiments on one text with one model, all of them on a window before the next window begins.

    Args:
        evaluator: The text and the model.
        reference: The clean model on it.
        progress: Called with ``(windows x experiments done, all of them)``.

    Attributes:
        resumes: Whether only the blocks behind a change run.
        note: Why not, where they do not.
        idle: Keys of the recipes that changed no weight.
    """

    def __init__(
        self, evaluator: Evaluator, reference: Reference, *, progress: Progress = lambda done, total: None
    ) -> None:
        self.evaluator, self.reference, self._progress = evaluator, reference, progress
        self.anatomy: Anatomy = evaluator.anatomy
        check = self.anatomy.checks.get("suffix")
        self.resumes = check is not None and check.passed is True
        self.note = (
            ""
            if self.resumes
            else "this model's blocks cannot be re-run from a recording "
            f"({check.note if check is not None else 'not checked'}): every experiment ran the whole model"
        )
        self.idle: set[str] = set()
        self._clean: dict[tuple[str, ...], str] = {}

    def report(self, progress: Progress) -> None:
        """Send progress elsewhere from now on.

        Args:
            progress: Called with ``(windows x experiments done, all of them)``.
        """
        self._progress = progress

    @torch.no_grad()
    def null(self) -> float:
        """Re-run the first window from every block on with nothing changed.

        Returns:
            The largest absolute difference of any final hidden state: exactly 0 where re-runs are exact, and then so is
            every difference of NLL and the KL.
        """
        _, recording = next(iter(self._recordings()))
        starts = range(len(self.anatomy.blocks)) if self.resumes else range(1)
        return max(float((recording.resume(start) - recording.states).abs().max()) for start in starts)

    @torch.no_grad()
    def perturbed(self, recipes: Mapping[str, Perturbation]) -> dict[str, Response]:
        """Score the text under each recipe, every one applied, proved and undone on every window.

        Args:
            recipes: Key to resolved recipe; its matrices must lie inside blocks.

        Returns:
            Key to NLL and KL. A broken model's figures are returned as they are, not finite. A recipe that changes no weight
            (all it hits is zero) gives the clean NLL and a KL of 0, and its key goes into ``idle``.
        """
        tallies = {key: self._tally() for key in recipes}
        starts = {key: self._start(self._matrices(recipe)) for key, recipe in recipes.items()}
        done, total = 0, len(recipes) * len(self.evaluator.windows.inputs)
        for index, recording in self._recordings():
            for key, recipe in recipes.items():
                self._progress(done, total)
                try:
                    with recipe.applied(self.anatomy, known_checksum=self._known(recipe)):
                        states = recording.resume(starts[key])[0]
                        sums = self.evaluator.score_window(index, states, self.reference)
                except NoEffectError:
                    self.idle.add(key)
                    sums = self.evaluator.score_window(index, recording.states[0], self.reference)
                tallies[key].nll[index], tallies[key].kl[index] = sums
                done += 1
        self._progress(total, total)
        return {key: self._response(tally) for key, tally in tallies.items()}

    @torch.no_grad()
    def negated(
        self, columns: Mapping[str, Sequence[int]], *, together: int = 4
    ) -> dict[tuple[str, int], tuple[Response, Response]]:
        """Score the text with one input column after the other negated: whole-column flips that touch no weight.

        Several columns of a matrix ride as batch entries of one run, beside an entry with nothing negated. That entry is
        the null control: arithmetic depends on the batch's composition, so the damage is taken against it.

        Args:
            columns: Matrix name to columns.
            together: Columns in one run.

        Returns:
            ``(matrix, column)`` to the response and the null control's.
        """
        runs = [
            (self.anatomy.matrix(name), list(picked)[first : first + together])
            for name, picked in columns.items()
            for first in range(0, len(picked), together)
        ]
        tallies = {(m.name, column): (self._tally(), self._tally()) for m, part in runs for column in part}
        done, total = 0, len(runs) * len(self.evaluator.windows.inputs)
        for index, recording in self._recordings():
            for matrix, part in runs:
                self._progress(done, total)
                with negate_each(self.anatomy, matrix, [None, *part]):
                    states = recording.resume(self._start([matrix]), copies=1 + len(part))
                null = self.evaluator.score_window(index, states[0], self.reference)
                for entry, column in enumerate(part, start=1):
                    now = self.evaluator.score_window(index, states[entry], self.reference)
                    for tally, sums in zip(tallies[matrix.name, column], (now, null), strict=True):
                        tally.nll[index], tally.kl[index] = sums
                done += 1
        self._progress(total, total)
        return {key: (self._response(now), self._response(null)) for key, (now, null) in tallies.items()}

    def _start(self, matrices: Iterable[WeightMatrix]) -> int:
        return first_affected(self.anatomy, matrices) if self.resumes else 0

    def _matrices(self, recipe: Perturbation) -> list[WeightMatrix]:
        return [self.anatomy.matrix(name) for name, _ in recipe.touched(self.anatomy)]

    def _known(self, recipe: Perturbation) -> str:
        touched = recipe.touched(self.anatomy)
        names = tuple(name for name, _ in touched)
        if names not in self._clean:
            self._clean[names] = checksum(tensor for _, tensor in touched)
        return self._clean[names]

    def _recordings(self) -> Iterable[tuple[int, Recording]]:
        for index, row in enumerate(self.evaluator.windows.inputs):
            recording = record_blocks(self.anatomy, row[None])
            if not torch.equal(recording.states[0], self.reference.states[index]):
                raise ProbeError(
                    f"window {index}: the clean model gives other hidden states than before, so differences would not be "
                    "paired; the model changed meanwhile, or its device is not deterministic"
                )
            yield index, recording

    def _tally(self) -> _Tally:
        n = len(self.evaluator.windows.inputs)
        return _Tally(np.zeros(n), np.zeros(n))

    def _response(self, tally: _Tally) -> Response:
        counts = self.reference.result.counts
        return Response(NllResult(tally.nll, counts), NllResult(tally.kl, counts))
