"""An architecture as data. The engines execute a `ModelSpec`; a family file (`families/`) only translates a config into one.

All of it is `msgspec.Struct`s, so that a spec is cached as `spec.json` and read back by type.
Weights go by canonical names, one per matrix or vector, in row-major (out, in) as Hugging Face stores them:

    embed                                  (vocab, hidden)
    layers.{i}.attn_norm                   (hidden,)
    layers.{i}.attn.{q,k,v}[.bias]         (heads * head_dim, hidden)
    layers.{i}.attn.{q_norm,k_norm}        (head_dim,)
    layers.{i}.attn.o[.bias]               (hidden, heads * head_dim)
    layers.{i}.mlp_norm                    (hidden,)
    layers.{i}.mlp.{gate,up}[.bias]        (intermediate, hidden)
    layers.{i}.mlp.down[.bias]             (hidden, intermediate)
    final_norm                             (hidden,)
    head[.bias]                            (vocab, hidden); absent when tied
"""

from __future__ import annotations

from typing import Literal

import msgspec


class RopeLinear(msgspec.Struct, frozen=True, tag="linear"):
    factor: float


class RopeDynamic(msgspec.Struct, frozen=True, tag="dynamic"):
    """NTK-aware, its base fixed from the configured context, so that a position's angle never depends on how long a sequence grew."""

    factor: float
    original_max_position: int
    context_len: int


class RopeLlama3(msgspec.Struct, frozen=True, tag="llama3"):
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


class RopeYarn(msgspec.Struct, frozen=True, tag="yarn"):
    """Peng et al. 2023, as transformers reads the parameters."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class RopeFactors(msgspec.Struct, frozen=True, tag="factors"):
    """Frequencies divided one by one (GGUF's `rope_freqs.weight`)."""

    factors: tuple[float, ...]


RopeScaling = RopeLinear | RopeDynamic | RopeLlama3 | RopeYarn | RopeFactors


class RopeSpec(msgspec.Struct, frozen=True):
    """Rotary embedding over the first `dim` of each head, halves paired (x[i], x[i + dim/2])."""

    theta: float
    dim: int
    scaling: RopeScaling | None = None


class AttentionSpec(msgspec.Struct, frozen=True, tag="attention"):
    """Grouped-query attention; query head h reads key head h // (num_heads // num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Multiplies q·k."""
    rope: RopeSpec | None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """RMS norm over head_dim on q and k, before rope."""
    window: int | None = None
    """A query at position p sees keys at positions > p - window; None sees all."""
    kv_group: int = 0
    """Index into `ModelSpec.kv_groups`."""


class GatedMLPSpec(msgspec.Struct, frozen=True, tag="gated_mlp"):
    """down(act(gate(x)) * up(x))"""

    intermediate: int
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    bias: bool = False


class LayerSpec(msgspec.Struct, frozen=True):
    """x += mixer(norm(x)); x += mlp(norm(x))"""

    mixer: AttentionSpec
    mlp: GatedMLPSpec
    norm_eps: float


class KVGroup(msgspec.Struct, frozen=True):
    """Layers whose KV is allocated and matched together."""

    kind: Literal["full"]
    layers: tuple[int, ...]
    elements_per_token: int
    """Numbers (not bytes) that one token's K and V take over all layers of the group."""


class ModelSpec(msgspec.Struct, frozen=True):
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    kv_groups: tuple[KVGroup, ...]
    final_norm_eps: float
    tied_head: bool
    causal: bool = True
    head_bias: bool = False


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every canonical weight that the spec needs, and its shape: no more and no fewer."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, spec.hidden_size)}

    def matrix(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[name] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for i, layer in enumerate(spec.layers):
        mixer, mlp, at = layer.mixer, layer.mlp, f"layers.{i}"
        shapes[f"{at}.attn_norm"] = (spec.hidden_size,)
        matrix(f"{at}.attn.q", mixer.num_heads * mixer.head_dim, spec.hidden_size, mixer.qkv_bias)
        matrix(f"{at}.attn.k", mixer.num_kv_heads * mixer.head_dim, spec.hidden_size, mixer.qkv_bias)
        matrix(f"{at}.attn.v", mixer.num_kv_heads * mixer.head_dim, spec.hidden_size, mixer.qkv_bias)
        if mixer.qk_norm:
            shapes[f"{at}.attn.q_norm"] = shapes[f"{at}.attn.k_norm"] = (mixer.head_dim,)
        matrix(f"{at}.attn.o", spec.hidden_size, mixer.num_heads * mixer.head_dim, mixer.o_bias)
        shapes[f"{at}.mlp_norm"] = (spec.hidden_size,)
        matrix(f"{at}.mlp.gate", mlp.intermediate, spec.hidden_size, mlp.bias)
        matrix(f"{at}.mlp.up", mlp.intermediate, spec.hidden_size, mlp.bias)
        matrix(f"{at}.mlp.down", spec.hidden_size, mlp.intermediate, mlp.bias)
    shapes["final_norm"] = (spec.hidden_size,)
    if not spec.tied_head:
        matrix("head", spec.vocab_size, spec.hidden_size, spec.head_bias)
    return shapes
