"""Canonical weight names to those of the two file formats. A family changes the few that it has differently."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Place:
    """A canonical name, taken apart."""

    layer: int | None
    part: str
    """Within the layer, an expert's number replaced by `*`: `mlp.experts.*.gate`; without a layer the whole name."""
    expert: int | None
    suffix: str
    """`.weight` or `.bias`: both formats write them so."""

    @staticmethod
    def of(canonical: str) -> Place:
        stem, suffix = (canonical[:-5], ".bias") if canonical.endswith(".bias") else (canonical, ".weight")
        if not stem.startswith("layers."):
            return Place(None, stem, None, suffix)
        _, layer, part = stem.split(".", 2)
        expert = _EXPERT.search(part)
        return Place(int(layer), _EXPERT.sub(".experts.*.", part), int(expert[1]) if expert else None, suffix)


@dataclass(frozen=True, slots=True)
class Names:
    """One format's names."""

    layers: str
    """What a layer's tensors begin with."""
    whole: Mapping[str, str]
    """Names of what belongs to no layer."""
    parts: Mapping[str, str]
    """Names within a layer, by `Place.part`; a `*` in one stands for the expert's number."""

    def changed(self, parts: Mapping[str, str]) -> Names:
        return replace(self, parts={**self.parts, **parts})

    def stored(self, place: Place) -> str:
        if place.layer is None:
            return self.whole[place.part] + place.suffix
        part = self.parts[place.part].replace("*", str(place.expert))
        return f"{self.layers}.{place.layer}.{part}{place.suffix}"


HF_NAMES = Names(
    "model.layers",
    {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"},
    {
        "attn_norm": "input_layernorm",
        "attn.q": "self_attn.q_proj",
        "attn.k": "self_attn.k_proj",
        "attn.v": "self_attn.v_proj",
        "attn.q_norm": "self_attn.q_norm",
        "attn.k_norm": "self_attn.k_norm",
        "attn.o": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "mlp.router": "mlp.gate",
        "mlp.experts.*.gate": "mlp.experts.*.gate_proj",
        "mlp.experts.*.up": "mlp.experts.*.up_proj",
        "mlp.experts.*.down": "mlp.experts.*.down_proj",
    },
)

GGUF_NAMES = Names(
    "blk",
    {"embed": "token_embd", "final_norm": "output_norm", "head": "output"},
    {
        "attn_norm": "attn_norm",
        "attn.q": "attn_q",
        "attn.k": "attn_k",
        "attn.v": "attn_v",
        "attn.q_norm": "attn_q_norm",
        "attn.k_norm": "attn_k_norm",
        "attn.o": "attn_output",
        "attn_post_norm": "post_attention_norm",
        "mlp_norm": "ffn_norm",
        "mlp.gate": "ffn_gate",
        "mlp.up": "ffn_up",
        "mlp.down": "ffn_down",
        "mlp.router": "ffn_gate_inp",
        # One tensor for all experts.
        "mlp.experts.*.gate": "ffn_gate_exps",
        "mlp.experts.*.up": "ffn_up_exps",
        "mlp.experts.*.down": "ffn_down_exps",
        "mlp_post_norm": "post_ffw_norm",
    },
)
