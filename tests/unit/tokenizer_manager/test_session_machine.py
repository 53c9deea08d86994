"""Any order of turns, endings, disconnects, replacements and pauses: sessions say what a model that copies every token says."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sterna.errors import DuplicateRid, InvalidRequest, SessionBusy, SessionNotFound, TooManySessions
from sterna.protocol.finish import ABORTED, FAULT, FinishLength, FinishReason
from unit.tokenizer_manager.session_turns import FakeJournal, Group

CAPACITY = 80
MAX_TOKENS = 120
TIMEOUT = 10
LENGTH = 3
"""Output tokens at most."""
SESSIONS = ["s", "t"]
RIDS = [f"r{index}" for index in range(12)]
IDS = st.lists(st.integers(0, 255), min_size=1, max_size=5)


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
    replaced: list[Told] = field(default_factory=list)
    """While it runs: what comes back if it fails. One list for all members of a request."""

    @property
    def held(self) -> int:
        return self.added + len(self.output)

    @property
    def whole(self) -> list[int]:
        return self.prompt + self.output


class SessionsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.group = Group(max_sessions=2, max_tokens=MAX_TOKENS, timeout=float(TIMEOUT), capacity=CAPACITY)
        self.idle_since: dict[str, float] = {}
        self.done: dict[tuple[str, str], Told] = {}
        self.running: dict[str, Told] = {}
        for session in SESSIONS:
            self.group.open(session)
            self.idle_since[session] = 0.0
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

    def _running_in(self, session: str) -> list[str]:
        return [told.name for told in self.running.values() if told.session == session]

    def _aside(self, session: str | None = None) -> list[Told]:
        running = [told for told in self.running.values() if session in (None, told.session)]
        return list({(told.session, each.name): each for told in running for each in told.replaced}.values())

    def _held(self, session: str | None = None) -> int:
        return sum(told.held for told in [*self.done.values(), *self._aside()] if session in (None, told.session))

    def _freed(self, session: str, after: str | None) -> list[Told]:
        """What a `replace` of all that goes on from `after` replaces."""
        below = self._below(session, after)
        replaced = [told for told in self.done.values() if told.session == session and told.name in below]
        ended = [self.running[name] for name in self._running_in(session) if name in below]
        return replaced + list({each.name: each for told in ended for each in told.replaced}.values())

    def _refusal(self, session: str, rids: list[str], after: str | None, replace: bool, cut: int, drop: bool) -> type[Exception] | None:
        if session not in self.idle_since:
            return SessionNotFound
        if after in self._running_in(session):
            if not replace:
                return SessionBusy
        elif after is not None and (session, after) not in self.done:
            return SessionBusy if after in [told.name for told in self._aside(session)] else SessionNotFound
        elif not replace and any(self.running[name].after == after for name in self._running_in(session)):
            return SessionBusy
        freed = [] if not replace else self.running[after].replaced if after in self._running_in(session) else self._freed(session, after)  # type: ignore[index]
        taken = {told.name for told in [*self.done.values(), *self._aside()] if told.session == session}
        if taken.intersection(rids) - {told.name for told in freed}:
            return DuplicateRid
        if abs(cut) > len(self._base(session, after, drop)) and after is not None:
            return InvalidRequest
        return TooManySessions if self._held() - sum(told.held for told in freed) >= MAX_TOKENS else None

    def _base(self, session: str, after: str | None, drop: bool) -> list[int]:
        """What a turn that goes on from `after` can cut."""
        if after is None:
            return []
        told = self.running[after] if after in self._running_in(session) else self.done[session, after]
        return told.prompt if drop else told.whole

    def _end(self, name: str, *, kept: bool) -> None:
        told = self.running.pop(name, None)
        if told is not None:
            self.idle_since[told.session] = self.group.now
            if kept:
                self.done[told.session, name] = told
                told.replaced.clear()
            elif not any(other.replaced is told.replaced for other in self.running.values()):
                for each in told.replaced:
                    self.done[told.session, each.name] = each

    # ---- what may happen ----

    @rule(session=st.sampled_from(SESSIONS))
    def open(self, session: str) -> None:
        self._forget_idle()
        try:
            self.group.open(session)
        except InvalidRequest:
            assert session in self.idle_since
        else:
            assert session not in self.idle_since
            self.idle_since[session] = self.group.now

    @precondition(lambda self: len(self.done) > 3)
    @rule(session=st.sampled_from(SESSIONS))
    def close(self, session: str) -> None:
        self._forget_idle()
        try:
            self.group.sessions.close(session)
        except SessionNotFound:
            assert session not in self.idle_since
        else:
            self._forget(session)

    @rule(seconds=st.sampled_from([1, 1, 9]))
    def wait(self, seconds: int) -> None:
        self.group.now += seconds

    @precondition(lambda self: len(self.live) < len(RIDS) - 1)
    @rule(
        data=st.data(),
        session=st.sampled_from(SESSIONS),
        members=st.sampled_from([1, 1, 1, 2]),
        replace=st.sampled_from([False, False, False, False, True]),
        cut=st.sampled_from([0, 0, 0, 0, 0, 5, 2, -1, -4, 30]),
        drop=st.sampled_from([False, False, False, True]),
        new=IDS,
    )
    def begin(self, data: st.DataObject, session: str, members: int, replace: bool, cut: int, drop: bool, new: list[int]) -> None:
        known = sorted(told.name for told in [*self._all(session), *self._aside(session)])
        after = data.draw(st.sampled_from([None, RIDS[0], *known, *known, *known]))
        first = self._some_rid(data, session)
        others = [rid for rid in RIDS if rid not in self.live and rid != first]
        rids = [first] if members == 1 else [first, data.draw(st.sampled_from(others))]
        self._begin(session, rids, after, replace, cut, drop, new)

    @precondition(lambda self: len(self.live) < len(RIDS))
    @rule(data=st.data(), session=st.sampled_from(SESSIONS), turns=st.lists(st.tuples(IDS, IDS), min_size=1, max_size=4))
    def converse(self, data: st.DataObject, session: str, turns: list[tuple[list[int], list[int]]]) -> None:
        """Whole turns, one after the other."""
        after = data.draw(st.sampled_from([None, *(name for owner, name in self.done if owner == session)]))
        for new, output in turns:
            rid = self._some_rid(data, session)
            self._begin(session, [rid], after, False, 0, False, new)
            if rid not in self.live:
                return
            self._put(rid, output)
            self._finish(rid, FinishLength(len(output)))
            after = rid

    def _some_rid(self, data: st.DataObject, session: str) -> str:
        free = [rid for rid in RIDS if rid not in self.live]  # the manager refuses the others
        unused = [rid for rid in free if (session, rid) not in self.done]
        return data.draw(st.sampled_from([*unused, *unused, *free]))

    def _begin(self, session: str, rids: list[str], after: str | None, replace: bool, cut: int, drop: bool, new: list[int]) -> None:
        self._forget_idle()
        expected = self._refusal(session, rids, after, replace, cut, drop)
        aborted = len(self.group.aborted)
        place = {"session": session, "rid": after, "replace": replace, "offset": cut, "drop_previous_output": drop}
        if expected is not None:
            with pytest.raises(expected):
                self.group.begin(*rids, **place)
            assert len(self.group.aborted) == aborted
            return
        journals = self.group.begin(*rids, **place)
        ended, replaced = self._replace(session, after) if replace else ([], [])
        assert sorted(self.group.aborted[aborted:]) == sorted(ended)
        before = None if after is None else self.done[session, after]
        for journal in journals:
            self.live[journal.rid] = journal
            self.running[journal.rid] = Told(session, journal.rid, after, new, 0, replaced=replaced)
        for journal in journals:
            self._tokenize(journal, before, cut, drop)

    def _replace(self, session: str, after: str | None) -> tuple[list[str], list[Told]]:
        """Who is ended by it, and what it replaces."""
        if after in self._running_in(session):
            assert after is not None
            self._end(after, kept=True)
            return [after], []
        replaced, below = self._freed(session, after), self._below(session, after)
        self.done = {key: told for key, told in self.done.items() if key[0] != session or key[1] not in below}
        ended = [name for name in self._running_in(session) if name in below]
        for name in ended:
            self.running[name].replaced = []  # they pass on
            self._end(name, kept=False)
        return ended, replaced

    def _tokenize(self, journal: FakeJournal, before: Told | None, cut: int, drop: bool) -> None:
        told = self.running[journal.rid]
        base = [] if before is None else before.prompt if drop else before.whole
        kept = base[:cut] if cut else base
        reserved = sum(other.turn.reserved for name in self._running_in(told.session) if (other := self.live[name]).turn)
        held = self._held(told.session) - sum(each.held for each in told.replaced)
        room = CAPACITY - held - reserved - len(told.prompt)
        if room < LENGTH:
            with pytest.raises(InvalidRequest, match="the session holds"):
                self.group.tokenize(journal, told.prompt, max_new_tokens=LENGTH)
            self._fail(journal, ABORTED)
            return
        ids = self.group.tokenize(journal, told.prompt, max_new_tokens=LENGTH)
        assert ids == kept + told.prompt
        told.added, told.prompt = len(told.prompt), ids

    def _fail(self, journal: FakeJournal, reason: object) -> None:
        journal.finished_reason = reason
        self.group.sessions.settle(journal.rid)
        del self.live[journal.rid]
        self._end(journal.rid, kept=False)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 255), min_size=1, max_size=2))
    def generate(self, data: st.DataObject, tokens: list[int]) -> None:
        self._put(data.draw(st.sampled_from(sorted(self.live))), tokens)

    def _put(self, rid: str, tokens: list[int]) -> None:
        journal = self.live[rid]
        tokens = tokens[: LENGTH - len(journal.output_ids)]
        journal.output_ids += tokens
        if rid in self.running:
            self.running[rid].output += tokens

    @precondition(lambda self: self.live)
    @rule(data=st.data(), reason=st.sampled_from([FinishLength(3), FinishLength(3), FinishLength(3), ABORTED, FAULT]))
    def finish(self, data: st.DataObject, reason: FinishReason) -> None:
        """Nobody tells the session."""
        self._finish(data.draw(st.sampled_from(sorted(self.live))), reason)

    def _finish(self, rid: str, reason: FinishReason) -> None:
        self.live.pop(rid).finished_reason = reason
        self._end(rid, kept=isinstance(reason, FinishLength))

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
        aside = {(session.id, name) for session in sessions._sessions.values() for name in session.aside}
        assert aside == {(told.session, told.name) for told in self._aside()}
        assert sessions._nodes == len(self.done) + len(aside)
        assert sessions._turns.keys() == self.running.keys()
        for session in sessions._sessions.values():
            replaced = sum(told.held for told in self._aside(session.id))
            assert session.tokens <= CAPACITY
            assert session.tokens - replaced + sum(turn.reserved for turn in session.turns.values()) <= CAPACITY
            for node in session.nodes.values():
                assert node.prefix(node.context_len) == self.done[session.id, node.rid].whole


TestSessionsMachine = SessionsMachine.TestCase
TestSessionsMachine.settings = settings(max_examples=80, stateful_step_count=50)
