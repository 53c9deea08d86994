"""Any `ModelSpec`, executed: embedding, layers over the paged KV pool, logits.

Norms, rotary embedding, softmax and the sampler's logits are computed in float32 whatever the weights' dtype is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from sterna.errors import ModelError
from sterna.executor.torch.kv_pool import KVPool
from sterna.executor.torch.linear import Linear
from sterna.executor.torch.plan import Bucket, StepPlan
from sterna.models.rope import inverse_frequencies
from sterna.models.spec import AttentionSpec, GatedMLPSpec, LayerSpec, ModelSpec, RopeSpec

Activation = Callable[[torch.Tensor], torch.Tensor]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


_MATMUL_ROWS = 4
"""From so many decodes on, two bfloat16 products are up to four times as fast on a CPU as its fused attention, whose tiles are for many
queries of one head."""


class WeightSource(Protocol):
    """What `models/weights.py: WeightStore` offers."""

    def float32(self, name: str) -> NDArray[np.float32]:
        """One weight by its canonical name (`models/spec.py`)."""
        ...


@dataclass(slots=True, frozen=True)
class _Layer:
    spec: LayerSpec
    mlp: GatedMLPSpec
    attn_norm: torch.Tensor
    qkv: Linear
    """Rows of q, k and v; within a head the two halves of each rotary pair are neighbours (`_pair_order`)."""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class TorchModel:
    """Weights of a spec on one device. Only decoders: `spec.causal` must be true."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        load = partial(_load, weights, dtype, device)
        self._embed = load("embed")
        self._layers = [_load_layer(load, i, layer) for i, layer in enumerate(spec.layers)]
        self._final_norm = load("final_norm")
        head = self._embed if spec.tied_head else load("head")
        self._head = Linear(head, load("head.bias") if spec.head_bias else None)
        self._group_of = {i: g for g, group in enumerate(spec.kv_groups) for i in group.layers}
        self._ropes = {layer.mixer.rope: _Rope(layer.mixer.rope, device) for layer in spec.layers if layer.mixer.rope is not None}

    def forward(self, input_ids: torch.Tensor, plan: StepPlan, pool: KVPool) -> torch.Tensor:
        """Run T tokens, `input_ids` (T,) int64, and write their K and V into `pool`.

        Returns (S, vocab) float32: logits after the last token of each row that wants a sample.
        """
        turns = {spec: rope.turns(plan.positions) for spec, rope in self._ropes.items()}
        x = functional.embedding(input_ids, self._embed)
        for i, layer in enumerate(self._layers):
            group = self._group_of[i]
            normed = _rms_norm(x, layer.attn_norm, layer.spec.norm_eps)
            turn = None if layer.spec.mixer.rope is None else turns[layer.spec.mixer.rope]
            mixed = _attention(layer, normed, turn, pool.layers[i], plan.write_slots[group], plan.buckets[group])
            x = layer.o.add_to(x, mixed)
            normed = _rms_norm(x, layer.mlp_norm, layer.spec.norm_eps)
            x = layer.down.add_to(x, _gated(layer.mlp, layer.gate_up(normed)))
        last = x.index_select(0, plan.sample_tokens)
        return self._head(_rms_norm(last, self._final_norm, self.spec.final_norm_eps)).float()


class _Rope:
    """Rotary embedding over pairs that lie beside each other: one complex product."""

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        frequencies, scale = inverse_frequencies(spec)
        self._frequencies = torch.from_numpy(frequencies.astype(np.float32)).to(device)
        self._scale = torch.tensor(scale, dtype=torch.float32, device=device)

    def turns(self, positions: torch.Tensor) -> torch.Tensor:
        """(T, 1, dim / 2) complex64: what each pair of each head is multiplied by."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        return torch.polar(self._scale.expand_as(angles), angles)[:, None]


def _attention(
    layer: _Layer,
    x: torch.Tensor,
    turns: torch.Tensor | None,
    kv: torch.Tensor,
    write_slots: torch.Tensor,
    buckets: tuple[Bucket, ...],
) -> torch.Tensor:
    """(T, hidden) -> (T, heads * head_dim), all heads' outputs side by side; K and V of the T tokens go to `kv`."""
    spec = layer.spec.mixer
    heads, kv_heads, width = spec.num_heads, spec.num_kv_heads, spec.head_dim
    fused = layer.qkv(x)
    by_head = fused.view(-1, heads + 2 * kv_heads, width)
    if layer.q_norm is not None and layer.k_norm is not None:
        for norm, part in ((layer.q_norm, by_head[:, :heads]), (layer.k_norm, by_head[:, heads : heads + kv_heads])):
            part.copy_(_rms_norm(part, norm, layer.spec.norm_eps))
    if turns is not None:
        _rotate(by_head[:, : heads + kv_heads, : 2 * turns.shape[-1]], turns)
    kv.index_copy_(0, write_slots, fused[:, heads * width :])
    queries = fused[:, : heads * width]
    if len(buckets) == 1 and buckets[0].tokens is None:
        return _attend(spec, queries, kv, buckets[0])
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    for bucket in buckets:
        mixed = _attend(spec, queries.index_select(0, bucket.tokens), kv, bucket)
        out.index_copy_(0, bucket.real_tokens, mixed if bucket.real is None else mixed.index_select(0, bucket.real))
    return out


def _attend(spec: AttentionSpec, queries: torch.Tensor, kv: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """One bucket: (B * n, heads * head_dim) -> the same. Query heads that share a key head stand in for more queries of that head."""
    batch, count, length = bucket.shape
    kv_heads, width, group = spec.num_kv_heads, spec.head_dim, spec.num_heads // spec.num_kv_heads
    keys, values = kv.view(-1, width).index_select(0, bucket.kv_rows(kv_heads)).view(2, batch, kv_heads, length, width)
    q = queries.reshape(batch, count, kv_heads, group, width).transpose(1, 2).reshape(batch, kv_heads, count * group, width)
    mask = bucket.mask(spec.window, group, queries.dtype)
    if count == 1 and batch >= _MATMUL_ROWS and q.dtype == torch.bfloat16 and q.device.type == "cpu":
        scores = torch.matmul(q, keys.transpose(-1, -2)).float().mul_(spec.scale)
        if mask is not None:
            scores += mask
        out = torch.matmul(scores.softmax(dim=-1).to(q.dtype), values)
    else:
        out = functional.scaled_dot_product_attention(q, keys, values, mask, scale=spec.scale)
    return out.reshape(batch, kv_heads, count, group * width).transpose(1, 2).reshape(batch * count, spec.num_heads * width)


def _rotate(x: torch.Tensor, turns: torch.Tensor) -> None:
    """Turn the pairs of x (T, heads, dim) in place, in float32."""
    pairs = x if x.dtype == torch.float32 else x.float()
    torch.view_as_complex(pairs.unflatten(-1, (-1, 2))).mul_(turns)
    if pairs is not x:
        x.copy_(pairs)


def _gated(spec: GatedMLPSpec, gate_up: torch.Tensor) -> torch.Tensor:
    return _ACTIVATIONS[spec.activation](gate_up[:, : spec.intermediate]).mul_(gate_up[:, spec.intermediate :])


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def _load(weights: WeightSource, dtype: torch.dtype, device: torch.device, name: str) -> torch.Tensor:
    return torch.from_numpy(weights.float32(name)).to(device=device, dtype=dtype)


def _load_layer(load: Callable[[str], torch.Tensor], i: int, spec: LayerSpec) -> _Layer:
    mixer, mlp, at = spec.mixer, spec.mlp, f"layers.{i}"
    if not isinstance(mlp, GatedMLPSpec):
        raise ModelError("the torch executor does not run mixtures of experts")
    order = _pair_order(mixer)

    def paired(name: str) -> torch.Tensor:
        stored = load(name)
        return stored.unflatten(0, (-1, mixer.head_dim))[:, order].flatten(0, 1)

    def stacked(names: list[str], bias: bool, read: dict[str, Callable[[str], torch.Tensor]]) -> Linear:
        def cat(suffix: str) -> torch.Tensor:
            return torch.cat([read.get(name, load)(f"{at}.{name}{suffix}") for name in names])

        return Linear(cat(""), cat(".bias") if bias else None)

    return _Layer(
        spec=spec,
        mlp=mlp,
        attn_norm=load(f"{at}.attn_norm"),
        qkv=stacked(["attn.q", "attn.k", "attn.v"], mixer.qkv_bias, {"attn.q": paired, "attn.k": paired}),
        q_norm=load(f"{at}.attn.q_norm")[order] if mixer.qk_norm else None,
        k_norm=load(f"{at}.attn.k_norm")[order] if mixer.qk_norm else None,
        o=stacked(["attn.o"], mixer.o_bias, {}),
        mlp_norm=load(f"{at}.mlp_norm"),
        gate_up=stacked(["mlp.gate", "mlp.up"], mlp.bias, {}),
        down=stacked(["mlp.down"], mlp.bias, {}),
    )


def _pair_order(spec: AttentionSpec) -> torch.Tensor:
    """(head_dim,): which stored element of a head comes where. Pair (i, i + dim / 2) of rope comes to (2i, 2i + 1).

    Queries and keys are reordered alike, which leaves their products as they were.
    """
    order = torch.arange(spec.head_dim)
    if spec.rope is not None:
        order[: spec.rope.dim] = order[: spec.rope.dim].view(2, -1).T.flatten()
    return order
