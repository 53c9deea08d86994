"""A resolved model's weights as a bf16 checkpoint in Hugging Face layout, for peers that can't read its file."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from sterna.config.model_config import ModelConfig
from sterna.models.spec import GatedMLPSpec, ModelSpec
from sterna.models.weights import WeightStore

NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "attn.q": "self_attn.q_proj.weight",
    "attn.k": "self_attn.k_proj.weight",
    "attn.v": "self_attn.v_proj.weight",
    "attn.o": "self_attn.o_proj.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
}
"""Canonical -> the llama family's, within a layer where it has one."""


def write(resolved: Path, target: Path) -> None:
    """Make the folder `target` (whole, or not at all) from a resolved model of the llama family."""
    spec = msgspec.json.decode((resolved / "spec.json").read_bytes(), type=ModelSpec)
    unfinished = target.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    (unfinished / "config.json").write_text(json.dumps(_config(spec, ModelConfig.load(resolved))))
    (unfinished / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    shutil.copy(resolved / "tokenizer.json", unfinished)
    store = WeightStore.open(resolved)
    _write_safetensors(unfinished / "model.safetensors", store)
    unfinished.rename(target)


def _config(spec: ModelSpec, facts: ModelConfig) -> dict[str, object]:
    layer = spec.layers[0]
    mixer, mlp = layer.mixer, layer.mlp
    if (
        not isinstance(mlp, GatedMLPSpec)
        or mixer.rope is None
        or mixer.rope.scaling is not None
        or any(each != layer for each in spec.layers)
    ):
        raise ValueError("only plain llama models can be handed to a peer")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": mlp.intermediate,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "hidden_act": mlp.activation,
        "rms_norm_eps": spec.final_norm_eps,
        "rope_theta": mixer.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": mixer.rope.theta},
        "max_position_embeddings": facts.context_len,
        "tie_word_embeddings": spec.tied_head,
        "bos_token_id": facts.bos_token_id,
        "eos_token_id": list(facts.eos_token_ids),
    }


def _write_safetensors(path: Path, store: WeightStore) -> None:
    """The format: eight bytes of header length, a JSON header (name -> type, shape, byte range), the tensors' bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    names = sorted(store.names())
    for name in names:
        begin, end = end, end + 2 * int(np.prod(store.shape(name)))
        header[_theirs(name)] = {"dtype": "BF16", "shape": store.shape(name), "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(bfloat16(store.float32(name)).tobytes())


def _theirs(name: str) -> str:
    inner = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    return f"model.layers.{inner[1]}.{NAMES[inner[2]]}" if inner else NAMES[name]


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of float32 numbers, rounded to nearest, ties to even. No NaN is expected."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
