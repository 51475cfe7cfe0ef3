"""A policy's model and optimiser spread over the ranks of torchrun by FSDP2: each holds its rows of every tensor.

fp32 masters are the sharded parameters themselves; a layer is gathered in the compute dtype while it is used, and its
gradients are summed over the ranks in fp32. Invariant: a rank's loss is its own tokens' share of the whole
mini-batch's, so sums over ranks are the gradients one process would have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from astraflow.weightsync import Piece, shards_of

from .config import OptimConfig
from .model import Inputs, head_weight, load_model, micro_logprobs
from .optim import adamw_step, learning_rate
from .ranks import Ranks
from .state_files import Span

KINDS = ("master", "exp_avg", "exp_avg_sq")


class _Scored(nn.Module):
    """A causal language model whose forward pass ends in log-probabilities: all it needs is gathered within it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return micro_logprobs(self.model, head_weight(self.model), inputs)


def _shard(directory: str | Path, ranks: Ranks, *, dtype: torch.dtype, device: str) -> _Scored:
    """Load the whole model and keep this rank's rows."""
    assert ranks.mesh is not None
    model = load_model(directory, dtype=torch.float32, device=device)
    scored = _Scored(model)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    layers: Sequence[nn.Module] = model.base_model.layers  # type: ignore[assignment, union-attr]
    for layer in layers:
        fully_shard(layer, mesh=ranks.mesh, mp_policy=precision)
    fully_shard(scored, mesh=ranks.mesh, mp_policy=precision)
    for module in scored.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return scored


class ShardedFrozen:
    """A policy that is only scored, its rows spread over the ranks."""

    def __init__(self, directory: str | Path, ranks: Ranks, *, dtype: torch.dtype, device: str) -> None:
        self._scored = _shard(directory, ranks, dtype=dtype, device=device).requires_grad_(False)

    def score(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        scores: tuple[Tensor, Tensor] = self._scored(inputs)
        return scores


class ShardedLearner:
    """`Learner` on one of several ranks; every method is called on all of them."""

    def __init__(
        self, directory: str | Path, config: OptimConfig, ranks: Ranks, *, dtype: torch.dtype, device: str
    ) -> None:
        self._config, self._ranks, self._dtype = config, ranks, dtype
        self._scored = _shard(directory, ranks, dtype=dtype, device=device)
        self.model = self._scored.model
        self._parameters: dict[str, DTensor] = {}
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter, DTensor)
            self._parameters[name] = parameter
        self.vocab_size = len(head_weight(self.model))
        masters = {name: _local(parameter) for name, parameter in self._parameters.items()}
        self._state = {
            "master": masters,
            "exp_avg": {name: torch.zeros_like(master) for name, master in masters.items()},
            "exp_avg_sq": {name: torch.zeros_like(master) for name, master in masters.items()},
        }
        self._steps = torch.zeros((), device=device)

    @property
    def lr(self) -> float:
        return learning_rate(self._config, int(self._steps))

    def score(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        scores: tuple[Tensor, Tensor] = self._scored(inputs)
        return scores

    def gradients(self) -> Mapping[str, Tensor]:
        """Gathered: for tests and inspection."""
        return {name: grad.full_tensor() for name, grad in self._grads().items()}

    def forget(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self) -> float:
        grads = {name: grad.to_local() for name, grad in self._grads().items()}
        squares = torch.stack([grad.square().sum() for grad in grads.values()]).sum()
        self._ranks.sum(squares)
        self.forget()
        norm = squares.sqrt()
        if not math.isfinite(norm):
            return float(norm)
        held = [name for name, grad in grads.items() if grad.numel()]
        adamw_step(
            self._config,
            self.lr,
            norm,
            masters=[self._state["master"][name] for name in held],
            grads=[grads[name] for name in held],
            moments=[self._state["exp_avg"][name] for name in held],
            squares=[self._state["exp_avg_sq"][name] for name in held],
            steps=[self._steps.clone() for _ in held],
        )
        self._steps += 1
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        state = {f"{kind}.{name}": tensor for kind in KINDS for name, tensor in self._state[kind].items()}
        return state | {"step": self._steps}

    def spans(self) -> dict[str, Span]:
        pieces = {piece.name: piece for piece in self.pieces(torch.float32)}
        return {f"{kind}.{name}": (piece.row, len(piece.data)) for kind in KINDS for name, piece in pieces.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for kind in KINDS:
            for name, tensor in self._state[kind].items():
                tensor.copy_(state[f"{kind}.{name}"])
        self._steps.copy_(state["step"])
        self.forget()

    def weights(self) -> dict[str, Tensor]:
        return {name: _whole(parameter).to(self._dtype) for name, parameter in self._parameters.items()}

    def pieces(self, dtype: torch.dtype | None = None) -> list[Piece]:
        """This rank's rows of what is published."""
        tensors: dict[str, Any] = {name: parameter.detach() for name, parameter in self._parameters.items()}
        return shards_of(tensors, dtype or self._dtype)

    def _grads(self) -> dict[str, DTensor]:
        grads = {}
        for name, parameter in self._parameters.items():
            grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            assert isinstance(grad, DTensor)
            grads[name] = grad
        return grads


def _local(parameter: DTensor) -> Tensor:
    """This rank's rows, sharing their memory."""
    detached = parameter.detach()
    assert isinstance(detached, DTensor)
    return detached.to_local()


def _whole(parameter: DTensor) -> Tensor:
    detached = parameter.detach()
    assert isinstance(detached, DTensor)
    return detached.full_tensor()
