"""Settings of mixtures of experts, from either format."""

from __future__ import annotations

from sterna.models.families.dimensions import Dimensions
from sterna.models.fields import Fields
from sterna.models.spec import MoESpec

_MAX_EXPERTS = 1024
_MAX_EXPERTS_OF_ALL_LAYERS = 1 << 17
_MAX_INTERMEDIATE = 1 << 20

_GGUF_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_gating_func": (0, 1),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
}
GGUF_READS = ("expert_count", "expert_used_count", "expert_feed_forward_length", *_GGUF_NEUTRAL)
"""For `gguf_dimensions`."""


def experts_from_hf(fields: Fields, dims: Dimensions, *, experts: int, top_k: int, intermediate: int, normalize: bool) -> MoESpec:
    """`experts`, `top_k`: what the family takes where the config doesn't mention them."""
    # transformers reads either name, and writes the first.
    name = "num_local_experts" if fields.get("num_local_experts") is not None else "num_experts"
    count = _count(fields, name, dims, experts)
    if name == "num_local_experts":
        fields.refuse({"num_experts": (count,)})
    used = fields.integer("num_experts_per_tok", top_k, high=count)
    return MoESpec(count, used, intermediate, dims.activation, normalize)


def experts_from_gguf(fields: Fields, dims: Dimensions) -> MoESpec:
    """As llama.cpp runs them: softmax over all experts, the weights of the chosen ones divided by their sum."""
    fields.refuse(_GGUF_NEUTRAL)
    count = _count(fields, "expert_count", dims, None)
    used = fields.integer("expert_used_count", high=count)
    intermediate = fields.integer("expert_feed_forward_length", dims.intermediate, high=_MAX_INTERMEDIATE)
    return MoESpec(count, used, intermediate, dims.activation, normalize=True)


def _count(fields: Fields, name: str, dims: Dimensions, default: int | None) -> int:
    count = fields.integer(name, default, high=_MAX_EXPERTS)
    if count * dims.num_layers > _MAX_EXPERTS_OF_ALL_LAYERS:
        raise fields.fault(name, f"{count} in each of {dims.num_layers} layers are more than {_MAX_EXPERTS_OF_ALL_LAYERS}")
    return count
