"""A Llama as a pure function of its parameters, which keep their Hugging Face names and shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from safetensors.torch import load_file

Params = dict[str, Array]


class Shape(NamedTuple):
    """What of a configuration the forward pass needs; hashable, so that it can be a static argument."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float
    tied: bool
    vocab: int


def read_shape(directory: Path) -> Shape:
    """Raises ValueError for a model that this forward pass would compute wrongly."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    plain = (
        config["model_type"] == "llama"
        and config.get("hidden_act", "silu") == "silu"
        and not config.get("attention_bias")
        and not config.get("mlp_bias")
        and rope.get("rope_type", "default") == "default"
    )
    if not plain:
        raise ValueError(f"{directory} is a {config['model_type']} that is not a plain Llama; train it with torch")
    return Shape(
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        theta=float(rope.get("rope_theta") or config.get("rope_theta", 10000.0)),
        eps=config["rms_norm_eps"],
        tied=config.get("tie_word_embeddings", False),
        vocab=config["vocab_size"],
    )


def read_params(directory: Path, shape: Shape) -> Params:
    """fp32, every tensor of the directory's safetensors files; a tied head is left out."""
    params = {}
    for path in sorted(directory.glob("*.safetensors")):
        params |= {name: jnp.asarray(tensor.float().numpy()) for name, tensor in load_file(path).items()}
    if shape.tied:
        params.pop("lm_head.weight", None)
    return params


def hidden_states(params: Params, tokens: Array, shape: Shape) -> Array:
    """tokens int32 [B, L] -> [B, L, H], causal; rows are padded at their end, which no earlier token sees."""
    length = tokens.shape[1]
    cos, sin = _rotary(length, shape)
    mask = jnp.tril(jnp.ones((length, length), bool))
    x = params["model.embed_tokens.weight"][tokens]
    for layer in range(shape.layers):
        name = f"model.layers.{layer}."
        x = x + _attention(
            params, name + "self_attn.", _norm(params, name + "input_layernorm", x, shape), cos, sin, mask, shape
        )
        y = _norm(params, name + "post_attention_layernorm", x, shape)
        gate = jax.nn.silu(_linear(params, name + "mlp.gate_proj", y)) * _linear(params, name + "mlp.up_proj", y)
        x = x + _linear(params, name + "mlp.down_proj", gate)
    return _norm(params, "model.norm", x, shape)


def token_logprobs(params: Params, tokens: Array, temperatures: Array, shape: Shape) -> tuple[Array, Array]:
    """log p of tokens 1 … L-1 after those before them, and the entropy there: float32 [B, L - 1] each; `temperatures`
    float32 [B]."""
    hidden = hidden_states(params, tokens, shape)[:, :-1]
    head = params["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
    logits = (hidden @ head.T).astype(jnp.float32) / temperatures[:, None, None]
    table = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(table, tokens[:, 1:, None], -1)[..., 0]
    return chosen, -(jnp.exp(table) * table).sum(-1)


def _linear(params: Params, name: str, x: Array) -> Array:
    return x @ params[name + ".weight"].T


def _norm(params: Params, name: str, x: Array, shape: Shape) -> Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + shape.eps)
    return params[name + ".weight"] * y.astype(x.dtype)


def _rotary(length: int, shape: Shape) -> tuple[Array, Array]:
    frequencies = shape.theta ** (-jnp.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = jnp.arange(length)[:, None] * jnp.concatenate([frequencies, frequencies])
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    half = x.shape[-1] // 2
    turned = jnp.concatenate([-x[..., half:], x[..., :half]], -1)
    return (x * cos + turned * sin).astype(x.dtype)


def _attention(params: Params, name: str, x: Array, cos: Array, sin: Array, mask: Array, shape: Shape) -> Array:
    batch, length, _ = x.shape

    def heads(projection: str, count: int) -> Array:
        return _linear(params, name + projection, x).reshape(batch, length, count, -1).transpose(0, 2, 1, 3)

    query = _rotate(heads("q_proj", shape.heads), cos, sin)
    key = _rotate(heads("k_proj", shape.kv_heads), cos, sin)
    value = heads("v_proj", shape.kv_heads)
    query = query.reshape(batch, shape.kv_heads, -1, length, shape.head_dim)
    scores = jnp.einsum("bgrqd,bgkd->bgrqk", query, key).astype(jnp.float32) * shape.head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)).astype(x.dtype)
    mixed = jnp.einsum("bgrqk,bgkd->bgrqd", weights, value).reshape(batch, shape.heads, length, shape.head_dim)
    return _linear(params, name + "o_proj", mixed.transpose(0, 2, 1, 3).reshape(batch, length, -1))
