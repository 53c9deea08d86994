"""Whatever comes in whatever order: each request gets its own tokens and one ending, and nothing is left held.

After every turn each slot has exactly one owner, and the executor verifies every context that it reads.
"""

import random
from collections import Counter

import pytest

from sterna.protocol.control import FlushCacheReq
from sterna.protocol.finish import FinishAbort, FinishLength, FinishMatchedToken
from unit.scheduler.harness import EOS, Harness, echo

NAN = 998


ALL_FULL = "0"
WINDOWED = ["0:16", "0:5:40", "24", "7:30", "0:1", "1"]
"""The windows of the KV groups; 0 is a group without one."""


def settings_of(rng: random.Random, windows: str) -> dict[str, object]:
    page_size = rng.choice([1, 4, 16])
    # A single request of any length has room in the smallest.
    window_slots = page_size * (40 // page_size + 3 + rng.randrange(60 // page_size)) if windows != ALL_FULL else 0
    return {
        "page_size": page_size,
        "max_total_tokens": page_size * rng.randrange(160 // page_size, 900 // page_size),
        "max_running_requests": rng.choice([2, 6, 24]),
        "max_queued_requests": rng.choice([3, 1000]),
        "chunked_prefill_size": rng.choice([0, 1, 5, 32, 512]),
        "schedule_policy": rng.choice(["fcfs", "lpm"]),
        "radix_cache": rng.random() < 0.8,
        "stream_interval": rng.choice([1, 1, 3]),
        "options": f"reuse_generated_kv={rng.randrange(2)},nan_token={NAN},windows={windows},window_slots={window_slots}",
    }


def prompt_of(rng: random.Random, stems: list[list[int]]) -> list[int]:
    stem = rng.choice(stems)[: rng.randrange(0, 90)]
    prompt = [*stem, *(rng.randrange(900) for _ in range(rng.randrange(1, 30)))]
    if rng.random() < 0.2:
        prompt[rng.randrange(len(prompt))] = rng.choice([EOS, NAN])
    return prompt


def run_mix(seed: int, windows: str) -> tuple[Harness, Counter[str]]:
    rng = random.Random(seed)
    h = Harness(**settings_of(rng, windows))  # type: ignore[arg-type]
    if windows != ALL_FULL and seed % 3:
        h.scheduler.prefill.ratio.INITIAL = h.scheduler.prefill.ratio.value = 0.0  # admits too many
    stems = [[rng.randrange(900) for _ in range(90)] for _ in range(3)]
    sent: dict[str, tuple[list[int], int, int]] = {}
    for i in range(60):
        prompt, count = prompt_of(rng, stems), rng.randrange(1, 70)
        resumed = 0 if {EOS, NAN} & set(prompt) or rng.random() < 0.9 else rng.randrange(count)
        sent[f"r{i}"] = (prompt, count, resumed)
        h.send(f"r{i}", prompt, count, stream=rng.random() < 0.7, salt=rng.choice(["", "", "s"]), resume=echo(prompt, resumed))
        if rng.random() < 0.15:
            h.abort(f"r{rng.randrange(i + 1)}")
        if rng.random() < 0.05:
            h.inbox.messages.append(FlushCacheReq(control_id=i, reply_to="ipc://server"))
        for _ in range(rng.choice([0, 0, 1, 5, 20])):
            h.turn()
    h.scheduler.prefill.ratio.value = 0.0
    h.run()
    kinds = Counter(check_one(h, rid, *sent[rid]) for rid in sent)
    h.assert_at_baseline()
    assert h.outbox.stats is not None
    kinds["retractions"] = h.outbox.stats.retractions_total
    kinds["cached"] = h.outbox.stats.cached_tokens_total
    for rid, (_, _, resumed) in sent.items():
        if h.outbox.params[rid].return_logprob and (last := h.outbox.rows[rid][-1]).times is not None:
            kinds["logprobs after a retraction"] += last.times.retractions
            kinds["logprobs after a resumption"] += resumed > 0
            kinds["logprobs up to a fault"] += isinstance(last.finished_reason, FinishAbort) and last.start > 0
    return h, kinds


def check_one(h: Harness, rid: str, prompt: list[int], count: int, resumed: int) -> str:
    """Its output is the echo up to where its reason says; the reason is the right one."""
    reason, output = h.reason(rid), echo(prompt, resumed) + h.output(rid)
    assert output == echo(prompt, len(output))
    expected = next((k for k, token in enumerate(echo(prompt, count)) if token in (EOS, NAN)), count)
    match reason:
        case FinishLength():
            assert len(output) == count == expected
        case FinishMatchedToken():
            assert output[-1] == EOS
            assert len(output) == expected + 1
        case FinishAbort(code="invalid_logits"):
            assert prompt[len(output) % len(prompt)] == NAN
        case FinishAbort(code=code):
            assert code in ("aborted", "queue_full", "engine_failure")
            assert len(output) <= expected
            if code == "engine_failure":
                assert len(prompt) + count > h.scheduler.ledger.pools.longest_request, "only what can't fit alone may fail"
    return type(reason).__name__


ENDS = {
    "FinishLength",
    "FinishMatchedToken",
    "FinishAbort",
    "retractions",
    "cached",
    "logprobs after a retraction",
    "logprobs after a resumption",
    "logprobs up to a fault",
}


@pytest.mark.parametrize("first_seed", range(0, 24, 6))
def test_any_mix_of_requests_ends_right(first_seed: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + 6):
        seen += run_mix(seed, ALL_FULL)[1]
    assert seen.keys() >= ENDS, seen


@pytest.mark.parametrize("first_seed", [0, 6])
def test_any_mix_ends_right_whatever_windows_the_layers_have(first_seed: int) -> None:
    seen: Counter[str] = Counter()
    for seed, windows in enumerate(WINDOWED, first_seed):
        seen += run_mix(seed, windows)[1]
    assert seen.keys() >= ENDS, seen
