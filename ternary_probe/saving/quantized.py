"""Write a model as a `Ternarize` recipe quantizes it; the model itself is never changed."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from ternary_probe import __version__, schemes
from ternary_probe.anatomy import Anatomy, WeightMatrix, examine
from ternary_probe.errors import ProbeError
from ternary_probe.loading import LoadedModel
from ternary_probe.packing import CODES_PER_BYTE, TRITS_PER_BYTE
from ternary_probe.perturb.proof import sha256_weights
from ternary_probe.perturb.ternarize import Ternarize
from ternary_probe.pretrained import PACKED_METHOD
from ternary_probe.saving.folder import SavingError, ShardWriter, new_folder
from ternary_probe.saving.names import own_tensors, renaming
from ternary_probe.saving.packed import FORMAT_VERSION, Layout, pack

Format = Literal["dense", "packed"]

PROVENANCE = "ternary_probe.json"
PACKED_BYTES = 0.3
"""Bytes a weight that packing promises for one plane and groups of at least 64."""


def save_quantized(
    loaded: LoadedModel,
    recipe: Ternarize,
    folder: Path | str,
    format: Format = "dense",  # noqa: A002 - the option's name
    *,
    max_shard_size: int = 2 << 30,
    anatomy: Anatomy | None = None,
) -> Path:
    """Write the model as the recipe quantizes it, with tokenizer, generation config and provenance.

    ``dense`` is a plain checkpoint, of the same values and dtype as under ``recipe.applied(model)``. ``packed`` holds the
    same values as codes and scales, 2 bits a code (trits where float32 scales of short groups would push 2 bits to 0.3
    bytes a weight and trits stay below); it loads in transformers once ``ternary_probe_transformers`` is imported, with
    the same values in every dtype. The folder appears when all of it is written. Memory beyond the model: one shard.

    Args:
        loaded: The model, unquantized and wholly in memory.
        recipe: What to ternarize, and how.
        folder: Where to: absent or empty.
        format: ``dense`` or ``packed``.
        max_shard_size: Largest safetensors file, bytes.
        anatomy: The model's anatomy, where the caller has examined it already.

    Returns:
        The folder.

    Raises:
        SavingError: If the folder is not empty or not writable, the model is quantized already, or a matrix cannot be
            packed. A recipe that does not fit the model raises another `ProbeError`.
    """
    folder = Path(folder).expanduser()
    if format not in get_args(Format):
        raise SavingError(f"format {format!r} is not known: choose dense or packed")
    if max_shard_size < 1:
        raise SavingError(f"max_shard_size={max_shard_size} is no size: give bytes, such as {2 << 30}")
    model = loaded.model
    if getattr(model.config, "quantization_config", None) is not None:
        raise SavingError(f"{loaded.source.name} is quantized already: ternarize the model it was made from")
    matrices = recipe.targets(examine(model) if anatomy is None else anatomy)
    if format == "packed":
        _require_packable(model, matrices)
    plan = _plan(model, recipe, matrices, format)
    with new_folder(folder) as partial:
        _write_configs(loaded, plan, partial)
        rename = renaming(model, plan.outline())
        writer = ShardWriter(partial, max_shard_size)
        for piece in plan.pieces():
            for name, tensor in rename(piece).items():
                writer.add(name, tensor)
        writer.finish()
        provenance = json.dumps(_provenance(loaded, plan), indent=2)
        (partial / PROVENANCE).write_text(provenance + "\n")
    return folder


@dataclass
class _Plan:
    recipe: Ternarize
    format: Format
    tensors: dict[str, Tensor]
    """Live tensors by the model's names."""
    matrices: dict[str, list[WeightMatrix]]
    """The targeted matrices in each of them."""
    codes_per_byte: int
    done: list[dict[str, Any]] = field(default_factory=list)

    def pieces(self) -> Iterator[dict[str, Tensor]]:
        """Yield what to write, one live tensor at a time.

        Yields:
            Tensors by the model's names.
        """
        for name, live in self.tensors.items():
            matrices = self.matrices.get(name)
            if matrices is None:
                yield {name: live}
            elif self.format == "dense":
                yield {name: self._ternarized(live, matrices)}
            else:
                yield self._packed(name, matrices[0])

    def outline(self) -> Iterator[dict[str, Tensor]]:
        """Yield the same pieces without data.

        Yields:
            Tensors on the meta device.
        """
        for name, live in self.tensors.items():
            if self.format == "dense" or name not in self.matrices:
                yield {name: torch.empty_like(live, device="meta")}
            else:
                layout = self.layout(self.matrices[name][0])
                yield {
                    name: torch.empty(layout.weight_shape, dtype=torch.uint8, device="meta"),
                    f"{name}_scale": torch.empty(layout.scale_shape, dtype=live.dtype, device="meta"),
                }

    def layout(self, matrix: WeightMatrix) -> Layout:
        """Return how a matrix is packed."""
        return Layout(schemes.parse(self.recipe.scheme), *matrix.shape, self.codes_per_byte)

    def _ternarized(self, live: Tensor, matrices: list[WeightMatrix]) -> Tensor:
        """Return a copy of a parameter in which its targeted matrices are quantized."""
        twin = torch.empty_strided(live.shape, live.stride(), dtype=live.dtype, device=live.device).copy_(live)
        for matrix in matrices:
            view = matrix.view()
            place = twin.as_strided(view.shape, view.stride(), view.storage_offset() - live.storage_offset())
            values = self.recipe.values(matrix)
            self._note(matrix, int((values != view).sum()), values.nbytes)
            place.copy_(values)
        return twin

    def _packed(self, name: str, matrix: WeightMatrix) -> dict[str, Tensor]:
        quantized = self.recipe.quantized(matrix)
        try:
            packed = pack(quantized, matrix.dtype, self.codes_per_byte)
        except ProbeError as error:
            raise SavingError(f"{matrix.name}: {error}") from error
        self._note(matrix, int((quantized.dequantize(matrix.dtype) != matrix.view()).sum()), packed.nbytes)
        return {name: packed.weight, f"{name}_scale": packed.weight_scale}

    def _note(self, matrix: WeightMatrix, changed: int, nbytes: int) -> None:
        self.done.append({
            "matrix": matrix.name,
            "scheme": self.recipe.scheme,
            "shape": list(matrix.shape),
            "dtype": _name(matrix.dtype),
            "entries_changed": changed,
            "bytes_per_weight": nbytes / max(matrix.numel, 1),
        })


def _plan(model: PreTrainedModel, recipe: Ternarize, matrices: list[WeightMatrix], format: Format) -> _Plan:  # noqa: A002
    tensors = own_tensors(model)
    places = {_place(tensor): name for name, tensor in tensors.items()}
    held: dict[str, list[WeightMatrix]] = defaultdict(list)
    for matrix in matrices:
        name = places.get(_place(model.get_parameter(matrix.parameter_name)))
        if name is None:
            raise SavingError(
                f"{matrix.name} is not part of the model's state: exclude it with --exclude '{matrix.name}'"
            )
        held[name].append(matrix)
    return _Plan(recipe, format, tensors, dict(held), _codes_per_byte(recipe, matrices))


def _codes_per_byte(recipe: Ternarize, matrices: list[WeightMatrix]) -> int:
    """Return 4 codes a byte, or 5 where only those keep the promise on the size of the whole."""
    scheme = schemes.parse(recipe.scheme)
    weights = sum(m.numel for m in matrices)
    four, five = (
        sum(Layout(scheme, *m.shape, per).nbytes(m.dtype) for m in matrices) / max(weights, 1)
        for per in (CODES_PER_BYTE, TRITS_PER_BYTE)
    )
    return TRITS_PER_BYTE if scheme.planes == 1 and five < PACKED_BYTES <= four else CODES_PER_BYTE


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _require_packable(model: PreTrainedModel, matrices: list[WeightMatrix]) -> None:
    reasons = [(matrix, why) for matrix in matrices if (why := _unpackable(model, matrix)) is not None]
    if not reasons:
        return
    names = [matrix.name for matrix, _ in reasons]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    raise SavingError(
        f"{shown} cannot be packed: {reasons[0][0].name} {reasons[0][1]}; leave them out with --exclude, or save with "
        "--format dense"
    )


def _unpackable(model: PreTrainedModel, matrix: WeightMatrix) -> str | None:
    """Return why a matrix is not the sole weight of an `nn.Linear`, or None."""
    if matrix.axes.group is not None:
        return "is one of several matrices in one parameter"
    if matrix.aliases or matrix.also_lookup:
        return "is tied with " + (", ".join(matrix.aliases) or "the embedding")
    owner, _, name = matrix.parameter_name.rpartition(".")
    module = model.get_submodule(owner)
    if type(module) is not nn.Linear or name != "weight":
        return f"belongs to a {type(module).__name__}, not an nn.Linear"
    if matrix.in_features < 2:
        return "has one input feature, so that its packed shape would be its own"
    return None


def _write_configs(loaded: LoadedModel, plan: _Plan, folder: Path) -> None:
    model = loaded.model
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = loaded.source.dtype
    if plan.format == "packed":
        config.quantization_config = {
            "quant_method": PACKED_METHOD,
            "format_version": FORMAT_VERSION,
            "scheme": plan.recipe.scheme,
            "codes_per_byte": plan.codes_per_byte,
            "modules": [name.rpartition(".")[0] for name in plan.tensors if name in plan.matrices],
        }
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.to_json_file(folder / "generation_config.json")
    if loaded.tokenizer is not None:
        loaded.tokenizer.save_pretrained(folder)


def _provenance(loaded: LoadedModel, plan: _Plan) -> dict[str, Any]:
    source = loaded.source
    return {
        "format_version": FORMAT_VERSION,
        "format": plan.format,
        "recipe": plan.recipe.describe(),
        "source": {
            "name": source.name,
            "kind": source.kind,
            "revision": source.revision,
            "dtype": source.dtype,
            "config_sha256": source.config_sha256,
            "weights_sha256": sha256_weights(loaded.model),
            "notes": list(source.notes),
        },
        "tokenizer": loaded.tokenizer_problem or "saved",
        "matrices": plan.done,
        "versions": {
            "ternary_probe": __version__,
            **{name: version(name) for name in ("torch", "transformers", "safetensors")},
        },
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
