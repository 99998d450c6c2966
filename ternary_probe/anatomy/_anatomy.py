"""`examine`: one recorded forward and a few probes, and what they say about a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from ternary_probe.anatomy._accounting import Accounted, account, unhandled_parameters
from ternary_probe.anatomy._blocks import Block, find_blocks
from ternary_probe.anatomy._checks import SelfCheck, run_checks
from ternary_probe.anatomy._collect import Unhandled, collect
from ternary_probe.anatomy._finite import explain_non_finite
from ternary_probe.anatomy._head import Backbone, ChunkedHead, find_backbone
from ternary_probe.anatomy._matrix import StorageError, WeightMatrix
from ternary_probe.anatomy._norms import NormCalls, NormSite, find_norm_calls, place_norms
from ternary_probe.anatomy._readers import prove_readers
from ternary_probe.anatomy._skips import ResidualStream, classify, probe_skips, residual_stream
from ternary_probe.anatomy._trace import Trace, call_options, logits_of, record
from ternary_probe.errors import ProbeError

_PROBE_SHAPE = (2, 16)


class AnatomyError(ProbeError):
    """A model cannot be examined, or does not have what was asked for."""


@dataclass(eq=False)
class Anatomy:
    """What one recorded forward and a few probes found in a model.

    Attributes:
        model: The live model.
        matrices: Every weight that is contracted with an activation, in execution order: tied storage once, one for
            each expert.
        blocks: The blocks, in execution order.
        residual_stream: How the blocks add to it.
        norms: Every norm, in execution order.
        final_norm: The last norm before the head, or None.
        backbone: The module whose output the head receives, or None.
        unhandled: Parameters and structure that cannot be handled, with the reason.
        accounted: Every parameter by its use.
        input_device: Where token ids must be.
        vocab_size: Number of logits.
        checks: Self-checks by name.
    """

    model: nn.Module = field(repr=False)
    matrices: tuple[WeightMatrix, ...]
    blocks: tuple[Block, ...]
    residual_stream: ResidualStream
    norms: tuple[NormSite, ...]
    final_norm: NormSite | None
    backbone: Backbone | None
    unhandled: tuple[Unhandled, ...]
    accounted: Accounted
    input_device: torch.device
    vocab_size: int
    checks: dict[str, SelfCheck] = field(default_factory=dict)

    @cached_property
    def block_matrices(self) -> tuple[WeightMatrix, ...]:
        """The matrices that lie in a block."""
        return tuple(matrix for matrix in self.matrices if matrix.block is not None)

    @cached_property
    def head(self) -> ChunkedHead:
        """The model's own head, to be applied in chunks."""
        return ChunkedHead(self)

    @property
    def backbone_name(self) -> str | None:
        """Qualified name of the backbone, or None."""
        return None if self.backbone is None else self.backbone.name

    @property
    def head_matrix(self) -> WeightMatrix | None:
        """The matrix that makes the logits, or None."""
        return None if self.backbone is None else self._by_name.get(self.backbone.head)

    @property
    def head_name(self) -> str | None:
        """Name of the matrix that makes the logits, or None."""
        return None if self.backbone is None else self.backbone.head

    @cached_property
    def _by_name(self) -> dict[str, WeightMatrix]:
        return {name: matrix for matrix in self.matrices for name in (matrix.name, *matrix.aliases)}

    def matrix(self, name: str) -> WeightMatrix:
        """Return a matrix by its name or one of its aliases.

        Args:
            name: Qualified name.

        Returns:
            The matrix.

        Raises:
            AnatomyError: If there is none of that name.
        """
        if name not in self._by_name:
            raise AnatomyError(f"the model has no weight matrix named {name!r}: `ternary-probe inspect` lists them")
        return self._by_name[name]

    def norm(self, name: str) -> NormSite:
        """Return a norm by the name of its module.

        Args:
            name: Qualified name.

        Returns:
            The norm.

        Raises:
            AnatomyError: If there is none of that name.
        """
        for site in self.norms:
            if site.name == name:
                return site
        raise AnatomyError(f"the model has no norm named {name!r}: `ternary-probe inspect` lists them")


def examine(model: nn.Module, *, input_ids: Tensor | None = None, seed: int = 0) -> Anatomy:
    """Find a model's anatomy by running it on a few tokens; every parameter is left bit for bit as it was.

    Args:
        model: A causal language model in eval mode, wholly in memory.
        input_ids: Tokens to probe it with, ``[batch, tokens]``; 32 random ids by default.
        seed: Seed of the random ids.

    Returns:
        The anatomy.

    Raises:
        AnatomyError: If the model is in training mode, or no weight matrix can be found in it.
        NonFiniteError: If its logits are NaN.
    """
    _require_usable(model)
    if any(module.training for module in model.modules()):
        raise AnatomyError(
            f"{type(model).__name__} is in training mode, where two forwards may differ: call model.eval()"
        )
    device = _input_device(model)
    ids = _random_ids(model, seed).to(device) if input_ids is None else input_ids.to(device)
    options = call_options(model)

    @torch.no_grad()
    def forward(tokens: Tensor) -> Tensor:
        return logits_of(model(tokens, **options)).float()

    def run() -> Tensor:
        return forward(ids)

    trace = record(model, ids)
    logits = run() if trace.switched_experts else trace.logits.float()
    if torch.isnan(logits).any():
        error = explain_non_finite(model, run)
        raise error
    blocks = find_blocks(trace)
    collected = collect(model, trace, blocks)
    if not collected.matrices:
        raise AnatomyError(_nothing_found(model))
    tolerance = _tolerance(model)
    norm_calls = find_norm_calls(trace)
    adding = _classify(model, trace, blocks, collected.matrices, norm_calls, run, tolerance)
    norms = place_norms(trace, norm_calls, blocks, collected.matrices, adding)
    accounted = account(model, trace, collected.matrices, norms.norms, collected.unhandled)
    oriented = {entry.name for entry in collected.unhandled}
    unhandled = [
        *collected.unhandled,
        *norm_calls.unhandled,
        *(entry for entry in unhandled_parameters(model, trace, accounted) if entry.name not in oriented),
        *(
            Unhandled(name, "it is copied for every token before the product: its inputs cannot be watched")
            for name in sorted(trace.gathered)
        ),
    ]
    anatomy = Anatomy(
        model=model,
        matrices=collected.matrices,
        blocks=blocks,
        residual_stream=residual_stream(blocks),
        norms=norms.norms,
        final_norm=norms.final,
        backbone=find_backbone(trace, blocks),
        unhandled=tuple(unhandled),
        accounted=accounted,
        input_device=device,
        vocab_size=logits.shape[-1],
    )
    prove_readers(anatomy.norms, {matrix.name: matrix for matrix in anatomy.matrices}, run)
    with torch.no_grad():
        anatomy.checks = run_checks(anatomy, ids, logits, forward, tolerance)
    return anatomy


def _classify(
    model: nn.Module,
    trace: Trace,
    blocks: tuple[Block, ...],
    matrices: tuple[WeightMatrix, ...],
    norms: NormCalls,
    run: Callable[[], Tensor],
    tolerance: float,
) -> frozenset[str]:
    if not blocks:
        return frozenset()
    skips = probe_skips(model, blocks, matrices, run)
    return classify(trace, blocks, skips, norms.names, max(tolerance, 1e-4))


def _require_usable(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise StorageError(
                f"{name} is offloaded or was never loaded (meta device), so an edit would do nothing: "
                "load the model wholly into memory"
            )


def _tolerance(model: nn.Module) -> float:
    """Return the relative difference of logits that counts as rounding in the coarsest dtype of the model."""
    floating = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    return 4 * max(torch.finfo(dtype).eps for dtype in floating)


def _input_device(model: nn.Module) -> torch.device:
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(embeddings, "weight", None)
    return weight.device if isinstance(weight, Tensor) else next(model.parameters()).device


def _random_ids(model: nn.Module, seed: int) -> Tensor:
    sizes = []
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(embeddings, "weight", None)
    if isinstance(weight, Tensor):
        sizes.append(int(weight.shape[0]))
    config = getattr(model, "config", None)
    if config is not None:
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        sizes.append(int(getattr(text, "vocab_size", None) or 0))
    sizes = [size for size in sizes if size > 0]
    if not sizes:
        raise AnatomyError(f"the vocabulary of {type(model).__name__} is not known: pass input_ids")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, min(sizes), _PROBE_SHAPE, generator=generator)


def _nothing_found(model: nn.Module) -> str:
    stored = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if not p.is_floating_point()}
    if stored:
        return f"the weights of {type(model).__name__} are stored as {', '.join(sorted(stored))}: dequantize the model first"
    return f"no weight of {type(model).__name__} was seen to be contracted with an activation: it cannot be examined"
