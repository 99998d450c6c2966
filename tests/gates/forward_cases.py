"""Models, texts and planted faults of the tests of checks that read one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
import zoo
from tiny import tiny_tokenizer
from torch import nn

from ternary_probe.gates import Evidence, GateOptions, Subject, all_checks
from ternary_probe.loading import LoadedModel, wrap
from ternary_probe.records import Finding
from ternary_probe.text import Protocol, Windows, make_windows, read_text

OPTIONS = GateOptions(window=64, windows=8)
"""512 tokens: 16 a dimension of the zoo's models."""


def subject(model: Any, options: GateOptions = OPTIONS, *, name: str = "made") -> Subject:
    loaded = model if isinstance(model, LoadedModel) else wrap(model, tiny_tokenizer(), name=name)
    return Subject(loaded, options)


def run_check(name: str, model: Any, base: Any = None, options: GateOptions = OPTIONS, **limits: Any) -> list[Finding]:
    """Run one check on a model under changed thresholds."""
    check = all_checks()[name]
    judged = model if isinstance(model, Subject) else subject(model, options)
    against = base if base is None or isinstance(base, Subject) else subject(base, options, name="base")
    return list(check.body(Evidence(judged, against, judged.options), check.limits(**limits)))


def text_windows(windows: int = 8, window: int = 64) -> Windows:
    return make_windows(read_text(), tiny_tokenizer(), window=window, windows=windows)


def random_windows(tokens: int, vocabulary: int, *, length: int = 64, seed: int = 0) -> Windows:
    """Random ids, for models whose vocabulary is wider than the tiny tokenizer's."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (-(-tokens // length), length), generator=generator)
    described = text_windows(1).protocol
    protocol = Protocol(**(described.model_dump() | {"text": "random ids", "window": length, "windows": len(ids)}))
    scored = torch.ones_like(ids, dtype=torch.bool)
    scored[:, -1] = False
    return Windows(ids, ids.roll(-1, 1), scored, protocol, (0, ids.numel()))


def with_windows(model: Any, windows: Windows, options: GateOptions = OPTIONS, *, name: str = "made") -> Subject:
    """A subject that reads these windows instead of the text."""
    made = subject(model, options, name=name)
    made.__dict__["_cut"] = (read_text(), windows)
    return made


def built(model_class: str, config_class: str, *, seed: int = 0, **fields: Any) -> Any:
    """A random-init model of transformers as its class draws it."""
    config = getattr(transformers, config_class)(**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config)
    return model.eval().requires_grad_(False)


def wide_gpt2(layers: int, *, plant: int | None = None, seed: int = 0) -> Subject:
    """A random-init GPT-2 of width 256 with 1,280 random ids to read; with a fall planted in one block's MLP on request."""
    sizes = {"n_embd": 256, "n_layer": layers, "n_head": 4, "n_positions": 128, "vocab_size": 1024}
    model = built("GPT2LMHeadModel", "GPT2Config", seed=seed, bos_token_id=1, eos_token_id=2, **sizes)
    windows = random_windows(1280, 1024, length=128)
    if plant is not None:
        plant_fall(model, model.transformer.h[plant], "mlp", "ln_2", windows)
    return with_windows(model, windows)


@torch.no_grad()
def streams(model: Any, blocks: list[nn.Module], windows: Windows) -> list[np.ndarray]:
    """Input of the first block and output of every block, ``[tokens, width]`` float64, all tokens held: the slow way."""
    kept: list[list[np.ndarray]] = [[] for _ in range(len(blocks) + 1)]

    def array(value: Any) -> np.ndarray:
        tensor = value if isinstance(value, torch.Tensor) else value[0]
        return tensor.double().reshape(-1, tensor.shape[-1]).numpy()

    def before(_module: Any, args: Any, kwargs: Any) -> None:
        kept[0].append(array(args[0] if args else kwargs["hidden_states"]))

    def after(position: int) -> Callable[..., None]:
        return lambda _module, _args, output: kept[position].append(array(output))

    handles = [blocks[0].register_forward_pre_hook(before, with_kwargs=True)]
    handles += [block.register_forward_hook(after(number)) for number, block in enumerate(blocks, start=1)]
    for ids in windows.inputs:
        model(ids[None])
    for handle in handles:
        handle.remove()
    return [np.concatenate(parts) for parts in kept]


def dense_sigma_min(rows: np.ndarray) -> float:
    return float(np.linalg.svd(rows, compute_uv=False)[-1])


class Cancelling(nn.Module):
    """A sub-layer that also takes most of one direction out of the stream: what is left of it is ``keep``.

    Args:
        inner: The sub-layer.
        norm: The norm before it, whose input is the stream.
        direction: Unit vector.
        keep: Share of the direction left.
    """

    def __init__(self, inner: nn.Module, norm: nn.Module, direction: torch.Tensor, keep: float) -> None:
        super().__init__()
        self.inner = inner
        width = direction.numel()
        self.cancel = nn.Linear(width, width, bias=False, dtype=next(inner.parameters()).dtype)
        with torch.no_grad():
            self.cancel.weight.copy_(-(1 - keep) * torch.outer(direction, direction))
        self._stream: list[torch.Tensor] = []
        norm.register_forward_pre_hook(self._see)

    def _see(self, _module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._stream[:] = [args[0]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        first = output if isinstance(output, torch.Tensor) else output[0]
        changed = first + self.cancel(self._stream[0] + first)
        return changed if isinstance(output, torch.Tensor) else (changed, *output[1:])


def plant_fall(
    model: Any, block: nn.Module, part: str, norm: str, windows: Windows, keep: float = 1 / 18, *, centred: bool = False
) -> None:
    """Let a sub-layer of a block cancel the stream's weakest direction: σ_min falls to ``keep`` of what it was.

    ``centred`` takes a direction orthogonal to the constant one, so that it stays dead when a LayerNorm takes the mean out.
    """
    rows = streams(model, [block], windows)[1]
    if centred:
        rows = rows - rows.mean(1, keepdims=True)
    weakest = np.linalg.svd(rows, full_matrices=False)[2][-2 if centred else -1]
    direction = torch.from_numpy(weakest.copy()).float()
    setattr(block, part, Cancelling(getattr(block, part), getattr(block, norm), direction, keep))
    block.requires_grad_(False)


@cache
def trained_neox() -> tuple[Any, tuple[Any, ...]]:
    """A GPT-NeoX trained on the sample text for seconds: the model, and its state at every saved step."""
    model = zoo.build("gpt_neox", hidden_size=64, intermediate_size=128)
    windows = text_windows(24, 64)
    model.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    saved = []
    for step in range(41):
        if step % 10 == 0:
            saved.append({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
        ids = windows.inputs[(torch.arange(8) + 8 * step) % 24]
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().requires_grad_(False)
    model.load_state_dict(saved[-1])
    return model, tuple(saved)
