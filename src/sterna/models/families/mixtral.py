"""Mixtral: Mistral with experts in place of the MLP. In GGUF it goes by `llama`, with a count of experts."""

from __future__ import annotations

from typing import ClassVar

from sterna.models.families import rope_settings
from sterna.models.families.dense import dense_spec
from sterna.models.families.dimensions import hf_dimensions, hf_fields
from sterna.models.families.experts import experts_from_hf
from sterna.models.families.llama import Llama
from sterna.models.families.names import HF_NAMES, Names
from sterna.models.families.windows import read_window
from sterna.models.family import Settings, Shapes
from sterna.models.spec import ModelSpec


class Mixtral(Llama):
    name = "mixtral"
    hf_names: ClassVar[Names] = HF_NAMES.changed(
        {
            "mlp.router": "block_sparse_moe.gate",
            "mlp.experts.*.gate": "block_sparse_moe.experts.*.w1",
            "mlp.experts.*.up": "block_sparse_moe.experts.*.w3",
            "mlp.experts.*.down": "block_sparse_moe.experts.*.w2",
        }
    )

    def spec_from_hf(self, config: Settings, tensor_shapes: Shapes, *, context_len: int) -> ModelSpec:
        fields = hf_fields(config)
        fields.refuse({"attention_bias": (False,), "mlp_bias": (False,), "layer_types": ([],)})
        # Absent settings have the values of transformers' MixtralConfig.
        window = read_window(fields, "sliding_window", None, context_len=context_len)
        dims = hf_dimensions(fields, tensor_shapes, reads=("num_experts", "num_local_experts"), kv_heads=8, norm_eps=1e-5)
        experts = experts_from_hf(fields, dims, experts=8, top_k=2, intermediate=dims.intermediate, normalize=True)
        rope = rope_settings.rope_from_hf(fields, head_dim=dims.head_dim, context_len=context_len, default_theta=1e6)
        return dense_spec(dims, rope, windows=lambda layer: window, mlp=lambda layer: experts)
