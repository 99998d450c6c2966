"""What keeps a plausible wrong number out: shared response caches, re-tied heads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ternary_probe.errors import ProbeError
from ternary_probe.perturb import checksum

FINGERPRINT = "ternary_probe fingerprint"  # no key of lm-eval's, which are 64 hexadecimal digits


class CacheError(ProbeError):
    """A response cache holds the answers of another model."""


class RetiedError(ProbeError):
    """Wrapping a model changed its weights."""


def guard_cache(answers: MutableMapping[str, Any], fingerprint: Mapping[str, Any]) -> None:
    """Claim an empty response cache for this model, or make sure that a filled one is this model's.

    lm-eval's cache keys name the request but not the model, so a perturbed run would be served the clean answers.

    Args:
        answers: The cache.
        fingerprint: What the answers depend on, JSON-able.

    Raises:
        CacheError: If the answers are another model's, or of unknown origin.
    """
    own = json.dumps(fingerprint, sort_keys=True)
    if FINGERPRINT not in answers:
        if len(answers):
            raise CacheError(
                f"the response cache holds {len(answers)} answers of a model it does not name: give another --use_cache path"
            )
        answers[FINGERPRINT] = own
        return
    found = json.loads(answers[FINGERPRINT])
    differing = [key for key in {**found, **fingerprint} if found.get(key) != json.loads(own).get(key)]
    if differing:
        key = next((name for name in ("recipe", *sorted(differing)) if name in differing), differing[0])
        raise CacheError(
            f"the response cache holds answers under {key} {found.get(key)!r}, and this run has {fingerprint.get(key)!r}: "
            "give each its own --use_cache path"
        )


def weights_checksum(model: nn.Module) -> str:
    """Return one checksum over every parameter and buffer, tied storage once.

    Args:
        model: The model.

    Returns:
        16 hexadecimal digits.
    """
    seen: dict[tuple[int, Any], Tensor] = {}
    for _, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.numel():
            seen.setdefault((tensor.data_ptr(), tensor.shape), tensor)
    return checksum(seen.values())


@contextmanager
def ties_kept(model: nn.Module) -> Iterator[None]:
    """Keep the body, lm-eval's constructor, from tying head and embedding again, and prove that it did not.

    A config may say that they are tied where they are not, on purpose or by an edit: tying would throw the head away.

    Args:
        model: The model.

    Yields:
        Nothing.

    Raises:
        RetiedError: If head or embedding changed all the same.
    """
    before = _ends(model)
    model.__dict__["tie_weights"] = lambda *_args, **_kwargs: None
    try:
        yield
    finally:
        model.__dict__.pop("tie_weights", None)
    if _ends(model) != before:
        raise RetiedError(
            f"wrapping {type(model).__name__} for lm-eval changed its head or embedding: set "
            "config.tie_word_embeddings to what the weights are"
        )


def _ends(model: nn.Module) -> list[tuple[int, str]]:
    """Place and checksum of embedding and head."""
    found = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            weight = getattr(getattr(model, getter, lambda: None)(), "weight", None)
        except NotImplementedError:
            weight = None
        if isinstance(weight, Tensor) and not weight.is_meta:
            found.append((weight.data_ptr(), checksum([weight])))
    return found
