"""How large the KV pool becomes, and which settings are refused."""

from __future__ import annotations

import pytest
import torch

from sterna.errors import ConfigError
from sterna.executor.torch import executor
from unit.executor.torch_driver import tiny_executor

TOKEN_BYTES = 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, head_dim, float32


def test_the_pool_holds_the_tokens_asked_for_in_whole_pages() -> None:
    info = tiny_executor(max_total_tokens=1000, page_size=16).info
    assert (info.num_slots, info.page_size, info.kv_bytes_per_token) == (992, 16, TOKEN_BYTES)


def test_memory_asked_for_is_divided_by_what_a_token_takes() -> None:
    assert tiny_executor(max_total_tokens=None, kv_memory="768KiB", page_size=1).info.num_slots == (768 << 10) // TOKEN_BYTES


def test_by_default_a_quarter_of_what_is_free_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "available_memory_bytes", lambda: 4 * 320 * TOKEN_BYTES)
    assert tiny_executor(max_total_tokens=None).info.num_slots == 320


def test_by_default_no_more_is_taken_than_the_running_requests_can_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "available_memory_bytes", lambda: 1 << 40)
    assert tiny_executor(max_total_tokens=None, max_running_requests=3).info.num_slots == 3 * 512 + 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_total_tokens": 15}, "--max-total-tokens is too small: one page of 16 tokens takes 12 KiB"),
        ({"max_total_tokens": None, "kv_memory": "8KiB"}, "--kv-memory is too small"),
        ({"max_total_tokens": None, "kv_memory": "900TiB"}, "--kv-memory asks for too much memory"),
        ({"max_total_tokens": None, "kv_memory": "some"}, "--kv-memory must be an amount of memory"),
        ({"executor_options": "a=b"}, "--executor-options"),
        ({"device": "abacus"}, "--device must be auto, cpu or cuda"),
        ({"device": "meta"}, "--device must be auto, cpu or cuda"),
    ],
)
def test_settings_that_cannot_be_served_are_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_executor(**changes)


def test_too_little_free_memory_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "available_memory_bytes", lambda: TOKEN_BYTES)
    with pytest.raises(ConfigError, match="too little free memory for the KV pool"):
        tiny_executor(max_total_tokens=None)


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [({"avx512_bf16": True}, "bfloat16"), ({"bf16": True}, "bfloat16"), ({"avx512_bf16": False, "avx2": True}, "float32"), ({}, "float32")],
)
def test_auto_is_bfloat16_only_where_the_processor_has_it(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], dtype: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert executor._dtype("auto", torch.device("cpu")) == getattr(torch, dtype)


def test_only_float32_promises_exact_tokens() -> None:
    assert tiny_executor(dtype="float32").info.exactness == "token"
    assert tiny_executor(dtype="bfloat16").info.exactness == "none"


def test_shutdown_frees_the_pool_and_may_be_repeated() -> None:
    made = tiny_executor()
    assert sum(layer.numel() for layer in made.pool.layers) > 0
    made.shutdown()
    made.shutdown()
    assert made.pool.layers == []
