"""When a request's time is over, and what becomes of it: journals, aborts, the last text. The scheduler is the test itself."""

import asyncio
import time
from typing import Any

import pytest

from sterna.protocol.control import SchedulingStarted
from sterna.protocol.finish import FinishAbort, FinishLength
from sterna.protocol.generate import AbortReq, StrRow, TokenizedGenerateReqInput
from sterna.tokenizer_manager.admission import Terms
from sterna.tokenizer_manager.manager import CUT_GRACE_S
from sterna.tokenizer_manager.req_state import JournalReader
from unit.tokenizer_manager.fakes import ManagerWithFakes, output, pass_time, request, scenario, settled

LIMIT = 1000.0
"""Seconds that don't pass in a test unless it says so (`pass_time`)."""


def started(*rids: str, at: float | None = None, epoch: int = 1) -> SchedulingStarted:
    return SchedulingStarted(epoch=epoch, rids=list(rids), time=time.monotonic() if at is None else at)


async def begin(group: ManagerWithFakes, rid: str = "r", timeout: float | None = None) -> JournalReader:
    terms = Terms(deadline=None if timeout is None else time.monotonic() + timeout)
    return await group.generate(request(rid), group.admit(terms))


async def end_of(reader: JournalReader) -> FinishAbort:
    async with asyncio.timeout(20):
        while True:
            delta = await reader.next_delta()
            if delta.finished_reason is not None:
                assert isinstance(delta.finished_reason, FinishAbort)
                return delta.finished_reason


def aborts(group: ManagerWithFakes) -> list[tuple[str, str]]:
    return [(each.rid, each.reason.code) for each in group.scheduler.of(AbortReq)]  # type: ignore[union-attr]


def test_who_waits_for_too_long_ends_at_once_and_his_rid_is_free_after_the_terminal_row() -> None:
    async def test(group: ManagerWithFakes) -> None:
        reader = await begin(group)
        pass_time(group.manager, LIMIT - 1)
        assert not aborts(group)
        pass_time(group.manager, 1)
        reason = await end_of(reader)
        assert (reason.status_code, reason.code) == (503, "waiting_timeout")
        assert reason.retry_after_s is not None
        assert aborts(group) == [("r", "waiting_timeout")]
        reader.close()
        assert group.manager.is_live("r")
        group.inbox.put(output(StrRow("r", 0, [], "", reason)))
        await settled(lambda: not group.manager.is_live("r"))
        assert aborts(group) == [("r", "waiting_timeout")]
        assert group.manager.accounts.live == 0

    scenario(test, waiting_timeout=LIMIT)


def test_the_waiting_timeout_ends_when_the_scheduler_begins_a_request_though_no_token_comes() -> None:
    async def test(group: ManagerWithFakes) -> None:
        begun, waits = await begin(group, "begun"), await begin(group, "waits")
        group.inbox.put(started("begun"))
        await settled(lambda: group.manager.accounts.queued == 1)
        pass_time(group.manager, LIMIT)
        assert (await end_of(waits)).code == "waiting_timeout"
        assert [rid for rid, _ in aborts(group)] == ["waits"]
        group.inbox.put(output(StrRow("begun", 0, [97], "a", FinishLength(1))))
        assert (await begun.next_delta()).finished_reason == FinishLength(1)

    scenario(test, waiting_timeout=LIMIT)


def test_word_of_another_epoch_begins_nothing_and_a_first_token_does() -> None:
    async def test(group: ManagerWithFakes) -> None:
        stale, fresh = await begin(group, "stale"), await begin(group, "fresh")
        group.inbox.put(started("stale", "unknown", epoch=0))
        group.inbox.put(output(StrRow("fresh", 0, [97], "a")))
        await settled(lambda: group.manager.accounts.queued == 1)
        pass_time(group.manager, LIMIT)
        assert (await end_of(stale)).code == "waiting_timeout"
        assert [rid for rid, _ in aborts(group)] == ["stale"]
        assert (await fresh.next_delta()).text == "a"

    scenario(test, waiting_timeout=LIMIT)


def test_the_running_timeout_counts_from_the_beginning_and_lets_the_last_text_through() -> None:
    async def test(group: ManagerWithFakes) -> None:
        reader = await begin(group)
        pass_time(group.manager, LIMIT)
        group.inbox.put(started("r", at=time.monotonic() + LIMIT))
        await settled(lambda: group.manager.accounts.queued == 0)
        pass_time(group.manager, LIMIT - 1)
        assert not aborts(group)
        pass_time(group.manager, 1)
        assert aborts(group) == [("r", "running_timeout")]
        (abort,) = group.scheduler.of(AbortReq)
        group.inbox.put(output(StrRow("r", 0, [97], "late text")))
        group.inbox.put(output(StrRow("r", 1, [98], "!", abort.reason)))  # type: ignore[union-attr]
        delta = await reader.next_delta()
        while delta.finished_reason is None:
            delta = await reader.next_delta()
        assert (delta.finished_reason.status_code, delta.finished_reason.code) == (504, "running_timeout")  # type: ignore[union-attr]
        assert reader.completion_tokens == 2
        assert len(group.scheduler.of(AbortReq)) == 1

    scenario(test, running_timeout=LIMIT)


def test_an_engine_that_says_nothing_keeps_nobody_beyond_his_deadline() -> None:
    async def test(group: ManagerWithFakes) -> None:
        reader = await begin(group, timeout=LIMIT)
        group.inbox.put(started("r"))
        await settled(lambda: group.manager.accounts.queued == 0)
        pass_time(group.manager, LIMIT)
        (state,) = group.manager._states.values()
        assert not state.finished
        pass_time(group.manager, CUT_GRACE_S)
        reason = await end_of(reader)
        assert (reason.status_code, reason.code) == (504, "deadline_exceeded")
        assert aborts(group) == [("r", "deadline_exceeded")]
        group.inbox.put(output(StrRow("r", 0, [97], "too late")))
        group.inbox.put(output(StrRow("r", 1, [], "", reason)))
        reader.close()
        await settled(lambda: group.manager.num_live == 0)

    scenario(test)


def test_what_comes_first_ends_it() -> None:
    async def test(group: ManagerWithFakes) -> None:
        late, early = await begin(group, "late", timeout=LIMIT + 1), await begin(group, "early", timeout=LIMIT - 1)
        pass_time(group.manager, LIMIT - 1)
        pass_time(group.manager, 1)
        assert (await end_of(late)).code == "waiting_timeout"
        assert (await end_of(early)).code == "deadline_exceeded"

    scenario(test, waiting_timeout=LIMIT)


def test_a_deadline_before_the_dispatch_dispatches_nothing() -> None:
    async def test(group: ManagerWithFakes) -> None:
        tokenizing, go_on = asyncio.Event(), asyncio.Event()
        inner = group.manager.run_blocking

        async def run_blocking(*args: Any, **kwargs: Any) -> Any:
            tokenizing.set()
            await go_on.wait()
            return await inner(*args, **kwargs)

        group.manager.run_blocking = run_blocking  # type: ignore[method-assign]
        admission = group.admit(Terms(deadline=time.monotonic() + LIMIT))
        told = asyncio.Event()
        admission.on_end = lambda _: told.set()
        task = asyncio.create_task(group.generate(request(), admission))
        await tokenizing.wait()
        pass_time(group.manager, LIMIT)
        assert told.is_set()
        task.cancel()  # as the one who was told does
        with pytest.raises(asyncio.CancelledError):
            await task
        assert group.scheduler.of(TokenizedGenerateReqInput) == []
        assert group.manager.num_live == 0
        assert admission.reason is not None
        assert admission.reason.code == "deadline_exceeded"

    scenario(test)


def test_a_request_that_ends_in_time_is_watched_no_longer() -> None:
    async def test(group: ManagerWithFakes) -> None:
        for index in range(300):
            reader = await begin(group, f"r{index}", timeout=LIMIT)
            assert len(group.manager.accounts.deadlines) == 1
            group.inbox.put(output(StrRow(f"r{index}", 0, [97], "a", FinishLength(1))))
            await reader.next_delta()
            reader.close()
        watched = group.manager.accounts.deadlines
        assert len(watched) == 0
        assert not group.scheduler.of(AbortReq)

    scenario(test, waiting_timeout=LIMIT, running_timeout=LIMIT)


def test_many_deadlines_are_one_timer_and_each_ends_its_own() -> None:
    async def test(group: ManagerWithFakes) -> None:
        tasks = len(asyncio.all_tasks())
        readers = [await begin(group, f"r{index}", timeout=LIMIT * (1 + index % 3)) for index in range(60)]
        assert len(asyncio.all_tasks()) == tasks
        for turn in range(3):
            pass_time(group.manager, LIMIT)
            assert len(aborts(group)) == 20 * (turn + 1)
        for reader in readers:
            assert (await end_of(reader)).code == "deadline_exceeded"
        assert sorted(aborts(group)) == sorted((reader.rid, "deadline_exceeded") for reader in readers)

    scenario(test)


def test_a_fault_in_one_s_ending_keeps_no_other_from_his() -> None:
    async def test(group: ManagerWithFakes) -> None:
        await begin(group, "bad", timeout=LIMIT)
        good = await begin(group, "good", timeout=LIMIT)

        def broken(_: FinishAbort) -> None:
            raise RuntimeError("the pipe is full")

        group.manager._states["bad"].admission.on_end = broken
        pass_time(group.manager, LIMIT)
        assert (await end_of(good)).code == "deadline_exceeded"

    scenario(test)


def test_an_evicted_request_ends_with_429_and_its_place_is_the_newcomer_s_at_once() -> None:
    async def test(group: ManagerWithFakes) -> None:
        low = await begin(group, "low")
        high = await group.generate(request("high"), group.admit(Terms(priority=1)))
        reason = await end_of(low)
        assert (reason.status_code, reason.code) == (429, "queue_full")
        sent = group.scheduler.sent
        assert [type(message).__name__ for message in sent] == ["TokenizedGenerateReqInput", "AbortReq", "TokenizedGenerateReqInput"]
        low.close()
        group.inbox.put(output(StrRow("low", 0, [], "", reason), StrRow("high", 0, [97], "a", FinishLength(1))))
        assert (await high.next_delta()).finished_reason == FinishLength(1)
        high.close()
        await settled(lambda: group.manager.num_live == 0)
        assert group.manager.accounts.live == 0

    scenario(test, max_running_requests=1, max_queued_requests=0, schedule_policy="priority")


def test_the_timer_needs_no_push() -> None:
    async def test(group: ManagerWithFakes) -> None:
        readers = [await begin(group, rid) for rid in ("a", "b")]
        for reader in readers:
            assert (await end_of(reader)).code == "waiting_timeout"

    scenario(test, waiting_timeout=0.02)


def test_the_recorder_is_told_once_of_each_timeout_and_eviction() -> None:
    async def test(group: ManagerWithFakes) -> None:
        counts = group.manager.recorder.counts
        waits, runs = await begin(group, "waits"), await begin(group, "runs", timeout=LIMIT)
        group.inbox.put(started("runs"))
        await settled(lambda: group.manager.accounts.queued == 1)
        pass_time(group.manager, LIMIT)
        pass_time(group.manager, CUT_GRACE_S)
        for reader in (waits, runs):
            await end_of(reader)
        assert (counts["timeout", "waiting_timeout"], counts["timeout", "deadline_exceeded"]) == (1, 1)
        assert counts["aborted", "timeout"] == 2
        low = await begin(group, "low")
        group.admit(Terms(priority=1))
        assert (await end_of(low)).code == "queue_full"
        assert counts["aborted", "evicted"] == 1

    scenario(test, waiting_timeout=LIMIT, schedule_policy="priority", max_running_requests=1, max_queued_requests=2)
