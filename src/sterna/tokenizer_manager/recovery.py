"""What is sent to the engine, and sent again when the engine has died: epochs and replay.

    epoch 1 ── a process dies ──> epoch 2: all that was sent is recalled ── its successor is ready ──> sent again, with what was accepted

An epoch is one pair of a scheduler and a detokenizer. Whichever of them dies, what was on its way is lost, so every request in flight is
recalled and, with its accepted tokens (`resume_output_ids`) and how much of their text is here (`resume_chars`), sent again. A scheduler
that lives on drops its requests without a word and finds most of their KV in its prefix cache (`NewDetokenizerReq`). Rows of an earlier
epoch are dropped by whoever gets them. New requests wait here until the engine is back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from sterna.protocol.channels import ToScheduler
from sterna.protocol.control import PROCESSES, NewDetokenizerReq, ProcessName
from sterna.protocol.finish import ABORTED, ENGINE_CRASHED, FinishAbort
from sterna.protocol.generate import AbortReq, TokenizedGenerateReqInput
from sterna.protocol.sampling import describe
from sterna.tokenizer_manager.fan_out import to_message
from sterna.tokenizer_manager.flight_recorder import FlightRecorder
from sterna.tokenizer_manager.receive import end_locally
from sterna.tokenizer_manager.req_state import ReqState
from sterna.tokenizer_manager.trials import Trials

log = logging.getLogger(__name__)


class SchedulerSender(Protocol):
    def send(self, message: ToScheduler) -> None: ...


class Recovery:
    """The server's end of the line to the engine. Owned by the event loop."""

    def __init__(
        self,
        states: Mapping[str, ReqState],
        scheduler: SchedulerSender,
        epoch: int,
        recorder: FlightRecorder,
        remove_if_done: Callable[[ReqState], None],
    ) -> None:
        """`states` are the live requests; `remove_if_done` is told of each that the engine owes nothing any more."""
        self.epoch = epoch
        self.scheduler = scheduler
        self.trials = Trials()
        self.has_served = False
        """Output of this epoch has come."""
        self.since: float | None = None
        """When the engine went (seconds of CLOCK_MONOTONIC); None while it is there."""
        self._states = states
        self._recorder = recorder
        self._remove_if_done = remove_if_done
        self._awaited = dict.fromkeys(PROCESSES, epoch)
        """Processes that aren't ready, and the epoch that they were started in."""
        self._held: dict[ReqState, None] = {}
        """To be sent as soon as may be, in this order."""

    @property
    def recovering(self) -> bool:
        """Requests wait here: for a process, or for the end of a search."""
        return bool(self._awaited) or self.trials.searching

    # ---- sending ----

    def dispatch(self, states: Sequence[ReqState]) -> None:
        """Send `states`, which are tokenized, as one message, or hold them until that may be."""
        if self.recovering:
            self._held.update(dict.fromkeys(states))
        else:
            self._send(states)

    def abort(self, state: ReqState, reason: FinishAbort) -> None:
        """`state` has been dispatched."""
        self.scheduler.send(AbortReq(rid=state.rid, reason=reason))

    def forget(self, state: ReqState) -> None:
        """`state` has ended and is removed."""
        self._held.pop(state, None)

    def advance(self) -> None:
        """Output has been folded: perhaps a trial has been passed."""
        if self.trials.searching and not self._awaited:
            self._release(self.trials.next_group())
            if not self.trials.searching:
                self._release(list(self._held))

    def _send(self, states: Sequence[ReqState]) -> None:
        now = time.monotonic()  # before the scheduler can be faster
        for state in states:
            if state.times.dispatched is None:
                state.times.dispatched = now
        self.scheduler.send(to_message([self._message(state) for state in states]))
        for state in states:
            self._held.pop(state, None)
            state.dispatched = state.awaits_terminal = True

    def _message(self, state: ReqState) -> TokenizedGenerateReqInput:
        assert state.tokenized is not None
        if not state.replays:
            return state.tokenized if state.tokenized.epoch == self.epoch else msgspec.structs.replace(state.tokenized, epoch=self.epoch)
        return msgspec.structs.replace(
            state.tokenized,
            epoch=self.epoch,
            stream=True,  # row by row: what is accepted needn't be computed a third time, and progress is seen
            resume_output_ids=list(state.output_ids),
            resume_chars=sum(map(len, state.text_chunks)),
        )

    def _release(self, states: Iterable[ReqState]) -> None:
        for state in states:
            if not state.finished:
                self._send([state])

    # ---- a process dies, and another one is ready ----

    def lost(self, process: ProcessName, scheduler: SchedulerSender, detokenizer: str) -> bool:
        """`process` has died, and its successor will be started in the new `epoch`.

        `scheduler` leads to the scheduler of that epoch, `detokenizer` is that one's address. Returns whether the engine had done, or been
        doing, anything for a request since it came up.
        """
        self.epoch += 1
        self.scheduler = scheduler
        self.since = self.since or time.monotonic()
        self._awaited[process] = self.epoch
        if process == "detokenizer":
            scheduler.send(NewDetokenizerReq(epoch=self.epoch, detokenizer=detokenizer))
        in_flight, ending = self._recall(f"{process}_died")
        culprit = self.trials.crashed(process, in_flight, ending)
        if culprit is not None:
            self._convict(culprit)
            in_flight.remove(culprit)
        self._held = dict.fromkeys([*in_flight, *self._held])
        served, self.has_served = self.has_served, False
        log.warning("epoch %d begins; %d requests wait for the %s", self.epoch, len(self._held), process)
        return bool(in_flight) or culprit is not None or served

    def _recall(self, cause: str) -> tuple[list[ReqState], int]:
        """Nothing is at the engine any more. Returns who was, and isn't at his end, and how many more were: aborted, and not gone yet."""
        in_flight: list[ReqState] = []
        ending = 0
        for state in list(self._states.values()):
            state.epoch = self.epoch
            if not state.dispatched:
                continue
            was_there = state.awaits_terminal
            state.dispatched = state.awaits_terminal = False
            if state.abort_sent:
                end_locally(state, state.admission.reason or ABORTED)
                state.abort_sent = False
            if state.finished:
                ending += was_there
                self._remove_if_done(state)
                continue
            state.replays += 1
            self._recorder.note(state.rid, "replayed", cause, len(state.output_ids))
            in_flight.append(state)
        return in_flight, ending

    def _convict(self, state: ReqState) -> None:
        assert state.tokenized is not None
        request = describe(state.tokenized.sampling_params, len(state.tokenized.input_ids), len(state.output_ids))
        log.error("%s: the %s died %d times on it, now with no other in flight: %s", state.rid, state.struck_by, state.strikes, request)
        end_locally(state, ENGINE_CRASHED)
        self._remove_if_done(state)

    def note_ready(self, process: ProcessName, epoch: int) -> bool:
        """A process says that it is ready; False for one that has died since."""
        if self._awaited.get(process) != epoch:
            return False
        del self._awaited[process]
        if not self._awaited:
            self._resume()
        return True

    def _resume(self) -> None:
        if self.since is not None:
            log.warning("the engine is back after %.2f s", time.monotonic() - self.since)
            self.since = None
        if self.trials.searching:
            self.advance()
        else:
            self._release(list(self._held))
