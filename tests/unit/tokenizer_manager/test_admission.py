"""The accounts: what is counted, who is refused, who must go."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from sterna.config.server_args import ServerArgs
from sterna.errors import DeadlineExceeded, InvalidRequest, OverloadedError, QueueFull, TooManyConcurrent, TooManyQueuedTokens
from sterna.protocol.finish import FinishAbort
from sterna.tokenizer_manager.admission import ANY_TERMS, Accounts, Admission, Terms


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def accounts_of(clock: Callable[[], float] | None = None, **args: Any) -> Accounts:
    return Accounts(ServerArgs(**args), clock or Clock())


def ended(places: list[Admission]) -> list[FinishAbort]:
    """What each of `places` is told to end for, in the order in which they are told."""
    told: list[FinishAbort] = []
    for place in places:
        place.on_end = told.append
    return told


def test_places_are_as_many_as_run_and_wait() -> None:
    accounts = accounts_of(max_running_requests=2, max_queued_requests=3)
    places = [accounts.admit(ANY_TERMS)[0] for _ in range(5)]
    with pytest.raises(QueueFull):
        accounts.admit(ANY_TERMS)
    places[0].begin(0.0)
    with pytest.raises(QueueFull):
        accounts.admit(ANY_TERMS)
    places[0].close()
    accounts.admit(ANY_TERMS)
    with pytest.raises(QueueFull):
        accounts.admit(ANY_TERMS)


def test_a_list_gets_all_of_its_places_or_none() -> None:
    accounts = accounts_of(max_running_requests=2, max_queued_requests=2)
    accounts.admit(ANY_TERMS, 3)
    with pytest.raises(QueueFull):
        accounts.admit(ANY_TERMS, 2)
    assert accounts.live == 3
    with pytest.raises(InvalidRequest):
        accounts.admit(ANY_TERMS, 5)


def test_waiting_tokens_are_bounded_and_those_of_begun_requests_no_longer_wait() -> None:
    accounts = accounts_of(max_queued_tokens=100)
    (first,) = accounts.admit(ANY_TERMS, 1, 90)
    with pytest.raises(TooManyQueuedTokens):
        accounts.admit(ANY_TERMS, 1, 11)
    accounts.admit(ANY_TERMS, 1, 10)[0].close()
    first.begin(0.0)
    accounts.admit(ANY_TERMS, 1, 100)


def test_a_prompt_beyond_the_limit_is_taken_when_none_waits() -> None:
    accounts = accounts_of(max_queued_tokens=100)
    accounts.admit(ANY_TERMS, 1, 5000)
    with pytest.raises(TooManyQueuedTokens):
        accounts.admit(ANY_TERMS, 1, 1)


def test_an_estimate_is_corrected_and_refuses_nobody_who_is_in() -> None:
    accounts = accounts_of(max_queued_tokens=100)
    first, second = accounts.admit(ANY_TERMS, 2, 20)
    assert (first.tokens, second.tokens) == (10, 10)
    first.tokenized(200)
    assert accounts.queued_tokens == 210
    with pytest.raises(TooManyQueuedTokens):
        accounts.admit(ANY_TERMS, 1, 1)
    first.tokenized(3)
    assert accounts.queued_tokens == 13
    first.close()
    first.tokenized(1000)
    second.begin(0.0)
    second.tokenized(1000)
    assert accounts.queued_tokens == 0


def test_a_key_has_its_own_limit_and_those_without_share_one() -> None:
    accounts = accounts_of(max_concurrent_per_key=2)
    for key in (b"", b"a", b"b"):
        accounts.admit(Terms(key=key), 2)
        with pytest.raises(TooManyConcurrent):
            accounts.admit(Terms(key=key))
    assert accounts.live == 6
    with pytest.raises(InvalidRequest):
        accounts.admit(Terms(key=b"c"), 3)


def test_a_key_that_has_nothing_running_is_forgotten() -> None:
    accounts = accounts_of(max_concurrent_per_key=2)
    for index in range(100):
        accounts.admit(Terms(key=b"%d" % index))[0].close()
    assert accounts._per_key == {}


def test_a_deadline_that_has_passed_takes_no_place() -> None:
    clock = Clock()
    accounts = accounts_of(clock)
    with pytest.raises(DeadlineExceeded):
        accounts.admit(Terms(deadline=clock.now))
    assert accounts.live == 0
    assert accounts.idle_event.is_set()


# ---- evictions ----


def by_priority(**args: Any) -> tuple[Accounts, Clock]:
    clock = Clock()
    settings = {"schedule_policy": "priority", "priority_ageing": 10.0, "max_running_requests": 1, "max_queued_requests": 2} | args
    return accounts_of(clock, **settings), clock


def test_at_a_full_queue_a_higher_priority_takes_the_place_of_the_lowest_and_latest() -> None:
    accounts, clock = by_priority()
    places = []
    for priority in (1, 0, 0):
        clock.now += 0.1
        places += accounts.admit(Terms(priority=priority))
    told = {index: ended([place]) for index, place in enumerate(places)}
    accounts.admit(Terms(priority=2))
    assert [index for index in told if told[index]] == [2]
    (reason,) = told[2]
    assert (reason.status_code, reason.code) == (429, "queue_full")
    assert reason.retry_after_s is not None
    assert reason.retry_after_s >= 1
    assert places[2].closed
    assert accounts.live == 3


def test_nobody_is_evicted_by_an_equal_nor_when_he_has_begun_nor_when_he_has_waited_for_longer_than_the_difference_is_worth() -> None:
    accounts, clock = by_priority()
    begun, equal, old = (accounts.admit(Terms(priority=priority))[0] for priority in (0, 2, 1))
    begun.begin(0.0)
    told = ended([begun, equal, old])
    with pytest.raises(QueueFull):
        accounts.admit(Terms(priority=1))
    clock.now += 10.1
    with pytest.raises(QueueFull):
        accounts.admit(Terms(priority=2))
    assert told == []
    accounts.admit(Terms(priority=3))
    assert len(told) == 1
    assert old.closed


def test_a_list_evicts_as_many_as_it_needs_or_nobody() -> None:
    accounts, _ = by_priority(max_queued_requests=3)
    accounts.admit(Terms(priority=5))
    low = accounts.admit(Terms(priority=0), 3)
    told = ended(low)
    with pytest.raises(QueueFull):
        accounts.admit(Terms(priority=1), 4)
    assert told == []
    accounts.admit(Terms(priority=1), 3)
    assert len(told) == 3
    with pytest.raises(QueueFull):
        accounts.admit(Terms(priority=1))


def test_room_for_tokens_is_made_too() -> None:
    accounts, _ = by_priority(max_queued_requests=100, max_queued_tokens=100)
    low = [accounts.admit(Terms(priority=0), 1, 30)[0] for _ in range(3)]
    told = ended(low)
    accounts.admit(Terms(priority=1), 1, 60)
    assert len(told) == 2
    assert accounts.queued_tokens == 90
    with pytest.raises(TooManyQueuedTokens):
        accounts.admit(Terms(priority=0), 1, 60)


def test_without_the_policy_nobody_is_evicted() -> None:
    accounts, _ = by_priority(schedule_policy="fcfs")
    told = ended(accounts.admit(Terms(priority=0), 3))
    with pytest.raises(QueueFull):
        accounts.admit(Terms(priority=9))
    assert told == []


# ---- Retry-After ----


def retry_after(accounts: Accounts, kind: type[OverloadedError], terms: Terms = ANY_TERMS) -> int:
    with pytest.raises(kind) as refused:
        accounts.admit(terms)
    return refused.value.retry_after_s


def test_retry_after_is_what_the_queue_ahead_takes_at_the_pace_of_late() -> None:
    clock = Clock()
    accounts = accounts_of(clock, max_running_requests=2, max_queued_requests=6)
    accounts.admit(ANY_TERMS)  # never idle
    for _ in range(100):
        (place,) = accounts.admit(ANY_TERMS)
        place.begin(clock.now)
        clock.now += 2.0
        place.close()
    accounts.admit(ANY_TERMS, 7)
    assert accounts.queued == 8
    assert retry_after(accounts, QueueFull) == 16


def test_retry_after_is_a_second_at_first_and_grows_while_nothing_ends_to_a_minute() -> None:
    clock = Clock()
    accounts = accounts_of(clock, max_running_requests=1, max_queued_requests=0)
    clock.now += 3600  # an idle hour says nothing
    accounts.admit(ANY_TERMS)
    assert retry_after(accounts, QueueFull) == 1
    clock.now += 20
    assert retry_after(accounts, QueueFull) == 20
    clock.now += 2000
    assert retry_after(accounts, QueueFull) == 60


def test_a_key_is_told_when_one_of_its_own_will_have_ended() -> None:
    clock = Clock()
    accounts = accounts_of(clock, max_concurrent_per_key=2)
    busy = [accounts.admit(Terms(key=b"%d" % index))[0] for index in range(6)]
    accounts.admit(Terms(key=b"mine"), 2)
    for place in busy[:4]:
        place.begin(clock.now)
        clock.now += 1
        place.close()
    assert accounts.live == 4
    assert retry_after(accounts, TooManyConcurrent, Terms(key=b"mine")) == 2


# ---- the books ----


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(8))
def test_the_accounts_equal_what_is_in(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    clock = Clock()
    accounts = accounts_of(
        clock, schedule_policy=policy, max_running_requests=8, max_queued_requests=24, max_queued_tokens=600, max_concurrent_per_key=20
    )
    held: list[Admission] = []
    refused = 0
    for _ in range(2000):
        clock.now += rng.random()
        action = rng.random()
        if action < 0.5:
            terms = Terms(priority=rng.randrange(-2, 3), key=rng.choice([b"", b"a", b"b"]))
            try:
                held += accounts.admit(terms, rng.randrange(1, 4), rng.randrange(60))
            except OverloadedError:
                refused += 1
        elif held:
            place = rng.choice(held)
            rng.choice([place.close, lambda place=place: place.begin(clock.now), lambda place=place: place.tokenized(rng.randrange(40))])()
        held = [place for place in held if not place.closed]
        waiting = [place for place in held if not place.begun]
        assert accounts.live == len(held) <= accounts.capacity
        assert accounts.queued == len(waiting)
        assert accounts.queued_tokens == sum(place.tokens for place in waiting)
        assert sum(accounts._per_key.values()) == len(held)
        assert accounts.idle_event.is_set() == (not held)
        assert len(accounts._last) == (len(waiting) if policy == "priority" else 0)
    assert refused > 50
    for place in held:
        place.close()
        place.close()
    assert (accounts.live, accounts.queued, accounts.queued_tokens, accounts._per_key) == (0, 0, 0, {})
