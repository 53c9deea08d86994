"""SmolLM3: Llama's block, with no rope at all in every fourth layer, or in those that a config lists."""

from __future__ import annotations

from sterna.models.families import rope_settings
from sterna.models.families.dense import dense_spec
from sterna.models.families.dimensions import gguf_dimensions, gguf_fields, hf_dimensions, hf_fields
from sterna.models.families.llama import Llama, gguf_biases
from sterna.models.families.qwen2 import refuse_gguf_window
from sterna.models.families.windows import read_window, sliding_layers_from_hf
from sterna.models.family import NO_TENSORS, RopeTensors, Settings, Shapes
from sterna.models.fields import Fields
from sterna.models.spec import ModelSpec

_INTERVAL = 4


class SmolLM3(Llama):
    name = "smollm3"

    def spec_from_hf(self, config: Settings, tensor_shapes: Shapes, *, context_len: int) -> ModelSpec:
        fields = hf_fields(config)
        # Absent settings have the values of transformers' SmolLM3Config.
        # Published configs have a `pretraining_tp` of 2, which nothing reads.
        dims = hf_dimensions(fields, tensor_shapes, reads=("no_rope_layers", "pretraining_tp"), kv_heads=4)
        turning = _turning_layers(fields, dims.num_layers)
        rope = rope_settings.rope_from_hf(fields, head_dim=dims.head_dim, context_len=context_len, default_theta=2e6)
        on = fields.flag("use_sliding_window", False)
        window = read_window(fields, "sliding_window", None, context_len=context_len) if on else None
        sliding = sliding_layers_from_hf(fields, dims.num_layers, [on and not turns for turns in turning])
        if any(sliding) and not on:
            raise fields.fault("layer_types", "has windows where use_sliding_window is false")
        bias = fields.flag("attention_bias", False)
        return dense_spec(
            dims,
            lambda layer: rope if turning[layer] else None,
            windows=lambda layer: window if sliding[layer] else None,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=fields.flag("mlp_bias", False),
        )

    def spec_from_gguf(
        self, metadata: Settings, tensor_shapes: Shapes, *, context_len: int, rope_tensors: RopeTensors = NO_TENSORS
    ) -> ModelSpec:
        fields = gguf_fields(metadata)
        dims = gguf_dimensions(fields, tensor_shapes)
        refuse_gguf_window(fields, context_len)
        rope = rope_settings.rope_from_gguf(fields, tensor_shapes, head_dim=dims.head_dim, tensors=rope_tensors)
        biases = gguf_biases(tensor_shapes)
        return dense_spec(
            dims,
            # The format has no setting for it: llama.cpp leaves out every fourth.
            lambda layer: rope if (layer + 1) % _INTERVAL else None,
            qkv_bias=biases.qkv,
            o_bias=biases.o,
            mlp_bias=biases.mlp,
        )


def _turning_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Which layers have rope: `no_rope_layers` has a 1 for those that have it, whatever its name says, or else all but every n-th do."""
    turning = fields.get("no_rope_layers")
    if turning is None:
        interval = fields.integer("no_rope_layer_interval", _INTERVAL, high=1 << 20)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(turning, list) or len(turning) < num_layers or not all(turns in (0, 1) for turns in turning):
        raise fields.fault("no_rope_layers", f"must be {num_layers} times 0 or 1")
    return [turns == 1 for turns in turning[:num_layers]]
