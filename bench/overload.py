"""What a server does with far more requests than it takes: how soon the surplus is refused, and what that costs those that are served.

    burst      so many connections at once, each with a request, against limits of 64 running and 64 waiting: every one must be answered
    refusals   a full server is asked so many times a second, over connections that stay open: how long a refusal takes from the moment at
               which it was due to be sent, and how the streams that are running keep their pace meanwhile
    probes     how soon /health and /ready answer while 64 streams run

    python bench/overload.py [--model MODEL] [--burst 4096] [--rate 500] [--seconds 10] [--streams 8] [--flag=…]

Without `--model` no model runs: the scripted executor takes 20 ms a step. Prints one line of JSON per part. The client shares the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

import serving

LIMIT = 64
SCRIPTED = ("--executor", "scripted", "--executor-options", "step_ms=20,threaded=1,overlap=1")


def request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nhost: bench\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(data)) + data


def short(**more: Any) -> bytes:
    return request("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "ignore_eos": True} | more)


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers of one response that says its length, whose body is read and dropped."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    await reader.readexactly(int(headers.get("content-length", 0)))
    return int(head[0].split()[1]), headers


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def in_ms(values: list[float]) -> dict[str, float]:
    return {name: round(percentile(values, share) * 1000, 1) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}


# ---- a burst ----


async def burst(host: str, port: int, count: int) -> dict[str, Any]:
    began = time.perf_counter()
    outcomes = await asyncio.gather(*(_one(host, port, began) for _ in range(count)), return_exceptions=True)
    answered = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    refused = [seconds for status, seconds, _ in answered if status == 429]
    return {
        "part": "burst",
        "requests": count,
        "limits": [LIMIT, LIMIT],
        "statuses": dict(Counter(status for status, _, _ in answered)),
        "unanswered": [repr(outcome) for outcome in outcomes if isinstance(outcome, BaseException)][:3],
        "refused_ms": in_ms(refused) if refused else None,
        "retry_after_s": sorted({wait for status, _, wait in answered if status == 429}, key=str),
        "all_answered_s": round(time.perf_counter() - began, 2),
    }


async def _one(host: str, port: int, began: float) -> tuple[int, float, str | None]:
    """Status, seconds since `began`, Retry-After."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(short())
    status, headers = await answer(reader)
    seconds = time.perf_counter() - began
    writer.close()
    return status, seconds, headers.get("retry-after")


# ---- refusals beside streams ----


class Stream:
    """A long stream; when each of its events came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    async def read(self, host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(short(stream=True, max_tokens=4000))
        try:
            while line := await reader.readline():
                if line.startswith(b"data:"):
                    self.times.append(time.perf_counter())
        finally:
            writer.close()

    def gaps(self, begin: float, end: float) -> list[float]:
        times = [at for at in self.times if begin <= at < end]
        return [later - sooner for sooner, later in itertools.pairwise(times)]


class Asker:
    """A connection that stays open, one request at a time."""

    def __init__(self) -> None:
        self.results: list[tuple[int, float]] = []

    async def run(self, host: str, port: int, due: asyncio.Queue[float]) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        data = short()
        try:
            while True:
                at = await due.get()
                writer.write(data)
                status, _ = await answer(reader)
                self.results.append((status, time.perf_counter() - at))
        finally:
            writer.close()


async def _ask(due: asyncio.Queue[float], rate: float, seconds: float) -> None:
    """Put the moments at which requests are due, when they come, whether the ones before have been answered or not."""
    began = time.perf_counter()
    for index in range(int(rate * seconds)):
        at = began + index / rate
        await asyncio.sleep(max(at - time.perf_counter(), 0))
        due.put_nowait(at)


async def refusals(host: str, port: int, *, rate: float, seconds: float, streams: int, connections: int = 64) -> dict[str, Any]:
    """Left alone, refusing, left alone again, `seconds` each: the streams' contexts grow meanwhile, and their pace slackens by itself."""
    running = [Stream() for _ in range(streams)]
    tasks = [asyncio.create_task(stream.read(host, port)) for stream in running]
    while not all(stream.times for stream in running):
        await asyncio.sleep(0.05)
    marks = [time.perf_counter()]
    await asyncio.sleep(seconds)
    marks.append(time.perf_counter())
    due: asyncio.Queue[float] = asyncio.Queue()
    askers = [Asker() for _ in range(connections)]
    tasks += [asyncio.create_task(asker.run(host, port, due)) for asker in askers]
    await _ask(due, rate, seconds)
    marks.append(time.perf_counter())
    await asyncio.sleep(seconds)
    marks.append(time.perf_counter())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    before, loaded, after = ([gap for stream in running for gap in stream.gaps(*span)] for span in itertools.pairwise(marks))
    results = [result for asker in askers for result in asker.results]
    means = [statistics.mean(gaps) for gaps in (before, loaded, after)]
    return {
        "part": "refusals",
        "per_second": rate,
        "statuses": dict(Counter(status for status, _ in results)),
        "unanswered": int(rate * seconds) - len(results),
        "refused_ms": in_ms([seconds for _, seconds in results]),
        "streams": streams,
        "gap_ms": {name: round(mean * 1000, 2) for name, mean in zip(("before", "refusing", "after"), means, strict=True)},
        "gap_p99_ms": {"quiet": round(percentile(before + after, 0.99) * 1000, 1), "refusing": round(percentile(loaded, 0.99) * 1000, 1)},
        "slower_by": round(2 * means[1] / (means[0] + means[2]), 2),
    }


# ---- probes ----


async def probes(host: str, port: int, *, seconds: float) -> dict[str, Any]:
    running = [Stream() for _ in range(LIMIT)]
    tasks = [asyncio.create_task(stream.read(host, port)) for stream in running]
    while not all(stream.times for stream in running):
        await asyncio.sleep(0.05)
    prober = Path(__file__).with_name("probe.py")
    command = (sys.executable, str(prober), f"http://{host}:{port}", str(seconds))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {"part": "probes", "streams": LIMIT, **json.loads(said)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="serve this one, with its own engine")
    parser.add_argument("--burst", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=500)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--flag", action="append", default=[], help="more flags for the server")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = (args.model,) if args.model else (_byte_model(Path(folder)), *SCRIPTED)
        places = ("--max-running-requests", str(LIMIT), "--max-queued-requests", str(LIMIT))
        with serving.serving(*engine, *places, *args.flag) as server:
            print(json.dumps(_run(server, burst, count=args.burst)), flush=True)
            print(json.dumps(_run(server, probes, seconds=args.seconds)), flush=True)
        places = ("--max-running-requests", str(args.streams), "--max-queued-requests", "0")
        with serving.serving(*engine, *places, *args.flag) as server:
            print(json.dumps(_run(server, refusals, rate=args.rate, seconds=args.seconds, streams=args.streams)), flush=True)


def _run(server: serving.Server, part: Any, **options: Any) -> dict[str, Any]:
    url = urlsplit(server.url)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures: dict[str, Any] = runner.run(part(url.hostname, url.port, **options))
    return figures | {"load": [round(value, 1) for value in os.getloadavg()[:2]]}


def _byte_model(folder: Path) -> str:
    """The tests' model without weights, made in `folder`."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    make_byte_model = importlib.import_module("byte_model").make_byte_model
    return str(make_byte_model(folder))


if __name__ == "__main__":
    main()
