"""Any order of turns, endings, disconnects, replacements and pauses: sessions say what a model that copies every token says."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from sterna.errors import DuplicateRid, InvalidRequest, RequestError, SessionBusy, SessionFull, SessionNotFound, TooManySessions
from sterna.protocol.finish import ABORTED, FAULT, FinishLength
from unit.tokenizer_manager.session_turns import FakeJournal, Group

CAPACITY = 60
MAX_TOKENS = 90
TIMEOUT = 10
SESSIONS = st.sampled_from(["s", "t"])
RIDS = st.sampled_from([f"r{index}" for index in range(6)])
IDS = st.lists(st.integers(0, 255), min_size=1, max_size=4)


@dataclass
class Told:
    """A turn as the model has it: every token of it, written out."""

    session: str
    name: str
    after: str | None
    prompt: list[int]
    added: int
    """Tokens that the session holds for its prompt."""
    output: list[int] = field(default_factory=list)

    @property
    def whole(self) -> list[int]:
        return self.prompt + self.output


class SessionsMachine(RuleBasedStateMachine):
    journals = Bundle("journals")

    def __init__(self) -> None:
        super().__init__()
        self.group = Group(max_sessions=2, max_tokens=MAX_TOKENS, timeout=float(TIMEOUT), capacity=CAPACITY)
        self.idle_since: dict[str, float] = {}
        self.done: dict[tuple[str, str], Told] = {}
        self.running: dict[str, Told] = {}
        self.live: dict[str, FakeJournal] = {}
        """Journals that have not ended, whether their session still knows them or not."""

    # ---- the model's own words ----

    def _forget_idle(self) -> None:
        for session in list(self.idle_since):
            if any(told.session == session for told in self.running.values()):
                continue
            if self.group.now >= self.idle_since[session] + TIMEOUT:
                self._forget(session)

    def _forget(self, session: str) -> None:
        del self.idle_since[session]
        self.done = {key: told for key, told in self.done.items() if key[0] != session}
        self.running = {name: told for name, told in self.running.items() if told.session != session}

    def _below(self, session: str, name: str | None) -> set[str]:
        found: set[str] = set()
        while True:
            more = {told.name for told in self._all(session) if told.after in found or told.after == name} - found
            if not more:
                return found
            found |= more

    def _all(self, session: str) -> list[Told]:
        return [told for told in [*self.done.values(), *self.running.values()] if told.session == session]

    def _held(self, session: str | None = None) -> int:
        return sum(told.added + len(told.output) for told in self.done.values() if session in (None, told.session))

    def _refusal(self, session: str, rid: str, after: str | None, replace: bool) -> type[Exception] | None:
        if session not in self.idle_since:
            return SessionNotFound
        running_there = self.running.get(after or "")
        if running_there is not None and running_there.session == session:
            if not replace or self.live[running_there.name].tokenized is None:
                return SessionBusy
        elif after is not None and (session, after) not in self.done:
            return SessionNotFound
        elif not replace and any(told.after == after and told.session == session for told in self.running.values()):
            return SessionBusy
        if (session, rid) in self.done and not (replace and rid in self._below(session, after)):
            return DuplicateRid
        return TooManySessions if self._held() >= MAX_TOKENS else None

    def _end(self, name: str, *, kept: bool) -> None:
        told = self.running.pop(name, None)
        if told is not None:
            self.idle_since[told.session] = self.group.now
            if kept:
                self.done[told.session, name] = told

    # ---- what may happen ----

    @rule(session=SESSIONS)
    def open(self, session: str) -> None:
        self._forget_idle()
        try:
            self.group.open(session)
        except InvalidRequest:
            assert session in self.idle_since
        else:
            assert session not in self.idle_since
            self.idle_since[session] = self.group.now

    @rule(session=SESSIONS)
    def close(self, session: str) -> None:
        self._forget_idle()
        try:
            self.group.sessions.close(session)
        except SessionNotFound:
            assert session not in self.idle_since
        else:
            self._forget(session)

    @rule(seconds=st.sampled_from([1, 4, 9]))
    def wait(self, seconds: int) -> None:
        self.group.now += seconds

    @rule(session=SESSIONS, rid=RIDS, after=st.none() | RIDS, replace=st.booleans(), cut=st.integers(-9, 9), drop=st.booleans(), new=IDS)
    def begin(self, session: str, rid: str, after: str | None, replace: bool, cut: int, drop: bool, new: list[int]) -> None:
        if rid in self.live:
            return  # the manager refuses it
        self._forget_idle()
        expected = self._refusal(session, rid, after, replace)
        aborted = len(self.group.aborted)
        try:
            (journal,) = self.group.begin(rid, session=session, rid=after, replace=replace, offset=cut, drop_previous_output=drop)
        except (RequestError, TooManySessions) as refusal:
            assert type(refusal) is expected
            assert len(self.group.aborted) == aborted
            return
        assert expected is None
        self.live[rid] = journal
        if replace:
            ended = self._replace(session, after)
            assert sorted(self.group.aborted[aborted:]) == sorted(ended)
        self.running[rid] = Told(session, rid, after, new, 0)
        before = self.done[session, after] if after is not None else None
        self._tokenize(journal, before, cut, drop)

    def _replace(self, session: str, after: str | None) -> list[str]:
        if after in self.running:
            self._end(after, kept=True)
            return [after]
        below = self._below(session, after)
        self.done = {key: told for key, told in self.done.items() if key[0] != session or key[1] not in below}
        ended = [name for name in below if name in self.running]
        for name in ended:
            self._end(name, kept=False)
        return ended

    def _tokenize(self, journal: FakeJournal, before: Told | None, cut: int, drop: bool) -> None:
        told = self.running[journal.rid]
        base = [] if before is None else before.prompt if drop else before.whole
        kept = base[:cut] if cut else base
        reserved = sum(other.turn.reserved for other in self.live.values() if other.turn and self._runs_in(other, told.session))
        room = CAPACITY - self._held(told.session) - reserved - len(told.prompt)
        try:
            ids = self.group.tokenize(journal, told.prompt, max_new_tokens=3)
        except InvalidRequest as refusal:
            outside = before is not None and abs(cut) > len(base)
            assert isinstance(refusal, SessionFull) == (not outside)
            assert outside or room < 3
            self._fail(journal, ABORTED)
        else:
            assert room >= 3
            assert ids == kept + told.prompt
            told.added, told.prompt = len(told.prompt), ids

    def _runs_in(self, journal: FakeJournal, session: str) -> bool:
        return journal.rid in self.running and self.running[journal.rid].session == session

    def _fail(self, journal: FakeJournal, reason: object) -> None:
        journal.finished_reason = reason
        self.group.sessions.settle(journal.rid)
        del self.live[journal.rid]
        self._end(journal.rid, kept=False)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 255))
    def generate(self, data: st.DataObject, token: int) -> None:
        journal = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        if len(journal.output_ids) < 3:
            journal.output_ids.append(token)
            if journal.rid in self.running:
                self.running[journal.rid].output.append(token)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), reason=st.sampled_from([FinishLength(3), ABORTED, FAULT]), noticed=st.booleans())
    def finish(self, data: st.DataObject, reason: object, noticed: bool) -> None:
        """`noticed` or not: the session finds out by itself. (When it was idle since, it takes the moment at which it looks.)"""
        journal = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        journal.finished_reason = reason
        if noticed:
            self.group.sessions.settle(journal.rid)
        else:
            assert self.group.sessions.num_tokens >= 0
        self._end(journal.rid, kept=isinstance(reason, FinishLength))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.group.sessions.settle(name, gone=True)
        self._end(name, kept=False)

    # ---- always ----

    @invariant()
    def they_agree_on_what_is_held(self) -> None:
        self._forget_idle()
        sessions = self.group.sessions
        assert sessions.num_open == len(self.idle_since)
        assert sessions.num_tokens == self._held()
        assert {(session.id, name) for session in sessions._sessions.values() for name in session.nodes} == self.done.keys()
        assert sessions._turns.keys() == self.running.keys()
        for session in sessions._sessions.values():
            assert session.tokens + sum(turn.reserved for turn in session.turns.values()) <= CAPACITY
            for node in session.nodes.values():
                assert node.prefix(node.context_len) == self.done[session.id, node.rid].whole


TestSessionsMachine = SessionsMachine.TestCase
TestSessionsMachine.settings = settings(max_examples=60, stateful_step_count=40)
