"""Gemma 3, the text model: Gemma 2 with norms on q and k in place of the soft caps, five windows to one full layer, and a rope of its own
for the layers with a window."""

from __future__ import annotations

from sterna.models.families import rope_settings
from sterna.models.families.dense import dense_spec
from sterna.models.families.dimensions import gguf_dimensions, gguf_fields, hf_fields
from sterna.models.families.gemma2 import Gemma2, gemma_dimensions, gguf_query_scale, query_scale, softcap, with_ends
from sterna.models.families.windows import read_window, sliding_layers_from_gguf, sliding_layers_from_hf
from sterna.models.family import NO_TENSORS, RopeTensors, Settings, Shapes
from sterna.models.fields import Fields
from sterna.models.spec import ModelSpec, RopeSpec

_PERIOD = 6
_FULL, _SLIDING = "full_attention", "sliding_attention"
_THETA, _LOCAL_THETA = 1e6, 1e4


class Gemma3(Gemma2):
    name = "gemma3"

    def context_len_from_hf(self, config: Settings) -> int:
        # What its full layers are scaled by is counted in already.
        return hf_fields(config).integer("max_position_embeddings", high=rope_settings.MAX_CONTEXT)

    def spec_from_hf(self, config: Settings, tensor_shapes: Shapes, *, context_len: int) -> ModelSpec:
        fields = hf_fields(config)
        # transformers and llama.cpp have no cap on the scores here, so that one who sets it expects what nobody does.
        dims = gemma_dimensions(fields, tensor_shapes, reads=())
        rope, local = _ropes(fields, dims.head_dim, context_len)
        window = read_window(fields, "sliding_window", 4096, context_len=context_len)
        period = fields.integer("sliding_window_pattern", _PERIOD, high=1 << 20)
        sliding = sliding_layers_from_hf(fields, dims.num_layers, [(layer + 1) % period != 0 for layer in range(dims.num_layers)])
        bias = fields.flag("attention_bias", False)
        spec = dense_spec(
            dims,
            lambda layer: local if sliding[layer] else rope,
            windows=lambda layer: window if sliding[layer] else None,
            scale=query_scale(fields),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
            post_norm=True,
        )
        return with_ends(spec, softcap(fields, "final_logit_softcapping", None))

    def spec_from_gguf(
        self, metadata: Settings, tensor_shapes: Shapes, *, context_len: int, rope_tensors: RopeTensors = NO_TENSORS
    ) -> ModelSpec:
        fields = gguf_fields(metadata)
        reads = ("final_logit_softcapping", "attention.sliding_window_pattern", "rope.freq_base_swa")
        dims = gguf_dimensions(fields, tensor_shapes, reads=reads, activation="gelu_tanh")
        rope = rope_settings.rope_from_gguf(fields, tensor_shapes, head_dim=dims.head_dim, tensors=rope_tensors)
        local = RopeSpec(rope_settings.theta_from_gguf(fields, "rope.freq_base_swa", _LOCAL_THETA), rope.dim)
        sliding = (False,) * dims.num_layers
        if fields.get("attention.sliding_window") not in (None, 0):
            sliding = sliding_layers_from_gguf(fields, dims.num_layers, _PERIOD)
        window = read_window(fields, "attention.sliding_window", None, context_len=context_len)
        spec = dense_spec(
            dims,
            lambda layer: local if sliding[layer] else rope,
            windows=lambda layer: window if sliding[layer] else None,
            scale=gguf_query_scale(dims, largest_layers=62),
            qk_norm="head",
            post_norm=True,
        )
        return with_ends(spec, softcap(fields, "final_logit_softcapping", None))


def _ropes(config: Fields, head_dim: int, context_len: int) -> tuple[RopeSpec, RopeSpec]:
    """Of full layers, and of those with a window. transformers 5 has settings for each kind of layer in `rope_parameters`; older configs
    have the full layers' `rope_theta` and `rope_scaling` at the top, and `rope_local_base_freq`."""
    config.refuse({"partial_rotary_factor": (1.0,), "rope_interleaved": (False,)})
    kinds = config.mapping("rope_parameters")
    full = local = None
    if kinds is not None:
        for name in kinds.names():
            if name not in (_FULL, _SLIDING):
                raise kinds.fault(name, f"is neither {_FULL!r} nor {_SLIDING!r}")
        full, local = kinds.mapping(_FULL), kinds.mapping(_SLIDING)
    scaled = config.mapping("rope_scaling")
    if scaled is not None and full is not None:
        raise config.fault("rope_scaling", f"is there, and rope_parameters.{_FULL} too")
    full = full or scaled

    def rope(settings: Fields | None, theta: float) -> RopeSpec:
        scaling = rope_settings.scaling_from_hf(config, settings, head_dim=head_dim, context_len=context_len) if settings else None
        return RopeSpec(theta, head_dim, scaling)

    return (
        rope(full, rope_settings.theta_from_hf(config, full, _THETA)),
        rope(local, rope_settings.theta_from_hf(config, local, _LOCAL_THETA, name="rope_local_base_freq")),
    )
