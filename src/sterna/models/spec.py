"""An architecture as data. The engines execute a `ModelSpec`; a family file (`families/`) only translates a config into one.

All of it is `msgspec.Struct`s, so that a spec is cached as `spec.json` and read back by type.
Weights go by canonical names, one per matrix or vector, in row-major (out, in) as Hugging Face stores them:

    embed                                  (vocab, hidden)
    layers.{i}.attn_norm                   (hidden,); absent without pre_norm
    layers.{i}.attn.{q,k,v}[.bias]         (heads * head_dim, hidden)
    layers.{i}.attn.{q_norm,k_norm}        (head_dim,), or (heads * head_dim,) where the norm is over the projection
    layers.{i}.attn.o[.bias]               (hidden, heads * head_dim)
    layers.{i}.attn_post_norm              (hidden,); only with post_norm
    layers.{i}.mlp_norm                    (hidden,); absent without pre_norm
    layers.{i}.mlp.{gate,up}[.bias]        (intermediate, hidden)
    layers.{i}.mlp.down[.bias]             (hidden, intermediate)
    layers.{i}.mlp.router                  (experts, hidden)
    layers.{i}.mlp.experts.{e}.{gate,up}   (intermediate, hidden)
    layers.{i}.mlp.experts.{e}.down        (hidden, intermediate)
    layers.{i}.mlp_post_norm               (hidden,); only with post_norm
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


class RopeLong(msgspec.Struct, frozen=True, tag="long"):
    """Phi-3's LongRoPE, one of its two factor lists chosen from the configured context, so that a position's angle never depends on how
    long a sequence grew. cos and sin are multiplied by `attention_factor`."""

    factors: tuple[float, ...]
    attention_factor: float


RopeScaling = RopeLinear | RopeDynamic | RopeLlama3 | RopeYarn | RopeFactors | RopeLong


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
    qk_norm: Literal["head", "projection"] | None = None
    """RMS norm on q and k before rope: over each head (Qwen3, Gemma 3), or over all heads at once (OLMo 2)."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap), after the scale and before the mask (Gemma 2)."""
    window: int | None = None
    """A query at position p sees keys at positions > p - window; None sees all."""


class GatedMLPSpec(msgspec.Struct, frozen=True, tag="gated_mlp"):
    """down(act(gate(x)) * up(x))"""

    intermediate: int
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    bias: bool = False


class MoESpec(msgspec.Struct, frozen=True, tag="moe"):
    """softmax(router(x)) over all experts; the `top_k` likeliest (the lower index on ties) each run their gated MLP, and their outputs are
    summed by weight, in descending order of it."""

    num_experts: int
    top_k: int
    intermediate: int
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    normalize: bool = True
    """Divide the chosen experts' weights by their sum."""


class LayerSpec(msgspec.Struct, frozen=True):
    """x += residual_scale * post(mixer(pre(x))); x += residual_scale * post(mlp(pre(x))), where pre and post are an RMS norm or nothing."""

    mixer: AttentionSpec
    mlp: GatedMLPSpec | MoESpec
    norm_eps: float
    pre_norm: bool = True
    post_norm: bool = False
    residual_scale: float = 1.0


class KVGroup(msgspec.Struct, frozen=True):
    """Layers whose KV is allocated and matched together.

    `window`: all layers of the group see `window` positions at most, so that older slots may be given back.
    """

    kind: Literal["full", "window"]
    layers: tuple[int, ...]
    elements_per_token: int
    """Numbers (not bytes) that one token's K and V take over all layers of the group."""
    window: int | None = None
    """In tokens; None exactly where `kind` is full."""


class ModelSpec(msgspec.Struct, frozen=True):
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    kv_groups: tuple[KVGroup, ...]
    final_norm_eps: float
    tied_head: bool
    causal: bool = True
    head_bias: bool = False
    embed_scale: float = 1.0
    """Embeddings are multiplied by it (Gemma, Granite)."""
    logit_scale: float = 1.0
    """Logits are multiplied by it (Granite: 1 / logits_scaling)."""
    logit_softcap: float | None = None
    """Logits become softcap * tanh(logit / softcap), after the scale (Gemma 2)."""


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every canonical weight that the spec needs, and its shape: no more and no fewer."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, spec.hidden_size)}

    def matrix(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[name] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    def gated(at: str, intermediate: int, bias: bool) -> None:
        matrix(f"{at}.gate", intermediate, spec.hidden_size, bias)
        matrix(f"{at}.up", intermediate, spec.hidden_size, bias)
        matrix(f"{at}.down", spec.hidden_size, intermediate, bias)

    for i, layer in enumerate(spec.layers):
        mixer, mlp, at = layer.mixer, layer.mlp, f"layers.{i}"
        if layer.pre_norm:
            shapes[f"{at}.attn_norm"] = shapes[f"{at}.mlp_norm"] = (spec.hidden_size,)
        if layer.post_norm:
            shapes[f"{at}.attn_post_norm"] = shapes[f"{at}.mlp_post_norm"] = (spec.hidden_size,)
        widths = {"q": mixer.num_heads * mixer.head_dim, "k": mixer.num_kv_heads * mixer.head_dim}
        matrix(f"{at}.attn.q", widths["q"], spec.hidden_size, mixer.qkv_bias)
        matrix(f"{at}.attn.k", widths["k"], spec.hidden_size, mixer.qkv_bias)
        matrix(f"{at}.attn.v", widths["k"], spec.hidden_size, mixer.qkv_bias)
        if mixer.qk_norm is not None:
            for part, width in widths.items():
                shapes[f"{at}.attn.{part}_norm"] = (mixer.head_dim if mixer.qk_norm == "head" else width,)
        matrix(f"{at}.attn.o", spec.hidden_size, widths["q"], mixer.o_bias)
        match mlp:
            case GatedMLPSpec():
                gated(f"{at}.mlp", mlp.intermediate, mlp.bias)
            case MoESpec():
                matrix(f"{at}.mlp.router", mlp.num_experts, spec.hidden_size, False)
                for e in range(mlp.num_experts):
                    gated(f"{at}.mlp.experts.{e}", mlp.intermediate, False)
    shapes["final_norm"] = (spec.hidden_size,)
    if not spec.tied_head:
        matrix("head", spec.vocab_size, spec.hidden_size, spec.head_bias)
    return shapes


def kv_groups(layers: tuple[LayerSpec, ...]) -> tuple[KVGroup, ...]:
    """The groups of `layers`: one per window that occurs, the full one (where there is one) first, then windows ascending."""
    members: dict[int | None, list[int]] = {}
    for i, layer in enumerate(layers):
        members.setdefault(layer.mixer.window, []).append(i)
    groups = []
    for window in sorted(members, key=lambda window: -1 if window is None else window):
        mixers = [layers[i].mixer for i in members[window]]
        elements = sum(2 * mixer.num_kv_heads * mixer.head_dim for mixer in mixers)
        groups.append(KVGroup("full" if window is None else "window", tuple(members[window]), elements, window))
    return tuple(groups)
