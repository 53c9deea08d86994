"""Who owns a request when, and what every ending frees. The scheduler is the test itself."""

import asyncio
from typing import Any

import pytest

from sterna.errors import ContextLengthExceeded, DuplicateRid, EngineDead, InvalidRequest, OverloadedError, QueueFull
from sterna.protocol.control import DecodeRefused, FlushCacheOutput, FlushCacheReq, OutputCredit
from sterna.protocol.finish import FinishAbort, FinishLength
from sterna.protocol.generate import AbortReq, StrRow, TokenizedGenerateReqInput
from unit.tokenizer_manager.fakes import ManagerWithFakes, output, request, scenario, settled

ABORTED = FinishAbort("aborted", 499, "aborted")


def test_a_request_goes_out_tokenized_and_comes_back_through_its_reader() -> None:
    async def test(group: ManagerWithFakes) -> None:
        outcomes: list[Any] = []
        group.manager.on_finish.append(lambda state, outcome: outcomes.append((state.rid, outcome)))
        reader = await group.generate(request(), group.admit())
        (sent,) = group.scheduler.of(TokenizedGenerateReqInput)
        assert sent.input_ids == list(b"hello")
        assert sent.sampling_params.max_new_tokens == 4
        assert sent.reply_to == group.inbox.address
        group.inbox.put(output(StrRow("r", 0, [97], "a", None, 5)))
        assert (await reader.next_delta()).text == "a"
        group.inbox.put(output(StrRow("r", 1, [98], "b", FinishLength(2), 5)))
        delta = await reader.next_delta()
        assert (delta.text, delta.finished_reason) == ("b", FinishLength(2))
        assert group.manager.num_live == 1
        reader.close()
        assert group.manager.num_live == 0
        assert outcomes == [("r", "ok")]
        assert not group.scheduler.of(AbortReq)
        await settled(lambda: bool(group.scheduler.of(OutputCredit)))

    scenario(test)


def test_a_duplicate_rid_is_refused_before_anything_is_registered() -> None:
    async def test(group: ManagerWithFakes) -> None:
        reader = await group.generate(request(), group.admit())
        with pytest.raises(DuplicateRid):
            await group.generate(request(), group.admit())
        assert len(group.scheduler.of(TokenizedGenerateReqInput)) == 1
        group.inbox.put(output(StrRow("r", 0, [97], "a", FinishLength(1))))
        assert (await reader.next_delta()).text == "a"

    scenario(test)


def test_two_starts_of_one_rid_at_once_register_one() -> None:
    async def test(group: ManagerWithFakes) -> None:
        results = await asyncio.gather(*(group.generate(request(), group.admit()) for _ in range(2)), return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["DuplicateRid", "JournalReader"]

    scenario(test)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"text": "x" * 64}, ContextLengthExceeded),
        ({"text": "x" * 61}, ContextLengthExceeded),
        ({"text": ""}, InvalidRequest),
        ({"text": None, "input_ids": [260]}, InvalidRequest),
        ({"text": None, "input_ids": [-1]}, InvalidRequest),
    ],
)
def test_a_failure_before_dispatch_is_a_local_drop(fields: dict[str, Any], fault: type[Exception]) -> None:
    async def test(group: ManagerWithFakes) -> None:
        with pytest.raises(fault):
            await group.generate(request(**fields), group.admit())
        assert group.scheduler.sent == []
        assert group.manager.num_live == 0
        group.admit().close()

    scenario(test, max_running_requests=1, max_queued_requests=0)


def test_prompt_and_output_may_fill_the_context_exactly() -> None:
    async def test(group: ManagerWithFakes) -> None:
        await group.generate(request(text="x" * 60), group.admit())
        await group.generate(request("rest", text="x" * 60, max_new_tokens=None), group.admit())
        assert [sent.sampling_params.max_new_tokens for sent in group.scheduler.of(TokenizedGenerateReqInput)] == [4, 4]

    scenario(test)


def test_a_reader_that_leaves_sends_one_abort_and_the_state_stays_until_the_terminal_row() -> None:
    async def test(group: ManagerWithFakes) -> None:
        outcomes: list[str] = []
        group.manager.on_finish.append(lambda _, outcome: outcomes.append(outcome))
        reader = await group.generate(request(), group.admit())
        group.manager.abort_request("r")
        reader.close()
        reader.close()
        assert len(group.scheduler.of(AbortReq)) == 1
        assert group.manager.num_live == 1
        group.inbox.put(output(StrRow("r", 0, [97], "a")))
        group.inbox.put(output(StrRow("r", 1, [], "", ABORTED)))
        await settled(lambda: group.manager.num_live == 0)
        assert outcomes == ["abort"]

    scenario(test)


def test_an_abort_is_of_exactly_one_rid() -> None:
    async def test(group: ManagerWithFakes) -> None:
        for rid in ("req-1", "req-10"):
            await group.generate(request(rid), group.admit())
        assert not group.manager.abort_request("req")
        assert group.manager.abort_request("req-1")
        assert [abort.rid for abort in group.scheduler.of(AbortReq)] == ["req-1"]

    scenario(test)


def test_a_cancelled_handler_leaves_nothing_while_it_tokenizes() -> None:
    async def test(group: ManagerWithFakes) -> None:
        task = asyncio.create_task(group.generate(request(), group.admit()))
        await asyncio.sleep(0)
        assert group.manager.num_live == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert group.manager.num_live == 0
        assert group.scheduler.sent == []

    scenario(test)


def test_admission_is_bounded_and_every_ending_gives_it_back() -> None:
    async def test(group: ManagerWithFakes) -> None:
        first, second = group.admit(), group.admit()
        with pytest.raises(QueueFull):
            group.admit()
        first.close()
        first.close()
        reader = await group.generate(request(), group.admit())
        with pytest.raises(QueueFull):
            group.admit()
        second.close()
        group.inbox.put(output(StrRow("r", 0, [97], "a", FinishLength(1))))
        await reader.next_delta()
        reader.close()
        group.admit(), group.admit()

    scenario(test, max_running_requests=1, max_queued_requests=1)


def test_lost_output_ends_the_request_and_no_other() -> None:
    async def test(group: ManagerWithFakes) -> None:
        reader = await group.generate(request(), group.admit())
        other = await group.generate(request("other"), group.admit())
        group.inbox.put(output(StrRow("r", 2, [97], "a"), StrRow("other", 0, [97], "a")))
        reason = (await reader.next_delta()).finished_reason
        assert isinstance(reason, FinishAbort)
        assert reason.status_code == 500
        assert [abort.rid for abort in group.scheduler.of(AbortReq)] == ["r"]
        assert (await other.next_delta()).finished_reason is None
        reader.close()
        with pytest.raises(DuplicateRid):  # the scheduler still has it
            await group.generate(request(), group.admit())
        group.inbox.put(output(StrRow("r", 3, [], "", ABORTED)))
        await settled(lambda: not group.manager.is_live("r"))
        await group.generate(request(), group.admit())

    scenario(test)


def test_a_dead_engine_ends_every_request_and_admits_none() -> None:
    async def test(group: ManagerWithFakes) -> None:
        reader = await group.generate(request(), group.admit())
        flush = asyncio.create_task(group.manager.flush_cache())
        await settled(lambda: bool(group.scheduler.of(FlushCacheReq)))
        group.manager.fail("the scheduler process died (signal 9)")
        reason = (await reader.next_delta()).finished_reason
        assert isinstance(reason, FinishAbort)
        assert reason.code == "engine_dead"
        reader.close()
        assert group.manager.num_live == 0
        with pytest.raises(EngineDead):
            group.admit()
        with pytest.raises(EngineDead):
            await flush

    scenario(test)


def test_a_draining_server_admits_nothing() -> None:
    async def test(group: ManagerWithFakes) -> None:
        group.manager.draining = True
        with pytest.raises(OverloadedError) as caught:
            group.admit()
        assert caught.value.code == "draining"

    scenario(test)


def test_what_the_detokenizer_refuses_is_aborted_once() -> None:
    async def test(group: ManagerWithFakes) -> None:
        reader = await group.generate(request(), group.admit())
        group.inbox.put(DecodeRefused(rid="r", epoch=1))
        group.inbox.put(DecodeRefused(rid="nobody", epoch=1))
        await settled(lambda: bool(group.scheduler.of(AbortReq)))
        group.inbox.put(output(StrRow("r", 0, [], "", FinishAbort("no room", 429, "queue_full"))))
        reason = (await reader.next_delta()).finished_reason
        assert isinstance(reason, FinishAbort)
        assert reason.code == "queue_full"
        assert len(group.scheduler.of(AbortReq)) == 1

    scenario(test)


def test_messages_of_another_epoch_change_nothing() -> None:
    async def test(group: ManagerWithFakes) -> None:
        reader = await group.generate(request(), group.admit())
        group.inbox.put(DecodeRefused(rid="r", epoch=0))
        group.inbox.put(output(StrRow("r", 0, [97], "old", FinishLength(1)), epoch=0))
        group.inbox.put(output(StrRow("r", 0, [97], "new", FinishLength(1))))
        assert (await reader.next_delta()).text == "new"
        assert not group.scheduler.of(AbortReq)
        await settled(lambda: bool(group.scheduler.of(OutputCredit)))
        assert group.scheduler.of(OutputCredit) == [OutputCredit(batches=1)]

    scenario(test)


def test_a_shutdown_ends_every_request_with_its_own_reason_and_tells_the_scheduler() -> None:
    async def test(group: ManagerWithFakes) -> None:
        reader = await group.generate(request(), group.admit())
        group.manager.end_all(FinishAbort("the server is shutting down", 503, "draining"))
        reason = (await reader.next_delta()).finished_reason
        assert isinstance(reason, FinishAbort)
        assert reason.code == "draining"
        reader.close()
        assert [abort.rid for abort in group.scheduler.of(AbortReq)] == ["r"]
        assert not group.manager.idle_event.is_set()
        group.inbox.put(output(StrRow("r", 0, [], "", ABORTED)))
        await settled(group.manager.idle_event.is_set)

    scenario(test)


def test_a_control_answer_finds_its_question() -> None:
    async def test(group: ManagerWithFakes) -> None:
        calls = [asyncio.create_task(group.manager.flush_cache()) for _ in range(2)]
        await settled(lambda: len(group.scheduler.of(FlushCacheReq)) == 2)
        first, second = group.scheduler.of(FlushCacheReq)
        group.inbox.put(FlushCacheOutput(control_id=second.control_id, flushed_tokens=2))
        group.inbox.put(FlushCacheOutput(control_id=first.control_id, flushed_tokens=1))
        group.inbox.put(FlushCacheOutput(control_id=99, flushed_tokens=9))
        assert await asyncio.gather(*calls) == [1, 2]

    scenario(test)


def test_text_is_joined_once_however_long_the_output() -> None:
    """The journal keeps pieces: a token's cost doesn't grow with the text before it."""

    async def test(group: ManagerWithFakes) -> None:
        reader = await group.generate(request(), group.admit())
        for start in range(1000):
            group.inbox.put(output(StrRow("r", start, [97], "a")))
        seen = ""
        while len(seen) < 1000:
            seen += (await reader.next_delta()).text
        assert seen == "a" * 1000

    scenario(test)


def test_a_fault_in_folding_one_row_ends_that_request_and_no_other() -> None:
    async def test(group: ManagerWithFakes) -> None:
        bad, good = [await group.generate(request(rid), group.admit()) for rid in ("bad", "good")]
        group.manager._states["bad"].output_ids = None  # type: ignore[assignment]
        group.inbox.put(output(StrRow("bad", 0, [97], "a"), StrRow("good", 0, [97], "a", FinishLength(1))))
        assert (await good.next_delta()).text == "a"
        await settled(lambda: group.manager._states["bad"].finished)
        assert group.scheduler.of(AbortReq) == [AbortReq(rid="bad")]
        await settled(lambda: bool(group.scheduler.of(OutputCredit)))
        group.manager._states["bad"].output_ids = []
        bad.close()

    scenario(test)


def test_an_observer_that_fails_leaves_nothing_behind() -> None:
    async def test(group: ManagerWithFakes) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("observer")

        seen: list[str] = []
        group.manager.on_finish += [fail, lambda state, outcome: seen.append(outcome)]
        reader = await group.generate(request(), group.admit())
        group.inbox.put(output(StrRow("r", 0, [97], "a", FinishLength(1))))
        await reader.next_delta()
        reader.close()
        assert (seen, group.manager.num_live) == (["ok"], 0)

    scenario(test)


def test_an_admitted_request_counts_as_work_before_it_is_registered() -> None:
    async def test(group: ManagerWithFakes) -> None:
        admission = group.admit()
        assert not group.manager.idle_event.is_set()
        admission.close()
        assert group.manager.idle_event.is_set()

    scenario(test)


def test_silence_begins_with_the_oldest_debt_or_with_the_last_word_whichever_is_later() -> None:
    async def test(group: ManagerWithFakes) -> None:
        manager = group.manager
        assert manager.silent_since() is None
        readers = [await group.generate(request(rid), group.admit()) for rid in ("old", "new")]
        dispatched = [reader.times.dispatched for reader in readers]
        assert manager.last_heard <= dispatched[0] <= dispatched[1]  # type: ignore[operator]
        assert manager.silent_since() == dispatched[0]
        group.inbox.put(output(StrRow("new", 0, [97], "a")))
        await readers[1].next_delta()
        assert manager.silent_since() == manager.last_heard >= dispatched[1]  # type: ignore[operator]
        for reader in readers:
            reader.close()
        assert manager.silent_since() is not None, "their terminal rows are owed"
        group.inbox.put(output(StrRow("old", 0, [], "", ABORTED), StrRow("new", 1, [], "", ABORTED)))
        await settled(lambda: manager.num_live == 0)
        assert manager.silent_since() is None

    scenario(test)
