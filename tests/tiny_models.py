"""Tiny random models of every family, made in a moment from a seed: as Hugging Face folders here, as GGUF files in `tiny_gguf.py`.

Weights are exact functions of (variant, tensor name) on every platform: uniform numbers of NumPy's frozen legacy generator under
correctly rounded arithmetic. So references made from them once can be kept (`tests/data`). Their scale makes layers outweigh the
embedding and attention sharp, so that greedy output wanders and a fault in rope, masks or biases shows in it.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

FloatArray = NDArray[np.float32]

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BOS_ID, EOS_ID = 1, 2

MERGES = """t h|th e|Ġ the|i n|a n|Ġ a|e r|o n|r e|Ġ t|Ġ s|Ġ w|Ġ c|e n|o r|a t|e s|Ġ o
in g|an d|Ġ and|o f|Ġ of|Ġ in|i t|i s|o u|Ġ f|Ġ b|Ġ p|h e|l l|e d|Ġ m
a r|a l|Ġ to|t o|Ġ d|Ġ h|i c|o m|l e|s t|Ġ l|Ġ n|v e|r o|Ġ y|Ġy ou|Ġ re|i on|c h
Ġ g|u s|u r|s e|Ġ =|Ġ e|i l|l o|a s|Ġt h|Ã ©|ã ģ|ä ¸|ð Ł|Ċ Ċ|Ġ Ġ|ĠĠ ĠĠ"""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_BASE: dict[str, Any] = {
    "vocab_size": 336,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 16}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
_QWEN3_EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 96, "head_dim": 32}

_MODEL_TYPES = {"gemma3": "gemma3_text"}
"""transformers' `model_type`, where it isn't the family's name."""


_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}


@dataclass(frozen=True)
class Variant:
    """One tiny model: a family and what its config says beyond `_BASE`."""

    family: str
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """config.json's settings, in transformers 5's layout."""
        settings = {**_BASE, **self.changes}
        rope = settings.get("rope_parameters", {})
        # By kind of layer, or for all.
        settings["rope_parameters"] = rope if "full_attention" in rope else {**_ROPE, **rope}
        return settings

    @property
    def model_type(self) -> str:
        return _MODEL_TYPES.get(self.family, self.family)

    @property
    def rope(self) -> dict[str, Any]:
        """The rope's settings; where kinds of layers differ, those of the full ones."""
        rope: dict[str, Any] = self.config["rope_parameters"]
        return rope.get("full_attention", rope)

    @property
    def head_dim(self) -> int:
        return int(self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"])


def _scaled(family: str, rope_type: str, **settings: Any) -> Variant:
    head_dim = {"head_dim": 32} if family == "qwen3" else {}
    return Variant(family, {"rope_parameters": {"rope_type": rope_type, **settings}, **head_dim})


_YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

_GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}

_PHI3: dict[str, Any] = {"tie_word_embeddings": False, "original_max_position_embeddings": 512, "pad_token_id": 0}


def _longrope(pairs: int, **settings: Any) -> dict[str, Any]:
    short, long = [1.0 + 0.25 * i for i in range(pairs)], [1.5 + i * i for i in range(pairs)]
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **settings}


VARIANTS: dict[str, Variant] = {
    "llama": Variant("llama"),
    "llama-untied": Variant("llama", {"tie_word_embeddings": False}),
    "llama-bias": Variant("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": Variant("llama", {"head_dim": 32}),
    "llama-every-head": Variant("llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": Variant("llama", {"num_key_value_heads": 1}),
    "llama-gelu": Variant("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-linear": _scaled("llama", "linear", factor=4.0),
    "llama-dynamic": _scaled("llama", "dynamic", factor=2.0),
    "llama-llama3": _scaled("llama", "llama3", **_LLAMA3),
    "llama-yarn": _scaled("llama", "yarn", **_YARN),
    # Rows of 256: what GGUF's k-quants need.
    "llama-wide": Variant("llama", {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}),
    "mistral": Variant("mistral", {"sliding_window": None, "tie_word_embeddings": False}),
    "mistral-window": Variant("mistral", {"sliding_window": 16}),
    "qwen2": Variant("qwen2"),
    "qwen2-untied": Variant("qwen2", {"tie_word_embeddings": False}),
    "qwen2-window": Variant("qwen2", {**_WINDOW, "max_window_layers": 1}),
    "qwen2-yarn": _scaled("qwen2", "yarn", **_YARN),
    "qwen3": Variant("qwen3", {"head_dim": 32}),
    "qwen3-bias": Variant("qwen3", {"head_dim": 32, "attention_bias": True}),
    "qwen3-window": Variant(
        "qwen3", {"head_dim": 32, **_WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    ),
    "qwen3-untied": Variant("qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
    "qwen3-yarn": _scaled("qwen3", "yarn", **_YARN),
    "mixtral": Variant("mixtral", {**_EXPERTS, "num_local_experts": 4, "sliding_window": None}),
    "mixtral-window": Variant("mixtral", {**_EXPERTS, "num_local_experts": 4, "sliding_window": 16}),
    "qwen3-moe": Variant("qwen3_moe", {**_EXPERTS, **_QWEN3_EXPERTS, "norm_topk_prob": True}),
    "qwen3-moe-some": Variant("qwen3_moe", {**_EXPERTS, **_QWEN3_EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "phi3": Variant("phi3", _PHI3),
    "phi3-window": Variant("phi3", {**_PHI3, "sliding_window": 16, "partial_rotary_factor": 0.75}),
    "phi3-short": Variant("phi3", {**_PHI3, "rope_parameters": _longrope(8, factor=4.0)}),
    # Past its first token a sequence is longer than the original window: transformers takes the long factors, as Sterna always does.
    "phi3-long": Variant(
        "phi3",
        {
            **_PHI3,
            "original_max_position_embeddings": 1,
            "rope_parameters": _longrope(6, attention_factor=1.25, partial_rotary_factor=0.75),
        },
    ),
    "olmo2": Variant("olmo2", {"tie_word_embeddings": False}),
    "olmo2-bias": Variant("olmo2", {"tie_word_embeddings": False, "attention_bias": True}),
    "granite": Variant(
        "granite", {"embedding_multiplier": 0.5, "attention_multiplier": 0.4, "residual_multiplier": 1.5, "logits_scaling": 4.0}
    ),
    "smollm3": Variant("smollm3", {"num_hidden_layers": 4, "pad_token_id": 0}),
    "smollm3-window": Variant("smollm3", {**_WINDOW, "no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "gemma2": Variant(
        "gemma2",
        {**_GEMMA, "num_hidden_layers": 4, "attn_logit_softcapping": 6.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": Variant(
        "gemma3",
        {
            **_GEMMA,
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


def weights(name: str) -> dict[str, FloatArray]:
    """A variant's tensors by Hugging Face name, float32."""
    variant = VARIANTS[name]
    values = {tensor: _random(f"{name}/{tensor}", shape, tensor) for tensor, shape in _shapes(variant).items()}
    if variant.family in ("gemma2", "gemma3"):
        # Its norms multiply by 1 + weight, and its embeddings by the root of the width.
        values |= {tensor: norm - np.float32(1.0) for tensor, norm in values.items() if tensor.endswith("norm.weight")}
        values["model.embed_tokens.weight"] /= np.float32(8.0)
    if variant.family == "olmo2":
        # A norm over all heads leaves scores small.
        values |= {tensor: norm * np.float32(2.0) for tensor, norm in values.items() if tensor.endswith(("q_norm.weight", "k_norm.weight"))}
    return values


def weights_sha256(name: str) -> str:
    """Identifies a variant's weights: a reference says which ones it was made from."""
    digest = hashlib.sha256()
    for tensor, values in sorted(weights(name).items()):
        digest.update(tensor.encode() + values.tobytes())
    return digest.hexdigest()


_GATED = ("gate_proj", "up_proj", "down_proj")
_GEMMA_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")
_NORMS = {"gemma2": _GEMMA_NORMS, "gemma3": _GEMMA_NORMS, "olmo2": ("post_attention", "post_feedforward")}


def _shapes(variant: Variant) -> dict[str, tuple[int, ...]]:
    config, family = variant.config, variant.family
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_rows, kv_rows = config["num_attention_heads"] * variant.head_dim, config["num_key_value_heads"] * variant.head_dim
    qkv_bias = family == "qwen2" or config.get("attention_bias", False)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    def gated(at: str, parts: tuple[str, str, str], rows: int, bias: bool) -> None:
        gate, up, down = parts
        linear(f"{at}.{gate}", rows, hidden, bias)
        linear(f"{at}.{up}", rows, hidden, bias)
        linear(f"{at}.{down}", hidden, rows, bias)

    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for norm in _NORMS.get(family, ("input", "post_attention")):
            shapes[f"{layer}.{norm}_layernorm.weight"] = (hidden,)
        if family == "phi3":
            linear(f"{layer}.self_attn.qkv_proj", q_rows + 2 * kv_rows, hidden, False)
        for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)) if family != "phi3" else ():
            linear(f"{layer}.self_attn.{part}_proj", rows, hidden, qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, q_rows, config.get("attention_bias", False))
        if family == "olmo2":
            shapes |= {f"{layer}.self_attn.q_norm.weight": (q_rows,), f"{layer}.self_attn.k_norm.weight": (kv_rows,)}
        if family in ("qwen3", "qwen3_moe", "gemma3"):
            shapes[f"{layer}.self_attn.q_norm.weight"] = shapes[f"{layer}.self_attn.k_norm.weight"] = (variant.head_dim,)
        if family == "mixtral":
            linear(f"{layer}.block_sparse_moe.gate", config["num_local_experts"], hidden, False)
            for e in range(config["num_local_experts"]):
                gated(f"{layer}.block_sparse_moe.experts.{e}", ("w1", "w3", "w2"), inner, False)
        elif family == "qwen3_moe" and i not in config.get("mlp_only_layers", ()):
            linear(f"{layer}.mlp.gate", config["num_experts"], hidden, False)
            for e in range(config["num_experts"]):
                gated(f"{layer}.mlp.experts.{e}", _GATED, config["moe_intermediate_size"], False)
        elif family == "phi3":
            linear(f"{layer}.mlp.gate_up_proj", 2 * inner, hidden, False)
            linear(f"{layer}.mlp.down_proj", hidden, inner, False)
        else:
            gated(f"{layer}.mlp", _GATED, inner, config.get("mlp_bias", False))
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _random(seed: str, shape: tuple[int, ...], tensor: str) -> FloatArray:
    uniform = 2.0 * np.random.RandomState(zlib.crc32(seed.encode())).random_sample(shape) - 1.0
    if tensor.endswith("norm.weight"):
        values = 1.0 + 0.25 * uniform
    elif len(shape) == 1 or "embed" in tensor:
        values = 0.5 * uniform
    else:
        # Maps inputs of size 1 to outputs of about 1.4. (IEEE's root is correctly rounded: the same everywhere.)
        values = 2.5 / np.sqrt(float(shape[1])) * uniform
    return values.astype(np.float32)


@cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE over `SPECIAL_TOKENS`, 256 bytes and `MERGES`: 328 ids, so that some of the models' 336 have no token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = [(left, right) for left, right in (pair.split(" ") for line in MERGES.split("\n") for pair in line.split("|"))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL_TOKENS, *alphabet]
    known = set(pieces)
    usable = []
    for left, right in merges:
        if left in known and right in known and left + right not in known:
            known.add(left + right)
            usable.append((left, right))
            pieces.append(left + right)
    made = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=usable))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return made


def torch_model(name: str) -> PreTrainedModel:
    """A variant as transformers runs it: float32, eval mode."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    variant = VARIANTS[name]
    config = AutoConfig.for_model(variant.model_type, **variant.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {tensor: torch.from_numpy(values) for tensor, values in _as_transformers_holds(weights(name)).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=0)
    return model.eval()


def _as_transformers_holds(weights: dict[str, FloatArray]) -> dict[str, FloatArray]:
    """Its files have a matrix for each expert, its memory one stack for all, gate above up."""
    held: dict[str, FloatArray] = {}
    stacks: dict[str, dict[str, list[FloatArray]]] = {}
    for tensor, values in weights.items():
        tensor = tensor.replace("block_sparse_moe", "mlp")
        at, _, expert = tensor.partition(".experts.")
        if not expert:
            held[tensor] = values
            continue
        part = expert.split(".")[1]
        part = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(part, part)
        stacks.setdefault(at, {}).setdefault(part, []).append(values)
    for at, parts in stacks.items():
        held[f"{at}.experts.gate_up_proj"] = np.concatenate([np.stack(parts["gate_proj"]), np.stack(parts["up_proj"])], axis=1)
        held[f"{at}.experts.down_proj"] = np.stack(parts["down_proj"])
    return held


def write_hf(
    folder: Path,
    name: str,
    *,
    sharded: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    template: Literal["jinja", "tokenizer_config", "none"] = "jinja",
) -> Path:
    """Write a variant as a Hugging Face folder by transformers' own `save_pretrained`; returns the folder.

    `sharded`: several safetensors files and their index. `template`: which of the two places holds the chat template.
    """
    import torch

    model = torch_model(name).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="100KB" if sharded else "1GB")
    tokenizer().save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "pad_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    if template == "tokenizer_config":
        settings["chat_template"] = CHAT_TEMPLATE
    elif template == "jinja":
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return folder
