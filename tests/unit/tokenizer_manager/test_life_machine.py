"""The life of a `ReqState` under random interleavings; the scheduler and the detokenizer are the test itself, and not always polite.

The promises are those of docs/reliability.md: a live rid is unique, each accepted one gets one terminal answer, an abort is sent at most
once and only where the scheduler may hold something, text comes out once and in order, and every ending gives everything back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from sterna.errors import DuplicateRid, EngineDead, QueueFull, RequestError
from sterna.protocol.channels import ToServer
from sterna.protocol.control import DecodeRefused, ProcessReady
from sterna.protocol.finish import ABORTED, ENGINE_CRASHED, SHUTTING_DOWN, FinishAbort, FinishLength, FinishReason
from sterna.protocol.generate import AbortReq, StrRow, TokenizedGenerateReqInput
from sterna.protocol.logprobs import TokenLogprobs
from sterna.tokenizer_manager.manager import CUT_GRACE_S
from sterna.tokenizer_manager.req_state import JournalReader
from sterna.tokenizer_manager.trials import PROGRESS_TOKENS
from unit.tokenizer_manager.fakes import ManagerWithFakes, output, pass_time, request

T = TypeVar("T")

ROWS, QUEUED = 2, 1
RIDS = ["r", "r1", "r10", "q", "q2"]
MAX_TOKENS = 8
LIMIT_S = 1000.0
"""Passes only where a rule says so."""

SEEN: Counter[str] = Counter()
MUST_BE_SEEN = {
    "FinishLength",
    "FinishAbort",
    "duplicate",
    "queue full",
    "bad request",
    "left early",
    "left late",
    "crash",
    "abort",
    "gap",
    "lost logprobs",
    "replay",
    "convicted",
    "end of the group",
    "timeout",
}


@dataclass(eq=False)
class Run:
    """One request under one rid: what was sent for it, and what its reader got."""

    rid: str
    reader: JournalReader
    sent_ids: list[int] = field(default_factory=list)
    """By the scheduler so far; after a crash those that were accepted."""
    may_read: list[str] = field(default_factory=list)
    """Text of the rows that the manager must accept."""
    owed: bool = False
    """The scheduler has it, and hasn't sent its terminal row."""
    held: bool = False
    """To be sent when the engine is back."""
    abort_asked: bool = False
    crashes: int = 0
    """While it was at the engine."""
    broken: bool = False
    """Output of it was lost."""
    wants_logprobs: bool = False
    got: str = ""
    got_ids: list[int] = field(default_factory=list)
    got_logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    closed: bool = False


def logprobs_of(token: int) -> TokenLogprobs:
    return TokenLogprobs(-float(token))


class RequestsOfAServer(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.group = self.play(self._begin())
        self.manager = self.group.manager
        self.finished: list[str] = []
        self.manager.on_finish.append(lambda state, _: self.finished.append(state.rid))
        self.runs: list[Run] = []
        self.dead = False
        self.epoch = 1
        self.away: dict[str, int] = {}
        """Processes that are being restarted, in which epoch."""
        self.heard = 0
        """Messages to the scheduler that `hear` has taken in."""
        self.epoch_began = 0
        """Which of them was the epoch's first."""

    async def _begin(self) -> ManagerWithFakes:
        return await ManagerWithFakes(
            max_running_requests=ROWS, max_queued_requests=QUEUED, waiting_timeout=LIMIT_S, running_timeout=LIMIT_S
        ).ready()

    def play(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def owed(self) -> list[Run]:
        return [run for run in self.runs if run.owed]

    def unread(self) -> list[Run]:
        return [run for run in self.runs if not run.closed]

    def taken(self) -> set[str]:
        """The rids that are."""
        return {run.rid for run in self.runs if (run.owed and not self.dead) or run.held or not run.closed}

    def tell(self, message: ToServer) -> None:
        self.group.inbox.put(message)
        self.play(self._settle())
        self.hear()

    async def _settle(self) -> None:
        while self.group.inbox._messages:
            await asyncio.sleep(0)

    def hear(self) -> None:
        """What the scheduler was told: who is there now, and with what."""
        sent = self.group.scheduler.sent
        for message in sent[self.heard :]:
            match message:
                case TokenizedGenerateReqInput():
                    run = next(run for run in reversed(self.runs) if run.rid == message.rid)
                    assert message.epoch == self.epoch
                    assert not self.away, "sent to an engine that isn't there"
                    assert run.held
                    assert message.resume_output_ids == run.sent_ids, "it goes on after what was accepted"
                    assert message.resume_chars == len("".join(run.may_read))
                    SEEN["replay"] += bool(run.sent_ids)
                    run.held, run.owed = False, True
                case AbortReq():
                    run = next(run for run in reversed(self.runs) if run.rid == message.rid)
                    run.abort_asked = True
        self.heard = len(sent)

    def ended_while_held(self, *rids: str) -> None:
        for run in self.runs:
            run.held = run.held and run.rid not in rids

    # ---- clients ----

    @rule(rid=st.sampled_from(RIDS), text=st.sampled_from(["a", "hello", "hello", "b", "c", "x" * 64, ""]), logprobs=st.booleans())
    def submit(self, rid: str, text: str, logprobs: bool) -> None:
        before = len(self.group.scheduler.of(TokenizedGenerateReqInput))
        try:
            reader = self.play(self._submit(rid, text, logprobs))
        except DuplicateRid:
            assert rid in self.taken()
            SEEN["duplicate"] += 1
        except QueueFull:
            assert len(self.taken()) == ROWS + QUEUED
            SEEN["queue full"] += 1
        except EngineDead:
            assert self.dead
        except RequestError:
            assert text in ("", "x" * 64)
            SEEN["bad request"] += 1
        else:
            assert rid not in self.taken()
            assert not self.dead
            self.runs.append(Run(rid, reader, held=True, wants_logprobs=logprobs))
            self.hear()
            assert self.runs[-1].owed != self.manager.recovery.recovering
            return
        assert len(self.group.scheduler.of(TokenizedGenerateReqInput)) == before, "what was refused was sent"

    async def _submit(self, rid: str, text: str, logprobs: bool = False) -> JournalReader:
        return await self.group.generate(request(rid, text, MAX_TOKENS, return_logprob=logprobs), self.group.admit())

    @precondition(lambda self: not self.dead and len(self.taken()) < ROWS + QUEUED)
    @rule(rid=st.sampled_from(RIDS), leaves=st.booleans())
    def end_before_dispatch(self, rid: str, leaves: bool) -> None:
        """The client leaves, or another aborts, while the prompt is being tokenized: a local drop."""
        if rid in self.taken():
            return
        sent = len(self.group.scheduler.sent)
        self.play(self._end_before_dispatch(rid, leaves))
        assert len(self.group.scheduler.sent) == sent, "the scheduler heard of it"
        assert not self.manager.is_live(rid)

    async def _end_before_dispatch(self, rid: str, leaves: bool) -> None:
        task = asyncio.ensure_future(self._submit(rid, "hello"))
        while not self.manager.is_live(rid):
            await asyncio.sleep(0)
        if leaves:
            task.cancel()
            assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
            return
        assert self.manager.abort_request(rid) == 1
        reader = await task
        assert (await reader.next_delta()).finished_reason == ABORTED
        reader.close()

    @precondition(lambda self: self.unread())
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.unread()))
        self.play(self._read_what_is_there(run))

    async def _read_what_is_there(self, run: Run) -> None:
        while run.reason is None:
            task = asyncio.ensure_future(run.reader.next_delta())
            await asyncio.sleep(0)
            if not task.done():
                task.cancel()
                return
            delta = task.result()
            run.got += delta.text
            run.got_ids += delta.output_ids
            run.got_logprobs += delta.logprobs
            run.reason = delta.finished_reason

    @precondition(lambda self: self.unread())
    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        """Also a client that has read all."""
        run = data.draw(st.sampled_from(self.unread()))
        SEEN["left early" if run.owed else "left late"] += 1
        run.closed = True
        run.reader.close()
        run.reader.close()
        self.hear()
        self.ended_while_held(run.rid)

    @rule(rid=st.sampled_from([*RIDS, "r1 ", ""]))
    def abort(self, rid: str) -> None:
        found = self.manager.abort_request(rid)
        assert found <= sum(run.rid == rid for run in self.runs)
        self.hear()
        self.ended_while_held(rid)

    @rule(how_likely=st.integers(0, 3))
    def abort_everything(self, how_likely: int) -> None:
        if how_likely:
            return
        self.manager.abort_all()
        self.hear()
        self.ended_while_held(*RIDS)

    # ---- the scheduler and the detokenizer ----

    @precondition(lambda self: self.owed())
    @rule(data=st.data(), count=st.sampled_from([0, 1, 1, 2, 3, PROGRESS_TOKENS]), last=st.booleans())
    def row(self, data: st.DataObject, count: int, last: bool) -> None:
        run = data.draw(st.sampled_from(self.owed()))
        self.send_row(run, count, FinishLength(len(run.sent_ids) + count) if last else None)

    def send_row(self, run: Run, count: int, reason: FinishReason | None) -> None:
        start = len(run.sent_ids)
        ids = list(range(start, start + count))
        text = "".join(f"<{token}>" for token in ids)
        run.sent_ids += ids
        run.owed = run.owed and reason is None
        if not (run.broken or self.dead):
            run.may_read.append(text)
        logprobs = list(map(logprobs_of, ids)) if run.wants_logprobs else None
        self.tell(output(StrRow(run.rid, start, ids, text, reason, logprobs=logprobs), epoch=self.epoch))

    @precondition(lambda self: self.aborting())
    @rule(data=st.data())
    def answer_an_abort(self, data: st.DataObject) -> None:
        SEEN["abort"] += 1
        self.send_row(data.draw(st.sampled_from(self.aborting())), 0, ABORTED)

    def aborting(self) -> list[Run]:
        return [run for run in self.owed() if run.abort_asked]

    @precondition(lambda self: any(run.sent_ids for run in self.owed()))
    @rule(data=st.data())
    def repeat_a_row(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from([run for run in self.owed() if run.sent_ids]))
        self.tell(output(StrRow(run.rid, 0, run.sent_ids[:1], "again"), epoch=self.epoch))

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), last=st.booleans())
    def row_of_another_epoch(self, data: st.DataObject, last: bool) -> None:
        """That would fit, but for its epoch."""
        run = data.draw(st.sampled_from(self.runs))
        row = StrRow(run.rid, len(run.sent_ids), [1], "stale", FinishLength(len(run.sent_ids) + 1) if last else None)
        self.tell(output(row, epoch=self.epoch - 1))

    @rule(last=st.booleans())
    def row_of_nobody(self, last: bool) -> None:
        self.tell(output(StrRow("nobody", 0, [1], "lost", FinishLength(1) if last else None), epoch=self.epoch))

    @precondition(lambda self: self.owed())
    @rule(data=st.data(), how_likely=st.integers(0, 3))
    def lose_a_row(self, data: st.DataObject, how_likely: int) -> None:
        """The journal ends at once; the rid stays taken until the scheduler has let go of it."""
        if how_likely:
            return
        run = data.draw(st.sampled_from(self.owed()))
        start = len(run.sent_ids) + 1
        run.sent_ids += [0, 0]
        run.broken = True
        SEEN["gap"] += 1
        self.tell(output(StrRow(run.rid, start, [0], "beyond a gap"), epoch=self.epoch))

    @precondition(lambda self: any(run.wants_logprobs for run in self.owed()))
    @rule(data=st.data(), how_likely=st.integers(0, 3))
    def lose_a_row_s_logprobs(self, data: st.DataObject, how_likely: int) -> None:
        """Likewise."""
        if how_likely:
            return
        run = data.draw(st.sampled_from([run for run in self.owed() if run.wants_logprobs]))
        start = len(run.sent_ids)
        run.sent_ids += [start]
        run.broken = True
        SEEN["lost logprobs"] += 1
        self.tell(output(StrRow(run.rid, start, [start], "without its logprobs", logprobs=[]), epoch=self.epoch))

    @precondition(lambda self: self.owed())
    @rule(data=st.data(), how_likely=st.integers(0, 3))
    def refuse_to_decode(self, data: st.DataObject, how_likely: int) -> None:
        if how_likely:
            return
        run = data.draw(st.sampled_from(self.owed()))
        self.tell(DecodeRefused(rid=run.rid, epoch=self.epoch))

    @rule(how_likely=st.integers(0, 9))
    def the_drain_is_over(self, how_likely: int) -> None:
        """Everyone's journal ends; what the scheduler still sends is absorbed."""
        if how_likely == 0:
            self.manager.end_all(SHUTTING_DOWN)
            self.hear()
            self.ended_while_held(*RIDS)
            for run in self.owed():
                run.broken = True

    @rule(how_likely=st.integers(0, 5))
    def everybody_s_time_is_over(self, how_likely: int) -> None:
        """Who waits ends at once, who runs with the scheduler's word or, where that doesn't come, without."""
        if how_likely == 0:
            SEEN["timeout"] += bool(self.owed())
            self.play(self._time_passes())
            self.hear()
            self.ended_while_held(*RIDS)
            for run in self.owed():
                run.broken = True

    async def _time_passes(self) -> None:
        """In the loop, where deadlines act: a request that is cut gets a new one. For those that come later the clock is right again."""
        deadlines = self.manager.accounts.deadlines
        clock = deadlines._clock
        pass_time(self.manager, LIMIT_S)
        pass_time(self.manager, CUT_GRACE_S)
        deadlines._clock = clock

    @precondition(lambda self: not self.dead)
    @rule(how_likely=st.integers(0, 9))
    def crash(self, how_likely: int) -> None:
        """Of a server that doesn't recover."""
        if how_likely == 0:
            SEEN["end of the group"] += bool(self.owed())
            self.dead = True
            self.manager.fail("the scheduler process died")
            self.ended_while_held(*RIDS)

    @precondition(lambda self: not self.dead)
    @rule(process=st.sampled_from(["scheduler", "detokenizer"]), times=st.integers(1, 6), speaks=st.booleans(), back=st.booleans())
    def a_process_dies(self, process: str, times: int, speaks: bool, back: bool) -> None:
        """Perhaps while another one isn't back yet; perhaps again as soon as it is back."""
        for run in self.owed() if speaks else ():
            self.send_row(run, 1, None)
        for _ in range(times - 1):
            self.lose(process)
            self.the_engine_is_back()
        self.lose(process)
        if back:
            self.the_engine_is_back()

    def lose(self, process: str) -> None:
        at_engine = self.owed()
        SEEN["crash"] += bool(at_engine)
        self.manager.lose(process, self.group.scheduler, "ipc://another")
        self.epoch += 1
        self.epoch_began = self.heard
        self.away[process] = self.epoch
        for run in at_engine:
            run.owed = False
            run.crashes += 1
            run.held = not (run.abort_asked or run.broken)
            state = self.manager._states.get(run.rid)
            if run.held and (state is None or state.finished_reason == ENGINE_CRASHED):
                assert len(at_engine) == 1, "convicted, and it wasn't alone"
                assert run.crashes >= 3
                run.held = False
                SEEN["convicted"] += 1

    @precondition(lambda self: self.away and not self.dead)
    @rule()
    def the_engine_is_back(self) -> None:
        away, self.away = self.away, {}
        for process, epoch in away.items():
            self.tell(ProcessReady(process=process, epoch=epoch, info={}))
        assert not self.manager.recovery.recovering or self.owed(), "requests wait, and nobody is on trial"

    # ---- what always holds ----

    @invariant()
    def a_rid_is_live_as_long_as_somebody_holds_something_of_it(self) -> None:
        live = {rid for rid in RIDS if self.manager.is_live(rid)}
        assert live == self.taken()
        assert self.manager.num_live == len(live)

    @invariant()
    def places_are_given_back(self) -> None:
        assert self.manager.accounts.live == self.manager.num_live <= ROWS + QUEUED
        assert self.manager.idle_event.is_set() == (self.manager.num_live == 0)
        assert self.manager._closed <= self.manager._states.keys()

    @invariant()
    def dispatched_says_whether_the_scheduler_may_hold_something(self) -> None:
        """And each dispatch is aborted at most once."""
        aborts: dict[str, int] = {}
        for message in self.group.scheduler.sent[self.epoch_began :]:
            match message:
                case TokenizedGenerateReqInput(rid=rid):
                    aborts[rid] = 0
                case AbortReq(rid=rid):
                    assert rid in aborts, f"{rid} was aborted and never sent"
                    aborts[rid] += 1
                    assert aborts[rid] == 1, f"{rid} was aborted twice"
        for state in self.manager._states.values():
            assert state.dispatched == (state.rid in aborts)
            assert state.abort_sent == (aborts.get(state.rid) == 1)

    @invariant()
    def each_end_is_told_once(self) -> None:
        assert self.manager.started_total == len(self.finished) + self.manager.num_live

    @invariant()
    def text_comes_out_once_and_in_order(self) -> None:
        for run in self.runs:
            whole = "".join(run.may_read)
            assert whole.startswith(run.got)
            if isinstance(run.reason, FinishLength):
                assert run.got == whole
            assert run.got == "".join(f"<{token}>" for token in run.got_ids)
            assert run.got_logprobs == (list(map(logprobs_of, run.got_ids)) if run.wants_logprobs else [])

    def teardown(self) -> None:
        try:
            if self.away and not self.dead:
                self.the_engine_is_back()
            while owed := self.owed():  # the end of those on trial lets others go on
                self.send_row(owed[0], 0, ABORTED if not self.dead else FinishAbort("", 500, "late"))
            for run in self.unread():
                self.play(self._read_what_is_there(run))
                assert run.reason is not None, f"{run.rid} was never answered"
                run.reader.close()
            assert self.manager.num_live == self.manager.accounts.live == 0
            assert not self.manager._closed
            SEEN.update(type(run.reason).__name__ for run in self.runs)
        finally:
            self.group.close()
            self.loop.close()


def test_whatever_happens_each_request_is_answered_once_and_gives_everything_back() -> None:
    for _ in range(5):  # nearly always one round meets everything that it must have met
        run_state_machine_as_test(RequestsOfAServer, settings=settings(max_examples=100, stateful_step_count=50, deadline=None))
        if (+SEEN).keys() >= MUST_BE_SEEN:
            break
    assert (+SEEN).keys() >= MUST_BE_SEEN, SEEN
