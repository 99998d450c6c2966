"""Recipe strings and recipe JSON, read back into recipes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ternary_probe.errors import ProbeError
from ternary_probe.perturb.column_flip import ColumnFlip
from ternary_probe.perturb.composed import Composed
from ternary_probe.perturb.entry_flip import EntryFlip
from ternary_probe.perturb.magnitude import Magnitude
from ternary_probe.perturb.outlier_columns import OutlierColumns
from ternary_probe.perturb.recipe import Perturbation
from ternary_probe.perturb.sign_flip import SignFlip
from ternary_probe.perturb.ternarize import Ternarize

KINDS: dict[str, type[Perturbation]] = {
    "sign_flip": SignFlip,
    "magnitude": Magnitude,
    "column_flip": ColumnFlip,
    "outlier_columns": OutlierColumns,
    "ternarize": Ternarize,
    "entry_flip": EntryFlip,
}
_COLUMN_OPTIONS = ("columns", "fraction", "by")
_FROZEN = {"kind", "counts", "parts", "spared"}
_LISTS = {"include", "exclude", "roles"}


def parse(text: str) -> Perturbation:
    """Read a recipe string: ``sign_flip:rate=0.005,columns=outlier,seed=3``; several joined by ``+`` apply in order.

    Args:
        text: ``kind:name=value,…``. Lists (``columns``, ``include``, ``exclude``, ``roles``) are separated by ``;``.

    Returns:
        The recipe; unresolved where it depends on activations.

    Raises:
        ProbeError: If the kind, an option or a value is not known; the message names the nearest one.
    """
    pieces = re.split(r"\+(?!\d|ls\b)", text)  # not the plus sign of an exponent, k=1e+16, or of a scheme, absmean+ls
    parts = [_parse_one(piece.strip()) for piece in pieces]
    return parts[0] if len(parts) == 1 else _build(Composed, {"parts": parts}, text)


def from_description(data: Mapping[str, Any]) -> Perturbation:
    """Read a recipe back from the JSON of `Perturbation.describe`.

    Args:
        data: The description.

    Returns:
        An equal recipe.

    Raises:
        ProbeError: If it is no description of a recipe.
    """
    if not isinstance(data, Mapping):
        raise ProbeError(f"recipe JSON must be an object with a kind, not {type(data).__name__}")
    kinds: dict[str, type[Perturbation]] = {**KINDS, "composed": Composed}
    kind = kinds.get(str(data.get("kind")))
    if kind is None:
        raise ProbeError(f"recipe JSON has kind {data.get('kind')!r}; known are {', '.join(kinds)}")
    return _build(kind, dict(data), str(data.get("kind")))


def _parse_one(text: str) -> Perturbation:
    name, _, rest = text.partition(":")
    kind = KINDS.get(name.strip())
    if kind is None:
        raise ProbeError(
            f"unknown recipe {name.strip()!r}{_nearest(name.strip(), KINDS)}; known are {', '.join(KINDS)}"
        )
    options: dict[str, str] = {}
    for item in filter(None, (piece.strip() for piece in rest.split(","))):
        key, equals, value = item.partition("=")
        if not equals:
            raise ProbeError(f"recipe option {item!r} of {name} is not of the form name=value")
        if key.strip() in options:
            raise ProbeError(f"recipe option {key.strip()!r} of {name} is given twice")
        options[key.strip()] = value.strip()
    return _build(kind, _fields(kind, options), text)


def _fields(kind: type[Perturbation], options: dict[str, str]) -> dict[str, Any]:
    """Turn option texts into the kind's fields; refuse unknown names."""
    selects_columns = kind not in {OutlierColumns, Ternarize, EntryFlip}
    known = [n for n in kind.model_fields if n not in _FROZEN]
    known += [n for n in _COLUMN_OPTIONS if n not in known and selects_columns]
    fields: dict[str, Any] = {}
    columns: dict[str, Any] = {}
    for key, value in options.items():
        if key not in known:
            raise ProbeError(
                f"unknown option {key!r} of {kind.model_fields['kind'].default}{_nearest(key, known)}; "
                f"known are {', '.join(known)}"
            )
        if key in _LISTS:
            fields[key] = tuple(filter(None, value.split(";")))
        elif key == "columns" and not selects_columns:
            fields[key] = _integers(value)
        elif key == "columns":
            columns.update(_selection(value))
        elif key in _COLUMN_OPTIONS:
            columns[key] = value
        else:
            fields[key] = value
    if columns:
        default = kind.model_fields["columns"].default.model_dump()
        fields["columns"] = {**default, **columns}
    return fields


def _selection(text: str) -> dict[str, Any]:
    if text in {"all", "outlier", "other"}:
        return {"select": text}
    if not any(character.isdigit() for character in text):
        raise ProbeError(f"columns={text} is neither all, outlier, other nor a list like 3;17;99")
    return {"select": "listed", "listed": _integers(text)}


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(piece) for piece in text.split(";") if piece)
    except ValueError:
        raise ProbeError(f"columns={text} is not a list of column numbers like 3;17;99") from None


def _build(kind: type[Perturbation], data: dict[str, Any], text: str) -> Perturbation:
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(piece) for piece in first["loc"]) or "recipe"
        given = f" (got {first['input']!r})" if first["type"] != "missing" else ""
        raise ProbeError(f"recipe {text!r}: {where}: {first['msg'].lower()}{given}") from None


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
