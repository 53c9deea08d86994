"""Qwen2 and Qwen2.5 (dense): Llama's block with biases on q, k and v, and sliding windows in the upper layers where a config asks."""

from __future__ import annotations

from collections.abc import Callable

from sterna.models.families import rope_settings
from sterna.models.families.dense import DenseFamily, dense_spec
from sterna.models.families.dimensions import gguf_dimensions, gguf_fields, hf_dimensions, hf_fields
from sterna.models.families.windows import read_window, sliding_layers_from_hf
from sterna.models.family import NO_TENSORS, RopeTensors, Settings, Shapes
from sterna.models.fields import Fields
from sterna.models.spec import ModelSpec


class Qwen2(DenseFamily):
    name = "qwen2"

    def spec_from_hf(self, config: Settings, tensor_shapes: Shapes, *, context_len: int) -> ModelSpec:
        fields = hf_fields(config)
        fields.refuse({"attention_bias": (True,), "mlp_bias": (False,)})
        dims = hf_dimensions(fields, tensor_shapes, kv_heads=32)
        windows = layer_windows(fields, dims.num_layers, context_len)
        rope = rope_settings.rope_from_hf(fields, head_dim=dims.head_dim, context_len=context_len)
        return dense_spec(dims, rope, windows=windows, qkv_bias=True)

    def spec_from_gguf(
        self, metadata: Settings, tensor_shapes: Shapes, *, context_len: int, rope_tensors: RopeTensors = NO_TENSORS
    ) -> ModelSpec:
        fields = gguf_fields(metadata)
        dims = gguf_dimensions(fields, tensor_shapes)
        refuse_gguf_window(fields, context_len)
        rope = rope_settings.rope_from_gguf(fields, tensor_shapes, head_dim=dims.head_dim, tensors=rope_tensors)
        return dense_spec(dims, rope, qkv_bias=True)


def layer_windows(fields: Fields, num_layers: int, context_len: int) -> Callable[[int], int | None]:
    """Each layer's window: `use_sliding_window` turns them on, `layer_types` or else `max_window_layers` says where."""
    on = fields.flag("use_sliding_window", False)
    first = fields.integer("max_window_layers", 28, low=0, high=1 << 20)
    sliding = sliding_layers_from_hf(fields, num_layers, [on and layer >= first for layer in range(num_layers)])
    if any(sliding) and not on:
        raise fields.fault("layer_types", "has windows where use_sliding_window is false")
    window = read_window(fields, "sliding_window", 4096, context_len=context_len) if on else None
    return lambda layer: window if sliding[layer] else None


def refuse_gguf_window(fields: Fields, context_len: int) -> None:
    """The format doesn't say which layers a window would be on, and llama.cpp reads none for these architectures."""
    if read_window(fields, "attention.sliding_window", None, context_len=context_len) is not None:
        raise fields.fault("attention.sliding_window", "is not supported for this architecture")
