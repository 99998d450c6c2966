"""Which matrices to keep in higher precision: from measured ternary damage, and measured again as a whole."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ternary_probe.perturb import Ternarize
from ternary_probe.sensitivity_record import Plan, PlanStep

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, WeightMatrix
    from ternary_probe.studies.damage_cells import Damage, DamageCells


class MadePlan(NamedTuple):
    """A plan, and the damage it rests on."""

    record: Plan
    damage: Mapping[str, float | None]
    """KL of each matrix ternarized alone, nats per token; ``None`` where the model broke."""


def make_plan(
    cells: DamageCells, anatomy: Anatomy, matrices: Sequence[WeightMatrix], scheme: str, share: float
) -> MadePlan:
    """Ternarize every matrix alone, keep the costliest per entry until the share of damage is avoided, measure the rest.

    Args:
        cells: Measures.
        anatomy: The model's anatomy.
        matrices: The matrices to decide about.
        scheme: Ternary scheme.
        share: Of the summed damage, to be avoided.

    Returns:
        The plan; its ΔNLL is measured with everything else ternarized at once, not added up.
    """
    del anatomy
    usable = [m for m in matrices if bool(m.view().count_nonzero())]
    recipes = {f"ternary|{scheme}|{m.name}": _ternarize(scheme, [m]) for m in usable}
    alone = cells.of(recipes, f"each matrix ternarized alone ({scheme})")
    damage = {m.name: alone[f"ternary|{scheme}|{m.name}"].kl for m in usable}
    kept = choose(damage, {m.name: m.numel for m in usable}, share)
    rest = [m for m in usable if m.name not in set(kept)]
    everything = _measured(cells, scheme, usable, usable, [], damage)
    plan = everything if not kept else _measured(cells, scheme, usable, rest, kept, damage)
    return MadePlan(
        Plan(
            scheme=scheme,
            share=share,
            exclude=tuple(glob.escape(name) for name in kept),
            everything=everything,
            plan=plan,
        ),
        damage,
    )


def choose(damage: Mapping[str, float | None], entries: Mapping[str, int], share: float) -> list[str]:
    """Return the matrices to keep: those with the most damage per entry, until their damage adds up to the share.

    A matrix that breaks the model counts as infinitely costly and is always kept.

    Args:
        damage: Matrix name to KL; ``None`` where the model broke.
        entries: Matrix name to its number of entries.
        share: Of the summed finite damage.

    Returns:
        Names, costliest per entry first.
    """
    kept = [name for name, kl in damage.items() if kl is None]
    known = {name: max(kl, 0.0) for name, kl in damage.items() if kl is not None}
    total, avoided = sum(known.values()), 0.0
    for name in sorted(known, key=lambda n: (-known[n] / entries[n], n)):
        if avoided >= share * total:
            break
        kept.append(name)
        avoided += known[name]
    return kept


def _ternarize(scheme: str, matrices: Sequence[WeightMatrix]) -> Ternarize:
    return Ternarize(scheme=scheme, include=tuple(glob.escape(m.name) for m in matrices))


def _measured(
    cells: DamageCells,
    scheme: str,
    usable: Sequence[WeightMatrix],
    ternarized: Sequence[WeightMatrix],
    kept: Sequence[str],
    damage: Mapping[str, float | None],
) -> PlanStep:
    total = sum(kl for kl in damage.values() if kl is not None)
    avoided = sum(damage[name] or 0.0 for name in kept)
    found: Damage | None = None
    if ternarized:
        key = f"plan|{scheme}|{'|'.join(kept)}"
        found = cells.of({key: _ternarize(scheme, ternarized)}, "the plan as a whole")[key]
    over = None if found is None else found.over_windows
    entries = {m.name: m.numel for m in usable}
    return PlanStep(
        kept=len(kept),
        kept_entries=sum(entries[name] for name in kept) / max(1, sum(entries.values())),
        predicted_share=avoided / total if total > 0 else 0.0,
        kl=0.0 if found is None else found.kl,
        delta_nll=0.0 if found is None else found.delta_nll,
        nll_low=None if over is None else over.low,
        nll_high=None if over is None else over.high,
    )
