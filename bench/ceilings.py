"""What this machine can do at most, to hold an engine's figures against: memory reading and multiply-adds, on the cores that we may use.

    python bench/ceilings.py [--threads N] [--seconds 0.3]

Compiles `ceilings.cpp` with the system's compiler. Where there is none NumPy takes the same kind of measurement, less exactly: it knows
neither 8-bit nor bfloat16 products.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from sterna.config.cores import usable_cores

SOURCE = Path(__file__).with_name("ceilings.cpp")
READ_SIZES_MB = (64, 512)


def measure(threads: int | None = None, seconds: float = 0.3) -> dict[str, Any]:
    """`threads`, `read_gb_s` by array size, and `int8_tops`, `bf16_tflops`, `fp32_tflops` by instruction set; `by` says what measured.

    `seconds` are those of each single measurement, of which there are at most a dozen; each is the best of three that share them.
    """
    threads = threads or usable_cores()
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is not None:
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "ceilings"
            built = subprocess.run(
                [compiler, "-O3", "-std=c++17", "-Wno-psabi", "-pthread", str(SOURCE), "-o", str(program)], capture_output=True, text=True
            )
            if built.returncode == 0:
                out = subprocess.run([program, str(threads), str(seconds)], check=True, capture_output=True, text=True)
                return {"by": f"{Path(compiler).name}", **json.loads(out.stdout)}
    return {"by": "NumPy", **_numpy(threads, seconds)}


def best(ceilings: dict[str, Any], kind: str, isa: str | None) -> float | None:
    """The rate of a kind (`int8_tops`, …) with `isa`, as `STERNA_ISA` names it, or the highest of all where that is None.

    None where it has no such instruction, or nothing was measured.
    """
    rates: dict[str, float] = ceilings[kind]
    if isa is None:
        return max(rates.values(), default=None)
    if isa == "amx-int8":
        isa = "amx" if kind == "int8_tops" else "avx512"
    return rates.get("avx512" if isa == "avx512vnni" and kind != "bf16_tflops" else isa)


def _numpy(threads: int, seconds: float) -> dict[str, Any]:
    def read(megabytes: int) -> float:
        parts = [np.ones(megabytes * 1_000_000 // 8 // threads, dtype=np.int64) for _ in range(threads)]

        def once(thread: int) -> float:
            parts[thread].sum()
            return parts[thread].nbytes

        return _rate(once, threads, seconds) / 1e9

    square = np.ones((512, 512), dtype=np.float32)

    def multiply(_: int) -> float:
        np.matmul(square, square)
        return 2.0 * 512**3

    return {
        "threads": threads,
        "read_gb_s": {f"{size} MB": round(read(size), 1) for size in READ_SIZES_MB},
        "int8_tops": {},
        "bf16_tflops": {},
        # NumPy's BLAS brings its own threads.
        "fp32_tflops": {"numpy": round(_rate(multiply, 1, seconds) / 1e12, 4)},
    }


def _rate(work: Callable[[int], float], threads: int, seconds: float) -> float:
    """What all threads together do in a second; `work` says how much it did."""

    def one(thread: int) -> float:
        work(thread)
        done, began = 0.0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            done += work(thread)
        return done / (time.perf_counter() - began)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(one, range(threads)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=0.3)
    options = parser.parse_args()
    print(json.dumps(measure(options.threads, options.seconds)))
