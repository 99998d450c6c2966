"""What lm-eval adds to its results about the model: source, recipe with its proof, protocol, signs of a broken model."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from ternary_probe_lm_eval.task_recipes import facts_of

if TYPE_CHECKING:
    from ternary_probe.perturb import Application
    from ternary_probe_lm_eval.model import TernaryProbeLM


def describe_model(lm: TernaryProbeLM) -> dict[str, Any]:
    """Return what goes into ``results['config']``; asks nothing of the network.

    Args:
        lm: The model.

    Returns:
        JSON-able data: lm-eval's own keys, and ``ternary_probe``.
    """
    source = lm.loaded.source
    recipe = lm.recipe_now
    return {
        "model_num_parameters": int(lm.loaded.model.num_parameters()),
        "model_dtype": source.dtype,
        "model_revision": source.revision or "",
        "model_sha": source.revision or "",
        "model_source": source.name,
        "ternary_probe": {
            "recipe": None if recipe is None else str(recipe),
            "perturbation": None if recipe is None or lm.last_proof is None else describe_proof(lm.last_proof),
            "calibration": lm.calibration_label,
            "quantization": lm.arguments.quant,
            "source": {"kind": source.kind, "path": source.path, "config_sha256": source.config_sha256},
            "protocol": describe_protocol(lm),
            "scored": dict(lm.scored),
            "tasks": facts_of(lm),
            "warnings": [sentence for sentences in lm.warnings.values() for sentence in sentences],
            "notes": [*source.notes, *lm.notes],
        },
    }


def describe_protocol(lm: TernaryProbeLM) -> dict[str, Any]:
    """Return how documents and answers are scored.

    Args:
        lm: The model.

    Returns:
        JSON-able data.
    """
    arguments = lm.arguments
    prefix = None if arguments.bos == "none" or lm.prefix_token_id is None else int(lm.prefix_token_id)
    mixed = lm.mixed_precision_dtype
    return {
        "name": arguments.protocol,
        "window": lm.window,
        "window_inherited": lm.window_inherited,
        "stride": arguments.stride,
        "bos": arguments.bos,
        "prefix_token": prefix,
        "prefix_text": None if prefix is None else lm.tokenizer.convert_ids_to_tokens(prefix),
        "max_length": lm.max_length,
        "add_bos_token": lm.add_bos_token,
        "softmax_dtype": str(lm.scorer_dtype).removeprefix("torch."),
        "sum_dtype": "float64",
        "mixed_precision_dtype": None if mixed is None else str(mixed).removeprefix("torch."),
    }


def describe_proof(proof: Application) -> dict[str, Any]:
    """Return what a perturbation did.

    Args:
        proof: What `TernaryProbeLM.perturbed` yielded.

    Returns:
        JSON-able data; ``checksum_after`` is None while it is in effect.
    """
    return {
        "entries": proof.entries,
        "flips": proof.changed,
        "zeros": proof.zeros,
        "delta_energy": proof.delta_energy,
        "matrices": len(proof.matrices),
        "recipe_sha256": digest(proof.recipe.describe()),
        "checksum_before": proof.checksum_before,
        "checksum_during": proof.checksum_during,
        "checksum_after": proof.checksum_after or None,
    }


def digest(data: Any) -> str:
    """Return SHA-256 of JSON-able data.

    Args:
        data: The data.

    Returns:
        64 hexadecimal digits.
    """
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
