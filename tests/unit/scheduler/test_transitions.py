"""What the scheduler tells the flight recorder: when it scheduled, chunked, retracted and readmitted a request, and where a live one is."""

from hypothesis import given
from hypothesis import strategies as st

from sterna.protocol.control import LiveReq, LookUpOutput, LookUpReq
from sterna.protocol.generate import MAX_MARKS, SchedulerMark, SchedulerTimes
from sterna.scheduler.req import Req, ReqState
from unit.scheduler.harness import Harness


def final_times(h: Harness, rid: str) -> SchedulerTimes:
    times = h.outbox.rows[rid][-1].times
    assert times is not None
    return times


def looked_up(h: Harness, *rids: str) -> list[LiveReq]:
    h.inbox.messages.append(LookUpReq(control_id=3, reply_to="ipc://asker", rids=list(rids)))
    h.scheduler.receive()
    address, answer = h.outbox.control[-1]
    assert isinstance(answer, LookUpOutput)
    assert (address, answer.control_id) == ("ipc://asker", 3)
    return answer.reqs


def test_every_chunk_of_a_prompt_is_told_with_its_time_and_end() -> None:
    h = Harness(chunked_prefill_size=16)
    h.send("r", list(range(1, 41)), 4)
    h.run()
    times = final_times(h, "r")
    assert [(mark.kind, mark.tokens) for mark in times.marks] == [("chunk", 16), ("chunk", 32), ("chunk", 40)]
    assert times.first_scheduled is not None
    assert times.first_token is not None
    assert times.received <= times.first_scheduled <= times.marks[0].at <= times.marks[-1].at == times.first_token


def test_the_first_row_tells_when_the_request_was_scheduled_and_later_ones_tell_nothing_until_the_last() -> None:
    h = Harness()
    h.send("r", [1, 2, 3], 6)
    h.run()
    rows = h.outbox.rows["r"]
    assert len(rows) > 2
    first, last = rows[0].times, rows[-1].times
    assert first is not None
    assert last is not None
    assert (first.received, first.first_scheduled, first.first_token, first.marks) == (
        last.received,
        last.first_scheduled,
        last.first_token,
        last.marks,
    )
    assert all(row.times is None for row in rows[1:-1])


def test_a_retraction_and_the_readmission_after_it_are_told_with_their_times() -> None:
    h = Harness(max_total_tokens=512, chunked_prefill_size=24)
    rids = [f"r{i}" for i in range(12)]
    for index, rid in enumerate(rids):
        h.send(rid, [(index * 37 + k) % 900 + 1 for k in range(10 + index)], 120)
    h.run()
    retracted = [times for rid in rids if (times := final_times(h, rid)).retractions]
    assert retracted, "memory was not short"
    for times in retracted:
        kinds = [mark.kind for mark in times.marks]
        assert kinds.count("retracted") == kinds.count("readmitted") == times.retractions
        assert kinds.count("chunk") == times.chunks
        for mark, following in zip(times.marks, times.marks[1:], strict=False):
            assert mark.at <= following.at
            if mark.kind == "retracted":
                assert following.kind == "readmitted"
                assert mark.tokens >= following.tokens


@given(st.integers(0, 3 * MAX_MARKS))
def test_marks_are_bounded_and_keep_the_first_and_the_latest(count: int) -> None:
    h = Harness()
    h.send("r", [1, 2, 3], 4)
    h.scheduler.receive()
    req: Req = h.scheduler.reqs["r"]
    for index in range(count):
        req.mark(SchedulerMark(float(index), "chunk", index))
    half = MAX_MARKS // 2
    expected = list(range(count)) if count <= MAX_MARKS else [*range(half), *range(count - half, count)]
    assert [mark.tokens for mark in req.times().marks] == expected


def test_a_live_request_is_found_wherever_it_is_and_an_ended_one_is_not() -> None:
    h = Harness(chunked_prefill_size=16, max_running_requests=1)
    h.send("r", list(range(1, 41)), 8)
    h.send("behind", [1, 2, 3], 8)
    states = []
    while h.scheduler.reqs.get("r") is not None or not states:
        for live in looked_up(h, "r", "unknown"):
            assert live.rid == "r"
            states.append(live.state)
            assert live.prompt_tokens == 40
            assert live.times.chunks == len(live.times.marks)
            assert (live.state == "running") == (live.output_tokens > 0)
        h.turn()
    assert [state for index, state in enumerate(states) if states[:index][-1:] != [state]] == ["waiting", "prefill", "running"]
    assert looked_up(h, "r") == []
    h.run_until("behind", ReqState.RUNNING)
    h.run()
    h.assert_at_baseline()
