"""The manager when the engine dies: what is sent again, what is not, and what is dropped. The test plays the engine."""

import pytest

from sterna.errors import EngineDead
from sterna.protocol.control import NewDetokenizerReq, OutputCredit, ProcessFailed, ProcessReady, SchedulerStats
from sterna.protocol.finish import FinishAbort, FinishLength
from sterna.protocol.generate import AbortReq, StrRow, TokenizedGenerateReqInput
from unit.tokenizer_manager.fakes import FakeSender, ManagerWithFakes, output, request, scenario, settled

ABORTED = FinishAbort("aborted", 499, "aborted")


def die(group: ManagerWithFakes, process: str = "scheduler") -> FakeSender:
    """Of a dead scheduler the sender is dead too; the one of its successor."""
    sender = FakeSender() if process == "scheduler" else group.scheduler
    group.manager.lose(process, sender, "ipc://detokenizer-next")
    group.scheduler = sender
    return sender


def come_back(group: ManagerWithFakes, process: str = "scheduler", epoch: int = 2) -> None:
    group.inbox.put(ProcessReady(process=process, epoch=epoch, info={}))


async def start(group: ManagerWithFakes, rid: str = "r", **fields: object):  # type: ignore[no-untyped-def]
    return await group.generate(request(rid, **fields), group.admit())


def resumed(sender: FakeSender) -> dict[str, TokenizedGenerateReqInput]:
    return {message.rid: message for message in sender.of(TokenizedGenerateReqInput) if isinstance(message, TokenizedGenerateReqInput)}


def test_a_request_resumes_after_what_was_accepted_with_the_text_that_was_sent() -> None:
    async def test(group: ManagerWithFakes) -> None:
        reader = await start(group, max_new_tokens=6)
        group.inbox.put(output(StrRow("r", 0, [0xE4, 0xB8], "", None, 5, 3), StrRow("r", 2, [0x96, 97, 98], "世a", None, 5, 3)))
        assert (await reader.next_delta()).text == "世a"
        (before,) = group.scheduler.of(TokenizedGenerateReqInput)
        sender = die(group)
        assert not group.manager.ready
        assert sender.sent == []
        come_back(group)
        await settled(lambda: bool(sender.sent))
        assert group.manager.recorder.counts["replayed", "scheduler_died"] == 1
        (again,) = sender.of(TokenizedGenerateReqInput)
        assert isinstance(before, TokenizedGenerateReqInput)
        assert isinstance(again, TokenizedGenerateReqInput)
        assert (again.resume_output_ids, again.resume_chars, again.epoch) == ([0xE4, 0xB8, 0x96, 97, 98], 2, 2)
        assert (again.input_ids, again.sampling_params) == (before.input_ids, before.sampling_params)
        assert group.manager.ready
        group.inbox.put(output(StrRow("r", 5, [98], "stale", FinishLength(6)), epoch=1))
        group.inbox.put(output(StrRow("r", 5, [99], "bc", FinishLength(6), 5, 0), epoch=2))
        delta = await reader.next_delta()
        assert (delta.text, delta.output_ids, delta.finished_reason) == ("bc", [99], FinishLength(6))
        assert reader.cached_tokens == 3, "usage is that of a request that was never interrupted"
        reader.close()
        assert group.manager.num_live == 0

    scenario(test)


def test_nothing_is_sent_before_every_process_that_died_is_back() -> None:
    async def test(group: ManagerWithFakes) -> None:
        await start(group)
        sender = die(group)
        die(group, "detokenizer")
        assert sender.sent == [NewDetokenizerReq(epoch=3, detokenizer="ipc://detokenizer-next")]
        late = await start(group, "late")
        come_back(group, "scheduler", 2)
        come_back(group, "detokenizer", 2)  # of an epoch that it wasn't started in
        await settled(lambda: "scheduler" not in group.manager.recovery._awaited)
        assert not resumed(sender)
        assert not group.manager.ready
        come_back(group, "detokenizer", 3)
        await settled(lambda: len(resumed(sender)) == 2)
        assert list(resumed(sender)) == ["r", "late"]
        assert {message.epoch for message in resumed(sender).values()} == {3}
        late.close()

    scenario(test)


def test_who_was_being_aborted_ends_with_the_engine_and_isn_t_sent_again() -> None:
    async def test(group: ManagerWithFakes) -> None:
        reader, left = await start(group, "r"), await start(group, "left")
        group.manager.abort_request("r")
        left.close()
        sender = die(group)
        assert (await reader.next_delta()).finished_reason == ABORTED
        assert not group.manager.is_live("left")
        reader.close()
        assert group.manager.num_live == 0
        come_back(group)
        await settled(lambda: group.manager.ready)
        assert sender.sent == []

    scenario(test)


def test_whose_time_was_over_when_the_engine_died_is_told_so() -> None:
    async def test(group: ManagerWithFakes) -> None:
        timeout = FinishAbort("not done in time", 504, "running_timeout")
        admission = group.admit()
        reader = await group.generate(request(), admission)
        admission.end(timeout)
        (abort,) = group.scheduler.of(AbortReq)
        assert abort == AbortReq(rid="r", reason=timeout)
        die(group)
        assert (await reader.next_delta()).finished_reason == timeout

    scenario(test)


def test_an_abort_while_the_engine_is_away_is_a_local_drop() -> None:
    async def test(group: ManagerWithFakes) -> None:
        readers = [await start(group, "dispatched")]
        sender = die(group)
        readers.append(await start(group, "new"))
        assert [group.manager.recorder.find(rid)[0].phase for rid in ("dispatched", "new")] == ["queued", "queued"]
        assert group.manager.abort_all() == 2
        for reader in readers:
            assert (await reader.next_delta()).finished_reason == ABORTED
            reader.close()
        come_back(group)
        await settled(lambda: group.manager.ready)
        assert sender.sent == []
        assert not group.manager.recovery._held

    scenario(test)


def test_a_request_whose_end_had_come_is_not_sent_again() -> None:
    async def test(group: ManagerWithFakes) -> None:
        reader = await start(group)
        group.inbox.put(output(StrRow("r", 0, [97], "a", FinishLength(1))))
        await reader.next_delta()
        sender = die(group)
        reader.close()
        assert group.manager.num_live == 0
        come_back(group)
        await settled(lambda: group.manager.ready)
        assert sender.sent == []

    scenario(test)


def test_a_request_that_is_tokenized_while_the_engine_dies_is_sent_once() -> None:
    async def test(group: ManagerWithFakes) -> None:
        import asyncio

        task = asyncio.create_task(start(group))
        await asyncio.sleep(0)
        sender = die(group)
        come_back(group)
        await task
        await settled(lambda: bool(sender.sent))
        assert list(resumed(sender)) == ["r"]
        assert group.manager.recorder.counts["replayed", "scheduler_died"] == 0

    scenario(test)


def test_credits_of_an_epoch_stay_in_it_and_gauges_of_the_dead_are_forgotten() -> None:
    async def test(group: ManagerWithFakes) -> None:
        counts = dict.fromkeys((name for name in SchedulerStats.__struct_fields__ if name != "epoch"), 0)
        group.inbox.put(SchedulerStats(epoch=1, **counts))
        await settled(lambda: group.manager.stats is not None)
        sender = die(group)
        assert group.manager.stats is None
        group.inbox.put(SchedulerStats(epoch=1, **counts))
        group.inbox.put(output(epoch=1))
        group.inbox.put(output(epoch=2))
        come_back(group)
        await settled(lambda: bool(sender.of(OutputCredit)))
        assert sender.of(OutputCredit) == [OutputCredit(batches=1)]
        assert group.manager.stats is None

    scenario(test)


def test_a_question_to_the_dead_is_answered_with_503() -> None:
    async def test(group: ManagerWithFakes) -> None:
        die(group)
        with pytest.raises(EngineDead, match="being restarted"):
            await group.manager.flush_cache()
        group.manager.fail("for good")
        with pytest.raises(EngineDead, match="has stopped"):
            await group.manager.flush_cache()

    scenario(test)


def test_a_start_that_fails_after_the_first_is_left_to_whoever_counts_them() -> None:
    async def test(group: ManagerWithFakes) -> None:
        die(group)
        group.inbox.put(ProcessFailed(process="scheduler", message="out of memory"))
        come_back(group)
        await settled(lambda: group.manager.ready)
        assert group.manager.alive

    scenario(test)


def test_only_deaths_that_found_nothing_done_or_to_do_count_as_for_nothing() -> None:
    async def test(group: ManagerWithFakes) -> None:
        recovery = group.manager.recovery
        assert not recovery.lost("scheduler", FakeSender(), "")
        come_back(group)
        await settled(lambda: group.manager.ready)
        reader = await start(group)
        assert recovery.lost("scheduler", FakeSender(), "")
        come_back(group, epoch=3)
        await settled(lambda: group.manager.ready)
        group.inbox.put(output(StrRow("r", 0, [97], "a", FinishLength(1)), epoch=3))
        await reader.next_delta()
        reader.close()
        assert recovery.lost("scheduler", FakeSender(), "")
        assert not recovery.lost("scheduler", FakeSender(), "")

    scenario(test)


def test_silence_counts_from_the_death_while_a_process_is_started_again() -> None:
    async def test(group: ManagerWithFakes) -> None:
        assert group.manager.silent_since() is None
        die(group)
        since = group.manager.silent_since()
        assert since is not None
        assert since >= (group.manager.recovery.since or 0)
        come_back(group)
        await settled(lambda: group.manager.ready)
        assert group.manager.silent_since() is None

    scenario(test)
