"""What one forward pass over the text shows: the final norm's kernel and the residual stream's smallest singular values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ternary_probe.anatomy import NonFiniteError, explain_non_finite
from ternary_probe.anatomy._trace import call_options, tensors_in
from ternary_probe.errors import ProbeError
from ternary_probe.loading import LoadedModel, wrap
from ternary_probe.measure.covariance import SmallestSingular, smallest_singular
from ternary_probe.measure.depth import DepthProfile, Fall, StreamRecorder, depth_profile, locate_fall, point_groups
from ternary_probe.measure.nll import check_windows
from ternary_probe.measure.norm_kernel import NormKernel, NormMoments

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, NormSite
    from ternary_probe.text import Windows

_SKIPS = frozenset({"pre", "parallel", "scaled"})


class FreshWeightsError(ProbeError):
    """A model cannot be built again from its config."""


@dataclass
class ForwardEvidence:
    """One forward pass over the text.

    Attributes:
        anatomy: The model's anatomy.
        windows: The text.
        tokens: Tokens read.
        distinct_tokens: Different ids among them.
        norm: Moments of the final norm, or None if there is none.
        profile: The depth profile, or None with `profile_exception`.
        profile_exception: Why the premise of a depth profile does not hold: the first block without an identity skip.
    """

    anatomy: Anatomy
    windows: Windows
    tokens: int
    distinct_tokens: int
    norm: NormMoments | None
    profile: DepthProfile | None
    profile_exception: str | None
    _kernel: NormKernel | None = field(default=None, repr=False)

    @property
    def kernel(self) -> NormKernel:
        """The kernel of the final norm's output.

        Raises:
            ProbeError: If the model has no final norm, or the text has no more tokens than the stream dimensions.
        """
        if self.norm is None:
            raise ProbeError(f"{type(self.anatomy.model).__name__} has no norm before its head that could be measured")
        if self._kernel is None:
            self._kernel = self.norm.kernel()
        return self._kernel

    def locate(self, point: int) -> Fall:
        """Find the sub-layer behind a fall of σ_min; the model runs again, up to that block.

        Args:
            point: The block, counted from 1.

        Returns:
            The fall by sub-layer.
        """
        return locate_fall(self.anatomy, list(self.windows.inputs), point, runner(self.anatomy))


def runner(anatomy: Anatomy) -> Callable[[Tensor], object]:
    """Return a function that runs a model through its final norm: without its head, where that can be left out.

    Args:
        anatomy: The model's anatomy.

    Returns:
        Takes token ids ``[batch, tokens]``.
    """
    final, backbone = anatomy.final_norm, anatomy.backbone
    inside = backbone is not None and (final is None or f"{final.name}.".startswith(f"{backbone.name}."))
    options = call_options(anatomy.model)

    def run(ids: Tensor) -> object:
        ids = ids.to(anatomy.input_device)
        return anatomy.head.states(ids) if inside else anatomy.model(ids, **options)

    return run


def premise_exception(anatomy: Anatomy) -> str | None:
    """Return the first block that does not add to the stream unchanged, up to a scalar; None if all do.

    Args:
        anatomy: The model's anatomy.
    """
    if not anatomy.blocks:
        return "no chain of blocks was found"
    odd = next((block for block in anatomy.blocks if block.kind not in _SKIPS), None)
    return None if odd is None else f"{odd.name}: {odd.kind} ({odd.reason})"


@torch.no_grad()
def observe_forward(anatomy: Anatomy, windows: Windows) -> ForwardEvidence:
    """Run the text through the model once and gather what the forward checks read.

    Memory: one fp64 matrix ``[d, d]`` for every block, in several passes where they do not fit `measure.depth.GRAM_BYTES`.

    Args:
        anatomy: The model's anatomy.
        windows: The text.

    Returns:
        The evidence.

    Raises:
        named: `NonFiniteError`, if the model computes NaN or infinity; it says where.
    """
    check_windows(anatomy, windows)
    exception = premise_exception(anatomy)
    site = anatomy.final_norm
    moments = None if site is None else NormMoments(site)
    tokens = int(windows.inputs.numel())
    found: dict[int, SmallestSingular] = {}
    width = 0
    groups: list[range] = [range(0)]
    if exception is None:
        width = anatomy.blocks[0].call.inputs[0].shape[-1]
        if tokens > width:
            groups = point_groups(len(anatomy.blocks), width)
    try:
        for number, points in enumerate(groups):
            recorder = StreamRecorder(anatomy.blocks, points)
            _pass(anatomy, windows, recorder, moments if number == 0 else None)
            for point in points:
                name = (
                    "the input of the first block" if point == 0 else f"the output of {anatomy.blocks[point - 1].name}"
                )
                found[point] = smallest_singular(recorder.grams.pop(point), recorder.dtypes[point], where=name)
        evidence = ForwardEvidence(
            anatomy=anatomy,
            windows=windows,
            tokens=tokens,
            distinct_tokens=windows.distinct_tokens,
            norm=moments,
            profile=depth_profile(anatomy.blocks, found, tokens, width) if found else None,
            profile_exception=exception,
        )
        if moments is not None and tokens > moments.site.law.width:
            _ = evidence.kernel
    except NonFiniteError as error:
        run = runner(anatomy)
        named: NonFiniteError = explain_non_finite(anatomy.model, lambda: [run(ids[None]) for ids in windows.inputs])
        raise named from error
    return evidence


def _pass(anatomy: Anatomy, windows: Windows, recorder: StreamRecorder, moments: NormMoments | None) -> None:
    run = runner(anatomy)
    last: dict[str, Tensor] = {}  # of several calls in one forward, the final norm is the last

    def see(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        last["x"] = next(tensor for _, tensor in tensors_in((args, kwargs)))
        last["y"] = next(tensor for _, tensor in tensors_in(output))

    with ExitStack() as stack:
        stack.enter_context(recorder.recording())
        if moments is not None:
            stack.callback(moments.site.module.register_forward_hook(see, with_kwargs=True).remove)
        for ids in windows.inputs:
            recorder.start()
            run(ids[None])
            if moments is not None:
                moments.add(last["x"], last["y"])
                last.clear()


def freshly_initialised(loaded: LoadedModel, *, seed: int) -> LoadedModel:
    """Build a model of the same class and config with weights as its initialiser draws them.

    Args:
        loaded: The trained model; it is not touched.
        seed: Seed of the weights.

    Returns:
        The fresh model, on the same device, in the same floating dtype, with the same tokenizer.

    Raises:
        FreshWeightsError: If the class cannot be built from the config.
    """
    model = loaded.model
    first = next(parameter for parameter in model.parameters())
    floating = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fresh = type(model)._from_config(plain_config(model), dtype=floating)
    except Exception as error:  # a model's own code may raise anything
        raise FreshWeightsError(
            f"{loaded.source.name} cannot be built anew from its config ({type(error).__name__}: {error}); "
            "leave out --random-init"
        ) from error
    return wrap(fresh.to(first.device), loaded.tokenizer, name=f"{loaded.source.name} (random init)")


def plain_config(model: Any) -> Any:
    """Return a copy of a model's config without its quantization.

    Args:
        model: The model.
    """
    config = copy.deepcopy(model.config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    return config


def site_label(site: NormSite) -> str:
    """Return a norm's name and kind, for messages.

    Args:
        site: The norm.
    """
    return f"{site.name} ({'LayerNorm' if site.kind == 'layer_norm' else 'RMSNorm'})"
