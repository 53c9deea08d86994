"""How many slots each KV group gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.config.server_args import ServerArgs
from sterna.errors import ConfigError
from sterna.executor.kv_memory import DEFAULT_CAP_BYTES, choose_group_slots, kv_bytes
from sterna.models.spec import AttentionSpec, GatedMLPSpec, LayerSpec, ModelSpec, kv_groups

PLENTY = 1 << 45
ELEMENT_BYTES = 2
LAYER_TOKEN_BYTES = 2 * 64 * ELEMENT_BYTES


def spec_of(*windows: int | None) -> ModelSpec:
    """One layer per window; None sees all."""
    layers = tuple(
        LayerSpec(AttentionSpec(4, 1, 64, 1.0, None, window=window), GatedMLPSpec(intermediate=8), norm_eps=1e-5) for window in windows
    )
    return ModelSpec(8, 8, layers, kv_groups(layers), 1e-5, True)


def choose(spec: ModelSpec, available: int = PLENTY, **settings: object) -> tuple[int, ...]:
    return choose_group_slots(ServerArgs(**settings), spec, ELEMENT_BYTES, available)  # type: ignore[arg-type]


def test_a_window_group_gets_what_the_running_requests_can_use_and_the_full_group_the_tokens_asked_for() -> None:
    settings = {"max_total_tokens": 100_000, "max_running_requests": 10, "chunked_prefill_size": 64, "page_size": 16}
    full, window = choose(spec_of(None, 128, 128), **settings)
    assert full == 100_000
    assert 10 * (128 + 64) < window <= 10 * (128 + 64 + 3 * 16) + 64


def test_no_group_gets_more_slots_than_there_are_tokens() -> None:
    assert choose(spec_of(None, 4096), max_total_tokens=1000, page_size=16) == (992, 992)


def test_prompts_that_are_never_split_may_need_every_slot_in_a_window_group() -> None:
    assert choose(spec_of(None, 128), max_total_tokens=100_000, chunked_prefill_size=0) == (100_000, 100_000)


def test_the_memory_that_windows_save_goes_to_the_full_group() -> None:
    settings = {"kv_memory": "64MiB", "max_running_requests": 8}
    spec = spec_of(*[None, *[128] * 5])
    full, window = choose(spec, **settings)
    (alike,) = choose(spec_of(*[None] * 6), **settings)
    assert window < alike < full
    assert (64 << 20) - 16 * LAYER_TOKEN_BYTES * 6 < kv_bytes(spec, (full, window), ELEMENT_BYTES) <= 64 << 20


def test_where_every_layer_has_a_window_the_widest_gets_the_tokens_asked_for() -> None:
    assert choose(spec_of(128), max_total_tokens=100_000, max_running_requests=4) == (100_000,)
    narrow, wide = choose(spec_of(128, 512), max_total_tokens=100_000, max_running_requests=4)
    assert narrow < wide == 100_000


@pytest.mark.parametrize("windows", [(None,), (None, 64), (32, None, 64), (64,)])
def test_by_default_no_more_is_taken_than_a_quarter_of_free_memory_or_requests_fill(
    windows: tuple[int | None],
) -> None:
    spec = spec_of(*windows)
    small = choose(spec, available=4 << 20)
    assert (1 << 20) - 16 * LAYER_TOKEN_BYTES * len(windows) < kv_bytes(spec, small, ELEMENT_BYTES) <= 1 << 20
    assert kv_bytes(spec, choose(spec, max_running_requests=100_000), ELEMENT_BYTES) <= DEFAULT_CAP_BYTES
    assert max(choose(spec, max_running_requests=3)) == 3 * 2048 + 16
    assert max(choose(spec, max_running_requests=3, context_length=512)) == 3 * 512 + 16


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_total_tokens": 15}, "--max-total-tokens is too small: one page of 16 tokens takes 8 KiB"),
        ({"kv_memory": "7KiB"}, "--kv-memory is too small"),
        ({"kv_memory": "900TiB"}, "--kv-memory asks for too much memory"),
        ({"max_total_tokens": 1 << 40}, "--max-total-tokens asks for too much memory"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose(spec_of(None, 64), **settings)


def test_too_little_free_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="too little free memory"):
        choose(spec_of(None, 64), available=1000)


@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 300)), min_size=1, max_size=6),
    megabytes=st.integers(1, 64),
    page_size=st.sampled_from([1, 16, 64]),
    rows=st.integers(1, 64),
    chunk=st.sampled_from([0, 1, 32, 512]),
)
def test_any_budget_is_used_up_to_less_than_a_page_and_never_exceeded(
    windows: list[int | None], megabytes: int, page_size: int, rows: int, chunk: int
) -> None:
    spec = spec_of(*windows)
    settings = {"kv_memory": f"{megabytes}MiB", "page_size": page_size, "max_running_requests": rows, "chunked_prefill_size": chunk}
    slots = choose(spec, **settings)
    taken = kv_bytes(spec, slots, ELEMENT_BYTES)
    assert (megabytes << 20) - (page_size + 1) * LAYER_TOKEN_BYTES * len(windows) < taken <= megabytes << 20
    assert all(count % page_size == 0 for count in slots)
