"""Who a soak consists of. Each actor repeats one kind of thing until the time is up, and counts how it went in `Tally`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from faults.hostile import hostile_requests
from faults.load import Answer, Ask, Load

SESSION_TIMEOUT_S = 10.0
"""Idle; a client here may be that slow between two of its turns."""


@dataclass
class Tally:
    """What happened. `unexplained` must stay empty."""

    outcomes: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    """Of whole answers."""
    probes_s: list[float] = field(default_factory=list)
    """Of /health."""

    def strange(self, what: str) -> None:
        self.outcomes["unexplained"] += 1
        if len(self.unexplained) < 100:
            self.unexplained.append(what)


class Stage:
    """What the actors share."""

    def __init__(self, url: str, model: str, asks: Sequence[Ask], reference: Sequence[Answer], until: float) -> None:
        """`until` is a time of CLOCK_MONOTONIC."""
        self.url = url
        self.model = model
        self.tally = Tally()
        self._known = list(zip(asks, reference, strict=True))
        self._until = until
        self.http = httpx.AsyncClient(base_url=url, timeout=90, verify=False)

    @property
    def going(self) -> bool:
        return time.monotonic() < self._until

    def pick(self, rng: random.Random) -> tuple[Ask, Answer]:
        return rng.choice(self._known)


async def ask_known_questions(stage: Stage, seed: int) -> None:
    """The answer must be what it was when nobody else was there; or a refusal that says when to come again."""
    rng = random.Random(seed)
    while stage.going:
        ask, undisturbed = stage.pick(rng)
        began = time.monotonic()
        (answer,) = await Load(stage.url, [ask]).run()
        if answer.error is None and answer.broken is None and not answer.faults and answer.content == undisturbed.content:
            stage.tally.outcomes["answered"] += 1
            stage.tally.latencies_s.append(time.monotonic() - began)
        elif answer.status in (429, 503) and answer.retry_after is not None:
            stage.tally.outcomes[f"refused {answer.status}"] += 1
        else:
            stage.tally.strange(f"{ask.name}: {answer.status} {answer.error} {answer.broken} {answer.faults} {answer.content}")


async def leave_early(stage: Stage, seed: int) -> None:
    """A client that goes after a few events of its stream, or before the first."""
    rng = random.Random(seed)
    while stage.going:
        body = {"model": stage.model, "prompt": f"leaver {rng.random()}", "max_tokens": 400, "ignore_eos": True, "stream": True}
        events = rng.choice([0, 1, 5, 40])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05 if events == 0 else 60), stage.http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200 and answer.status_code not in (429, 503):
                    stage.tally.strange(f"leaver: {answer.status_code}")
                seen = 0
                async for _ in answer.aiter_lines():
                    seen += 1
                    if seen > 2 * events:
                        break
        stage.tally.outcomes["left early"] += 1


async def abort_by_name(stage: Stage, seed: int) -> None:
    """A request that another one aborts by its rid: one ending, `abort`, or the end that came first."""
    rng = random.Random(seed)
    for count in range(10**9):
        if not stage.going:
            return
        rid = f"named-{seed}-{count}"
        params = {"max_new_tokens": 300, "ignore_eos": True}
        ask = Ask(rid, "/generate", {"rid": rid, "text": "to be aborted", "sampling_params": params, "stream": True})
        at = rng.choice([1, 3, 30])
        aborts: list[asyncio.Task[httpx.Response]] = []

        def watch(load: Load, rid: str = rid, at: int = at, aborts: list[asyncio.Task[httpx.Response]] = aborts) -> None:
            if load.events >= at and not aborts:
                aborts.append(asyncio.get_running_loop().create_task(stage.http.post("/abort_request", json={"rid": rid})))

        (answer,) = await Load(stage.url, [ask], watch).run()
        for abort in aborts:
            if (await abort).status_code != 200:
                stage.tally.strange(f"{rid}: its abort got {abort.result().status_code}")
        if answer.faults or answer.broken or (answer.finish is None and answer.status not in (429, 503)):
            stage.tally.strange(f"{rid}: {answer.status} {answer.error} {answer.broken} {answer.faults}")
        stage.tally.outcomes["aborted by rid"] += 1


async def be_hostile(stage: Stage, seed: int) -> None:
    rng = random.Random(seed)
    requests = hostile_requests(stage.model)
    while stage.going:
        path, body = rng.choice(requests)
        answer = await stage.http.post(path, content=body, headers={"content-type": "application/json"})
        if 400 <= answer.status_code < 500 and "error" in answer.json():
            stage.tally.outcomes["hostile, refused"] += 1
        else:
            stage.tally.strange(f"hostile {path} {body[:80]!r}: {answer.status_code} {answer.text[:200]}")
        await asyncio.sleep(0.05)  # its pace: it isn't there to take the machine


async def converse(stage: Stage, seed: int) -> None:
    """Sessions: a few turns each, some left to their timeout."""
    rng = random.Random(seed)
    while stage.going:
        opened = await stage.http.post("/open_session", json={"timeout": SESSION_TIMEOUT_S})
        session = opened.json()
        last: str | None = None
        for turn in range(rng.randrange(1, 6)):
            rid = f"{session}-{turn}"
            params = {"id": session} | ({"rid": last} if last else {})
            sampling = {"max_new_tokens": 20, "temperature": 0}
            body = {"rid": rid, "text": f" turn {turn}: and then", "sampling_params": sampling, "session_params": params}
            answer = await stage.http.post("/generate", json=body)
            if answer.status_code == 200:
                last = rid
                stage.tally.outcomes["turns"] += 1
            elif answer.status_code in (429, 503):
                stage.tally.outcomes[f"refused {answer.status_code}"] += 1
            else:
                stage.tally.strange(f"turn {rid}: {answer.status_code} {answer.text[:200]}")
        if rng.random() < 0.7:
            closed = await stage.http.post("/close_session", json={"session_id": session})
            if closed.status_code != 200:
                stage.tally.strange(f"close {session}: {closed.status_code} {closed.text[:200]}")
    # What was left has its time, and is cleared away by whoever comes next.
    await asyncio.sleep(SESSION_TIMEOUT_S + 1)
    opened = await stage.http.post("/open_session", json={})
    await stage.http.post("/close_session", json={"session_id": opened.json()})


async def probe(stage: Stage) -> None:
    """Liveness, five times a second."""
    while stage.going:
        began = time.monotonic()
        answer = await stage.http.get("/health")
        stage.tally.probes_s.append(time.monotonic() - began)
        if answer.status_code != 200:
            stage.tally.strange(f"/health: {answer.status_code} {json.dumps(answer.text[:100])}")
        await asyncio.sleep(0.2)
