"""How many KV slots each group gets: the rules that every engine shares.

A group of full layers holds every token of every request. A group of windowed layers holds a window's worth of each, so it gets what
`max_running_requests` can use and no more; the memory that this saves goes to the group without a window (where all have one: to the
widest), whose number of slots is what `--max-total-tokens` and `--kv-memory` speak of.
"""

from __future__ import annotations

from sterna.config.memory import parse_bytes, show_bytes
from sterna.config.server_args import ServerArgs
from sterna.errors import ConfigError
from sterna.mem_cache.window import UNLIMITED, most_window_tokens
from sterna.models.spec import KVGroup, ModelSpec

DEFAULT_SHARE = 0.25
"""Of the memory that is available once the weights are loaded."""
DEFAULT_CAP_BYTES = 4 << 30
"""More has to be asked for."""
DEFAULT_TOKENS_PER_REQUEST = 2048
"""No more than this for each of `max_running_requests`."""


def choose_group_slots(args: ServerArgs, spec: ModelSpec, bytes_per_element: int, available_bytes: int) -> tuple[int, ...]:
    """Slots of each of `spec.kv_groups`: multiples of the page size. `bytes_per_element` is what one number of K or V takes.

    `--max-total-tokens` decides, else `--kv-memory`, else a quarter of `available_bytes`, at most 4 GiB and at most 2,048 tokens (or the
    context) for every running request. Raises ConfigError where that is less than a page, or more than there is.
    """
    page_size = args.page_size
    most = [_most_slots(args, group, spec.kv_groups) for group in spec.kv_groups]
    sizes = [bytes_per_element * group.elements_per_token for group in spec.kv_groups]
    if args.max_total_tokens is not None:
        flag, tokens = "--max-total-tokens", args.max_total_tokens
    elif args.kv_memory is not None:
        flag, tokens = "--kv-memory", _tokens_in(parse_bytes(args.kv_memory, "--kv-memory"), sizes, most)
    else:
        flag = ""
        per_request = min(args.context_length or DEFAULT_TOKENS_PER_REQUEST, DEFAULT_TOKENS_PER_REQUEST)
        budget = min(int(available_bytes * DEFAULT_SHARE), DEFAULT_CAP_BYTES)
        tokens = min(_tokens_in(budget, sizes, most), args.max_running_requests * per_request + page_size)
    tokens -= tokens % page_size
    if tokens < page_size:
        page = f"one page of {page_size} tokens takes {show_bytes(page_size * sum(sizes))}"
        raise ConfigError(f"{flag} is too small: {page}" if flag else f"too little free memory for the KV pool: {page}")
    slots = tuple(tokens if limit is None else min(tokens, limit) for limit in most)
    needed = kv_bytes(spec, slots, bytes_per_element)
    if needed > available_bytes:
        text = f"{tokens} tokens take {show_bytes(needed)}, and {show_bytes(available_bytes)} is available"
        raise ConfigError(f"{flag or 'the KV pool'} asks for too much memory: {text}")
    return slots


def kv_bytes(spec: ModelSpec, group_slots: tuple[int, ...], bytes_per_element: int) -> int:
    """What pools of these sizes take."""
    return bytes_per_element * sum(group.elements_per_token * slots for group, slots in zip(spec.kv_groups, group_slots, strict=True))


def _most_slots(args: ServerArgs, group: KVGroup, groups: tuple[KVGroup, ...]) -> int | None:
    """What `max_running_requests` can use of `group`, in whole pages; None: all that there is.

    Of a step's chunk each request may have all; two steps may be under way.
    """
    widest = max((each.window for each in groups), key=lambda window: window or UNLIMITED)
    if group.window is None or group.window == widest or not args.chunked_prefill_size:
        return None
    page_size, chunk = args.page_size, args.chunked_prefill_size
    each = most_window_tokens(group.window, chunk, page_size)
    return args.max_running_requests * each + -(-chunk // page_size) * page_size


def _tokens_in(budget: int, sizes: list[int], most: list[int | None]) -> int:
    """The largest number of tokens for which each group's slots, up to its limit, fit into `budget` bytes together."""
    total = sum(sizes)
    tokens = budget // total
    for limit, size in sorted((limit, size) for limit, size in zip(most, sizes, strict=True) if limit is not None):
        if tokens <= limit:
            break
        budget -= size * limit
        total -= size
        tokens = budget // total
    return tokens
