"""Qwen2 and Qwen2.5 (dense): Llama's block with biases on q, k and v, and sliding windows in the upper layers where a config asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sterna.models.families import rope_settings
from sterna.models.families.dense import (
    DenseFamily,
    dense_spec,
    gguf_dimensions,
    gguf_fields,
    hf_dimensions,
    hf_fields,
    read_window,
)
from sterna.models.family import Settings, Shapes
from sterna.models.fields import Fields
from sterna.models.spec import ModelSpec

_FULL, _SLIDING = "full_attention", "sliding_attention"


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
        self, metadata: Settings, tensor_shapes: Shapes, *, context_len: int, rope_factors: Sequence[float] | None = None
    ) -> ModelSpec:
        fields = gguf_fields(metadata)
        dims = gguf_dimensions(fields, tensor_shapes)
        refuse_gguf_window(fields, context_len)
        rope = rope_settings.rope_from_gguf(fields, tensor_shapes, head_dim=dims.head_dim, factors=rope_factors)
        return dense_spec(dims, rope, qkv_bias=True)


def layer_windows(fields: Fields, num_layers: int, context_len: int) -> Callable[[int], int | None]:
    """Each layer's window: `use_sliding_window` turns them on, `layer_types` or else `max_window_layers` says where."""
    sliding = fields.flag("use_sliding_window", False)
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 28, low=0, high=1 << 20)
        kinds = [_SLIDING if sliding and layer >= first else _FULL for layer in range(num_layers)]
    elif not isinstance(kinds, list) or len(kinds) != num_layers or not set(map(str, kinds)) <= {_FULL, _SLIDING}:
        raise fields.fault("layer_types", f"must be {num_layers} times {_FULL!r} or {_SLIDING!r}")
    elif _SLIDING in kinds and not sliding:
        raise fields.fault("layer_types", f"has {_SLIDING!r} where use_sliding_window is false")
    window = read_window(fields, "sliding_window", 4096, context_len=context_len) if sliding else None
    return lambda layer: window if kinds[layer] == _SLIDING else None


def refuse_gguf_window(fields: Fields, context_len: int) -> None:
    """The format doesn't say which layers a window would be on, and llama.cpp reads none for these architectures."""
    if read_window(fields, "attention.sliding_window", None, context_len=context_len) is not None:
        raise fields.fault("attention.sliding_window", "is not supported for this architecture")
