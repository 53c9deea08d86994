"""`make soak`: everything at once for a long time, with too little memory, and then: is anything left, has anything grown?

    python -m faults.soak [--minutes 10] [--clients 12] [--kills]

Exits with 1 where an error has no explanation, an answer differs from the undisturbed one, a process holds on to something, memory grows,
or what was to be tried (retractions, refusals, aborts) never happened. `docs/reliability.md` has the figures of a run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from faults import actors, checks
from faults.load import Answer, Ask, mixed_asks
from faults.memory import MemorySeries, pss_mb
from faults.served import MODEL, Struck

FLAGS = ("--max-total-tokens", "2048", "--max-running-requests", "24", "--max-queued-requests", "4")
"""Less memory than the clients want at once, and a short queue."""
SAMPLE_S = 2.0
FLAT_MB_PER_MINUTE = 0.5
"""Slope of a process's memory that counts as none in ten minutes; allocators' noise is larger in a shorter run."""
KILL_EVERY_S = 30.0


async def soak(struck: Struck, minutes: float, clients: int, kills: bool, known: tuple[Sequence[Ask], Sequence[Answer]]) -> actors.Stage:
    stage = actors.Stage(struck.server.url, MODEL, *known, until=time.monotonic() + 60 * minutes)
    tasks = [actors.ask_known_questions(stage, seed) for seed in range(clients)]
    tasks += [actors.leave_early(stage, seed) for seed in range(2)]
    tasks += [actors.abort_by_name(stage, seed) for seed in range(2)]
    tasks += [actors.be_hostile(stage, 0), actors.probe(stage)]
    if has_sessions(struck):
        tasks += [actors.converse(stage, seed) for seed in range(2)]
    if kills:
        tasks.append(kill_now_and_then(struck, stage))
    await asyncio.gather(*tasks)
    await stage.http.aclose()
    return stage


def has_sessions(struck: Struck) -> bool:
    return httpx.post(struck.server.url + "/open_session", json={"timeout": 1}, verify=False).status_code != 404


async def kill_now_and_then(struck: Struck, stage: actors.Stage) -> None:
    rng = random.Random(0)
    while stage.going:
        await asyncio.sleep(KILL_EVERY_S)
        children = struck.server.children()
        if len(children) == 2 and stage.going:
            victim = rng.choice(sorted(children))
            os.kill(children[victim], signal.SIGKILL)
            stage.tally.outcomes[f"killed {victim}"] += 1


async def watch_memory(struck: Struck, series: MemorySeries, over: asyncio.Event) -> None:
    began = time.monotonic()
    while not over.is_set():
        for name, pid in {"server": struck.server.process.pid, **struck.server.children()}.items():
            try:
                series.add(name, time.monotonic() - began, pss_mb(pid))
            except OSError:
                continue  # it has just been killed
        try:
            await asyncio.wait_for(over.wait(), SAMPLE_S)
        except TimeoutError:
            continue


async def run(struck: Struck, options: argparse.Namespace) -> tuple[actors.Tally, MemorySeries, checks.Census]:
    asks = mixed_asks(40, MODEL, seed=1, max_tokens=(8, 200), prompt_words=500)
    reference: list[Answer] = []
    for start in range(0, len(asks), 4):  # undisturbed, and few enough for the queue
        reference += (await struck.perform(asks[start : start + 4], ()))[0]
    checks.each_is_answered_once(reference)
    checks.each_has_its_undisturbed_answer(reference, reference)
    checks.gauges_are_at_their_baseline(struck.server)
    census = struck.census()
    series, over = MemorySeries(), asyncio.Event()
    watching = asyncio.create_task(watch_memory(struck, series, over))
    try:
        stage = await soak(struck, options.minutes, options.clients, options.kills, (asks, reference))
    finally:
        over.set()
        await watching
    return stage.tally, series, census


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def table(tally: actors.Tally, series: MemorySeries, samples: dict[str, float]) -> str:
    lines = [f"{'what':<32}count", *(f"{name:<32}{count}" for name, count in sorted(tally.outcomes.items()))]
    lines += [f"{name:<32}{samples.get(name, 0):.0f}" for name in ("sterna_retractions_total", "sterna_output_tokens_total")]
    lines += [f"{name:<32}{value:.0f}" for name, value in samples.items() if value and ("restarts" in name or "replay" in name)]
    lines.append(f"{'answers, p50 and p99, s':<32}{percentile(tally.latencies_s, 0.5):.2f}  {percentile(tally.latencies_s, 0.99):.2f}")
    lines.append(f"{'/health, p99 and slowest, ms':<32}{1e3 * percentile(tally.probes_s, 0.99):.0f}  {1e3 * max(tally.probes_s):.0f}")
    lines += ["", f"{'memory (PSS)':<32}{'first MB':>10}{'last MB':>10}{'MB/min, second half':>22}"]
    lines += [f"{name:<32}{series.first(name):>10.1f}{series.last(name):>10.1f}{series.slope(name):>22.2f}" for name in series.names]
    return "\n".join(lines)


def verdict(tally: actors.Tally, series: MemorySeries, samples: dict[str, float], *, minutes: float, kills: bool) -> list[str]:
    """What is wrong."""
    wrong = [f"unexplained: {what}" for what in tally.unexplained]
    wrong += [
        f"never happened: {name}" for name in ("answered", "left early", "aborted by rid", "hostile, refused") if not tally.outcomes[name]
    ]
    if not samples["sterna_retractions_total"] and not kills:
        wrong.append("nobody was retracted")
    if minutes >= 10 and not kills:
        wrong += [f"{name} grows: {series.slope(name):.2f} MB/min" for name in series.names if series.slope(name) > FLAT_MB_PER_MINUTE]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--kills", action="store_true", help=f"kill a process every {KILL_EVERY_S:g} s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        struck = Struck(Path(folder) / "log", *FLAGS)
        try:
            struck.wait_ready()
            tally, series, census = asyncio.run(run(struck, options))
            wrong: list[str] = []
            for check in (
                lambda: checks.gauges_are_at_their_baseline(struck.server),
                lambda: checks.exactly_the_group_lives(struck.server, struck.folder),
                lambda: checks.nothing_is_held(struck.server, struck.folder, census),
            ):
                try:
                    check()
                except AssertionError as fault:
                    wrong.append(str(fault))
            samples = struck.server.metrics()
            wrong += verdict(tally, series, samples, minutes=options.minutes, kills=options.kills)
            print(table(tally, series, samples))
            print("\n".join(wrong) or "nothing is wrong")
            print("\n".join(line for line in struck.server.read_log().splitlines() if "ERROR" in line or "Traceback" in line)[-4000:])
        finally:
            code = struck.end()
    return 1 if wrong or code else 0


if __name__ == "__main__":
    sys.exit(main())
