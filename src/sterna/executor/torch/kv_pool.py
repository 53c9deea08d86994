"""KV memory: one tensor per layer, indexed by slot, and how large it may be.

A slot's row holds a token's keys and then its values: (num_slots, 2 * num_kv_heads * head_dim). The memory is allocated, not filled: pages
of the operating system are touched as slots are first used. What lies in a slot that nobody owns is arbitrary, NaN included; attention
therefore gathers a row's own slots and nothing else (`plan.py`).
"""

from __future__ import annotations

import torch

from sterna.config.memory import available_memory_bytes, parse_bytes, show_bytes
from sterna.config.server_args import ServerArgs
from sterna.errors import ConfigError
from sterna.models.spec import ModelSpec

DEFAULT_SHARE = 0.25
"""Of the memory that is available once the weights are loaded."""
DEFAULT_CAP_BYTES = 4 << 30
"""More has to be asked for."""
DEFAULT_TOKENS_PER_REQUEST = 2048
"""No more than this for each of `max_running_requests`."""


class KVPool:
    """Keys and values of all layers. `layers[i]` is (num_slots, 2 * num_kv_heads * head_dim) of layer i."""

    def __init__(self, spec: ModelSpec, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = num_slots
        self.layers = [
            torch.empty(num_slots, 2 * layer.mixer.num_kv_heads * layer.mixer.head_dim, dtype=dtype, device=device) for layer in spec.layers
        ]


def bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """K and V of one token over all layers."""
    return int(dtype.itemsize * sum(group.elements_per_token for group in spec.kv_groups))


def choose_num_slots(args: ServerArgs, token_bytes: int, device: torch.device) -> int:
    """How many tokens the pool holds: a multiple of the page size.

    `--max-total-tokens` decides, else `--kv-memory`, else a quarter of the memory that is available, at most 4 GiB and at most 2,048 tokens
    (or the context) for every running request. Raises ConfigError where that is less than a page, or more than there is.
    """
    available = _available(device)
    if args.max_total_tokens is not None:
        flag, slots = "--max-total-tokens", args.max_total_tokens
    elif args.kv_memory is not None:
        flag, slots = "--kv-memory", parse_bytes(args.kv_memory, "--kv-memory") // token_bytes
    else:
        flag = ""
        per_request = min(args.context_length or DEFAULT_TOKENS_PER_REQUEST, DEFAULT_TOKENS_PER_REQUEST)
        budget = min(int(available * DEFAULT_SHARE), DEFAULT_CAP_BYTES)
        slots = min(budget // token_bytes, args.max_running_requests * per_request + args.page_size)
    slots -= slots % args.page_size
    if slots < args.page_size:
        page = f"one page of {args.page_size} tokens takes {show_bytes(args.page_size * token_bytes)}"
        raise ConfigError(f"{flag} is too small: {page}" if flag else f"too little free memory for the KV pool: {page}")
    if slots * token_bytes > available:
        needed = f"{slots} tokens take {show_bytes(slots * token_bytes)}, and {show_bytes(available)} is available"
        raise ConfigError(f"{flag or 'the KV pool'} asks for too much memory: {needed}")
    return slots


def _available(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory_bytes()
