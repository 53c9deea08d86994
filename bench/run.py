"""Every figure of docs/performance.md that this checkout can take: `make bench`, or `bench/run.py [GROUP …]`.

Groups: host (a scripted executor that takes no time: what serving itself costs), serving (the real model),
scheduler (seconds per step against running and waiting requests), executor (against plain eager PyTorch), peers (Sterna against
llama.cpp, vLLM and OpenVINO, each installed into an environment of its own under ~/.cache/sterna-bench or STERNA_BENCH_DIR),
ceilings (what the machine can do at most), shapes (the engine alone on larger models of random weights, against the ceilings), accuracy
(the native engine against float32 on the same weights).
Prints one JSON line per measurement. Machines are noisy: compare lines of one run only; medians of `--repeat` runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cases
import tables
from peers.compare import all_peers, compare
from peers.environment import bench_folder
from serving import Server, drive, serving

HERE = Path(__file__).parent
SEEDS = cases.seeds()


def seed() -> list[str]:
    return ["--seed", str(next(SEEDS))]


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
        drive(server, "smollm2", *load, *seed())
        report("host overhead, 64 streams", [drive(server, "smollm2", *load, *seed()) for _ in range(args.repeat)])


def real(args: argparse.Namespace) -> None:
    """The load of docs/performance.md, on the default model."""
    with serving(args.model, *args.flags) as server:
        drive(server, args.model, *cases.CASES[0].flags(next(SEEDS)))
        for case in cases.CASES:
            report(case.name, [drive(server, args.model, *case.flags(next(SEEDS))) for _ in range(args.repeat)])
        report_start(server)


def peers(args: argparse.Namespace) -> None:
    """Sterna against the others: a table, and everything behind it as JSON."""
    out = args.out or (bench_folder() / "quick.json" if args.quick else tables.RESULTS)
    found = compare(all_peers(args.flags, args.isa, args.only), args.repeat, args.quick, out)
    print(tables.table(found))
    for name, reason in found["absent"].items():
        print(f"{name} is absent: {reason}")
    print(f"written: {out}; `python bench/tables.py {out}` puts it into docs/performance.md")


def report_start(server: Server) -> None:
    memory = {name: round(mb) for name, mb in server.proportional_set_mb().items()}
    print(json.dumps({"case": "start", "ready_s": round(server.ready_s, 2), "pss_mb": memory}), flush=True)


def script(name: str, *words: str) -> None:
    subprocess.run([sys.executable, str(HERE / name), *words], check=True)


def shapes(args: argparse.Namespace) -> None:
    """As the machine chooses, and with each instruction set that `--isa` names."""
    quick = ["--quick"] if args.quick else []
    script("shapes.py", *quick)
    if args.isa:
        script("shapes.py", *quick, "--isa", *args.isa)


def accuracy(args: argparse.Namespace) -> None:
    """With the weights as they are, and with bfloat16 products."""
    few = ["--tokens", "512", "--window", "256"] if args.quick else []
    script("accuracy.py", args.model, *few)
    script("accuracy.py", args.model, *few, "--bfloat16")


GROUPS = {
    "host": host,
    "scheduler": lambda _: script("scheduler_step.py"),
    "executor": lambda _: script("executor_torch.py"),
    "serving": real,
    "peers": peers,
    "ceilings": lambda _: script("ceilings.py"),
    "shapes": shapes,
    "accuracy": accuracy,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; default: all")
    parser.add_argument("--repeat", type=int, default=3, help="runs per case; the median is reported")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", nargs="*", default=[], metavar="PEER", help="peers to compare with (default: all that can be installed)")
    parser.add_argument(
        "--isa", nargs="*", default=[], help="measure Sterna also with each of these as STERNA_ISA, such as avx512 avx2 (peers, shapes)"
    )
    parser.add_argument("--out", type=Path, help="where the comparison is written (default: bench/results, with --quick the cache)")
    parser.add_argument("--quick", action="store_true", help="a fraction of the load, to try the benchmarks with: no figures to keep")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of sterna serve")
    args = parser.parse_args()
    if unknown := set(args.groups) - set(GROUPS):
        parser.error(f"there is no group {min(unknown)!r}; there are {', '.join(GROUPS)}")
    for group in args.groups or GROUPS:
        GROUPS[group](args)


if __name__ == "__main__":
    main()
