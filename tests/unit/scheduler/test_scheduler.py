import random
from collections.abc import Iterator

import pytest

from sterna.protocol.channels import ToScheduler
from sterna.protocol.control import OutputCredit, ShutdownReq
from sterna.protocol.finish import FinishLength, FinishMatchedToken
from sterna.protocol.generate import AbortReq, BatchTokenizedGenerateReqInput
from unit.scheduler.harness import EOS, Harness, Inbox, echo

pytestmark = pytest.mark.usefixtures("either_way")


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1, 900) for _ in range(length)]


def test_a_request_gets_its_tokens_in_order_and_one_ending() -> None:
    h = Harness()
    h.send("a", [1, 2, 3], 5)
    h.run()
    assert h.output("a") == [1, 2, 3, 1, 2]
    assert h.reason("a") == FinishLength(5)
    h.assert_at_baseline()


@pytest.mark.parametrize("chunk", [0, 1, 7, 64, 512])
@pytest.mark.parametrize("radix", [True, False])
def test_a_crowd_of_requests_gets_the_same_tokens_whatever_the_chunking_and_caching(chunk: int, radix: bool) -> None:
    rng = random.Random(chunk)
    count = {1: 400, 7: 200}.get(chunk, 30)  # long enough that many run at once
    h = Harness(chunked_prefill_size=chunk, radix_cache=radix, max_running_requests=32, max_total_tokens=16_384)
    shared = prompt_of(rng, 20)
    prompts = {f"r{i}": (shared if i % 2 else []) + prompt_of(rng, rng.randrange(1, 20 if chunk == 1 else 80)) for i in range(40)}
    for rid, prompt in prompts.items():
        h.send(rid, prompt, count)
    h.run()
    for rid, prompt in prompts.items():
        assert h.output(rid) == echo(prompt, count)
    h.assert_at_baseline()
    assert h.outbox.stats is not None
    assert h.outbox.stats.max_batch_size >= 16
    assert (h.outbox.stats.cached_tokens_total > 0) == radix
    if 0 < chunk < 64:
        assert max(h.outbox.rows[rid][-1].times.chunks for rid in prompts) > 1  # type: ignore[union-attr]


def test_an_end_token_ends_a_request_and_is_counted() -> None:
    h = Harness()
    h.send("a", [5, 6, EOS, 7], 10)
    h.send("own", [5, 6, 7, 8], 10, stop_token_ids=(7,))
    h.send("ignored", [5, 6, EOS, 7], 6, ignore_eos=True)
    h.send("held off", [5, EOS, 6, EOS], 10, min_new_tokens=3)
    h.run()
    assert (h.output("a"), h.reason("a")) == ([5, 6, EOS], FinishMatchedToken(EOS, True))
    assert (h.output("own"), h.reason("own")) == ([5, 6, 7], FinishMatchedToken(7, False))
    assert (h.output("ignored"), h.reason("ignored")) == ([5, 6, EOS, 7, 5, 6], FinishLength(6))
    assert (h.output("held off"), h.reason("held off")) == ([5, EOS, 6, EOS], FinishMatchedToken(EOS, True))
    h.assert_at_baseline()


def test_members_of_a_fan_out_arrive_together() -> None:
    h = Harness()
    for i in range(3):
        h.send(f"r{i}", [1 + i, 2], 3)
    h.inbox.messages = [BatchTokenizedGenerateReqInput(reqs=h.inbox.messages)]  # type: ignore[arg-type]
    h.run()
    assert [h.output(f"r{i}") for i in range(3)] == [echo([1 + i, 2], 3) for i in range(3)]


class SleepyInbox(Inbox):
    """Has nothing until it is waited for; then one more message of `script`."""

    def __init__(self, script: list[ToScheduler]) -> None:
        super().__init__()
        self.script = script
        self.waits = 0
        self.turns = 0

    def wait(self, timeout_ms: int | None = None) -> bool:
        assert timeout_ms is None, "an idle scheduler wakes for messages only"
        self.waits += 1
        self.messages.append(self.script.pop(0))
        return True

    def drain(self, limit: int = 1_000_000) -> Iterator[ToScheduler]:
        self.turns += 1
        return super().drain(limit)


def test_an_idle_scheduler_sleeps_in_its_inbox() -> None:
    h = Harness()
    inbox = SleepyInbox([AbortReq(rid="nobody"), OutputCredit(batches=1), ShutdownReq()])
    h.scheduler._inbox = inbox
    h.scheduler.main_loop()
    assert inbox.turns == inbox.waits == 3


def test_a_busy_scheduler_does_not_wait_for_messages() -> None:
    h = Harness()
    h.send("a", [1, 2], 10)
    request = h.inbox.messages.pop()
    inbox = SleepyInbox([request, ShutdownReq()])
    h.scheduler._inbox = inbox
    h.scheduler.main_loop()
    assert h.output("a") == echo([1, 2], 10)
    assert inbox.waits == 2
    # A turn for each token, the first one in the turn that the request came in; and where steps overlap one more, to read the last.
    assert inbox.turns == 2 + 9 + h.overlap
