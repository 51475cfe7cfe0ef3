"""Pairs of weight versions as training makes them: a small language model trained for real, then one more update.

The model reads Python's standard library byte by byte. Its last optimiser steps are taken at a learning rate so small
that the gradient hardly sees them; their displacement of the fp32 masters is then scaled, as the learning rate would
scale it, until the wanted share of the bf16 values changes. So positions, sizes and signs of the changes are
AdamW's, not random flips.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 768, 3, 12, 128, 8
STEPS, WARM_UP, RATE = 80, 10, 1e-3
LAST_STEPS = 4
LAST_RATE = 1e-6
_VOCABULARY = 256

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]


class Trained(NamedTuple):
    """fp32 masters by name, and how far the last optimiser steps moved them per unit of learning rate."""

    masters: dict[str, F32]
    displacement: dict[str, F32]

    def before(self) -> dict[str, U16]:
        """The bf16 bits that are published."""
        return {name: bf16(master) for name, master in self.masters.items()}

    def after(self, share: float) -> dict[str, U16]:
        """The bf16 bits after an update that changes `share` of them (within 1 % of it)."""
        before = self.before()
        low, high = 0.0, 1e-2
        while True:
            rate = (low * high) ** 0.5 if low else high / 8
            after = {name: bf16(master + rate * self.displacement[name]) for name, master in self.masters.items()}
            changed = sum(int(np.count_nonzero(before[name] != after[name])) for name in before)
            reached = changed / sum(bits.size for bits in before.values())
            if abs(reached - share) < 0.01 * share:
                return after
            low, high = (rate, high) if reached < share else (low, rate)


def bf16(values: F32) -> U16:
    """The bits of finite fp32 rounded to the nearest bf16, ties to even, as torch does."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def trained(seed: int, cache: Path) -> Trained:
    """The model of `seed`, from `cache` or trained now: about a minute on two cores. Needs torch."""
    settings = (seed, WIDTH, LAYERS, HEADS, CONTEXT, BATCH, STEPS, WARM_UP, RATE, LAST_STEPS, LAST_RATE)
    path = cache / f"trained-{hashlib.sha256(repr(settings).encode()).hexdigest()[:12]}.npz"
    if not path.exists():
        made = _train(seed)
        cache.mkdir(parents=True, exist_ok=True)
        _save(path, made)
    with np.load(path, allow_pickle=False) as stored:
        names = [key.removeprefix("master.") for key in stored.files if key.startswith("master.")]
        return Trained(
            {name: stored[f"master.{name}"] for name in names},
            {name: stored[f"displacement.{name}"] for name in names},
        )


def _save(path: Path, made: Trained) -> None:
    temporary = path.with_name(f".{path.name}")
    arrays = {f"master.{name}": array for name, array in made.masters.items()}
    arrays |= {f"displacement.{name}": array for name, array in made.displacement.items()}
    with temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    temporary.rename(path)


def _train(seed: int) -> Trained:
    import torch
    from torch.nn import functional

    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    random = torch.Generator().manual_seed(seed)
    parameters = _parameters(random)
    optimiser = torch.optim.AdamW(parameters.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)

    def step(rate: float) -> None:
        starts = torch.randint(0, len(data) - CONTEXT - 1, (BATCH,), generator=random)
        ids = torch.stack([data[start : start + CONTEXT + 1] for start in starts]).long()
        loss = functional.cross_entropy(_logits(parameters, ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimiser.param_groups[0]["lr"] = rate
        optimiser.step()

    for number in range(STEPS):
        decay = (1 + math.cos(math.pi * number / STEPS)) / 2
        step(RATE * min((number + 1) / WARM_UP, 0.1 + 0.9 * decay))
    masters = {name: parameter.detach().double() for name, parameter in parameters.items()}
    for _ in range(LAST_STEPS):
        step(LAST_RATE)
    moved = {name: (parameter.detach().double() - masters[name]) / LAST_RATE for name, parameter in parameters.items()}
    return Trained(
        {name: master.float().numpy() for name, master in masters.items()},
        {name: displacement.float().numpy() for name, displacement in moved.items()},
    )


def _parameters(random: torch.Generator) -> dict[str, torch.Tensor]:
    """A pre-norm decoder's, named and shaped as in a Hugging Face checkpoint of that kind."""
    import torch

    shapes = {"embed_tokens": (_VOCABULARY, WIDTH), "positions": (CONTEXT, WIDTH), "lm_head": (_VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.qkv": (3 * WIDTH, WIDTH),
            f"layers.{layer}.out": (WIDTH, WIDTH),
            f"layers.{layer}.up": (4 * WIDTH, WIDTH),
            f"layers.{layer}.down": (WIDTH, 4 * WIDTH),
        }
    parameters = {name: 0.02 * torch.randn(shape, generator=random) for name, shape in shapes.items()}
    parameters |= {f"layers.{layer}.norm{side}": torch.ones(WIDTH) for layer in range(LAYERS) for side in (1, 2)}
    parameters["norm"] = torch.ones(WIDTH)
    return {name: parameter.requires_grad_() for name, parameter in parameters.items()}


def _logits(parameters: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Next-byte logits [batch, length, vocabulary] of int64 `ids` [batch, length]."""
    from torch.nn.functional import gelu, rms_norm, scaled_dot_product_attention

    def norm(values: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(values, (WIDTH,), parameters[name], eps=1e-6)

    batch, length = ids.shape
    hidden = parameters["embed_tokens"][ids] + parameters["positions"][:length]
    for layer in range(LAYERS):
        own = f"layers.{layer}."
        heads = (norm(hidden, own + "norm1") @ parameters[own + "qkv"].T).view(batch, length, 3, HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + mixed @ parameters[own + "out"].T
        inner = gelu(norm(hidden, own + "norm2") @ parameters[own + "up"].T)
        hidden = hidden + inner @ parameters[own + "down"].T
    return norm(hidden, "norm") @ parameters["lm_head"].T
