"""`TrainerBackend` in JAX: clipped surrogates, optax's AdamW on fp32 masters, rows padded to few shapes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax import Array
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from astraflow.dataflow import TrainBatch
from astraflow.trainer import (
    Example,
    Groups,
    LossConfig,
    PolicySpec,
    StepResult,
    TrainerConfig,
    examples,
    minibatches,
    normalized,
    token_advantages,
)
from astraflow.trainer.losses import load_loss, token_weights

from .llama import Params, Shape, read_params, read_shape, token_logprobs
from .rows import padded

Floats = NDArray[np.float32]


class Tokens(NamedTuple):
    """Of trained tokens [N] or, spread over rows, [B, L - 1]: what the loss needs."""

    old: Floats | Array
    advantages: Floats | Array
    weights: Floats | Array
    reference: Floats | Array


class JaxTrainer:
    """One policy on JAX's default device. Knows the losses m2po, ppo and grpo; refuses options it would ignore."""

    def __init__(self, spec: PolicySpec, config: TrainerConfig, /) -> None:
        loss = config.loss
        if loss.name not in ("m2po", "ppo", "grpo") or loss.proximal or loss.entropy or loss.kl_in_reward:
            raise ValueError(f"the JAX trainer has m2po, ppo and grpo with k1, k2, k3 as a loss; asked for {loss}")
        if config.critic.enabled:
            raise ValueError("the JAX trainer has no critic")
        self._spec, self._config = spec, config
        self._loss = load_loss(loss)
        self._shape = read_shape(Path(spec.model))
        self._params = read_params(Path(spec.model), self._shape)
        self._dtype = jnp.dtype(config.dtype)
        self._reference: Params | None = None
        if loss.kl:
            self._reference = read_params(Path(spec.reference or spec.model), self._shape)
        warmup = config.warmup_steps
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
            optax.adamw(
                lambda count: config.lr * jnp.minimum(1.0, (count + 1) / warmup) if warmup else config.lr,
                b1=config.beta1,
                b2=config.beta2,
                weight_decay=config.weight_decay,
            ),
        )
        self._state = self._optimizer.init(self._params)
        self._update = jax.jit(self._apply)

    def step(self, batch: TrainBatch, /) -> StepResult:
        started = time.perf_counter()
        rows = examples(batch, self._spec.model_id, self._shape.vocab)
        lengths = np.array([row.trained.size for row in rows])
        raw, _ = token_advantages(self._config.advantage, Groups.of(rows), lengths)
        advantages = normalized(self._config.advantage, raw, lengths).astype(np.float32)
        reference = self._logprobs(self._reference, rows) if self._reference is not None else None
        metrics: list[dict[str, float]] = []
        first = token = 0
        for part in minibatches(rows, self._config.minibatches):
            size = int(lengths[first : first + len(part)].sum())
            cut = slice(token, token + size)
            parts = self._minibatch(part, advantages[cut], None if reference is None else reference[cut], batch.version)
            metrics.append(parts)
            first, token = first + len(part), token + size
        names = {name for part in metrics for name in part}
        means = {name: float(np.mean([part[name] for part in metrics if name in part])) for name in names}
        for name in ("mismatch_mean", "mismatch_max"):  # before any update: the first mini-batch's
            means.pop(name, None)
            means |= {name: metrics[0][name]} if name in metrics[0] else {}
        means["skipped"] = float(sum(part["skipped"] for part in metrics))
        means["reward_mean"] = float(np.mean([row.reward for row in rows]))
        means["tokens"] = float(lengths.sum())
        means["tokens_per_s"] = sum(row.tokens.size for row in rows) / (time.perf_counter() - started)
        return StepResult(metrics=means)

    def weights(self) -> dict[str, torch.Tensor]:
        dtype = getattr(torch, self._config.dtype)
        return {name: torch.from_numpy(np.array(value)).to(dtype) for name, value in self._params.items()}

    def save(self, directory: Path, /) -> None:
        leaves = jax.tree.leaves((self._params, self._state))
        save_file({f"{i:06d}": np.array(leaf) for i, leaf in enumerate(leaves)}, directory / "training.safetensors")

    def load(self, directory: Path, /) -> None:
        saved = load_file(directory / "training.safetensors")
        tree = jax.tree.structure((self._params, self._state))
        self._params, self._state = jax.tree.unflatten(tree, [jnp.asarray(saved[name]) for name in sorted(saved)])

    def export(self, directory: Path, /) -> None:
        for path in Path(self._spec.model).iterdir():
            if path.suffix in {".json", ".jinja", ".txt", ".model"} and "index" not in path.name:
                shutil.copyfile(path, directory / path.name)
        save_torch(self.weights(), directory / "model.safetensors", metadata={"format": "pt"})

    def _minibatch(
        self, rows: Sequence[Example], advantages: Floats, reference: Floats | None, version: int
    ) -> dict[str, float]:
        """One optimiser step."""
        old = np.concatenate([row.logprobs for row in rows])
        lengths = torch.tensor([row.trained.size for row in rows])
        weights = token_weights(lengths, torch.tensor([row.weight for row in rows]), self._config.loss).numpy()
        table = Tokens(old, advantages, weights, np.zeros_like(old) if reference is None else reference)
        before = self._logprobs(self._params, rows)
        low, high, _ = self._loss.range(*(torch.from_numpy(a) for a in (before, old, advantages)))
        total, entropy, grads = 0.0, 0.0, jax.tree.map(jnp.zeros_like, self._params)
        for part in padded(rows, self._config.micro_tokens):
            spread = Tokens(*(part.spread(column) for column in table))
            (loss, entropies), gradient = _gradients(
                self._params, part.tokens, part.temperatures, spread, low, high,
                shape=self._shape, dtype=self._dtype, config=self._config.loss,
            )  # fmt: skip
            grads = jax.tree.map(jnp.add, grads, gradient)
            total += float(loss)
            entropy += float(np.asarray(entropies)[part.trained].sum())
        norm = float(optax.tree.norm(grads))
        metrics = {
            "loss": total,
            "entropy": entropy / len(old),
            "ratio_mean": float(np.exp(np.clip(before - old, -20, 20)).mean()),
            "skipped": float(not np.isfinite(norm)),
        }
        if reference is not None:
            metrics["kl"] = float(np.mean(np.expm1(reference - before) - (reference - before)))
        current = np.abs(before - old)[np.concatenate([row.versions for row in rows]) == version]
        if current.size:
            metrics |= {"mismatch_mean": float(current.mean()), "mismatch_max": float(current.max())}
        if np.isfinite(norm):
            metrics["grad_norm"] = norm
            self._params, self._state = self._update(grads, self._params, self._state)
        return {name: value for name, value in metrics.items() if np.isfinite(value)}

    def _logprobs(self, params: Params, rows: Sequence[Example]) -> Floats:
        result = np.empty(sum(row.trained.size for row in rows), np.float32)
        for part in padded(rows, self._config.micro_tokens):
            logprobs = _forward(params, part.tokens, part.temperatures, shape=self._shape, dtype=self._dtype)
            result[part.index] = np.asarray(logprobs)[part.trained]
        return result

    def _apply(self, grads: Params, params: Params, state: optax.OptState) -> tuple[Params, optax.OptState]:
        updates, state = self._optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state


def _cast(params: Params, dtype: jnp.dtype) -> Params:
    return {name: value.astype(dtype) for name, value in params.items()}


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _forward(params: Params, tokens: Array, temperatures: Array, *, shape: Shape, dtype: jnp.dtype) -> Array:
    return token_logprobs(_cast(params, dtype), tokens, temperatures, shape)[0]


@partial(jax.jit, static_argnames=("shape", "dtype", "config"))
def _gradients(
    params: Params,
    tokens: Array,
    temperatures: Array,
    table: Tokens,
    low: float,
    high: float,
    *,
    shape: Shape,
    dtype: jnp.dtype,
    config: LossConfig,
) -> tuple[tuple[Array, Array], Params]:
    """((the weighted sum of token losses, entropies [B, L - 1]), its gradient)."""

    def loss(params: Params) -> tuple[Array, Array]:
        logprobs, entropy = token_logprobs(_cast(params, dtype), tokens, temperatures, shape)
        ratio = jnp.exp(jnp.clip(logprobs - table.old, -20, 20))
        terms = jnp.maximum(-ratio * table.advantages, -jnp.clip(ratio, low, high) * table.advantages)
        if config.dual_clip:
            terms = jnp.where(table.advantages < 0, jnp.minimum(terms, -config.dual_clip * table.advantages), terms)
        if config.kl:
            apart = jnp.clip(table.reference - logprobs, -20, 20)
            kl = {"k1": -apart, "k2": apart**2 / 2, "k3": jnp.expm1(apart) - apart}[config.kl_estimate]
            terms = terms + config.kl * kl
        # where, not a product: padding may hold infinities
        return jnp.where(table.weights != 0, terms * table.weights, 0).sum(), entropy

    return jax.value_and_grad(loss, has_aux=True)(params)
