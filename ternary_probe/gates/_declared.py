"""Which kind of norm a model's config asks for, found by building its class without weights and probing its norms."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import torch

from ternary_probe.anatomy._norm_law import NormKind, NormLaw, find_law
from ternary_probe.gates._forward import plain_config

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy

logger = logging.getLogger(__name__)


class DeclaredKinds(NamedTuple):
    """Kinds by the norm's name, as the config's class builds them; or why that is not known.

    Attributes:
        kinds: Those that could be probed.
        problem: Why there are none, or empty.
    """

    kinds: dict[str, NormKind]
    problem: str


def declared_kinds(anatomy: Anatomy) -> DeclaredKinds:
    """Build the model's class from its config on the meta device, and probe the modules that are norms in the live model.

    Args:
        anatomy: The live model's anatomy.

    Returns:
        What the config declares.
    """
    model = anatomy.model
    build = getattr(type(model), "_from_config", None)
    if build is None:
        return DeclaredKinds({}, f"{type(model).__name__} has no config it could be built from")
    try:
        with torch.device("meta"):
            plain = build(plain_config(model))
    except Exception as error:  # a model's own code may raise anything
        logger.info("cannot build %s without weights", type(model).__name__, exc_info=True)
        return DeclaredKinds({}, f"{type(model).__name__} cannot be built without weights ({type(error).__name__})")
    modules = dict(plain.named_modules())
    kinds: dict[str, NormKind] = {}
    for site in anatomy.norms:
        if site.name in modules:
            law = _probe(modules[site.name], site.law.width)
            if law is not None:
                kinds[site.name] = law.kind
    return DeclaredKinds(kinds, "")


def _probe(module: torch.nn.Module, width: int) -> NormLaw | None:
    real = module.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in real.parameters():
            parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    law = find_law(real, (1, 16, width), 0)
    return law if isinstance(law, NormLaw) else None
