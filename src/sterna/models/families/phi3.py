"""Phi-3, Phi-3.5 and Phi-4 in their shape: Llama's block with q, k, v and gate, up fused, a window on all layers or none, and LongRoPE over
all of each head or its first part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from sterna.models.families import rope_settings
from sterna.models.families.dense import DenseFamily, dense_spec
from sterna.models.families.dimensions import gguf_dimensions, gguf_fields, hf_dimensions, hf_fields
from sterna.models.families.names import GGUF_NAMES, HF_NAMES, Names, Place
from sterna.models.families.windows import read_window
from sterna.models.family import NO_TENSORS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT, ROPE_FREQS, RopeTensors, Settings, Shapes
from sterna.models.fields import Fields
from sterna.models.spec import ModelSpec, RopeLong, RopeSpec
from sterna.models.stored import Rows, Source

_HF_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "lm_head_bias": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "layer_types": ([],),
}
_LONG_KEYS = frozenset(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "short_factor", "long_factor", "attention_factor"}
    | {"original_max_position_embeddings"}
)


class Phi3(DenseFamily):
    name = "phi3"
    hf_names: ClassVar[Names] = HF_NAMES.changed(
        {
            **dict.fromkeys(("attn.q", "attn.k", "attn.v"), "self_attn.qkv_proj"),
            **dict.fromkeys(("mlp.gate", "mlp.up"), "mlp.gate_up_proj"),
        }
    )
    gguf_names: ClassVar[Names] = GGUF_NAMES.changed(
        {**dict.fromkeys(("attn.q", "attn.k", "attn.v"), "attn_qkv"), **dict.fromkeys(("mlp.gate", "mlp.up"), "ffn_up")}
    )

    def hf_source(self, spec: ModelSpec, canonical: str) -> Source:
        return _fused(spec, canonical, super().hf_source(spec, canonical))

    def gguf_source(self, spec: ModelSpec, canonical: str) -> Source:
        return _fused(spec, canonical, super().gguf_source(spec, canonical))

    def context_len_from_hf(self, config: Settings) -> int:
        return hf_fields(config).integer("max_position_embeddings", high=rope_settings.MAX_CONTEXT)

    def context_len_from_gguf(self, metadata: Settings) -> int:
        return gguf_fields(metadata).integer("context_length", high=rope_settings.MAX_CONTEXT)

    def spec_from_hf(self, config: Settings, tensor_shapes: Shapes, *, context_len: int) -> ModelSpec:
        fields = hf_fields(config)
        fields.refuse(_HF_NEUTRAL)
        # Absent settings have the values of transformers' Phi3Config.
        dims = hf_dimensions(fields, tensor_shapes, norm_eps=1e-5)
        window = read_window(fields, "sliding_window", None, context_len=context_len)
        return dense_spec(dims, _rope_from_hf(fields, dims.head_dim, context_len), windows=lambda layer: window)

    def spec_from_gguf(
        self, metadata: Settings, tensor_shapes: Shapes, *, context_len: int, rope_tensors: RopeTensors = NO_TENSORS
    ) -> ModelSpec:
        fields = gguf_fields(metadata)
        dims = gguf_dimensions(fields, tensor_shapes)
        # As the model was trained. llama.cpp reads it too, warns, and goes without.
        window = read_window(fields, "attention.sliding_window", None, context_len=context_len)
        rope = _rope_from_gguf(fields, tensor_shapes, dims.head_dim, context_len, rope_tensors)
        return dense_spec(dims, rope, windows=lambda layer: window)


def _fused(spec: ModelSpec, canonical: str, source: Source) -> Source:
    """q, k, v lie in one tensor, from the top, and gate and up in another."""
    place = Place.of(canonical)
    if place.layer is None:
        return source
    mixer, mlp = spec.layers[place.layer].mixer, spec.layers[place.layer].mlp
    kv = mixer.num_kv_heads * mixer.head_dim
    for rows in (
        {"attn.q": mixer.num_heads * mixer.head_dim, "attn.k": kv, "attn.v": kv},
        {"mlp.gate": mlp.intermediate, "mlp.up": mlp.intermediate},
    ):
        if place.part in rows:
            above = list(rows)[: list(rows).index(place.part)]
            return Source(source.tensor, (Rows(sum(rows[part] for part in above)),), (sum(rows.values()), spec.hidden_size))
    return source


def _rope_from_hf(config: Fields, head_dim: int, context_len: int) -> RopeSpec:
    config.refuse({"rope_interleaved": (False,)})
    settings = config.mapping("rope_scaling") or config.mapping("rope_parameters")
    theta = rope_settings.theta_from_hf(config, settings)
    holder = settings if settings is not None and settings.get("partial_rotary_factor") is not None else config
    dim = int(head_dim * holder.number("partial_rotary_factor", 1.0, low=0.0, high=1.0))
    if dim < 2 or dim % 2:
        raise holder.fault("partial_rotary_factor", f"must leave an even part of the {head_dim} numbers of a head, leaves {dim}")
    if settings is None:
        return RopeSpec(theta, dim)
    for name in settings.names():
        if name not in _LONG_KEYS:
            raise settings.fault(name, "not a setting of Phi-3's rope that is supported")
    match rope_settings.rope_kind(settings):
        case "default":
            return RopeSpec(theta, dim)
        case "longrope" | "su":
            return RopeSpec(theta, dim, _long_from_hf(config, settings, dim // 2, context_len))
        case kind:
            # transformers takes "yarn" for longrope too; llama.cpp's converter gives it another attention factor.
            raise settings.fault("rope_type", f"{kind!r} is not supported (supported: default, longrope, su)")


def _long_from_hf(config: Fields, settings: Fields, pairs: int, context_len: int) -> RopeLong:
    original = config.integer("original_max_position_embeddings", 4096, high=rope_settings.MAX_CONTEXT)
    settings.refuse({"original_max_position_embeddings": (original,)})
    stretch = config.integer("max_position_embeddings", high=rope_settings.MAX_CONTEXT) / original
    factor = settings.number("factor", max(stretch, 1e-6), low=1e-6, high=1e6)
    if factor <= 1.0:
        recommended = 1.0
    elif original > 1:
        recommended = math.sqrt(1 + math.log(factor) / math.log(original))
    elif settings.get("attention_factor") is None:
        raise settings.fault("attention_factor", "missing, and an original window of 1 gives none")
    else:
        recommended = 0.0
    return _long(
        settings.numbers("short_factor", count=pairs, low=1e-6, high=1e6),
        settings.numbers("long_factor", count=pairs, low=1e-6, high=1e6),
        settings.number("attention_factor", recommended, low=1e-3, high=1e3),
        is_long=context_len > original,
    )


def _rope_from_gguf(metadata: Fields, shapes: Shapes, head_dim: int, context_len: int, tensors: RopeTensors) -> RopeSpec:
    metadata.refuse({name: neutral for name, neutral in rope_settings.GGUF_NEUTRAL.items() if name != "rope.scaling.attn_factor"})
    metadata.refuse(
        {
            "rope.scaling.type": ("none", "linear", "longrope"),
            "rope.scaling.factor": (0.0, 1.0),
            "rope.scale_linear": (0.0, 1.0),
        }
    )
    theta = rope_settings.theta_from_gguf(metadata)
    dim = metadata.integer("rope.dimension_count", head_dim, low=2, high=head_dim)
    if dim % 2:
        raise metadata.fault("rope.dimension_count", f"must be even, is {dim}")
    if ROPE_FREQS in shapes:
        raise metadata.fault("rope.scaling.type", f"{ROPE_FREQS} is not supported for this architecture")
    present = [name for name in (ROPE_FACTORS_SHORT, ROPE_FACTORS_LONG) if name in shapes]
    attention_factor = metadata.number("rope.scaling.attn_factor", 1.0, low=1e-3, high=1e3)
    if not present:
        metadata.refuse({"rope.scaling.attn_factor": (1.0,)})
        return RopeSpec(theta, dim)
    for name in (ROPE_FACTORS_SHORT, ROPE_FACTORS_LONG):
        factors = tensors.get(name, ())
        if len(factors) * 2 != dim or not all(1e-6 <= factor <= 1e6 for factor in factors):
            raise metadata.fault("rope.dimension_count", f"{name} must hold {dim // 2} factors above 0")
    window = metadata.integer("context_length", high=rope_settings.MAX_CONTEXT)
    original = metadata.integer("rope.scaling.original_context_length", window, high=rope_settings.MAX_CONTEXT)
    scaling = _long(tensors[ROPE_FACTORS_SHORT], tensors[ROPE_FACTORS_LONG], attention_factor, is_long=context_len > original)
    return RopeSpec(theta, dim, scaling)


def _long(short: Sequence[float], long: Sequence[float], attention_factor: float, *, is_long: bool) -> RopeLong:
    """Which factors hold is fixed by the context that the server is configured for, as in llama.cpp. (transformers changes over within a
    sequence, and computes it anew.)"""
    return RopeLong(tuple(float(factor) for factor in (long if is_long else short)), attention_factor)
