"""Check ``files``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ternary_probe.gates._check import Limits, Tier, check
from ternary_probe.gates._reported import fault, worst_first
from ternary_probe.records import Finding

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Evidence
    from ternary_probe.gates._parameters import ParameterEvidence

_NAME = "files"


@check(_NAME, tier=Tier.PARAMETERS)
def files(evidence: Evidence, _limits: Limits) -> Iterable[Finding]:
    """Weight files must be whole, and the index must agree with their headers, both ways.

    Truncated, padded, zeroed and LFS-pointer shards are told apart; a tensor in the wrong shard, in two shards or in none is
    named. Some loaders load such checkpoints without a word. Read are headers, norm gains and four times 64 bytes of each
    file's matrices: where a file reads as zeros while others do not, its data were never written. A checkpoint whose matrices
    all read as zeros beside live gains is only warned of (a stand-in made for its shapes); --scan-weights fails it.

    Yields:
        One finding per fault, or one that all is well.
    """
    found = evidence.subject.parameters
    if found.unread:
        yield fault(_NAME, "not_applicable", "", f"the files are not read: {found.unread}")
        return
    faults = [fault(_NAME, "fail", p.file, p.message, fault=p.fault) for p in found.problems]
    for name, shards in found.duplicates.items():
        message = f"{name!r} lies in {len(shards)} files: {', '.join(shards)}"
        faults.append(fault(_NAME, "fail", name, message, fault="duplicate"))
    faults += _unwritten(found)
    yield from worst_first(faults)
    if not faults:
        held = {entry.file for entry in found.tensors.values()}
        message = f"{len(found.tensors)} tensors in {len(held)} files, as their headers and the index say"
        details = {"files": len(held), "tensors": len(found.tensors)}
        yield fault(_NAME, "pass", "", message, 0.0, 0.0, "faults", **details)


def _unwritten(found: ParameterEvidence) -> Iterator[Finding]:
    from ternary_probe.gates._zero_samples import sample_zeros

    samples = sample_zeros(found)
    alive = [shard for shard, sample in samples.items() if not all(sample.zero)]
    dead = [shard for shard, sample in samples.items() if sample.all_zero]
    for shard in dead:
        if alive or not any(sample.live_gain for sample in samples.values()):
            message = (
                f"{shard} is zeroed: its header is sound, and the data read at {len(samples[shard].zero)} places are zero "
                "bytes, as an interrupted download or a full disk leaves them"
            )
            yield fault(_NAME, "fail", shard, message, fault="zeroed data", places=list(samples[shard].names))
    if dead and not alive and any(sample.live_gain for sample in samples.values()):
        message = (
            f"all matrices read as zero bytes at {sum(len(sample.zero) for sample in samples.values())} places, though norm "
            "gains do not: a stand-in made for its shapes, or data never written; --scan-weights decides"
        )
        yield fault(_NAME, "warn", dead[0], message, fault="zeroed data", files=len(dead))
    for shard, sample in samples.items():
        if sample.zero_from is not None:
            message = (
                f"{shard} reads as zero bytes from {sample.names[sample.zero_from]} on, as a download that stopped in a "
                "preallocated file leaves it; --scan-weights decides"
            )
            yield fault(_NAME, "warn", shard, message, fault="zeroed tail")
