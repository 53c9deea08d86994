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

from sterna.executor.torch.kv_pool import KVPool
from sterna.executor.torch.linear import Linear
from sterna.executor.torch.mlp import MLP, load_mlp
from sterna.executor.torch.plan import Bucket, StepPlan
from sterna.models.rope import inverse_frequencies
from sterna.models.spec import AttentionSpec, LayerSpec, ModelSpec, RopeSpec

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
    attn_norm: torch.Tensor | None
    qkv: Linear
    """Rows of q, k and v; within a head the two halves of each rotary pair are neighbours (`_pair_order`)."""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    attn_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: MLP
    mlp_post_norm: torch.Tensor | None


class TorchModel:
    """Weights of a spec on one device. Only decoders: `spec.causal` must be true."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        load, load_norm = partial(_load, weights, dtype, device), partial(_load_norm, weights, dtype, device)
        self._embed = load("embed")
        self._layers = [_load_layer(load, load_norm, i, layer) for i, layer in enumerate(spec.layers)]
        self._final_norm = load_norm("final_norm")
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
        if self.spec.embed_scale != 1.0:
            x *= self.spec.embed_scale
        for i, layer in enumerate(self._layers):
            group, eps = self._group_of[i], layer.spec.norm_eps
            turn = None if layer.spec.mixer.rope is None else turns[layer.spec.mixer.rope]
            normed = _rms_norm(x, layer.attn_norm, eps)
            mixed = _attention(layer, normed, turn, pool.layers[i], plan.write_slots[group], plan.buckets[group])
            x = _add(layer.spec, x, layer.o, mixed, layer.attn_post_norm)
            normed = _rms_norm(x, layer.mlp_norm, eps)
            x = _add(layer.spec, x, layer.mlp, normed, layer.mlp_post_norm)
        last = x.index_select(0, plan.sample_tokens)
        return self._logits(_rms_norm(last, self._final_norm, self.spec.final_norm_eps))

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        logits = self._head(x).float()
        if self.spec.logit_scale != 1.0:
            logits *= self.spec.logit_scale
        if self.spec.logit_softcap is not None:
            _softcap(logits, self.spec.logit_softcap)
        return logits


class _AddsTo(Protocol):
    """`Linear`, or a whole MLP."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + self(x), as a new tensor."""
        ...


def _add(spec: LayerSpec, residual: torch.Tensor, part: _AddsTo, x: torch.Tensor, post_norm: torch.Tensor | None) -> torch.Tensor:
    """residual + residual_scale * post_norm(part(x))"""
    if post_norm is None and spec.residual_scale == 1.0:
        return part.add_to(residual, x)
    return torch.add(residual, _rms_norm(part(x), post_norm, spec.norm_eps), alpha=spec.residual_scale)


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
    if spec.qk_norm is not None:
        ends = (0, heads, heads + kv_heads)
        for norm, start, end in zip((layer.q_norm, layer.k_norm), ends, ends[1:], strict=False):
            part = by_head[:, start:end] if spec.qk_norm == "head" else fused[:, start * width : end * width]
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
    decodes = count == 1 and batch >= _MATMUL_ROWS and q.dtype == torch.bfloat16 and q.device.type == "cpu"
    if decodes or spec.softcap is not None:
        scores = torch.matmul(q, keys.transpose(-1, -2)).float().mul_(spec.scale)
        if spec.softcap is not None:
            _softcap(scores, spec.softcap)
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


def _softcap(x: torch.Tensor, cap: float) -> None:
    """In place."""
    x.div_(cap).tanh_().mul_(cap)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x as it is where there is no norm."""
    if weight is None:
        return x
    if weight.dtype != x.dtype:
        return functional.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
    return functional.rms_norm(x, weight.shape, weight, eps)


def _load(weights: WeightSource, dtype: torch.dtype, device: torch.device, name: str) -> torch.Tensor:
    return torch.from_numpy(weights.float32(name)).to(device=device, dtype=dtype)


def _load_norm(weights: WeightSource, dtype: torch.dtype, device: torch.device, name: str) -> torch.Tensor:
    """In float32 where `dtype` would round it, as it does Gemma's 1 + weight."""
    exact = torch.from_numpy(weights.float32(name)).to(device)
    narrow = exact.to(dtype)
    return narrow if torch.equal(narrow.float(), exact) else exact


def _load_layer(load: Callable[[str], torch.Tensor], load_norm: Callable[[str], torch.Tensor], i: int, spec: LayerSpec) -> _Layer:
    mixer, at = spec.mixer, f"layers.{i}"
    order = _pair_order(mixer)

    def paired(values: torch.Tensor) -> torch.Tensor:
        return values.unflatten(0, (-1, mixer.head_dim))[:, order].flatten(0, 1)

    def qkv(suffix: str) -> torch.Tensor:
        q, k, v = (load(f"{at}.attn.{part}{suffix}") for part in "qkv")
        return torch.cat([paired(q), paired(k), v])

    def norm(name: str, present: bool) -> torch.Tensor | None:
        return load_norm(f"{at}.{name}") if present else None

    def qk_norm(name: str) -> torch.Tensor | None:
        return paired(load_norm(f"{at}.attn.{name}")) if mixer.qk_norm is not None else None

    return _Layer(
        spec=spec,
        attn_norm=norm("attn_norm", spec.pre_norm),
        qkv=Linear(qkv(""), qkv(".bias") if mixer.qkv_bias else None),
        q_norm=qk_norm("q_norm"),
        k_norm=qk_norm("k_norm"),
        o=Linear(load(f"{at}.attn.o"), load(f"{at}.attn.o.bias") if mixer.o_bias else None),
        attn_post_norm=norm("attn_post_norm", spec.post_norm),
        mlp_norm=norm("mlp_norm", spec.pre_norm),
        mlp=load_mlp(load, f"{at}.mlp", spec.mlp),
        mlp_post_norm=norm("mlp_post_norm", spec.post_norm),
    )


def _pair_order(spec: AttentionSpec) -> torch.Tensor:
    """(head_dim,): which stored element of a head comes where. Pair (i, i + dim / 2) of rope comes to (2i, 2i + 1).

    Queries and keys are reordered alike, which leaves their products as they were.
    """
    order = torch.arange(spec.head_dim)
    if spec.rope is not None:
        order[: spec.rope.dim] = order[: spec.rope.dim].view(2, -1).T.flatten()
    return order
