"""A value model beside the policy, for generalised advantage estimation: the same body, one linear head.

Invariant: V of a trained token is read off the hidden state that predicts it, so a value never sees the token it is
the baseline of; before the first step every value is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .config import CriticConfig
from .model import Inputs, load_model
from .optim import MasterAdamW

PREFIX = "critic."


class Critic:
    """V(state) per trained token, trained on the batch's returns with its own optimiser."""

    def __init__(self, model: str, config: CriticConfig, *, dtype: torch.dtype, device: str) -> None:
        body = load_model(model, dtype=dtype, device=device).base_model
        assert isinstance(body, nn.Module)
        self._body: Any = body
        self._head = nn.Parameter(torch.zeros(body.config.hidden_size, dtype=torch.float32, device=device))  # type: ignore[union-attr, arg-type]
        self._clip = config.clip
        self._optimizer = MasterAdamW(dict(body.named_parameters()) | {"value_head": self._head}, config)

    @torch.no_grad()
    def values(self, micros: Sequence[Inputs]) -> Tensor:
        """float32 [N], of all trained tokens in the order of the samples."""
        result = torch.empty(sum(inputs.index.numel() for inputs in micros), device=self._head.device)
        for inputs in micros:
            result[inputs.index] = self._forward(inputs)
        return result

    def step(self, micros: Sequence[Inputs], before: Tensor, returns: Tensor, weights: Tensor) -> tuple[float, float]:
        """One optimiser step on a mini-batch: values `before` the batch, `returns` and loss `weights`, all [N].

        The loss is max((V - R)^2, (clip(V, before +- c) - R)^2) / 2 (PPO's implementation, arXiv:2005.12729).

        Returns:
            the loss, and the gradients' norm (not finite: nothing changed).
        """
        total = 0.0
        for inputs in micros:
            index = inputs.index
            values = self._forward(inputs)
            error = (values - returns[index]).square()
            if self._clip:
                near = before[index] + (values - before[index]).clamp(-self._clip, self._clip)
                error = torch.maximum(error, (near - returns[index]).square())
            loss = (weights[index] * error).sum() / 2
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total, self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        return {PREFIX + name: tensor for name, tensor in self._optimizer.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Raises KeyError for a missing tensor."""
        self._optimizer.restore({name.removeprefix(PREFIX): t for name, t in state.items() if name.startswith(PREFIX)})

    def _forward(self, inputs: Inputs) -> Tensor:
        hidden = self._body(
            input_ids=inputs.tokens[None], position_ids=inputs.positions[None], use_cache=False, spans=inputs.spans
        ).last_hidden_state[0]
        values = hidden[inputs.heads].float() @ self._head
        result: Tensor = values[inputs.pair_heads[inputs.copies]]
        return result
