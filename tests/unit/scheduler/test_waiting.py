"""The order of the waiting queue, against a list that is sorted anew each time."""

import random

import numpy as np
import pytest

from sterna.protocol.generate import CacheNamespace
from sterna.protocol.sampling import SamplingParams
from sterna.scheduler.req import Req
from sterna.scheduler.waiting import WaitingQueue


def req_of(serial: int) -> Req:
    return Req(
        rid=f"r{serial}",
        serial=serial,
        prompt_ids=np.array([1], dtype=np.int32),
        output_ids=[],
        sampling_params=SamplingParams(),
        max_new_tokens=1,
        output_interval=1,
        reply_to="",
        cache_namespace=CacheNamespace(),
        received_time=0.0,
        num_resumed=0,
        resume_chars=0,
        token_stops=frozenset(),
    )


def strict(reqs: list[Req]) -> list[Req]:
    return sorted(reqs, key=lambda req: (not req.retractions, req.serial))


def test_the_retracted_stand_before_those_that_waited_for_a_prefix_whoever_came_back_first() -> None:
    queue = WaitingQueue()
    early, late, retracted, new = (req_of(serial) for serial in (1, 2, 3, 4))
    retracted.retractions = 1
    queue.push_back(new)
    queue.push_front([retracted])
    queue.push_front([late])
    queue.push_front([early])
    assert list(queue) == [retracted, early, late, new]


@pytest.mark.parametrize("seed", range(20))
def test_first_come_first_served_is_strict_whoever_leaves_and_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    queue, waiting, away = WaitingQueue(), list[Req](), list[Req]()
    returns = 0
    for serial in range(400):
        action = rng.random()
        if action < 0.4:
            waiting.append(req_of(serial))
            queue.push_back(waiting[-1])
        elif action < 0.7 and waiting:
            head = queue.head()
            assert head is strict(waiting)[0]
            queue.discard(head)
            waiting.remove(head)
            away.append(head)
        elif action < 0.8 and waiting:
            gone = rng.choice(waiting)
            queue.discard(gone)
            queue.discard(gone)
            waiting.remove(gone)
        elif away:
            back = rng.sample(away, rng.randrange(1, len(away) + 1))
            returns += len(back)
            for req in back:
                away.remove(req)
                req.retractions += rng.random() < 0.5
            queue.push_front(back)
            waiting += back
        assert list(queue) == strict(waiting)
        assert len(queue) == len(waiting)
    assert returns > 20


def test_another_order_keeps_the_retracted_in_front() -> None:
    queue = WaitingQueue()
    reqs = [req_of(serial) for serial in range(4)]
    for req in reqs:
        queue.push_back(req)
    queue.discard(reqs[1])
    reqs[1].retractions = 1
    queue.push_front([reqs[1]])
    queue.reorder([reqs[3], reqs[2], reqs[1], reqs[0]])
    assert list(queue) == [reqs[1], reqs[3], reqs[2], reqs[0]]
    assert queue.head() is reqs[1]
