"""What became of each request, and why: written at transitions, bounded, and never anything of what was said."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.protocol.control import DecodeRefused, LiveReq, LookUpOutput, LookUpReq
from sterna.protocol.finish import QUEUE_FULL, SHUTTING_DOWN, FinishAbort, FinishLength, FinishMatchedStr, FinishMatchedToken, FinishReason
from sterna.protocol.generate import AbortReq, SchedulerMark, SchedulerTimes, StrRow
from sterna.tokenizer_manager import control
from sterna.tokenizer_manager.flight_recorder import CAUSES, MAX_CODES, MAX_NOTES, FlightRecorder, Record
from sterna.tokenizer_manager.req_state import MAX_SCHEDULERS, Origin, ReqState, RequestTimes
from unit.tokenizer_manager.fakes import ManagerWithFakes, a_place, output, request, scenario, settled

ABORTED = FinishAbort("aborted", 499, "aborted")
LENGTH = FinishLength(1)


def new_state(rid: str, origin: Origin | None = None) -> ReqState:
    return ReqState(rid, RequestTimes(1.0), 1, a_place(), origin)


def end(recorder: FlightRecorder, state: ReqState, reason: FinishReason = LENGTH, outcome: str = "ok") -> None:
    state.finished_reason = reason
    recorder.finished(state, outcome)


def everything(recorder: FlightRecorder, **options: Any) -> list[Record]:
    return recorder.newest(lambda record: True, **({"limit": 1000, "before": None} | options))


def test_the_ring_keeps_the_last_to_end_and_every_live_one() -> None:
    recorder = FlightRecorder(3)
    states = [new_state(f"r{i}") for i in range(10)]
    for state in states:
        recorder.begin(state)
    for state in states[:8]:
        end(recorder, state)
    assert [record.rid for record in everything(recorder)] == ["r9", "r8", "r7", "r6", "r5"]
    assert recorder.find("r4") == []
    assert recorder.find("r7")[0].phase == "finished"
    assert recorder.find("r9")[0].phase == "tokenizing"


def test_a_recorder_of_none_still_shows_the_living() -> None:
    recorder = FlightRecorder(0)
    state = new_state("r")
    recorder.begin(state)
    assert [record.rid for record in everything(recorder)] == ["r"]
    end(recorder, state)
    assert everything(recorder) == []


def test_an_ended_record_holds_nothing_of_the_journal_but_its_times() -> None:
    recorder = FlightRecorder(1)
    state = new_state("r")
    recorder.begin(state)
    state.output_ids += [1, 2, 3]
    end(recorder, state, FinishMatchedStr("secret stop", 2, 9))
    (record,) = recorder.find("r")
    assert record.state is None
    assert (record.output_tokens, record.finish_reason, record.stopped_by) == (3, "stop", "string")
    assert not hasattr(record, "__dict__")
    assert "secret" not in repr(record)


@given(st.lists(st.sampled_from(["replayed", "timeout"]), max_size=80))
def test_notes_are_bounded_and_all_are_counted(events: list[Any]) -> None:
    recorder = FlightRecorder(1)
    recorder.begin(new_state("r"))
    for index, event in enumerate(events):
        recorder.note("r", event, "x" * 1000, tokens=index)
    (record,) = recorder.find("r")
    half = MAX_NOTES // 2
    kept = list(range(len(events)))
    assert [note.tokens for note in record.notes] == (kept if len(events) <= MAX_NOTES else kept[:half] + kept[-half:])
    assert all(len(note.detail) <= 64 for note in record.notes)
    assert record.replays == recorder.counts["replayed", "other"] == events.count("replayed")
    assert set(recorder.counts) == {(event, cause) for event, causes in CAUSES.items() for cause in causes}


def test_the_first_cause_of_an_abort_counts_and_none_after_the_end() -> None:
    recorder = FlightRecorder(4)
    first, second = new_state("a"), new_state("b")
    recorder.begin(first)
    recorder.begin(second)
    recorder.note("a", "aborted", "abort_request")
    recorder.note("a", "aborted", "client_gone")
    second.finished_reason = FinishLength(1)
    recorder.note("b", "aborted", "client_gone")
    assert (recorder.find("a")[0].abort_cause, recorder.find("b")[0].abort_cause) == ("abort_request", None)
    assert {cause: count for (event, cause), count in recorder.counts.items() if event == "aborted" and count} == {"abort_request": 1}


def test_a_note_on_a_rid_that_nobody_knows_is_only_counted() -> None:
    recorder = FlightRecorder(4)
    recorder.note("gone", "timeout", "waiting_timeout")
    assert recorder.counts["timeout", "waiting_timeout"] == 1
    assert everything(recorder) == []


def test_codes_beyond_the_limit_share_one_label() -> None:
    recorder = FlightRecorder(4)
    for index in range(MAX_CODES + 10):
        recorder.refused(f"code{index}")
    assert len(recorder.refusals) == MAX_CODES + 1
    assert recorder.refusals["other"] == 10


def test_restarts_are_counted_by_process_and_cause() -> None:
    recorder = FlightRecorder(4)
    recorder.restarted("scheduler", "signal")
    recorder.restarted("detokenizer", "exit")
    assert {key: count for key, count in recorder.restarts.items() if count} == {("scheduler", "signal"): 1, ("detokenizer", "exit"): 1}


def test_a_name_stands_for_its_newest_request_or_fan_out() -> None:
    recorder = FlightRecorder(16)

    def run(name: str, *rids: str) -> None:
        origin = Origin("/x", "q", name, None, False)
        states = [new_state(rid, origin) for rid in rids]
        for state in states:
            recorder.begin(state)
        for state in reversed(states):
            end(recorder, state)

    run("x", "x")
    run("x", "x 0", "x 1")
    run("y", "y")
    assert [record.rid for record in recorder.find("x")] == ["x 0", "x 1"]
    assert [record.rid for record in recorder.find("x 1")] == ["x 1"]
    run("x", "x 0", "x 1", "x 2")
    assert [record.serial for record in recorder.find("x")] == [5, 6, 7]
    run("x", "x")
    assert [record.rid for record in recorder.find("x")] == ["x"]


@given(st.integers(0, 40), st.integers(1, 7), st.sets(st.integers(0, 39)))
def test_pages_show_every_record_once_newest_first(count: int, limit: int, ended: set[int]) -> None:
    recorder = FlightRecorder(100)
    states = [new_state(f"r{i}") for i in range(count)]
    for state in states:
        recorder.begin(state)
    for index in sorted(ended, reverse=True):
        if index < count:
            end(recorder, states[index])
    seen: list[int] = []
    before = None
    while page := everything(recorder, limit=limit, before=before):
        seen += [record.serial for record in page]
        before = seen[-1]
    assert seen == list(range(count, 0, -1))


def test_a_replay_moves_no_first_time_and_adds_to_what_happened() -> None:
    times = RequestTimes(0.0)
    times.take(SchedulerTimes(1.0, 2.0, 3.0, 3.0, 0, 1))  # on its first row
    times.take(SchedulerTimes(1.0, 2.0, 3.0, 5.0, 2, 4))  # and its last word, as it seemed
    times.take(SchedulerTimes(10.0, 11.0, 12.0, 13.0, 1, 1))
    assert (times.first_scheduled, times.first_token, times.last_token, times.retractions) == (2.0, 3.0, 13.0, 3)
    for start in range(20, 40):
        times.take(SchedulerTimes(float(start), None, None, None))
    assert [each.received for each in times.schedulers] == [1.0, 10.0, *map(float, range(20, 20 + MAX_SCHEDULERS - 3)), 39.0]


# ---- in the manager ----


def disconnect(group: ManagerWithFakes, reader: Any) -> None:
    reader.close("client_gone")


def abort(group: ManagerWithFakes, reader: Any) -> None:
    assert group.manager.abort_request("r") == 1


def shut_down(group: ManagerWithFakes, reader: Any) -> None:
    group.manager.end_all(SHUTTING_DOWN)


def lose_output(group: ManagerWithFakes, reader: Any) -> None:
    group.inbox.put(output(StrRow("r", 7, [1], "a")))


def refuse_to_decode(group: ManagerWithFakes, reader: Any) -> None:
    group.inbox.put(DecodeRefused(rid="r", epoch=1))


@pytest.mark.parametrize(
    ("act", "cause"),
    [
        (disconnect, "client_gone"),
        (abort, "abort_request"),
        (shut_down, "shutdown"),
        (lose_output, "output_lost"),
        (refuse_to_decode, "decode_refused"),
    ],
)
def test_every_abort_has_its_cause(act: Callable[[ManagerWithFakes, Any], None], cause: str) -> None:
    async def test(group: ManagerWithFakes) -> None:
        reader = await group.generate(request(), group.admit())
        act(group, reader)
        await settled(lambda: bool(group.scheduler.of(AbortReq)))
        reader.close()
        group.inbox.put(output(StrRow("r", 0, [], "", ABORTED, times=SchedulerTimes(1.0, None, None, None))))
        await settled(lambda: group.manager.num_live == 0)
        (record,) = group.manager.recorder.find("r")
        assert (record.phase, record.abort_cause) == ("finished", cause)
        assert [note.event for note in record.notes] == ["aborted"]
        left_before_the_end = cause not in ("shutdown", "output_lost")  # those end the journal at once
        assert (record.times.reader_gone is not None) == left_before_the_end
        assert group.manager.recorder.counts["aborted", cause] == 1
        assert sum(group.manager.recorder.counts.values()) == 1

    scenario(test)


def test_a_client_that_goes_while_its_prompt_is_tokenized_is_told_apart_too() -> None:
    async def test(group: ManagerWithFakes) -> None:
        task = asyncio.create_task(group.generate(request(), group.admit()))
        await settled(lambda: group.manager.is_live("r"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (record,) = group.manager.recorder.find("r")
        assert (record.outcome, record.abort_cause, record.times.dispatched) == ("abort", "client_gone", None)

    scenario(test)


def test_a_request_is_followed_from_phase_to_phase() -> None:
    async def test(group: ManagerWithFakes) -> None:
        def phase() -> str:
            return group.manager.recorder.find("r")[0].phase

        reader = await group.generate(request(), group.admit())
        assert phase() == "queued"
        group.inbox.put(output(StrRow("r", 0, [97], "a", None, 5, 3, SchedulerTimes(1.0, 2.0, 3.0, 3.0))))
        await reader.next_delta()
        assert phase() == "running"
        group.inbox.put(output(StrRow("r", 1, [98], "b", FinishMatchedToken(98, True), 5, 3, SchedulerTimes(1.0, 2.0, 3.0, 4.0, 1, 2))))
        await reader.next_delta()
        assert phase() == "finishing"
        reader.close()
        (record,) = group.manager.recorder.find("r")
        assert (record.phase, record.outcome, record.finish_reason, record.stopped_by) == ("finished", "ok", "stop", "token")
        assert (record.prompt_tokens, record.cached_tokens, record.output_tokens, record.max_new_tokens) == (5, 3, 2, 4)
        assert record.abort_cause is None

    scenario(test)


def test_a_look_up_brings_the_times_of_a_live_request_up_to_date() -> None:
    async def test(group: ManagerWithFakes) -> None:
        reader = await group.generate(request(), group.admit())
        asking = asyncio.create_task(group.manager.look_up(["r", "unknown"]))
        await settled(lambda: bool(group.scheduler.of(LookUpReq)))
        (asked,) = group.scheduler.of(LookUpReq)
        assert isinstance(asked, LookUpReq)
        assert asked.rids == ["r"]
        times = SchedulerTimes(1.0, 2.0, None, None, 0, 1, (SchedulerMark(2.5, "chunk", 4),))
        live = LiveReq("r", "prefill", 5, 0, 0, times)
        group.inbox.put(LookUpOutput(control_id=asked.control_id, reqs=[live]))
        assert await asking == {"r": live}
        assert reader.times.schedulers == [times]
        assert reader.times.first_scheduled == 2.0

    scenario(test)


def test_the_others_of_a_list_that_is_ended_from_outside_while_it_is_tokenized_are_not_taken_for_a_client_that_left() -> None:
    async def test(group: ManagerWithFakes) -> None:
        places = [group.admit() for _ in range(2)]
        tokenizing = asyncio.Event()

        async def run_blocking(*_: object, **__: object) -> object:
            tokenizing.set()
            return await asyncio.Event().wait()

        group.manager.run_blocking = run_blocking  # type: ignore[method-assign, assignment]
        starting = asyncio.create_task(group.manager.generate_batch([request("a"), request("b")], places))
        await tokenizing.wait()
        places[0].end(QUEUE_FULL)
        starting.cancel()  # as the one who is told does
        with pytest.raises(asyncio.CancelledError):
            await starting
        causes = {rid: group.manager.recorder.find(rid)[0].abort_cause for rid in ("a", "b")}
        assert causes == {"a": "evicted", "b": "request_failed"}

    scenario(test)


@pytest.mark.parametrize("dead", [False, True])
def test_a_scheduler_that_is_silent_or_dies_costs_the_one_who_looks_nothing_but_its_word(
    dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "LOOK_UP_TIMEOUT_S", 30.0 if dead else 0.01)

    async def test(group: ManagerWithFakes) -> None:
        await group.generate(request(), group.admit())
        asking = asyncio.create_task(group.manager.look_up(["r"]))
        await settled(lambda: bool(group.scheduler.of(LookUpReq)))
        if dead:
            group.manager.fail("the scheduler process died")
        assert await asking == {}
        assert await group.manager.look_up(["r" if dead else "unknown"]) == {}

    scenario(test)
