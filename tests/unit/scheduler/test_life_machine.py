"""The life of a `Req` under random interleavings: whatever comes in whatever order, the promises of docs/reliability.md hold at every step.

The scripted executor verifies what every row reads, and after every step each slot has exactly one owner (`Harness`). A crash throws the
scheduler away and plays, as the server does, what it accepted into a new one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from sterna.protocol.control import FlushCacheReq, NewDetokenizerReq, OutputCredit
from sterna.protocol.finish import FinishAbort, FinishLength, FinishMatchedToken, FinishReason
from sterna.scheduler.req import ReqState
from unit.scheduler.harness import EOS, VOCAB_SIZE, Harness, echo

NAN = 998
RAISES = 997
MAX_QUEUED = 4

SEEN: Counter[str] = Counter()
MUST_BE_SEEN = {
    "FinishLength",
    "FinishMatchedToken",
    "aborted",
    "invalid_logits",
    "engine_crashed",
    "queue_full",
    "replay",
    "new detokenizer",
    "duplicate",
    "retraction",
    "cache hit",
}

STEMS = [[stem * 100 + k for k in range(40)] for stem in range(3)]

tokens = st.one_of(st.integers(0, 900), st.sampled_from([EOS, NAN, RAISES]))
prompts = st.builds(
    lambda stem, cut, tail: [*stem[:cut], *tail], st.sampled_from(STEMS), st.integers(0, 40), st.lists(tokens, min_size=1, max_size=12)
)


@dataclass
class Life:
    """What the server knows of a request."""

    prompt: list[int]
    count: int
    accepted: list[int] = field(default_factory=list)
    """Of scheduler's epochs that are over."""
    aborted: bool = False
    hostile: bool = False


class RequestsOfAScheduler(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        rows=st.sampled_from([1, 3, 8]),
        chunk=st.sampled_from([0, 1, 7, 512]),
        overlap=st.booleans(),
        radix_cache=st.booleans(),
        policy=st.sampled_from(["fcfs", "lpm"]),
        stream_interval=st.sampled_from([1, 3]),
    )
    def start(self, page_size: int, rows: int, chunk: int, overlap: bool, radix_cache: bool, policy: str, stream_interval: int) -> None:
        self.settings: dict[str, object] = {
            "page_size": page_size,
            "max_total_tokens": 96,  # any one request fits, three hardly do
            "max_running_requests": rows,
            "max_queued_requests": MAX_QUEUED,
            "chunked_prefill_size": chunk,
            "schedule_policy": policy,
            "radix_cache": radix_cache,
            "stream_interval": stream_interval,
            "options": f"overlap={int(overlap)},nan_token={NAN},raise_token={RAISES}",
        }
        self.lives: dict[str, Life] = {}
        self.ended: dict[str, FinishReason] = {}
        self.epochs = 0
        self.boot()

    def boot(self) -> None:
        self.epochs += 1
        self.h = Harness(**self.settings)  # type: ignore[arg-type]
        self.h.scheduler.prefill.ratio.INITIAL = self.h.scheduler.prefill.ratio.value = 0.0  # admits too many: they are retracted

    # ---- what may happen ----

    @rule(crowd=st.lists(prompts, min_size=1, max_size=3), count=st.integers(1, 30), stream=st.booleans(), salt=st.sampled_from(["", "s"]))
    def submit(self, crowd: list[list[int]], count: int, stream: bool, salt: str) -> None:
        for prompt in crowd:
            rid = f"r{len(self.lives)}"
            self.lives[rid] = Life(prompt, count)
            self.h.send(rid, prompt, count, stream=stream, salt=salt)

    @rule(bad=st.sampled_from([[], [-1], [VOCAB_SIZE], [0] * 5000, [2**31]]), count=st.sampled_from([1, 4000]))
    def submit_what_the_server_would_have_refused(self, bad: list[int], count: int) -> None:
        rid = f"r{len(self.lives)}"
        self.lives[rid] = Life(bad, count, hostile=True)
        self.h.send(rid, bad, count)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def submit_a_duplicate(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(self.live()))
        if rid in self.h.scheduler.reqs and not self.lives[rid].aborted:
            SEEN["duplicate"] += 1
            self.h.send(rid, [1, 2, 3], 5)

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Alive or not: the abort may have crossed the end."""
        rid = data.draw(st.sampled_from(sorted(self.lives)))
        self.lives[rid].aborted = True
        self.h.abort(rid)

    @rule()
    def abort_nobody(self) -> None:
        self.h.abort("r")

    @rule()
    def flush_the_cache(self) -> None:
        self.h.inbox.messages.append(FlushCacheReq(control_id=1, reply_to="ipc://server"))

    @rule(turns=st.integers(1, 12))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.h.turn()

    @rule(turns=st.integers(1, 40))
    def the_server_folds_nothing_for_a_while(self, turns: int) -> None:
        before = self.h.outbox.batches
        for _ in range(turns):
            self.h.scheduler.receive()
            self.h.scheduler.step()
        assert self.h.scheduler.credits >= 0
        self.h.inbox.messages.append(OutputCredit(batches=self.h.outbox.batches - before))

    @precondition(lambda self: self.epochs < 4)
    @rule(turns=st.integers(0, 10), lost=st.booleans())
    def crash(self, turns: int, lost: bool) -> None:
        """The process dies; what it had sent arrives, but perhaps the last row of each. Everyone who hasn't ended is replayed."""
        self.turn(turns)
        self.recall(lost)
        self.boot()
        self.replay()

    @precondition(lambda self: self.epochs < 4)
    @rule(turns=st.integers(0, 10), lost=st.booleans())
    def the_detokenizer_dies(self, turns: int, lost: bool) -> None:
        """The scheduler lives on, drops everyone without a word, and gets them again."""
        self.turn(turns)
        self.recall(lost)
        self.epochs += 1
        self.h.outbox.rows.clear()
        self.h.inbox.messages.append(NewDetokenizerReq(epoch=self.epochs, detokenizer="ipc://another"))
        self.replay()
        SEEN["new detokenizer"] += 1

    def recall(self, lost: bool) -> None:
        """Journals end where they are; what hasn't been taken in yet is lost too."""
        self.note_endings()
        for rid, rows in self.h.outbox.rows.items():
            if rid not in self.ended:
                self.lives[rid].accepted += [token for row in (rows[:-1] if lost else rows) for token in row.output_ids]
        self.h.inbox.messages.clear()

    def replay(self) -> None:
        for rid, life in self.lives.items():
            if rid in self.ended:
                continue
            if life.aborted:  # the server answers for whoever it had aborted
                self.ended[rid] = FinishAbort("aborted", 499, "aborted")
            else:
                SEEN["replay"] += bool(life.accepted)
                self.h.send(rid, life.prompt, life.count, resume=life.accepted)

    # ---- what always holds ----

    @invariant()
    def everyone_alive_is_in_exactly_one_place(self) -> None:
        scheduler = self.h.scheduler
        for req in scheduler.reqs.values():
            waits = (req in scheduler.prefill.waiting) + (req in scheduler.prefill._followers)
            places = [waits, req in scheduler.prefill.active, req in scheduler.running.reqs]
            assert sum(places) == 1, (req.rid, places)
            assert places.index(1) == [ReqState.WAITING, ReqState.PREFILL, ReqState.RUNNING].index(req.state)
        assert len(scheduler.reqs) == scheduler.prefill.num_waiting + len(scheduler.prefill.active) + len(scheduler.running)

    @invariant()
    def what_can_grow_is_bounded(self) -> None:
        scheduler = self.h.scheduler
        rows = scheduler.prefill.max_rows
        assert len(scheduler.running) + len(scheduler.prefill.active) <= rows
        assert len(scheduler.reqs) <= rows + MAX_QUEUED
        assert len(self.h.executor.unread._steps) <= 1

    @invariant()
    def nobody_is_answered_twice_or_with_anything_but_his_own_tokens(self) -> None:
        for rid, rows in self.h.outbox.rows.items():
            life = self.lives[rid]
            output = [token for row in rows for token in row.output_ids]
            at = rows[0].start
            assert at == len(life.accepted), f"{rid}: it goes on where the server's journal ends"
            if not life.hostile:
                assert output == echo(life.prompt, at + len(output))[at:]

    # ---- the end ----

    def live(self) -> list[str]:
        return sorted(self.lives.keys() - self.ended.keys())

    def note_endings(self) -> None:
        for rid, rows in self.h.outbox.rows.items():
            if rows[-1].finished_reason is not None:
                self.ended.setdefault(rid, rows[-1].finished_reason)
                self.lives[rid].accepted += [token for row in rows for token in row.output_ids]

    def check_ending(self, rid: str, life: Life) -> None:
        expected = next((k for k, token in enumerate(echo(life.prompt, life.count)) if token in (EOS, NAN, RAISES)), life.count)
        match self.ended[rid]:
            case FinishLength():
                assert len(life.accepted) == life.count == expected
            case FinishMatchedToken():
                assert life.accepted[-1] == EOS
                assert len(life.accepted) == expected + 1
            case FinishAbort(code="invalid_logits"):
                assert life.prompt[expected % len(life.prompt)] == NAN
            case FinishAbort(code="engine_crashed"):
                assert life.prompt[expected % len(life.prompt)] == RAISES
            case FinishAbort(code="aborted"):
                assert life.aborted
            case FinishAbort(code="queue_full"):
                assert not life.accepted
            case reason:
                raise AssertionError(f"{rid}: {reason}")

    def teardown(self) -> None:
        if not hasattr(self, "h"):
            return
        self.h.run()
        self.note_endings()
        assert self.ended.keys() == self.lives.keys()
        for rid, life in self.lives.items():
            if life.hostile:
                reason = self.ended[rid]
                assert isinstance(reason, FinishAbort)
                assert reason.status_code in (400, 429) or (life.aborted and reason.status_code == 499)
            else:
                self.check_ending(rid, life)
        self.h.assert_at_baseline()
        followers = self.h.scheduler.prefill._followers
        assert not followers._followers
        assert not followers._leaders
        assert not followers._of
        assert self.h.outbox.stats is not None
        SEEN["retraction"] += self.h.outbox.stats.retractions_total
        SEEN["cache hit"] += self.h.outbox.stats.cached_tokens_total
        SEEN.update(reason.code if isinstance(reason, FinishAbort) else type(reason).__name__ for reason in self.ended.values())


def test_whatever_happens_each_request_is_answered_once_and_gives_everything_back() -> None:
    for _ in range(5):  # nearly always one round meets everything that it must have met
        run_state_machine_as_test(RequestsOfAScheduler, settings=settings(max_examples=40, stateful_step_count=40, deadline=None))
        if (+SEEN).keys() >= MUST_BE_SEEN:
            break
    assert (+SEEN).keys() >= MUST_BE_SEEN, SEEN
