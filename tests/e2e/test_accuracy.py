"""The default model on the native executor is near float32 on its dequantized weights: a small share of what bench/accuracy.py measures."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from e2e.engine import THREADS
from running_server import ROOT


def measure(*flags: str) -> dict[str, Any]:
    command = [
        sys.executable,
        str(ROOT / "bench/accuracy.py"),
        "smollm2",
        "--tokens",
        "512",
        "--window",
        "256",
        "--threads",
        str(THREADS),
        *flags,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


# Over so few tokens the figures vary with the text, which varies with Python's version: the bounds leave room for that.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("flags", "ratio", "same", "difference"), [((), 0.02, 0.96, 0.1), (("--bfloat16",), 0.01, 0.97, 0.04)])
def test_it_is_near_float32_in_both_roles(smollm2: object, flags: tuple[str, ...], ratio: float, same: float, difference: float) -> None:
    figures = measure(*flags)
    assert figures["tokens"] == 510
    assert abs(figures["perplexity_ratio"] - 1) < ratio
    assert figures["same_top1"] >= same
    assert 0 < figures["mean_abs_logprob_difference"] < difference
    assert figures["prompt_role_differs"] == 0
