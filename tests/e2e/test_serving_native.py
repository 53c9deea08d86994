"""The default model on the default executor, behind real processes, through the official SDK: what each gets alone, it gets in a crowd."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e.engine import THREADS
from e2e.served import CHATS, KNOWN, TEXTS, Client, Known, Reply
from running_server import running_server, until

TOKENS = 16


@pytest.fixture(scope="module")
def client(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("native") / "log"
    with running_server("smollm2", "--threads", str(THREADS), "--max-total-tokens", "16384", log=log) as server:
        made = Client(server)
        yield made
        made.close()


def at_once(ask: Callable[[Any], Any], each: Iterable[Any]) -> list[Any]:
    each = list(each)
    with ThreadPoolExecutor(len(each)) as pool:
        return list(pool.map(ask, each))


def say(client: Client, known: Known, **options: Any) -> Reply:
    options = {"max_tokens": TOKENS, "ignore_eos": True, **options}
    return client.chat(known.messages, **options) if known.messages else client.complete(known.text, **options)


def test_the_default_executor_is_native_and_says_all_that_it_chose(client: Client) -> None:
    info = client.server.get("/server_info").json()["processes"]["scheduler"]
    assert (info["executor"], info["exactness"], info["quantization"], info["threads"]) == ("native", "bitwise", "none", THREADS)
    assert info["isa"] in info["isas_available"].split(", ")
    assert info["kv_bytes"] >= 16384 * info["kv_bytes_per_token"] > 0
    assert info["weights_bytes"] > 80e6
    said = client.server.read_log()
    for part in (info["isa"], "1 thread", "Q4_1", "room for 16384 tokens", "pages of 16", "bfloat16", "auto arithmetic"):
        assert part in said, part


def test_sixteen_at_once_are_each_answered_as_alone_streamed_and_not(client: Client) -> None:
    crowd = KNOWN[:: len(KNOWN) // 16][:16]
    client.flush()
    alone = [say(client, known) for known in crowd]
    client.flush()
    together = at_once(lambda index: say(client, crowd[index], stream=index % 2 == 0), range(16))
    again = at_once(lambda index: say(client, crowd[index], stream=index % 2 == 1), range(16))
    for first, second, third in zip(alone, together, again, strict=True):
        assert first.text == second.text == third.text
        assert first.finish_reason == second.finish_reason == third.finish_reason == "length"
        assert first.usage.completion_tokens == second.usage.completion_tokens == third.usage.completion_tokens == TOKENS
    assert until(lambda: client.server.metrics()["sterna_max_batch_size"]) >= 12
    assert any(reply.usage.prompt_tokens_details.cached_tokens > 0 for reply in again)


def test_a_seed_repeats_its_text_in_a_crowd_and_two_seeds_differ(client: Client) -> None:
    known = CHATS[3]
    alone = [say(client, known, temperature=1, seed=seed).text for seed in (1, 2)]
    with client.crowd(15):
        crowded = [say(client, known, temperature=1, seed=seed, stream=True).text for seed in (1, 2)]
    assert crowded == alone
    assert alone[0] != alone[1]


def test_a_prompt_is_answered_alike_cold_and_warm(client: Client) -> None:
    known = max(CHATS, key=lambda known: len(known.prompt_ids))
    client.flush()
    cold = say(client, known)
    client.settle()
    warm = say(client, known, stream=True)
    assert cold.text == warm.text
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == len(known.prompt_ids) - 1 > 0


def test_it_begins_as_transformers_does_in_float32_more_often_than_not(client: Client) -> None:
    """Rounded activations turn a close choice now and then, and after that the texts differ; a fault turns them all."""
    said = at_once(lambda known: client.generate(known.prompt_ids, max_new_tokens=8, ignore_eos=True)["output_ids"], TEXTS)
    same = sum(ids == known.ids[:8] for ids, known in zip(said, TEXTS, strict=True))
    assert same > len(TEXTS) / 2


def test_when_all_have_gone_nothing_is_held(client: Client) -> None:
    held = ("sterna_requests_running", "sterna_scheduler_running", "sterna_scheduler_waiting", "sterna_kv_used_tokens")
    until(lambda: all(client.server.metrics()[name] == 0 for name in held))
