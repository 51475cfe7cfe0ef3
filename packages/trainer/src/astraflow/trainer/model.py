"""The model as the trainer sees it: a micro-batch in, log-probabilities of its trained tokens out.

Works with any `AutoModelForCausalLM` whose attention can be replaced and whose logits are a plain linear map of the
last hidden state; others are refused when loaded, not trained wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from .attention import NAME, Spans
from .logprobs import token_logprobs
from .packing import MicroBatch, Tree


@dataclass(frozen=True, slots=True)
class Inputs:
    """A micro-batch as tensors on the model's device; fields as in `MicroBatch`, `spans` as in `attention`."""

    tokens: Tensor
    positions: Tensor
    spans: Spans
    heads: Tensor
    temperatures: Tensor
    pair_heads: Tensor
    pair_targets: Tensor
    copies: Tensor
    index: Tensor

    @classmethod
    def of(cls, micro: MicroBatch, device: torch.device, dtype: torch.dtype) -> Inputs:
        """Copy `micro` to `device`; attention masks in `dtype`."""
        arrays = (micro.heads, micro.temperatures, micro.pair_heads, micro.pair_targets, micro.copies, micro.index)
        heads, temperatures, pair_heads, pair_targets, copies, index = (torch.from_numpy(a).to(device) for a in arrays)
        return cls(
            tokens=torch.cat([torch.from_numpy(tree.tokens) for tree in micro.trees]).to(device),
            positions=torch.cat([torch.from_numpy(tree.positions) for tree in micro.trees]).to(device),
            spans=[(tree.tokens.size, _mask(tree, device, dtype)) for tree in micro.trees],
            heads=heads,
            temperatures=temperatures,
            pair_heads=pair_heads,
            pair_targets=pair_targets,
            copies=copies,
            index=index,
        )

    def moved(self, by: int) -> Inputs:
        """The same, for tokens that stand `by` further on."""
        return replace(self, index=self.index + by)

    def idle(self) -> Inputs:
        """The same, belonging to no token."""
        return replace(self, index=self.index[:0])


def _mask(tree: Tree, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    if tree.visible is None:
        return None
    hidden = torch.from_numpy(~tree.visible)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).to(device)


def load_model(directory: str | Path, *, dtype: torch.dtype, device: str = "cpu") -> nn.Module:
    """Load a causal language model from a local Hugging Face directory, for packed forward passes.

    Dropout is off, as in every pass that compares log-probabilities.

    Raises:
        ValueError: packing or the log-probability head would not compute what this architecture does.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=NAME, local_files_only=True
    )
    config, name = model.config, type(model).__name__
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise ValueError(f"{name} in {directory}: sliding-window attention is not packed")
    for scaling in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, scaling, None) not in (None, 1, 1.0):
            raise ValueError(f"{name} in {directory}: logits are transformed ({scaling}), the head would be wrong")
    if model.get_output_embeddings().bias is not None:
        raise ValueError(f"{name} in {directory}: an output embedding with a bias is not supported")
    module: nn.Module = model.eval().to(device)
    return module


def head_weight(model: nn.Module) -> nn.Parameter:
    """The output embedding [V, H], which may be the input embedding too."""
    weight = model.get_output_embeddings().weight  # type: ignore[operator]
    assert isinstance(weight, nn.Parameter)
    return weight


def micro_logprobs(model: nn.Module, head: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Forward a micro-batch: log-probability and entropy of each trained token, copies included, float32 [N] each.

    `head` is the output embedding [V, H] to use: the model's own, or a leaf of its own that shares its storage.
    """
    hidden = model.base_model(  # type: ignore[operator]
        input_ids=inputs.tokens[None], position_ids=inputs.positions[None], use_cache=False, spans=inputs.spans
    ).last_hidden_state[0]
    logprobs, entropy = token_logprobs(
        hidden[inputs.heads], head, inputs.temperatures, inputs.pair_heads, inputs.pair_targets
    )
    return logprobs[inputs.copies], entropy[inputs.pair_heads[inputs.copies]]
