"""The models of `tiny_models.py` as GGUF files, written by the gguf package the way llama.cpp's converter does it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import gguf
import numpy as np

from tiny_models import BOS_ID, CHAT_TEMPLATE, EOS_ID, SPECIAL_TOKENS, VARIANTS, FloatArray, Variant, tokenizer, weights

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "granite": "granite",
    "smollm3": "smollm3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
}


_UNSAYABLE = ("qwen3-bias", "qwen3-moe-some", "olmo2-bias")
"""llama.cpp reads no biases, and no layers without experts, for these architectures."""


def has_gguf(name: str) -> bool:
    """Whether the format can say what the variant is: it knows no dynamic rope or other activation, and for most families no window."""
    variant = VARIANTS[name]
    config = variant.config
    window = bool(config.get("sliding_window")) and variant.family not in ("gemma2", "gemma3")
    return variant.rope["rope_type"] != "dynamic" and not window and "hidden_act" not in config and name not in _UNSAYABLE


def write_gguf(path: Path, name: str, *, quant: str = "F32") -> Path:
    """Write a variant with its matrices as `quant` (a ggml type that the gguf package can make: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0,
    Q5_1; rows must be multiples of its block), vectors and routers as F32. Returns the path."""
    if not has_gguf(name):
        raise ValueError(f"{name} can't be said in GGUF")
    variant = VARIANTS[name]
    writer = gguf.GGUFWriter(path, ARCHITECTURES[variant.family])
    _add_settings(writer, variant)
    _add_tokenizer(writer, variant)
    kind = gguf.GGMLQuantizationType[quant]
    for tensor, values in _tensors(name, variant).items():
        if values.ndim == 1 or "ffn_gate_inp" in tensor:
            writer.add_tensor(tensor, values)
        else:
            writer.add_tensor(tensor, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_settings(writer: gguf.GGUFWriter, variant: Variant) -> None:
    config = variant.config
    # Not the family's: transformers takes "mistral" for an architecture, llama.cpp "phi3" for a vocabulary with certain tokens.
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if "head_dim" in config:
        writer.add_key_length(variant.head_dim)
        writer.add_value_length(variant.head_dim)
    rope = variant.rope
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * variant.head_dim))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        window = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(window)
        recommended = math.sqrt(1 + math.log(rope.get("factor", 1.0)) / math.log(window)) if window > 1 else 0.0
        writer.add_rope_scaling_attn_factors(rope.get("attention_factor", recommended))
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if variant.family == "granite":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if variant.family in ("gemma2", "gemma3"):
        writer.add_sliding_window(config["sliding_window"])
    if variant.family == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _add_tokenizer(writer: gguf.GGUFWriter, variant: Variant) -> None:
    pieces = {index: piece for piece, index in tokenizer().get_vocab().items()}
    size = variant.config["vocab_size"]
    kinds = [gguf.TokenType.CONTROL if i < len(SPECIAL_TOKENS) else gguf.TokenType.NORMAL for i in range(len(pieces))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    # The converter fills up to the embedding's rows like this.
    writer.add_token_list([pieces.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types([*kinds, *[gguf.TokenType.UNUSED] * (size - len(pieces))])
    merges = json.loads(tokenizer().to_str())["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _tensors(name: str, variant: Variant) -> dict[str, FloatArray]:
    config = variant.config
    architecture = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == ARCHITECTURES[variant.family])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    tensors: dict[str, FloatArray] = {}
    for tensor, values in _stacked(weights(name)).items():
        paired = ARCHITECTURES[variant.family] in ("llama", "granite", "smollm3")
        if paired and ".q_proj." in tensor:
            values = _interleave(values, config["num_attention_heads"])
        elif paired and ".k_proj." in tensor:
            values = _interleave(values, config["num_key_value_heads"])
        if variant.family in ("gemma2", "gemma3") and tensor.endswith("norm.weight"):
            values = values + np.float32(1.0)
        stored = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        assert stored is not None, tensor
        tensors[stored] = values
    if variant.rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = _llama3_factors(variant)
    if variant.rope["rope_type"] == "longrope":
        tensors |= {f"rope_factors_{kind}.weight": np.array(variant.rope[f"{kind}_factor"], dtype=np.float32) for kind in ("long", "short")}
    return tensors


def _stacked(weights: dict[str, FloatArray]) -> dict[str, FloatArray]:
    """One tensor for all experts of a layer, under the names that the converter gives before it maps them."""
    merged: dict[str, FloatArray] = {}
    stacks: dict[str, list[FloatArray]] = {}
    for tensor, values in weights.items():
        if ".experts." in tensor:
            name = re.sub(r"\.experts\.\d+\.", ".experts.", tensor)
            stacks.setdefault(re.sub(r"^model\.(.*)\.block_sparse_moe\.", r"\1.feed_forward.", name), []).append(values)
        else:
            merged[tensor] = values
    return merged | {name: np.stack(values) for name, values in stacks.items()}


def _interleave(values: FloatArray, heads: int) -> FloatArray:
    """Rows of each head from halves (i, i + d/2) to pairs (2i, 2i + 1)."""
    return values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _llama3_factors(variant: Variant) -> FloatArray:
    """What llama.cpp's converter makes of Llama 3's settings."""
    rope = variant.rope
    window, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for frequency in 1.0 / rope["rope_theta"] ** (np.arange(0, variant.head_dim, 2) / variant.head_dim):
        wavelength = 2 * math.pi / frequency
        if wavelength < window / high:
            factors.append(1.0)
        elif wavelength > window / low:
            factors.append(rope["factor"])
        else:
            smooth = (window / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)
