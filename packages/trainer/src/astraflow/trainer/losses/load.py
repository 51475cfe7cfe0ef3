"""A loss by its name: one of ours, or a function of the user's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from torch import Tensor

from ..config import LOSS_NAMES, LossConfig
from .clipped import Clipped, fixed_range
from .gspo import Gspo
from .interface import LossInputs, PolicyLoss, RatioRange, TokenLoss
from .soft import Cispo, Sapo

LossFunction = Callable[[LossInputs, LossConfig], TokenLoss]
"""A loss of the user's own: `loss.name = "package.module:function"`."""


class UserLoss:
    """A function as a `PolicyLoss`; its range is only reported."""

    whole_minibatch = False

    def __init__(self, function: LossFunction, config: LossConfig) -> None:
        self._function, self._config = function, config

    def range(self, logprobs: Tensor, old: Tensor, advantages: Tensor) -> RatioRange:
        return fixed_range(self._config, logprobs, old, advantages)

    def tokens(self, inputs: LossInputs, bounds: RatioRange) -> TokenLoss:
        result = self._function(inputs, self._config)
        shapes = {tuple(tensor.shape) for tensor in result}
        if shapes != {tuple(inputs.logprobs.shape)}:
            raise ValueError(
                f"{self._config.name} gave arrays of {sorted(shapes)} for {tuple(inputs.logprobs.shape)} tokens"
            )
        return result


def load_loss(config: LossConfig) -> PolicyLoss:
    """Raises ValueError for a name that is neither known nor a function that can be imported."""
    if config.name in ("m2po", "ppo", "grpo"):
        return Clipped(config)
    if config.name == "gspo":
        return Gspo(config)
    if config.name == "sapo":
        return Sapo(config)
    if config.name == "cispo":
        return Cispo(config)
    return UserLoss(_function(config.name), config)


def _function(path: str) -> LossFunction:
    module, _, name = path.partition(":")
    if not name:
        raise ValueError(f"loss {path!r} is none of {', '.join(LOSS_NAMES)} and no package.module:function")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"loss {path!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"loss {path!r} is no function")
    return function  # type: ignore[no-any-return]
