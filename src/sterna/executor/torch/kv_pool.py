"""KV memory: one tensor per layer, indexed by slot of the layer's group.

A slot's row holds a token's keys and then its values: (slots, 2 * num_kv_heads * head_dim). The memory is allocated, not filled: pages
of the operating system are touched as slots are first used. What lies in a slot that nobody owns is arbitrary, NaN included; attention
therefore gathers a row's own slots and nothing else (`plan.py`).
"""

from __future__ import annotations

import numpy as np
import torch

from sterna.executor.base import GroupSlots, Int32Array
from sterna.models.spec import ModelSpec


class KVPool:
    """Keys and values of all layers. `layers[i]` is (slots, 2 * num_kv_heads * head_dim) of layer i; slots as its group has."""

    def __init__(self, spec: ModelSpec, group_slots: tuple[int, ...], page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        slots_of = {i: slots for group, slots in zip(spec.kv_groups, group_slots, strict=True) for i in group.layers}
        self.layers = [
            torch.empty(slots_of[i], 2 * layer.mixer.num_kv_heads * layer.mixer.head_dim, dtype=dtype, device=device)
            for i, layer in enumerate(spec.layers)
        ]
        self._groups = [group.layers for group in spec.kv_groups]
        self._lanes = np.arange(page_size, dtype=np.int64)

    def copy_pages(self, groups: tuple[GroupSlots, ...]) -> None:
        """What a step copies (`GroupSlots.copied_from`)."""
        for layers, slots in zip(self._groups, groups, strict=True):
            if len(slots.copied_from):
                source, target = self._slots(slots.copied_from), self._slots(slots.copied_to)
                for i in layers:
                    self.layers[i].index_copy_(0, target, self.layers[i].index_select(0, source))

    def _slots(self, first: Int32Array) -> torch.Tensor:
        """Of pages, by their first."""
        return torch.from_numpy((first[:, None] + self._lanes).reshape(-1)).to(self.layers[0].device)
