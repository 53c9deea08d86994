"""Who is let in: the server's own accounts of places, waiting prompt tokens and requests per key. Refusals for load come from here,
before template and tokenizer run and before the response starts.

    admitted ── begun (the scheduler has taken it out of its queue) ── closed
       │ counts as queued, with its prompt's tokens                       gives everything back, once
       └ may be evicted for one of higher priority, and may time out waiting

An admission is the one handle of a request that exists from here to its end, so that what ends it from outside (a deadline, an eviction, an
abort by name) goes through it, wherever the request is: see `Admission.end`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sterna.config.server_args import ServerArgs
from sterna.errors import DeadlineExceeded, InvalidRequest, QueueFull, TooManyConcurrent, TooManyQueuedTokens
from sterna.keyed_heap import KeyedHeap
from sterna.protocol.finish import FinishAbort, to_finish
from sterna.tokenizer_manager.deadlines import Deadlines

MAX_EVICTIONS = 64
"""For one HTTP request."""
MAX_RETRY_AFTER_S = 60
THROUGHPUT_WINDOW = 64
"""Ended requests from which throughput is estimated."""


@dataclass(slots=True, frozen=True)
class Terms:
    """What an HTTP request asks for, as far as it can be known before any work is done for it."""

    priority: int = 0
    deadline: float | None = None
    """End of its `timeout`, on CLOCK_MONOTONIC."""
    key: bytes = b""
    """A digest of the API key that it came with; requests without a key share one."""


ANY_TERMS = Terms()


class Admission:
    """A place among the live requests, taken before any work is done for one. `close` gives it back, once."""

    __slots__ = ("_accounts", "begun", "closed", "on_end", "order", "reason", "rid", "serial", "terms", "tokens")

    def __init__(self, accounts: Accounts, terms: Terms, tokens: int, order: float, serial: int) -> None:
        self._accounts = accounts
        self.terms = terms
        self.tokens = tokens
        """Of its prompt: an estimate until `tokenized`."""
        self.order = order
        """When it would have come had it no priority: who is later goes first where somebody must."""
        self.serial = serial
        self.rid: str | None = None
        """Of the request that has it; None before one is registered."""
        self.begun = False
        self.closed = False
        self.reason: FinishAbort | None = None
        """Why it was ended from outside."""
        self.on_end: Callable[[FinishAbort], None] | None = None
        """Whoever holds it at the moment, and can act on its end."""

    def tokenized(self, tokens: int) -> None:
        """Its prompt has `tokens`: the estimate is corrected. Nobody who is in already is refused for it."""
        self._accounts.correct(self, tokens)

    def begin(self, at: float) -> None:
        """The scheduler has begun it, at `at` of CLOCK_MONOTONIC. Once and for all: a retraction or a replay changes nothing."""
        if not self.begun and not self.closed:
            self._accounts.begin(self, at)

    def end(self, reason: FinishAbort) -> None:
        """The request must end for `reason`, if it hasn't: whoever holds it is told."""
        self.reason = self.reason or reason
        if self.on_end is not None:
            self.on_end(reason)

    def close(self) -> None:
        if not self.closed:
            self._accounts.close(self)


class Throughput:
    """Requests that ended lately, for `Retry-After`. Measured while somebody is there: an idle hour says nothing of how fast we are."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=THROUGHPUT_WINDOW)
        self._busy_since = 0.0

    def wake(self) -> None:
        """The first of a busy time has come."""
        self._busy_since = self._clock()
        self._ends.clear()

    def ended(self) -> None:
        if len(self._ends) == THROUGHPUT_WINDOW:
            self._busy_since = self._ends[0]
        self._ends.append(self._clock())

    def seconds_for(self, requests: float) -> int:
        """In how many whole seconds so many will have ended: 1 to 60. While none has, as long as we have been busy."""
        busy = self._clock() - self._busy_since
        estimate = busy * requests / len(self._ends) if self._ends else busy
        return min(max(math.ceil(estimate), 1), MAX_RETRY_AFTER_S)


class Accounts:
    """Owned by the server's event loop. Every operation takes O(log n) of those that are in."""

    def __init__(self, args: ServerArgs, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = min(args.max_running_requests + args.max_queued_requests, args.max_detokenizer_states)
        self.live = 0
        self.queued = 0
        """Of `live`: not begun."""
        self.queued_tokens = 0
        """Of their prompts."""
        self.idle_event = asyncio.Event()
        """Set while nobody is in."""
        self.idle_event.set()
        self.deadlines = Deadlines(args.waiting_timeout, args.running_timeout, clock, self._seconds_for_queue)
        self._max_queued_tokens = args.max_queued_tokens
        self._max_per_key = args.max_concurrent_per_key
        self._ageing_s = args.priority_ageing if args.schedule_policy == "priority" else None
        self._clock = clock
        self._per_key: dict[bytes, int] = {}
        self._throughput = Throughput(clock)
        self._serial = 0
        self._last: KeyedHeap[Admission, tuple[float, int]] = KeyedHeap()
        """Those that are queued, whoever would go last in front. Empty without priorities."""

    # ---- letting in ----

    def admit(self, terms: Terms, count: int = 1, tokens: int = 0) -> list[Admission]:
        """Places for `count` requests of one HTTP request, whose prompts are estimated at `tokens` together. All or none.

        A prompt alone always fits: `--max-queued-tokens` refuses whoever would wait behind others.
        Raises InvalidRequest for more requests than could ever be in at once, DeadlineExceeded, QueueFull, TooManyQueuedTokens,
        TooManyConcurrent.
        """
        self._check_count(count)
        now = self._clock()
        if terms.deadline is not None and terms.deadline <= now:
            raise DeadlineExceeded("the request's timeout was over before it could be taken in")
        of_key = self._per_key.get(terms.key, 0)
        if self._max_per_key is not None and of_key + count > self._max_per_key:
            wait = self._throughput.seconds_for(self.live / max(of_key, 1))
            raise TooManyConcurrent(f"{of_key} requests of this key are running; it may have {self._max_per_key}", retry_after_s=wait)
        order = now - terms.priority * (self._ageing_s or 0.0)
        self._make_room(order, count, tokens)
        if not self.live:
            self._throughput.wake()
            self.idle_event.clear()
        share, rest = divmod(tokens, count)
        return [self._open(terms, share + (index < rest), order) for index in range(count)]

    def _check_count(self, count: int) -> None:
        most = min(self.capacity, self._max_per_key or self.capacity)
        if count > most:
            raise InvalidRequest(f"prompt: {count} requests in one; this server takes {most} at once", param="prompt")

    def _open(self, terms: Terms, tokens: int, order: float) -> Admission:
        self._serial += 1
        admission = Admission(self, terms, tokens, order, self._serial)
        self.live += 1
        self.queued += 1
        self.queued_tokens += tokens
        self._per_key[terms.key] = self._per_key.get(terms.key, 0) + 1
        if self._ageing_s is not None:
            self._last.put(admission, (-order, -admission.serial))
        self.deadlines.watch(admission)
        return admission

    # ---- making room ----

    def _make_room(self, order: float, count: int, tokens: int) -> None:
        places = self.live + count - self.capacity
        surplus = 0 if self._max_queued_tokens is None else self.queued_tokens + tokens - self._max_queued_tokens
        if places <= 0 and (surplus <= 0 or not self.queued_tokens):
            return
        victims = self._victims(order, places, min(surplus, self.queued_tokens))
        wait = self._seconds_for_queue()
        if victims:
            evicted = QueueFull("The request queue is full; a request of higher priority took this one's place.", retry_after_s=wait)
            for victim in victims:
                victim.close()
                victim.end(to_finish(evicted))
        elif places > 0:
            raise QueueFull("The request queue is full.", retry_after_s=wait)
        else:
            raise TooManyQueuedTokens(f"{self.queued_tokens} prompt tokens are waiting; more are not taken", retry_after_s=wait)

    def _seconds_for_queue(self) -> int:
        return self._throughput.seconds_for(self.queued or 1)

    def _victims(self, order: float, places: int, tokens: int) -> list[Admission]:
        """Queued ones that would go after a newcomer of `order`, last ones first, as many as free `places` and `tokens`. None where that
        can't be done."""
        taken: list[tuple[Admission, tuple[float, int]]] = []
        while (places > len(taken) or tokens > 0) and len(taken) < MAX_EVICTIONS:
            worst = self._last.first()
            if worst is None or worst[0].order <= order:
                break
            self._last.discard(worst[0])
            taken.append(worst)
            tokens -= worst[0].tokens
        if places > len(taken) or tokens > 0:
            for admission, place in taken:
                self._last.put(admission, place)
            return []
        return [admission for admission, _ in taken]

    # ---- what becomes of an admission ----

    def correct(self, admission: Admission, tokens: int) -> None:
        if _is_queued(admission):
            self.queued_tokens += tokens - admission.tokens
        admission.tokens = tokens

    def begin(self, admission: Admission, at: float) -> None:
        admission.begun = True
        self._last.discard(admission)
        self.queued -= 1
        self.queued_tokens -= admission.tokens
        self.deadlines.begin(admission, at)

    def close(self, admission: Admission) -> None:
        admission.closed = True
        self._last.discard(admission)
        self.deadlines.forget(admission)
        self.live -= 1
        if admission.begun:
            self._throughput.ended()
        else:
            self.queued -= 1
            self.queued_tokens -= admission.tokens
        key = admission.terms.key
        self._per_key[key] -= 1
        if not self._per_key[key]:
            del self._per_key[key]
        if not self.live:
            self.idle_event.set()


def _is_queued(admission: Admission) -> bool:
    return not admission.begun and not admission.closed
