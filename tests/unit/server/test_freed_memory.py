"""In a process of its own: it changes the allocator for good."""

import subprocess
import sys
from pathlib import Path

import pytest

import sterna
from sterna.server.freed_memory import THRESHOLD_BYTES

PROGRAM = """
import re, sys
from sterna.server.freed_memory import give_freed_memory_back

def resident_kb():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])

if not give_freed_memory_back():
    print("another allocator")
    sys.exit()
before = resident_kb()
for size in (4, 8, 16, 24):  # each freed one would raise glibc's own threshold to its size
    del [bytearray(b"x" * (size << 20))][0]
pieces = [bytearray(b"x" * (1 << 20)) for _ in range(64)]
keep, pieces = pieces[-1], None  # the last one: below it nothing could be given back
print(resident_kb() - before)
"""


def test_what_large_bodies_took_is_given_back() -> None:
    environment = {"PYTHONPATH": str(Path(sterna.__file__).parents[1])}
    said = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True).stdout.strip()
    if said == "another allocator":
        pytest.skip("not glibc")
    assert int(said) < 4 * 1024 + THRESHOLD_BYTES // 1024
