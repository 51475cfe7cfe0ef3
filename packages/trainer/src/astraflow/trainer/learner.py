"""A policy's model with its optimiser, on one device: scores micro-batches and makes steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .config import OptimConfig
from .model import Inputs, head_weight, load_model, micro_logprobs
from .optim import MasterAdamW
from .state_files import Span


class Scorer(Protocol):
    """Scores micro-batches."""

    def score(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each trained token of the micro-batch, float32 each, differentiable."""
        ...


class Learner(Scorer, Protocol):
    """A scorer that learns. `model` is the transformers model (of which FSDP may hold a shard)."""

    model: Any
    vocab_size: int

    @property
    def lr(self) -> float: ...

    def gradients(self) -> Mapping[str, Tensor]:
        """The fp32 gradients summed since the last step, whole, by parameter name."""
        ...

    def forget(self) -> None:
        """Drop the gradients summed so far."""
        ...

    def step(self) -> float:
        """Clip and update; the gradients' global norm before clipping, not finite if nothing changed."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What a resume needs, of the rows held here."""
        ...

    def spans(self) -> dict[str, Span]:
        """Of `state`'s tensors, which rows those are; whole tensors are left out."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None: ...

    def weights(self) -> dict[str, Tensor]:
        """Tensors of the published dtype by name, tied ones once; whole, on rank 0 at least."""
        ...


class Frozen:
    """A policy that is only scored: the reference."""

    def __init__(self, directory: str | Path, *, dtype: torch.dtype, device: str) -> None:
        self._model = load_model(directory, dtype=dtype, device=device).requires_grad_(False)

    def score(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return micro_logprobs(self._model, head_weight(self._model), inputs)


class LocalLearner:
    """`Learner` in one process: a working copy in the compute dtype, fp32 masters beside it."""

    def __init__(self, directory: str | Path, config: OptimConfig, *, dtype: torch.dtype, device: str) -> None:
        self.model = load_model(directory, dtype=dtype, device=device)
        parameters = dict(self.model.named_parameters())
        self.optimizer = MasterAdamW(parameters, config)
        # Input and output embedding get leaves of their own: the sums of a (tied) embedding's dense gradients are
        # the largest tensors of a backward pass, and only a few of its rows are read.
        embedding = self.model.get_input_embeddings()  # type: ignore[operator]
        if isinstance(embedding, nn.Embedding) and device == "cpu":
            embedding.sparse = True
        head = head_weight(self.model)
        self.vocab_size = len(head)
        self._head = self.optimizer.leaf(next(name for name, tensor in parameters.items() if tensor is head))

    @property
    def lr(self) -> float:
        return self.optimizer.lr

    def score(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return micro_logprobs(self.model, self._head, inputs)

    def gradients(self) -> Mapping[str, Tensor]:
        return self.optimizer.gradients()

    def forget(self) -> None:
        self.optimizer.forget()

    def step(self) -> float:
        return self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        return self.optimizer.state()

    def spans(self) -> dict[str, Span]:
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.optimizer.restore(state)

    def weights(self) -> dict[str, Tensor]:
        unique: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in self.model.state_dict().items():
            unique.setdefault(tensor.data_ptr(), (name, tensor))
        return dict(unique.values())
