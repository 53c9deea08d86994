"""The load that every server is measured under, and the figure that each load gives."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

LOADGEN = Path(__file__).with_name("loadgen.py")
RUN_LIMIT_S = 1200


@dataclass(frozen=True, slots=True)
class Case:
    """Requests in a closed loop: `concurrency` of them at any time, each with its own prompt, greedy, end tokens ignored."""

    name: str
    concurrency: int
    requests: int
    prompt_tokens: int
    """Random words, one token each in the default model's vocabulary."""
    max_tokens: int
    figure: Literal["out_tok_s", "prompt_tok_s", "wall_s"]
    """What the case is about: a key of a run's figures."""
    shared_prefix: int = 0
    """Words that all prompts begin with, besides their own."""

    @property
    def unit(self) -> str:
        return {"out_tok_s": "tok/s", "prompt_tok_s": "tok/s", "wall_s": "s"}[self.figure]

    @property
    def more_is_better(self) -> bool:
        return self.figure != "wall_s"

    def flags(self, seed: int) -> list[str]:
        """The load generator's."""
        values = {
            "--concurrency": self.concurrency,
            "--requests": self.requests,
            "--prompt-tokens": self.prompt_tokens,
            "--max-tokens": self.max_tokens,
            "--shared-prefix": self.shared_prefix,
            "--seed": seed,
        }
        return [word for flag, value in values.items() for word in (flag, str(value))]

    def shortened(self) -> Case:
        """A sixth of the load, to try the harness with; its figures compare with nothing."""
        requests = max(1, self.requests // 6)
        return replace(self, requests=requests, concurrency=min(self.concurrency, requests), max_tokens=max(2, self.max_tokens // 4))


CASES = (
    Case("1 stream", 1, 3, 64, 128, "out_tok_s"),
    Case("16 streams", 16, 48, 64, 128, "out_tok_s"),
    Case("64 streams", 64, 128, 64, 128, "out_tok_s"),
    Case("shared prefix", 16, 48, 64, 32, "wall_s", shared_prefix=1000),
    Case("prompt", 1, 3, 1900, 2, "prompt_tok_s"),
)


def seeds(first: int = 1001) -> Iterator[int]:
    """A new seed for every run, so that nothing is answered from an earlier run's cache."""
    return itertools.count(first)


def drive(url: str, model: str, flags: list[str]) -> dict[str, Any]:
    """One run of the load generator: its line of JSON, and `prompt_tok_s`, the prompt's length over the median time to the first token.

    Raises RuntimeError where it fails, or any request did.
    """
    command = [sys.executable, str(LOADGEN), url, model, *flags]
    try:
        out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    except subprocess.CalledProcessError as fault:
        raise RuntimeError(f"the load generator failed: {fault.stderr[-400:]}") from fault
    except subprocess.TimeoutExpired as fault:
        raise RuntimeError(f"not done after {RUN_LIMIT_S} s") from fault
    figures: dict[str, Any] = json.loads(out.stdout)
    if figures["failed"]:
        raise RuntimeError(f"{figures['failed']} requests failed, the first with {figures['first_bad']}")
    return with_prompt_speed(figures)


def with_prompt_speed(figures: dict[str, Any]) -> dict[str, Any]:
    first_token_ms = figures["ttft_ms"]["p50"]
    if first_token_ms:
        figures["prompt_tok_s"] = round(figures["in_tok"] / figures["ok"] / first_token_ms * 1000, 1)
    return figures
