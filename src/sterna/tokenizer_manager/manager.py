"""`TokenizerManager`: where a request enters the runtime and where its output comes back. Owns `rid -> ReqState`.

It lives on the server's event loop; everything here runs there, but the tokenizer, which runs in threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import ParamSpec, TypeVar, assert_never

from sterna.config.model_config import ModelConfig
from sterna.config.server_args import ServerArgs
from sterna.errors import Draining, DuplicateRid, EngineDead, EngineError, NotReady, OverloadedError, QueueFull, RequestError, TimedOut
from sterna.ipc.channel import ChannelError, Receiver, Sender
from sterna.protocol.channels import ToScheduler, ToServer
from sterna.protocol.control import (
    DecodeRefused,
    FlushCacheOutput,
    LiveReq,
    LookUpOutput,
    OutputCredit,
    ProcessFailed,
    ProcessName,
    ProcessReady,
    SchedulerStats,
    SchedulingStarted,
)
from sterna.protocol.finish import ABORTED, ENGINE_DEAD, FAULT, FinishAbort, to_finish
from sterna.protocol.generate import BatchStrOutput, GenerateReqInput, StrRow
from sterna.text.chat_template import ChatTemplate
from sterna.text.tokenizer import Tokenizer
from sterna.tokenizer_manager.admission import Accounts, Admission, Terms
from sterna.tokenizer_manager.control import Questions
from sterna.tokenizer_manager.fan_out import Claims, FanOuts
from sterna.tokenizer_manager.flight_recorder import FlightRecorder
from sterna.tokenizer_manager.receive import InterTokenLatency, JournalGap, end_locally, fold, note_started
from sterna.tokenizer_manager.recovery import Recovery, SchedulerSender
from sterna.tokenizer_manager.req_state import AbortCause, JournalReader, Origin, Outcome, ReqState, RequestTimes, outcome_of
from sterna.tokenizer_manager.sessions import CAPACITY_CONTEXTS, Sessions
from sterna.tokenizer_manager.tokenize import check_logprobs, leading_bos, to_tokenized

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# The scheduler may have 32 batches of output in flight; credits go back in eighths of that, or when nothing more is there to fold.
CREDIT_BATCH = 4
# Messages folded before other tasks of the loop get their turn.
DRAIN_LIMIT = 64
TOKENIZER_THREADS = 2
CUT_GRACE_S = 0.5
"""For the last text of a request whose time is over to come through; then it ends without."""


class TokenizerManager:
    """See the module. `startup` attaches it to the running loop; until `ready` is set every request is refused."""

    def __init__(
        self,
        args: ServerArgs,
        model: ModelConfig,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        inbox: Receiver[ToServer],
        scheduler: Sender[ToScheduler],
        epoch: int,
    ) -> None:
        self.args = args
        self.model = model
        self.served_model_name = args.served_model_name or model.name
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.context_len = model.context_len
        self.itl = InterTokenLatency()
        self.stats: SchedulerStats | None = None
        self.process_info: dict[str, dict[str, str | int | float | bool]] = {}
        self.failure: str | None = None
        """Why a child could not start or has died; None while all is well."""
        self.failed_event = asyncio.Event()
        self.draining = False
        self.last_heard = time.monotonic()
        """When a message came last."""
        self.started_total = 0
        self.recorder = FlightRecorder(args.flight_recorder)
        self.on_finish: list[Callable[[ReqState, Outcome], None]] = [self.recorder.finished]
        self.ready_event = asyncio.Event()
        self.accounts = Accounts(args)
        self.claims = Claims()
        self.idle_event = self.accounts.idle_event
        """Set while no request is admitted."""
        self._inbox = inbox
        self._states: dict[str, ReqState] = {}
        self.recovery = Recovery(self._states, scheduler, epoch, self.recorder, self._remove_if_done)
        self._fan_outs = FanOuts()
        self._closed: set[str] = set()
        """Live rids whose reader has gone."""
        self.sessions = Sessions(
            max_sessions=args.max_sessions,
            max_tokens=args.max_session_tokens,
            timeout=args.session_timeout,
            capacity=CAPACITY_CONTEXTS * model.context_len,
            abort=partial(self.abort_request, cause="replaced"),
            call_later=lambda seconds, act: asyncio.get_running_loop().call_later(seconds, act),
        )
        self.on_finish.append(self.sessions.finished)
        self._leading_bos = leading_bos(tokenizer, model.bos_token_id, "" if chat_template is None else chat_template.source)
        self._questions = Questions(lambda question: self.recovery.scheduler.send(question), inbox.address)
        self._credit = 0
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- life ----

    def startup(self) -> None:
        """Begin to receive. Call from the loop that will run everything."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._inbox.fd, self._drain_inbox)
        self._drain_inbox()

    def shutdown(self) -> None:
        """Stop receiving and let the threads go. Live requests should have ended before (`end_all`)."""
        if self._loop is not None:
            self._loop.remove_reader(self._inbox.fd)
            self._loop = None
        self.accounts.deadlines.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def ready(self) -> bool:
        return self.ready_event.is_set() and self.alive and not self.draining and not self.recovery.recovering

    @property
    def alive(self) -> bool:
        return self.failure is None

    @property
    def num_live(self) -> int:
        return len(self._states)

    def is_live(self, rid: str) -> bool:
        """Whether a request or a fan-out has that name."""
        return rid in self._states or rid in self._fan_outs

    def silent_since(self) -> float | None:
        """Since when (seconds of CLOCK_MONOTONIC) the engine has owed an answer and said nothing at all; None while it owes none.

        Looks at every live request: for a probe, not for every token.
        """
        if self.recovery.since is not None:
            return max(self.last_heard, self.recovery.since)
        owed = [state.times.dispatched for state in self._states.values() if state.awaits_terminal and state.times.dispatched is not None]
        return max(self.last_heard, min(owed)) if owed else None

    # ---- requests ----

    def admit_all(self, terms: Terms, count: int = 1, tokens: int = 0) -> list[Admission]:
        """Take places. Raises EngineDead, Draining, NotReady, and what `Accounts.admit` raises."""
        if self.failure is not None:
            raise EngineDead("the engine has stopped")
        if self.draining:
            raise Draining("the server is shutting down")
        if not self.ready_event.is_set():
            raise NotReady("the model is still being loaded")
        return self.accounts.admit(terms, count, tokens)

    async def run_blocking(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `fn` off the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: fn(*args, **kwargs))

    def generate_batch(
        self, objs: Sequence[GenerateReqInput], admissions: Sequence[Admission], origin: Origin | None = None
    ) -> Coroutine[None, None, list[JournalReader]]:
        """Hop 3: register every member under its rid, tokenize each, dispatch all of them in one message. All or nothing.

        `admissions` are one per member, and taken over. The readers come in the order of `objs`; each must be closed by whoever gets them.
        A member that is aborted before the dispatch isn't part of it: its reader says so, and the others run.
        Raises DuplicateRid and what `Sessions.begin` does, at once and unregistered; awaited, ContextLengthExceeded, InvalidRequest or
        SessionFull, whichever member it is about. Then nothing of any is left and `admissions` are closed.
        """
        return self._start(objs, self._register(objs, admissions, origin))

    async def _start(self, objs: Sequence[GenerateReqInput], states: list[ReqState]) -> list[JournalReader]:
        try:
            for obj, state in zip(objs, states, strict=True):
                if not state.finished:
                    await self._tokenize(obj, state)
            check_logprobs(state.tokenized for state in states if state.tokenized is not None)
            self._dispatch(states)
        except BaseException as fault:
            self._give_up(states, fault)
            raise
        for state in states:
            state.admission.on_end = partial(self._cut, state)
        return [JournalReader(state, self._reader_closed) for state in states]

    def _register(self, objs: Sequence[GenerateReqInput], admissions: Sequence[Admission], origin: Origin | None) -> list[ReqState]:
        states: dict[str, ReqState] = {}
        try:
            for obj, admission in zip(objs, admissions, strict=True):
                if self.is_live(obj.rid) or obj.rid in states:
                    raise _duplicate(obj.rid)
                times = RequestTimes(obj.received_time, obj.templated_time)
                states[obj.rid] = ReqState(obj.rid, times, self.recovery.epoch, admission, origin)
            if objs[0].session is not None:  # the same for all members
                self.sessions.begin(objs[0].session, list(states.values()))
        except Exception:
            for each in admissions:
                each.close()
            raise
        for state in states.values():
            state.admission.rid = state.rid
        self._states.update(states)
        for state in states.values():
            self.recorder.begin(state)
            if state.admission.reason is not None:  # aborted before it had a state
                self._abort(state, "abort_request", state.admission.reason)
        self.started_total += len(states)
        return list(states.values())

    async def _tokenize(self, obj: GenerateReqInput, state: ReqState) -> None:
        """A job of its own for each member, one after the other: a long list never holds a thread for longer than one prompt takes."""
        tokenized = await self.run_blocking(
            to_tokenized,
            obj,
            self.tokenizer,
            vocab_size=self.model.vocab_size,
            context_len=self.context_len,
            reply_to=self._inbox.address,
            epoch=self.recovery.epoch,
            turn=state.turn,
            leading_bos=self._leading_bos,
        )
        if state.turn is not None:
            tokenized = self.sessions.fit(state.turn, tokenized, asked=obj.sampling_params.max_new_tokens is not None)
        state.times.tokenized = time.monotonic()
        state.tokenized = tokenized
        state.prompt_tokens = len(tokenized.input_ids)
        state.admission.tokenized(state.prompt_tokens)

    def _dispatch(self, states: list[ReqState]) -> None:
        """Send those that haven't ended while they were being tokenized: aborted, or the engine died."""
        ready = [state for state in states if state.tokenized is not None and not state.finished]
        if ready:
            self.recovery.dispatch(ready)

    def named(self, rid: str, members: Sequence[str]) -> AbstractContextManager[None]:
        """Inside the block a client's `rid` stands for all of `members`, the rids of one HTTP request. Raises DuplicateRid."""
        if self.is_live(rid):
            raise _duplicate(rid)
        return self._fan_outs.named(rid, members)

    def abort_request(self, rid: str, cause: AbortCause = "abort_request") -> int:
        """End exactly this rid, or else all that was sent under that name: a fan-out, an X-Request-Id. How many were live.

        Their readers get the terminal output.
        """
        exact = rid in self._states
        rids = [rid] if exact else dict.fromkeys([*self._fan_outs.members(rid), *self.claims.rids(rid)])
        found = [state for each in rids if (state := self._states.get(each)) is not None and not state.finished]
        for state in found:
            self._abort(state, cause)
        return len(found) + (0 if exact else self.claims.abort_unregistered(rid))

    def abort_all(self) -> int:
        """End every live request; how many there were."""
        return sum(self.abort_request(rid) for rid in list(self._states)) + self.claims.abort_unregistered()

    async def flush_cache(self) -> int:
        """Tokens whose KV was dropped. Raises EngineDead."""
        if self.failure is not None or self.recovery.since is not None:
            raise EngineDead("the engine has stopped" if self.failure is not None else "the engine is being restarted")
        return await self._questions.flush_cache()

    async def look_up(self, rids: Sequence[str]) -> dict[str, LiveReq]:
        """What the scheduler says now of those of `rids` that it has; nothing where it doesn't answer soon. Their times follow."""
        asked = [rid for rid in rids if (state := self._states.get(rid)) is not None and state.awaits_terminal]
        found = await self._questions.look_up(asked) if asked else {}
        for rid, live in found.items():
            if (state := self._states.get(rid)) is not None and not state.finished:
                state.times.take(live.times)
        return found

    def fail(self, message: str) -> None:
        """A process of the group is dead: every live request ends now, and no further one is admitted."""
        if self.failure is None:
            self.failure = message
            self.failed_event.set()
            self._questions.fail_all("the engine has stopped")
            for state in list(self._states.values()):
                state.awaits_terminal = False
                self._end_locally(state, ENGINE_DEAD)

    def lose(self, process: ProcessName, scheduler: SchedulerSender, detokenizer: str) -> bool:
        """`process` has died and will be started again: `Recovery.lost`."""
        self._questions.fail_all("the engine is being restarted")
        self._credit = 0
        self.stats = None
        return self.recovery.lost(process, scheduler, detokenizer)

    def end_all(self, reason: FinishAbort) -> None:
        """End every live request with `reason`, whatever the scheduler says of it later."""
        for state in list(self._states.values()):
            self._abort(state, "shutdown", reason)
            self._end_locally(state, reason)

    # ---- endings ----

    def _abort(self, state: ReqState, cause: AbortCause, reason: FinishAbort = ABORTED) -> None:
        self.recorder.note(state.rid, "aborted", cause)
        if not state.dispatched:
            end_locally(state, reason)
        elif not state.abort_sent:
            state.abort_sent = True
            self.recovery.abort(state, reason)

    def _cut(self, state: ReqState, reason: FinishAbort) -> None:
        """Its time is over, or its place was given to another. What it has said comes through first, unless that takes too long."""
        if state.finished:
            return
        grace = state.admission.begun and not state.abort_sent
        if not state.abort_sent:
            self._abort(state, self._note_cut(state, reason), reason)
        if grace and not state.finished:
            self.accounts.deadlines.again(state.admission, reason, CUT_GRACE_S)
        else:
            self._end_locally(state, reason)

    def _note_cut(self, state: ReqState, reason: FinishAbort) -> AbortCause:
        """What the recorder calls it."""
        if reason.code == QueueFull.code:
            return "evicted"
        self.recorder.note(state.rid, "timeout", reason.code)
        return "timeout"

    def _give_up(self, states: list[ReqState], fault: BaseException) -> None:
        """`fault` came before the dispatch. A cancellation says that the client has gone, or that a member was ended from outside."""
        cut = any(state.admission.reason is not None and not state.finished for state in states)
        for state in states:
            reason = state.admission.reason
            if reason is not None and not state.finished:
                self._abort(state, self._note_cut(state, reason), reason)
            elif isinstance(fault, asyncio.CancelledError):
                self.recorder.note(state.rid, "aborted", "request_failed" if cut else "client_gone")
            end_locally(state, _reason_of(fault))
            self._remove(state)

    def _end_locally(self, state: ReqState, reason: FinishAbort) -> None:
        end_locally(state, reason)
        self._remove_if_done(state)

    def _reader_closed(self, state: ReqState, cause: AbortCause) -> None:
        self._closed.add(state.rid)
        self.sessions.settle(state.rid, gone=True)
        if not state.finished:
            state.times.reader_gone = time.monotonic()
            self._abort(state, cause)
        self._remove_if_done(state)

    def _remove_if_done(self, state: ReqState) -> None:
        if state.finished and not state.awaits_terminal and state.rid in self._closed:
            self._remove(state)

    def _remove(self, state: ReqState) -> None:
        del self._states[state.rid]
        self._closed.discard(state.rid)
        self.recovery.forget(state)
        state.admission.close()
        state.admission.on_end = None  # an outdated deadline may hold the admission for a while, and shall not hold the journal
        state.times.finished = time.monotonic()
        outcome = outcome_of(state)
        for observer in self.on_finish:
            try:
                observer(state, outcome)
            except Exception:
                log.exception("%s: an observer of its end failed", state.rid)

    # ---- output ----

    def _drain_inbox(self) -> None:
        if self._loop is None:
            return
        received = 0
        try:
            for message in self._inbox.drain(DRAIN_LIMIT):
                received += 1
                self._receive(message)
        except ChannelError:
            log.exception("a message was dropped")
            self._credit += 1  # if it was output: the requests that miss it end at the gap
            received = DRAIN_LIMIT  # there may be more behind it
        if self._credit and (received < DRAIN_LIMIT or self._credit >= CREDIT_BATCH):
            self.recovery.scheduler.send(OutputCredit(batches=self._credit))
            self._credit = 0
        if received:
            self.last_heard = time.monotonic()
            self.recovery.advance()
        if received == DRAIN_LIMIT:
            self._loop.call_soon(self._drain_inbox)

    def _receive(self, message: ToServer) -> None:
        match message:
            case BatchStrOutput():
                if message.epoch == self.recovery.epoch:
                    self._credit += 1
                    self.recovery.has_served |= bool(message.rows)
                now = time.monotonic()
                for row in message.rows:
                    self._fold(row, message.epoch, message.detokenized_time, now)
            case SchedulerStats():
                if message.epoch == self.recovery.epoch:
                    self.stats = message
            case SchedulingStarted():
                note_started(self._states, message)
            case FlushCacheOutput() | LookUpOutput():
                self._questions.answer(message)
            case DecodeRefused():
                self._abort_refused(message)
            case ProcessReady():
                self._note_ready(message)
            case ProcessFailed() if self.ready_event.is_set():
                log.error("%s", message.message)  # its end follows: whoever watches over it decides
            case ProcessFailed():
                self.fail(message.message)
            case _:
                assert_never(message)

    def _fold(self, row: StrRow, epoch: int, detokenized_time: float, now: float) -> None:
        state = self._states.get(row.rid)
        if state is None:
            return  # ended without the scheduler; its output comes late
        try:
            fold(state, row, epoch, detokenized_time, now, self.itl)
        except Exception as fault:  # whatever it is, the rows behind it are other requests'
            log.error("%s: output was lost: %s", row.rid, fault, exc_info=not isinstance(fault, JournalGap))
            self._abort(state, "output_lost")
            self._end_locally(state, FAULT)
            return
        if row.finished_reason is not None and epoch == state.epoch:
            state.awaits_terminal = False
            self._remove_if_done(state)

    def _abort_refused(self, refused: DecodeRefused) -> None:
        state = self._states.get(refused.rid)
        if state is not None and not state.finished and state.epoch == refused.epoch:
            self._abort(state, "decode_refused")

    def _note_ready(self, message: ProcessReady) -> None:
        if self.recovery.note_ready(message.process, message.epoch):
            self.process_info[message.process] = message.info
            if not self.recovery.recovering:
                self.ready_event.set()


def _duplicate(rid: str) -> DuplicateRid:
    return DuplicateRid(f"a request with rid {rid!r} is running", param="rid")


def _reason_of(fault: BaseException) -> FinishAbort:
    """How a request ends that `fault` kept from being dispatched."""
    match fault:
        case RequestError() | OverloadedError() | TimedOut() | EngineError():
            return to_finish(fault)
        case asyncio.CancelledError():
            return ABORTED
        case _:
            return to_finish(EngineError("internal error"))
