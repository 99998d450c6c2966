"""What really happened to a model's weights, seen without the library: bits copied, matrices as their modules use them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")  # GPT-2 stores [in, out]


def bits(tensor: Tensor) -> Tensor:
    """A copy of a tensor's bits as integers."""
    return tensor.detach().clone().view(_INTEGERS[tensor.element_size()])


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """The bits of every parameter."""
    return {name: bits(parameter) for name, parameter in model.named_parameters()}


def assert_bit_identical(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Every parameter has the bits it had."""
    after = snapshot(model)
    assert after.keys() == before.keys()
    different = [name for name in before if not torch.equal(after[name], before[name])]
    assert not different


def logical(model: nn.Module, name: str) -> Tensor:
    """A copy of one matrix as ``[out, in]``: experts are the third axis of a stack, GPT-2's linears are transposed."""
    stacked = re.fullmatch(r"(.*)\[(\d+)\]", name)
    if stacked:
        return model.get_parameter(stacked[1])[int(stacked[2])].detach().clone()
    weight = model.get_parameter(name).detach()
    return (weight.t() if _TRANSPOSED.search(name) else weight).clone()


def logical_all(model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """Copies of several matrices."""
    return {name: logical(model, name) for name in names}


def changed(model: nn.Module, before: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Flat row-major entries of every matrix whose bits differ from a copy, sorted."""
    found = {}
    for name, old in before.items():
        different = bits(logical(model, name)) != bits(old)
        found[name] = torch.nonzero(different.reshape(-1))[:, 0].numpy()
    return found


def tokens(batch: int = 2, length: int = 24, *, vocabulary: int = 256, seed: int = 7) -> Tensor:
    """Random token ids."""
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def text_of(ids: Tensor) -> Any:
    """All of `Windows` that measuring activations needs."""
    return SimpleNamespace(inputs=ids)


def logits(model: Any, ids: Tensor) -> Tensor:
    """The model's own logits, float64."""
    with torch.no_grad():
        return model(ids, use_cache=False).logits.double()


def fake_matrix(name: str, out_features: int, in_features: int) -> Any:
    """All of a `WeightMatrix` that planning needs."""
    return SimpleNamespace(name=name, out_features=out_features, in_features=in_features)


def first_columns(matrices: Any, fraction: float) -> dict[str, tuple[int, ...]]:
    """Outlier columns of the right number; which ones does not matter here."""
    return {m.name: tuple(range(int(fraction * m.in_features))) for m in matrices}
