from __future__ import annotations

import pytest
import torch

from ternary_probe.errors import ProbeError
from ternary_probe.measure.grid import find_grid


def on_grid(bits: int, group: int, rows: int = 8, columns: int = 512) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits * 1000 + group)
    codes = torch.randint(0, 2**bits, (rows, columns // group, group), generator=generator)
    scale = torch.rand((rows, columns // group, 1), generator=generator) + 0.5
    offset = torch.randn((rows, columns // group, 1), generator=generator)
    return (codes * scale + offset).reshape(rows, columns)


@pytest.mark.parametrize(("bits", "group"), [(2, 16), (3, 32), (4, 32), (4, 64), (4, 128), (6, 256)])
def test_a_planted_grid_is_found_with_its_bits(bits, group):
    grid = find_grid(on_grid(bits, group))
    assert grid is not None
    assert grid.bits == bits
    assert grid.group == group


def test_a_ternary_matrix_with_one_scale_lies_on_a_2_bit_grid_per_row():
    grid = find_grid(torch.randint(-1, 2, (8, 300)).float() * 0.3)
    assert grid is not None
    assert (grid.bits, grid.group) == (2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gaussian_weights_lie_on_no_grid(dtype):
    generator = torch.Generator().manual_seed(0)
    assert find_grid(torch.randn(64, 2048, generator=generator).to(dtype)) is None


def test_integer_weights_are_refused():
    with pytest.raises(ProbeError, match="floating"):
        find_grid(torch.zeros(4, 4, dtype=torch.uint8))


@pytest.mark.slow
def test_the_demo_model_lies_on_its_4_bit_grid(demo_model):
    weight = demo_model.model.get_parameter("model.layers.3.mlp.up_proj.weight")
    grid = find_grid(weight)
    assert grid is not None
    assert (grid.bits, grid.group) == (4, 32)
