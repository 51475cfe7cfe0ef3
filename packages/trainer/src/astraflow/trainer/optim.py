"""AdamW on fp32 master weights, fed by the gradients of a working copy in the compute dtype.

A working parameter's gradient is added to its fp32 sum as soon as a backward pass has produced it and is then dropped,
so sums over micro-batches lose nothing to bf16 and at most a few bf16 gradients are alive at once. In fp32 the working
parameter is the master itself.

Invariant: a step with a non-finite gradient changes no weight, no moment and no counter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from .config import OptimConfig

EPS = 1e-8


def learning_rate(config: OptimConfig, steps: int) -> float:
    """Of the step after `steps` steps: up from 0 over the warm-up, then constant, or down to `lr_end`, straight or by
    half a cosine."""
    if steps < config.warmup_steps:
        return config.lr * (steps + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (steps - config.warmup_steps) / (config.schedule_steps - config.warmup_steps))
    left = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr_end + (config.lr - config.lr_end) * left


def adamw_step(
    config: OptimConfig,
    lr: float,
    norm: Tensor,
    *,
    masters: list[Tensor],
    grads: list[Tensor],
    moments: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
) -> None:
    """Scale the gradients, whose finite global norm is `norm`, to `config.clip_norm` and update in place."""
    # The fused kernel divides by the scale on its way: one pass over the gradients less.
    scale = (norm / config.clip_norm).clamp(min=1.0) if config.clip_norm else torch.ones_like(norm)
    adamw(
        masters,
        grads,
        moments,
        squares,
        [],
        steps,
        fused=True,
        grad_scale=scale,
        found_inf=torch.zeros_like(scale),
        amsgrad=False,
        beta1=config.beta1,
        beta2=config.beta2,
        lr=lr,
        weight_decay=config.weight_decay,
        eps=EPS,
        maximize=False,
    )


class MasterAdamW:
    """AdamW (arXiv:1711.05101) with global-norm clipping, over named working parameters."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimConfig) -> None:
        self._config = config
        self._working = {name: parameter.detach() for name, parameter in parameters.items()}
        self._masters = {name: tensor.float() for name, tensor in self._working.items()}
        self._grads = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        self._moments1 = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        self._moments2 = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        self._steps = {name: torch.zeros((), device=master.device) for name, master in self._masters.items()}
        self._touched: set[str] = set()
        for name, parameter in parameters.items():
            self._collect(name, parameter)

    @property
    def steps(self) -> int:
        """Optimiser steps made, skipped ones not counted."""
        return int(next(iter(self._steps.values())))

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return learning_rate(self._config, self.steps)

    def leaf(self, name: str) -> Tensor:
        """Another leaf over the storage of parameter `name`, whose gradients join the same sum.

        For a parameter used twice (tied embeddings): autograd then has no dense sum of its own to make.
        """
        leaf = self._working[name].detach().requires_grad_()
        self._collect(name, leaf)
        return leaf

    def gradients(self) -> Mapping[str, Tensor]:
        """The fp32 gradients summed since the last step; views, valid until the next backward or step."""
        for name in self._grads.keys() - self._touched:
            self._grads[name].zero_()
        self._touched.update(self._grads)
        return self._grads

    def forget(self) -> None:
        """Drop the gradients summed so far."""
        self._touched.clear()

    def step(self) -> float:
        """Clip, update masters and working copy, and forget the gradients.

        Returns:
            the gradients' global norm before clipping; not finite if the step was skipped.
        """
        grads = list(self.gradients().values())
        self.forget()
        norm = torch.nn.utils.get_total_norm(grads)
        if not torch.isfinite(norm):
            return float(norm)
        adamw_step(
            self._config,
            self.lr,
            norm,
            masters=list(self._masters.values()),
            grads=grads,
            moments=list(self._moments1.values()),
            squares=list(self._moments2.values()),
            steps=list(self._steps.values()),
        )
        self._publish()
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        """Everything a resume needs, flat: `master.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME` and `step`."""
        step = next(iter(self._steps.values()))
        return {f"{kind}.{name}": tensor for kind, tensors in self._kinds() for name, tensor in tensors.items()} | {
            "step": step
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go back to `state`. Raises KeyError for a missing tensor, RuntimeError for a wrong shape."""
        for kind, tensors in self._kinds():
            for name, tensor in tensors.items():
                tensor.copy_(state[f"{kind}.{name}"])
        for step in self._steps.values():
            step.copy_(state["step"])
        self.forget()
        self._publish()

    def _kinds(self) -> tuple[tuple[str, dict[str, Tensor]], ...]:
        return (("master", self._masters), ("exp_avg", self._moments1), ("exp_avg_sq", self._moments2))

    def _publish(self) -> None:
        for name, master in self._masters.items():
            working = self._working[name]
            if working.data_ptr() != master.data_ptr():
                working.copy_(master)

    def _collect(self, name: str, leaf: Tensor) -> None:
        """Move whatever gradient a backward pass leaves in `leaf` to the sum of parameter `name`."""
        total = self._grads[name]

        def accumulate(parameter: Tensor) -> None:
            grad = parameter.grad
            assert grad is not None
            if name in self._touched:
                total.add_(grad)
            elif grad.is_sparse:
                total.zero_().add_(grad)
            else:
                total.copy_(grad)
            self._touched.add(name)
            parameter.grad = None

        leaf.register_post_accumulate_grad_hook(accumulate)  # type: ignore[no-untyped-call]
