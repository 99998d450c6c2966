"""Check ``base-precision``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ternary_probe.gates._check import Limits, Tier, check
from ternary_probe.records import Finding

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Evidence, Subject


@check("base-precision", tier=Tier.RESPONSE, compares=True, severity="warn")
def base_precision(evidence: Evidence, _limits: Limits) -> Iterable[Finding]:
    """A base that is itself quantized is named: the candidate is then compared like for like, not with full precision.

    Some models ship natively quantized and have no full-precision base, so this only warns unless a policy says otherwise.
    Looked at are the config's ``quantization_config``, the dtype of what is stored, the file's own account (GGUF) and
    whether the weights lie on a k-bit grid.

    Yields:
        One finding.
    """
    base = evidence.base
    if base is None:
        yield Finding(check="base-precision", status="not_applicable", message="there is no base")
        return
    found = quantization_signs(base)
    dtype = base.loaded.source.dtype
    if not found:
        yield Finding(
            check="base-precision",
            status="pass",
            message=f"the base {base.name} is not quantized ({dtype}), so the candidate is compared with full precision",
            details={"base_dtype": dtype},
        )
        return
    yield Finding(
        check="base-precision",
        status="fail",
        message=f"the base {base.name} is itself quantized ({found[0]}): the candidate is compared like for like, and what "
        "the base lost against full precision stays unseen",
        details={"base_dtype": dtype, "base_signs": found, "candidate_signs": quantization_signs(evidence.subject)},
    )


def quantization_signs(subject: Subject) -> list[str]:
    """Collect what shows that a model is quantized.

    Args:
        subject: The model.

    Returns:
        One clause per sign; none for a model in full or half precision.
    """
    from ternary_probe.anatomy import stored_as_integers
    from ternary_probe.measure.grid import grid_note
    from ternary_probe.model_source import quantization_notes

    model = subject.loaded.model
    integers = stored_as_integers(model)
    signs = [*quantization_notes(model)]
    if integers is not None:
        signs.append(f"weights are stored as {integers}")
    signs += [note for note in subject.loaded.source.notes if "grid" in note and note not in signs]
    if integers is None:
        signs += grid_note(subject.anatomy)
    return list(dict.fromkeys(signs))
