"""KV memory: one tensor per layer, indexed by slot of the layer's group.

A slot's row holds a token's keys and then its values: (slots, 2 * num_kv_heads * head_dim). The memory is allocated, not filled: pages
of the operating system are touched as slots are first used. What lies in a slot that nobody owns is arbitrary, NaN included; attention
therefore gathers a row's own slots and nothing else (`plan.py`).
"""

from __future__ import annotations

import torch

from sterna.models.spec import ModelSpec


class KVPool:
    """Keys and values of all layers. `layers[i]` is (slots, 2 * num_kv_heads * head_dim) of layer i; slots as its group has."""

    def __init__(self, spec: ModelSpec, group_slots: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        slots_of = {i: slots for group, slots in zip(spec.kv_groups, group_slots, strict=True) for i in group.layers}
        self.layers = [
            torch.empty(slots_of[i], 2 * layer.mixer.num_kv_heads * layer.mixer.head_dim, dtype=dtype, device=device)
            for i, layer in enumerate(spec.layers)
        ]
