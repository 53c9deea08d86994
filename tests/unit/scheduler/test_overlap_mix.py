"""Whatever comes in whatever order, and whenever a step in flight runs: each request gets its own tokens and one ending, what a step gives
to those that have ended counts nowhere, and nothing is left held.

After every turn each slot has exactly one owner; the executor verifies every context that it reads, and that nothing that a step in flight
has to do with changes before it has been read.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sterna.protocol.control import FlushCacheReq
from sterna.protocol.finish import FinishAbort, FinishLength, FinishMatchedToken, FinishReason
from sterna.scheduler.decode import Decodes
from sterna.scheduler.req import Req, ReqState
from unit.scheduler.gates import Gates, Moment
from unit.scheduler.harness import EOS, Harness, echo

RAISE, NAN, OWN_STOP = 996, 997, 998
OPTIONS = {"nan_token": NAN, "raise_token": RAISE, "overlap": 1, "threaded": 1}
STEMS = [[(31 * stem + 7 * k) % 900 + 1 for k in range(70)] for stem in range(2)]


@dataclass(frozen=True)
class Send:
    stem: int
    shared: int
    """Tokens of the stem that its prompt begins with."""
    own: int
    count: int
    mark: int | None
    """A token that ends it, somewhere in its prompt and so in its output."""
    at: float
    stream: bool


@dataclass(frozen=True)
class Abort:
    which: int
    """Of those sent so far, counted from the last."""


@dataclass(frozen=True)
class Turns:
    count: int


@dataclass(frozen=True)
class Flush:
    pass


Action = Send | Abort | Turns | Flush


@dataclass(frozen=True)
class Plan:
    settings: dict[str, Any]
    ratio: float
    """Of the outputs that may come, how much is expected: with little, too many are admitted and memory runs out."""
    follow: bool
    """Whether a prefix that is being computed is waited for: where not, it is computed twice."""
    moments: list[Moment]
    actions: list[Action]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    page_size = draw(st.sampled_from([1, 4, 16]))
    options = {
        **OPTIONS,
        "reuse_generated_kv": draw(st.integers(0, 1)),
        # The KV groups' windows, and room for a single request of any length in the smallest pool.
        "windows": draw(st.sampled_from(["0", "0", "0:16", "0:5:40", "24", "0:1"])),
        "window_slots": page_size * (40 // page_size + 3 + draw(st.integers(0, 60 // page_size))),
    }
    sends = st.builds(
        Send,
        stem=st.integers(0, 1),
        shared=st.integers(0, 70),
        own=st.integers(1, 12),
        count=st.integers(1, 60),
        mark=st.sampled_from([None, None, None, EOS, OWN_STOP, NAN, RAISE]),
        at=st.floats(0, 1, exclude_max=True),
        stream=st.booleans(),
    )
    others = st.one_of(st.builds(Abort, st.integers(0, 5)), st.builds(Turns, st.integers(1, 12)), st.just(Flush()))
    return Plan(
        settings={
            "page_size": page_size,
            "max_total_tokens": page_size * draw(st.integers(112 // page_size, 240 // page_size)),
            "max_running_requests": draw(st.sampled_from([2, 8, 24])),
            "chunked_prefill_size": draw(st.sampled_from([0, 5, 32])),
            "schedule_policy": draw(st.sampled_from(["fcfs", "lpm"])),
            "radix_cache": draw(st.booleans()),
            "stream_interval": draw(st.sampled_from([1, 3])),
            "options": ",".join(f"{name}={value}" for name, value in options.items()),
        },
        ratio=draw(st.sampled_from([0.0, 0.7])),
        follow=draw(st.booleans()),
        moments=draw(st.lists(st.sampled_from(["early", "whenever", "late", "late"]), min_size=1, max_size=12)),
        actions=draw(st.lists(st.one_of(sends, sends, others), min_size=8, max_size=50)),
    )


def crowd(**options: Any) -> Plan:
    """More at once than memory holds, of one beginning, which each computes for himself."""
    marks = [None, EOS, None, OWN_STOP, None, NAN, None, None]
    sends = [Send(stem=i % 2, shared=40, own=3 + i, count=50, mark=mark, at=0.95, stream=True) for i, mark in enumerate(marks)]
    actions = [*sends[:4], Turns(3), *sends[4:], Turns(12), Abort(0), Turns(9), Abort(3)]
    settings = {"page_size": 4, "max_total_tokens": 160, "max_running_requests": 24, "chunked_prefill_size": 64}
    settings["options"] = ",".join(f"{name}={value}" for name, value in {**OPTIONS, **options}.items())
    return Plan(settings, ratio=0.0, follow=False, moments=["late", "early", "whenever"], actions=actions)


@dataclass
class Watch:
    """What happened while a step was in flight."""

    seen: Counter[str] = field(default_factory=Counter)

    def over(self, h: Harness) -> None:
        scheduler, runner, ledger = h.scheduler, h.scheduler._runner, h.scheduler.ledger
        end, grow, void, cache = scheduler._end, scheduler._grow_running, runner._void_the_rest, ledger.cache_computed

        def watched_end(endings: list[tuple[Req, FinishReason]]) -> None:
            for req, reason in endings:
                if req.state is not ReqState.FINISHED and req.req_pool_idx >= 0 and runner.in_flight.uses(req):
                    self.seen[f"{reason.code if isinstance(reason, FinishAbort) else type(reason).__name__} in flight"] += 1
            end(endings)

        def watched_grow() -> Decodes | None:
            decodes = grow()
            self.seen["short in flight"] += decodes is None and len(runner.in_flight) > 0
            return decodes

        def watched_void() -> list[Req]:
            reqs = void()
            self.seen["voided"] += bool(reqs)
            return reqs

        def watched_cache(req: Req, *, in_flight: bool = False) -> None:
            before = req.tree_len
            cache(req, in_flight=in_flight)
            left = min(req.kv_len, req.num_prompt) // ledger.page_size * ledger.page_size - req.tree_len
            self.seen["left for later"] += in_flight and ledger.cache.shares and req.tree_len == before and left > 0

        scheduler._end, scheduler._grow_running = watched_end, watched_grow  # type: ignore[method-assign, assignment]
        runner._void_the_rest, ledger.cache_computed = watched_void, watched_cache  # type: ignore[method-assign]


def prompt_of(send: Send, serial: int) -> list[int]:
    prompt = [*STEMS[send.stem][: send.shared], *((serial * 13 + k) % 900 + 1 for k in range(send.own))]
    if send.mark is not None:
        prompt[int(send.at * len(prompt))] = send.mark
    return prompt


def run(plan: Plan, seen: Counter[str]) -> None:
    h = Harness(max_queued_requests=1000, **plan.settings)
    gates = Gates(h.executor, itertools.cycle(plan.moments).__next__)
    watch = Watch(seen)
    watch.over(h)
    h.scheduler.prefill.ratio.value = plan.ratio
    if not plan.follow:
        h.scheduler.prefill._followers.follow = lambda *args: False  # type: ignore[method-assign]
    sent: list[Send] = []
    aborted: set[int] = set()
    for action in plan.actions:
        match action:
            case Send():
                h.send(str(len(sent)), prompt_of(action, len(sent)), action.count, stream=action.stream, stop_token_ids=(OWN_STOP,))
                sent.append(action)
            case Abort(which) if which < len(sent):
                aborted.add(len(sent) - 1 - which)
                h.abort(str(len(sent) - 1 - which))
            case Abort():
                pass
            case Turns(count):
                for _ in range(count):
                    h.turn()
            case Flush():
                h.inbox.messages.append(FlushCacheReq(control_id=0, reply_to="ipc://server"))
    h.run()
    for serial, send in enumerate(sent):
        check(h, str(serial), prompt_of(send, serial), send, aborted=serial in aborted)
    if sent:
        h.assert_at_baseline()
        assert h.outbox.stats is not None
        assert h.outbox.stats.output_tokens_total == sum(len(h.output(str(serial))) for serial in range(len(sent)))
        if not seen["voided"]:
            seen["surplus"] += gates.num_sampled - h.outbox.stats.output_tokens_total
        seen["retractions"] += h.outbox.stats.retractions_total
        seen["cached"] += h.outbox.stats.cached_tokens_total
    seen["on top"] += h.executor.unread.num_on_top
    seen["late"] += gates.late
    h.executor.shutdown()


def check(h: Harness, rid: str, prompt: list[int], send: Send, *, aborted: bool) -> None:
    """Its output is the echo up to where its reason says; the reason is the right one."""
    reason, output = h.reason(rid), h.output(rid)
    whole = echo(prompt, send.count)
    assert output == whole[: len(output)]
    if aborted and reason == FinishAbort("aborted", 499, "aborted"):
        return
    ends = whole.index(send.mark) if send.mark in whole else None
    if isinstance(reason, FinishAbort) and reason.message.startswith("the request does not fit"):
        assert len(prompt) + send.count - 1 > h.scheduler.ledger.pools.longest_request
        assert ends is None or len(output) <= ends
    elif ends is None:
        assert reason == FinishLength(send.count)
        assert output == whole
    elif send.mark in (EOS, OWN_STOP):
        assert reason == FinishMatchedToken(send.mark, send.mark == EOS)
        assert output == whole[: ends + 1]
    else:
        assert h.abort_code(rid) == (500, "invalid_logits" if send.mark == NAN else "engine_crashed")
        assert output == whole[:ends]


def test_any_mix_of_requests_ends_right_whenever_the_steps_in_flight_run() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(plans())
    @example(crowd())
    @example(crowd(reuse_generated_kv=0))
    @example(crowd(windows="0:16", window_slots=80))
    def each(plan: Plan) -> None:
        mine: Counter[str] = Counter()
        run(plan, mine)
        seen.update(mine)

    each()
    happened = {name for name, times in seen.items() if times}
    assert happened >= {
        "on top",
        "late",
        "surplus",
        "voided",
        "short in flight",
        "retractions",
        "cached",
        "left for later",
        "aborted in flight",
        "FinishMatchedToken in flight",
        "invalid_logits in flight",
    }, seen
