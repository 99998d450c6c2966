"""Models written for these tests, which no library knows."""

from __future__ import annotations

import torch
from torch import nn

IDS = torch.arange(24).view(2, 12)


class Block(nn.Module):
    """One branch of a norm and a matrix, added to its input by a rule."""

    def __init__(self, rule: str = "pre", width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.rule = rule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        branch = self.linear(normed)
        return {
            "pre": lambda: x + branch,
            "scaled": lambda: 0.5 * x + branch,
            "none": lambda: branch,
            "post": lambda: self.norm(x + self.linear(x)),
            "gated": lambda: x * branch.sigmoid() + branch,
            "leaky": lambda: x + self.linear(normed + normed.tanh()) + branch,
        }[self.rule]()


class Stack(nn.Module):
    """Table, blocks, norm, head."""

    def __init__(self, *rules: str) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(Block(rule) for rule in rules)
        self.last: nn.Module = nn.LayerNorm(16)
        self.head = nn.Linear(16, 40)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


class Unusual(nn.Module):
    """Weights outside any linear module: grouped (groups, in, out), on the left, cast and scaled; and one unused."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grouped = nn.Parameter(torch.randn(2, 6, 9) * 0.2)
            self.left = nn.Parameter(torch.randn(12, 18) * 0.2)
            self.cast = nn.Parameter(torch.randn(12, 12).double() * 0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            halves = x.reshape(-1, 2, 6).transpose(0, 1)
            wide = torch.bmm(halves, self.grouped).transpose(0, 1).reshape(-1, 18).tanh()
            branch = (self.left @ wide.T).T
            return x + (branch @ (0.5 * self.cast.float())).view_as(x)

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 12)
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))
        self.idle = nn.Parameter(torch.randn(4, 4))
        self.head = nn.Linear(12, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def seeded(make: type[nn.Module], *arguments: str) -> nn.Module:
    """Build a model with seeded weights and moved gains, ready to be examined."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make(*arguments)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.3 * torch.randn(parameter.shape)
    return model.eval().requires_grad_(False)
