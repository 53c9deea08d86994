"""`Sessions`: all open sessions, their bounds and their idle timeouts. Owned by the `TokenizerManager`, on the event loop.

They live in the server, so no scheduler that dies takes one along. What a session holds is token ids; the KV of its turns is ordinary
content of the prefix cache.

Turns are settled when somebody looks, and at the latest when their request is removed: a client that has its answer always finds the
turn finished, and nothing has to be told of the many ways in which a journal can end.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence

import msgspec

from sterna.errors import InvalidRequest, SessionFull, SessionNotFound, TooManySessions
from sterna.keyed_heap import KeyedHeap
from sterna.protocol.generate import SessionTurn, TokenizedGenerateReqInput
from sterna.tokenizer_manager.session import MAX_TURNS_OF_ALL, Journal, Node, Replacement, Session, Turn, failed

CAPACITY_CONTEXTS = 16
"""Capacity of a session that was opened without one, in contexts of the model: room for branches."""

ALARM_SLACK_S = 1.0
"""After a session's time, so that one look ends many."""
ALARM_MAX_S = 60.0
"""A session that is opened later may have less time than the one for which the alarm was set."""


class Sessions:
    """See the module."""

    def __init__(
        self,
        *,
        max_sessions: int,
        max_tokens: int,
        timeout: float,
        capacity: int,
        abort: Callable[[str], object],
        now: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        """`timeout` (seconds) and `capacity` (tokens) are those of a session that is opened without; `abort` ends a live rid.

        `call_later` is an event loop's: without one, an expired session is held until somebody comes.
        """
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._timeout = timeout
        self._capacity = capacity
        self._abort = abort
        self._now = now
        self._call_later = call_later
        self._alarm = False
        """Somebody will look when the next session may expire."""
        self._sessions: dict[str, Session] = {}
        self._turns: dict[str, Turn] = {}
        """By rid: turns in flight of all open sessions."""
        self._deadlines: KeyedHeap[str, float] = KeyedHeap()
        """By id: no session expires before its deadline here; one that has been used since gets a later one when this one comes up."""
        self._tokens = 0
        self._nodes = 0

    # ---- clients ----

    def open(self, session_id: str | None, capacity: int | None, timeout: float | None) -> str:
        """The new session's id. Raises InvalidRequest where `session_id` is open, TooManySessions."""
        self._expire()
        if session_id in self._sessions:
            raise InvalidRequest(f"a session {session_id!r} is open", param="session_id", code="duplicate_session")
        if len(self._sessions) >= self._max_sessions:
            raise TooManySessions(f"{self._max_sessions} sessions are open, and no more may be")
        session = Session(
            id=uuid.uuid4().hex if session_id is None else session_id,
            capacity=self._capacity if capacity is None else capacity,
            timeout=self._timeout if timeout is None else timeout,
            touched=self._now(),
        )
        self._sessions[session.id] = session
        self._deadlines.put(session.id, session.touched + session.timeout)
        self._set_alarm()
        return session.id

    def close(self, session_id: str) -> None:
        """Forget a session. Its turns in flight go on, as requests of no session. Raises SessionNotFound."""
        self._close(self._find(session_id, "session_id"))

    @property
    def num_open(self) -> int:
        self._expire()
        return len(self._sessions)

    @property
    def num_tokens(self) -> int:
        """Held by finished turns of all open sessions."""
        self._expire()
        for rid in list(self._turns):
            self.settle(rid)
        return self._tokens

    # ---- turns ----

    def begin(self, params: SessionTurn, journals: Sequence[Journal]) -> None:
        """One HTTP request's turns: its members all go on from one place, each under its own rid. Sets their `turn`.

        Raises SessionNotFound, SessionBusy, SessionFull, DuplicateRid, InvalidRequest, TooManySessions; then nothing has changed.
        """
        session = self._find(params.id, "session_params.id")
        plan = session.plan(params, [journal.rid for journal in journals])
        # Of what there is without what this very turn replaces: who has filled the bound can get below it.
        kept = self._tokens - sum(node.size for node in plan.freed)
        if kept >= self._max_tokens or self._nodes - len(plan.freed) >= MAX_TURNS_OF_ALL:
            raise TooManySessions("the open sessions hold as many tokens or turns as they may", code="too_many_session_tokens")
        parent = plan.parent
        if plan.interrupted is not None:
            self._release(plan.interrupted)
            parent = plan.interrupted.to_node(None)
            self._add(session, parent)
            self._forget_replaced(plan.interrupted)
            self._abort(parent.rid)
        for turn in plan.ended:
            self._release(turn)
            turn.replacement.nodes.clear()
            self._abort(turn.rid)
        session.set_aside(plan.replaced)
        replacement = Replacement(plan.replaced, len(journals))
        for journal in journals:
            journal.turn = Turn(session, params, parent, journal, replacement)
            session.turns[journal.rid] = self._turns[journal.rid] = journal.turn
        session.touched = self._now()

    def fit(self, turn: Turn, tokenized: TokenizedGenerateReqInput, *, asked: bool) -> TokenizedGenerateReqInput:
        """Reserve what the turn may come to hold. A length that the client didn't ask for ends where the capacity does.

        Raises SessionFull.
        """
        session = turn.session
        if self._turns.get(turn.rid) is not turn:
            return tokenized  # it has ended, or its session has
        own = len(tokenized.input_ids) - turn.kept
        held = session.tokens - turn.replacement.size
        room = session.capacity - held - sum(other.reserved for other in session.turns.values()) - own
        params = tokenized.sampling_params
        wanted = params.max_new_tokens
        assert wanted is not None, "hop 3 has set it"
        if room < max(1, params.min_new_tokens, wanted if asked else 0):
            raise SessionFull(
                f"the session holds {session.capacity} tokens at most; {room + own} are left, the turn adds {own} and its output",
                param="session_params.id",
            )
        wanted = min(wanted, room)
        turn.reserved = own + wanted
        return msgspec.structs.replace(tokenized, sampling_params=msgspec.structs.replace(params, max_new_tokens=wanted))

    def settle(self, rid: str, *, gone: bool = False) -> None:
        """Take in the end of a turn, if `rid` is one and has ended; `gone`: nobody reads it any more, so it ends here, as a failure."""
        turn = self._turns.get(rid)
        if turn is None:
            return
        reason = turn.journal.finished_reason
        if reason is None and not gone:
            return
        session = turn.session
        self._release(turn)
        if reason is None or failed(reason):
            self._bring_back_replaced(turn)
            session.remember_failure(turn)
        else:
            self._add(session, turn.to_node(reason))
            self._forget_replaced(turn)
        session.touched = self._now()

    def finished(self, journal: Journal, outcome: object) -> None:
        """An observer of the manager (`on_finish`)."""
        self.settle(journal.rid)
        journal.turn = None

    # ---- inside ----

    def _find(self, session_id: str, param: str) -> Session:
        self._expire()
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFound(f"there is no session {session_id[:128]!r}: never opened, closed, or expired", param=param)
        self._settle_all(session)
        return session

    def _settle_all(self, session: Session) -> None:
        for rid in list(session.turns):
            self.settle(rid)

    def _add(self, session: Session, node: Node) -> None:
        session.nodes[node.rid] = node
        session.failed.pop(node.rid, None)
        self._count(session, 1, node.size)

    def _forget_replaced(self, turn: Turn) -> None:
        nodes = turn.replacement.nodes
        for node in nodes:
            del turn.session.aside[node.rid]
        self._count(turn.session, -len(nodes), -turn.replacement.size)
        nodes.clear()

    def _bring_back_replaced(self, turn: Turn) -> None:
        replacement = turn.replacement
        replacement.in_flight -= 1
        if not replacement.in_flight:
            turn.session.bring_back(replacement.nodes)

    def _count(self, session: Session, nodes: int, tokens: int) -> None:
        session.tokens += tokens
        self._tokens += tokens
        self._nodes += nodes

    def _release(self, turn: Turn) -> None:
        del self._turns[turn.rid]
        del turn.session.turns[turn.rid]

    def _close(self, session: Session) -> None:
        for turn in list(session.turns.values()):
            self._release(turn)
        self._count(session, -len(session.nodes) - len(session.aside), -session.tokens)
        session.nodes.clear()
        session.aside.clear()
        del self._sessions[session.id]
        self._deadlines.discard(session.id)

    def _set_alarm(self) -> None:
        first = self._deadlines.first()
        if self._call_later is not None and not self._alarm and first is not None:
            self._alarm = True
            self._call_later(min(max(first[1] - self._now(), 0.0) + ALARM_SLACK_S, ALARM_MAX_S), self._ring)

    def _ring(self) -> None:
        self._alarm = False
        self._expire()
        self._set_alarm()

    def _expire(self) -> None:
        now = self._now()
        while (first := self._deadlines.first()) is not None and first[1] <= now:
            session = self._sessions[first[0]]
            self._settle_all(session)
            deadline = session.timeout + (now if session.turns else session.touched)
            if deadline <= now:
                self._close(session)
            else:
                self._deadlines.put(session.id, deadline)
