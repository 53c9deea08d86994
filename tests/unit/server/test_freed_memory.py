"""What changes the allocator for good is tried in a process of its own."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import sterna
from sterna.server import freed_memory
from sterna.server.freed_memory import BODY_BYTES, LARGE_BYTES, THRESHOLD_BYTES, FreedMemory
from unit.server.asgi import post
from unit.server.engine import running

PROGRAM = """
import re, sys
from sterna.config.heap import trim
from sterna.server.freed_memory import keep_thresholds

def resident_kb():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])

if not keep_thresholds():
    print("another allocator")
    sys.exit()
before = resident_kb()
"""
LARGE = """
for size in (4, 8, 16, 24):  # each freed one would raise glibc's own threshold to its size
    del [bytearray(b"x" * (size << 20))][0]
pieces = [bytearray(b"x" * (1 << 20)) for _ in range(64)]
keep, pieces = pieces[-1], None  # the last one: below it nothing could be given back
print(resident_kb() - before)
"""
SMALL = """
pieces = [bytearray(b"x" * 2000) for _ in range(32_000)]
keep, pieces = pieces[-1], None
trim()
print(resident_kb() - before)
"""


async def test_a_body_counts_though_it_was_not_read_to_its_end() -> None:
    async with running(max_body_bytes=250_000) as engine:
        call = await post(engine.app, "/v1/completions", b"x" * 300_000, chunk=100_000)
        assert call.status == 413
        assert engine.app._freed._bytes == 200_000


def told_by(program: str) -> str:
    environment = {"PYTHONPATH": str(Path(sterna.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + program], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("program", [LARGE, SMALL], ids=["large pieces", "small pieces below one that lives"])
def test_what_large_bodies_took_is_given_back(program: str) -> None:
    said = told_by(program)
    if said == "another allocator":
        pytest.skip("not glibc")
    assert int(said) < 4 * 1024 + THRESHOLD_BYTES // 1024


def test_the_heap_is_trimmed_once_after_many_bodies_that_are_large_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "PAUSE_S", 0.01)

    async def scenario() -> None:
        trims = asyncio.Queue[None]()
        loop = asyncio.get_running_loop()
        freed = FreedMemory(lambda: loop.call_soon_threadsafe(trims.put_nowait, None))
        freed.released(BODY_BYTES - 1)
        assert freed._timer is None
        for _ in range(3):
            freed.released(BODY_BYTES)
        await trims.get()
        assert freed._timer is None
        freed.released(BODY_BYTES - 1)
        for _ in range(100):
            freed.released(LARGE_BYTES - 1)
        assert freed._timer is None
        freed.released(LARGE_BYTES)
        await trims.get()
        assert trims.empty()
        freed.released(BODY_BYTES)
        freed.close()

    asyncio.run(scenario())
