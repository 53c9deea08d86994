"""Hop 8: rows become a journal."""

import asyncio

import pytest

from sterna.protocol.finish import FinishAbort, FinishLength
from sterna.protocol.generate import SchedulerTimes, StrRow, TokenizedGenerateReqInput
from sterna.protocol.logprobs import TokenLogprobs
from sterna.protocol.sampling import SamplingParams
from sterna.tokenizer_manager.receive import ITL_BOUNDS_S, InterTokenLatency, JournalGap, end_locally, fold
from sterna.tokenizer_manager.req_state import JournalReader, ReqState, RequestTimes
from unit.tokenizer_manager.fakes import a_place


def new_state(epoch: int = 1) -> ReqState:
    return ReqState("r", RequestTimes(0.0), epoch, a_place())


def folded(state: ReqState, row: StrRow, epoch: int = 1, now: float = 1.0) -> bool:
    return fold(state, row, epoch, 2.0, now, InterTokenLatency())


def test_rows_in_order_make_the_text_and_the_ids() -> None:
    state = new_state()
    assert folded(state, StrRow("r", 0, [1, 2], "ab", prompt_tokens=7, cached_tokens=3))
    assert folded(state, StrRow("r", 2, [3], "c", FinishLength(3), 7, 3, SchedulerTimes(0.1, 0.2, 0.3, 0.4, 1)))
    assert (state.text(), state.output_ids, state.prompt_tokens, state.cached_tokens) == ("abc", [1, 2, 3], 7, 3)
    assert state.finished_reason == FinishLength(3)
    assert (state.times.first_scheduled, state.times.last_token, state.times.detokenized, state.times.retractions) == (0.2, 0.4, 2.0, 1)


def test_a_row_seen_already_is_dropped() -> None:
    state = new_state()
    folded(state, StrRow("r", 0, [1, 2], "ab"))
    assert not folded(state, StrRow("r", 0, [1, 2], "ab"))
    assert not folded(state, StrRow("r", 1, [2], "b"))
    assert state.text() == "ab"


def test_a_row_of_another_epoch_is_dropped() -> None:
    state = new_state(epoch=2)
    assert not folded(state, StrRow("r", 0, [1], "a"), epoch=1)
    assert state.output_ids == []


def test_nothing_follows_the_terminal_row() -> None:
    state = new_state()
    folded(state, StrRow("r", 0, [1], "a", FinishLength(1)))
    assert not folded(state, StrRow("r", 1, [2], "b"))
    assert not folded(state, StrRow("r", 1, [], "", FinishAbort("x", 500, "y")))
    assert state.finished_reason == FinishLength(1)


@pytest.mark.parametrize("row", [StrRow("r", 3, [4], "d"), StrRow("r", 1, [2, 3], "bc")], ids=["missing tokens", "partial overlap"])
def test_a_gap_is_a_fault_and_changes_nothing(row: StrRow) -> None:
    state = new_state()
    folded(state, StrRow("r", 0, [1, 2], "ab"))
    with pytest.raises(JournalGap):
        folded(state, row)
    assert (state.text(), state.output_ids, state.finished) == ("ab", [1, 2], False)


def asking_state() -> ReqState:
    state = new_state()
    params = SamplingParams(max_new_tokens=9, return_logprob=True)
    state.tokenized = TokenizedGenerateReqInput(rid="r", input_ids=[1], sampling_params=params, stream=True, reply_to="")
    return state


def test_every_token_of_a_journal_that_asks_has_its_logprobs_and_a_reader_gets_each_once() -> None:
    state = asking_state()
    each = [TokenLogprobs(-float(index)) for index in range(3)]
    reader = JournalReader(state, lambda *_: None)
    folded(state, StrRow("r", 0, [1, 2], "ab", logprobs=each[:2]))
    first = asyncio.run(reader.next_delta())
    assert not folded(state, StrRow("r", 0, [1, 2], "ab", logprobs=each[:2]))
    folded(state, StrRow("r", 2, [3], "c", FinishLength(3), logprobs=each[2:]))
    assert (first.logprobs, asyncio.run(reader.next_delta()).logprobs) == (each[:2], each[2:])
    assert state.logprobs == each


@pytest.mark.parametrize("logprobs", [None, [], [TokenLogprobs(-1.0)], [TokenLogprobs(-1.0)] * 3])
def test_a_row_without_its_logprobs_is_a_fault_and_changes_nothing(logprobs: list[TokenLogprobs] | None) -> None:
    state = asking_state()
    with pytest.raises(JournalGap):
        folded(state, StrRow("r", 0, [1, 2], "ab", logprobs=logprobs))
    assert (state.text(), state.output_ids, state.logprobs) == ("", [], [])


def test_who_asked_for_no_logprobs_has_none() -> None:
    state = new_state()
    folded(state, StrRow("r", 0, [1], "a", logprobs=[TokenLogprobs(-1.0)]))
    assert (state.output_ids, state.logprobs) == ([1], [])


def test_a_refusal_ends_a_journal_that_has_output() -> None:
    state = new_state()
    folded(state, StrRow("r", 0, [1, 2], "ab"))
    refusal = FinishAbort("no room", 429, "queue_full")
    assert folded(state, StrRow("r", 0, [], "", refusal))
    assert (state.text(), state.output_ids, state.finished_reason) == ("ab", [1, 2], refusal)


def test_tokens_that_arrive_together_share_the_time_since_the_row_before() -> None:
    state, itl = new_state(), InterTokenLatency()
    fold(state, StrRow("r", 0, [1], "a"), 1, 0.0, 10.0, itl)
    assert itl.count == 0
    fold(state, StrRow("r", 1, [2, 3], "bc"), 1, 0.0, 10.004, itl)
    assert itl.count == 2
    assert itl.buckets[ITL_BOUNDS_S.index(0.0025)] == 2
    assert itl.total_s == pytest.approx(0.004)


def test_a_reader_gets_everything_once_however_it_arrives() -> None:
    async def scenario() -> list[str]:
        state = new_state()
        closed: list[ReqState] = []
        reader = JournalReader(state, lambda state, cause: closed.append(state))
        seen: list[str] = []

        async def read() -> None:
            while True:
                delta = await reader.next_delta()
                seen.append(delta.text)
                if delta.finished_reason is not None:
                    break

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        folded(state, StrRow("r", 0, [1], "a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        folded(state, StrRow("r", 1, [2], "b"))
        folded(state, StrRow("r", 2, [3], "c"))
        end_locally(state, FinishAbort("gone", 503, "engine_dead"))
        await task
        assert reader.completion_tokens == 3
        with pytest.raises(RuntimeError):
            await reader.next_delta()
        reader.close()
        reader.close()
        assert closed == [state]
        return seen

    assert asyncio.run(scenario()) == ["a", "bc"]
