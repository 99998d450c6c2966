"""Were a shard's data ever written? A few short reads from its matrices, beside the gains that were read anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ternary_probe.gates._file_access import Range

if TYPE_CHECKING:
    from ternary_probe.gates._parameters import ParameterEvidence
    from ternary_probe.safetensors_header import TensorEntry

_PLACES = 4
_BYTES = 64


class Sample(NamedTuple):
    """What was seen of one file.

    Attributes:
        zero: Whether each place holds nothing but zero bytes, in the file's order.
        names: Tensor of each place.
        live_gain: Whether a norm's gain in this file has an entry that is not 0.
    """

    zero: tuple[bool, ...]
    names: tuple[str, ...]
    live_gain: bool

    @property
    def all_zero(self) -> bool:
        """Whether there were places, and all of them zero."""
        return bool(self.zero) and all(self.zero)

    @property
    def zero_from(self) -> int | None:
        """First place from which on all is zero, where that is at least the last two and not all; else None."""
        run = len(self.zero)
        while run and self.zero[run - 1]:
            run -= 1
        return run if 0 < run <= len(self.zero) - 2 else None


def sample_zeros(found: ParameterEvidence) -> dict[str, Sample]:
    """Read 64 bytes at four places of every file, spread over its matrices.

    Args:
        found: The files.

    Returns:
        Samples by file; a file without a readable matrix of 64 bytes has none.
    """
    files = found.files
    if files is None:
        return {}
    samples: dict[str, Sample] = {}
    for shard, header in found.shards.items():
        size = files.sizes[shard]
        matrices = [
            (name, entry)
            for name, entry in header.items()
            if len(entry.shape) > 1 and entry.end <= size and entry.end - entry.begin >= _BYTES
        ]
        if not matrices:
            continue
        places = _places(matrices)
        data = files.read_many([Range(shard, begin, begin + _BYTES) for _, begin in places])
        gains = [gain for name, gain in found.gains.items() if found.tensors[name].file.name == shard]
        samples[shard] = Sample(
            tuple(not any(one) for one in data),
            tuple(name for name, _ in places),
            any(gain.stored.any() for gain in gains),
        )
    return samples


def _places(matrices: list[tuple[str, TensorEntry]]) -> list[tuple[str, int]]:
    """Choose places: one in each of four matrices, several in one where there are fewer."""
    chosen = []
    for place in range(_PLACES):
        share = (place + 0.5) / _PLACES * len(matrices)
        name, entry = matrices[int(share)]
        room = entry.end - entry.begin - _BYTES
        within = share - int(share) if len(matrices) < _PLACES else 0.5
        chosen.append((name, entry.begin + int(within * room)))
    return chosen
