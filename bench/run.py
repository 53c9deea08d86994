"""Every figure of docs/performance.md that this checkout can take: `make bench`, or `bench/run.py [GROUP …]`.

Groups: host (a scripted executor that takes no time: what serving itself costs), serving (the real model),
scheduler (seconds per step against running and waiting requests), executor (against plain eager PyTorch).
Prints one JSON line per measurement. Machines are noisy: compare lines of one run only; medians of `--repeat` runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from serving import Server, drive, serving

HERE = Path(__file__).parent
CASES: dict[str, list[str]] = {
    "1 stream": ["--concurrency", "1", "--requests", "3", "--prompt-tokens", "64", "--max-tokens", "128"],
    "16 streams": ["--concurrency", "16", "--requests", "48", "--prompt-tokens", "64", "--max-tokens", "128"],
    "64 streams": ["--concurrency", "64", "--requests", "128", "--prompt-tokens", "64", "--max-tokens", "128"],
    "shared prefix": ["--concurrency", "16", "--requests", "48", "--prompt-tokens", "64", "--shared-prefix", "1000", "--max-tokens", "32"],
    "prompt": ["--concurrency", "1", "--requests", "3", "--prompt-tokens", "1900", "--max-tokens", "2"],
}


class Seeds:
    """A new seed for every run, so that nothing is answered from an earlier run's cache."""

    def __init__(self) -> None:
        self._next = 1000

    def __call__(self) -> list[str]:
        self._next += 1
        return ["--seed", str(self._next)]


SEED = Seeds()


def report(name: str, runs: list[dict[str, Any]], **more: Any) -> None:
    """The median run by output speed, with all speeds beside it."""
    runs = sorted(runs, key=lambda run: run["out_tok_s"])
    median = runs[len(runs) // 2]
    print(json.dumps({"case": name, "out_tok_s_runs": [run["out_tok_s"] for run in runs], **median, **more}), flush=True)


def host(args: argparse.Namespace) -> None:
    """64 streams over an executor that takes no time; the load generator's own CPU is reported beside the server's."""
    flags = ["--executor", "scripted", "--executor-options", "verify=0"]
    with serving("smollm2", *flags) as server:
        load = ["--concurrency", "64", "--requests", "128", "--prompt-tokens", "64", "--max-tokens", "1000"]
        drive(server, "smollm2", *load, *SEED())
        report("host overhead, 64 streams", [drive(server, "smollm2", *load, *SEED()) for _ in range(args.repeat)])


def real(args: argparse.Namespace) -> None:
    """The load of docs/performance.md, on the default model."""
    with serving(args.model, *args.flags) as server:
        drive(server, args.model, *CASES["1 stream"], *SEED())
        for name, load in CASES.items():
            runs = [drive(server, args.model, *load, *SEED()) for _ in range(args.repeat)]
            report(name, runs, **prompt_speed(name, runs))
        report_start(server)


def prompt_speed(name: str, runs: list[dict[str, Any]]) -> dict[str, float]:
    if name != "prompt":
        return {}
    speeds = [run["in_tok"] / run["ok"] / (run["ttft_ms"]["p50"] / 1000) for run in runs]
    return {"prompt_tok_s": round(statistics.median(speeds), 1)}


def report_start(server: Server) -> None:
    memory = {name: round(mb) for name, mb in server.proportional_set_mb().items()}
    print(json.dumps({"case": "start", "ready_s": round(server.ready_s, 2), "pss_mb": memory}), flush=True)


def script(name: str) -> None:
    subprocess.run([sys.executable, str(HERE / name)], check=True)


GROUPS = {
    "host": host,
    "scheduler": lambda _: script("scheduler_step.py"),
    "executor": lambda _: script("executor_torch.py"),
    "serving": real,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; default: all")
    parser.add_argument("--repeat", type=int, default=3, help="runs per case; the median is reported")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of sterna serve")
    args = parser.parse_args()
    if unknown := set(args.groups) - set(GROUPS):
        parser.error(f"there is no group {min(unknown)!r}; there are {', '.join(GROUPS)}")
    for group in args.groups or GROUPS:
        GROUPS[group](args)


if __name__ == "__main__":
    main()
