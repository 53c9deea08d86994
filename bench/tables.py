"""The comparison's figures as a table, for the terminal and for docs/performance.md.

python bench/tables.py [RESULTS.json]     rewrites that document's section on the peers, and the plot beside it
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import machine
import plot
from cases import CASES

RESULTS = Path(__file__).parent / "results" / "peers.json"
DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
PLOT = DOCUMENT.with_name("peers.svg")
BEGIN, END = "<!-- peers: written by bench/tables.py -->", "<!-- peers: end -->"
OURS = "Sterna"


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity, over all systems that have it."""

    title: str
    unit: str
    more_is_better: bool
    values: dict[str, float]
    """Medians, by system."""
    spread: dict[str, list[float]]
    """All runs, ascending."""

    def cell(self, name: str) -> str:
        """The median, and the range of the runs where there were several; a dash for who has none."""
        if name not in self.values:
            return "–"
        runs = self.spread[name]
        middle = plot.figure(self.values[name])
        return f"{middle} ({plot.figure(runs[0])} to {plot.figure(runs[-1])})" if len(runs) > 1 else middle

    def times_better(self, peer: str) -> float:
        """How many times better Sterna is: above 1 it wins, whichever way the quantity counts."""
        ours, theirs = self.values[OURS], self.values[peer]
        return ours / theirs if self.more_is_better else theirs / ours

    def best_peer(self) -> str | None:
        peers = [name for name in self.values if not name.startswith(OURS)]
        if OURS not in self.values or not peers:
            return None
        return min(peers, key=self.times_better)


@dataclass(frozen=True, slots=True)
class Goal:
    """What is asked of a row."""

    kind: Literal["times", "at most"]
    amount: float
    peer: str = ""

    def verdict(self, row: Row) -> str:
        if OURS not in row.values:
            return ""
        if self.kind == "at most":
            return f"≤ {self.amount:g} {row.unit}: {'met' if row.values[OURS] <= self.amount else 'missed'}"
        asked = f"{self.amount:g} × {self.peer}"
        if self.peer not in row.values:
            return f"{asked}: {self.peer} is absent"
        times = row.times_better(self.peer)
        return f"{asked}: {times:.2f} ×, {'met' if times >= self.amount else 'missed'}"


GOALS = {
    "1 stream": Goal("times", 1.6, "llama.cpp"),
    "16 streams": Goal("times", 4, "vLLM"),
    "64 streams": Goal("times", 2.5, "vLLM"),
    "shared prefix": Goal("times", 3, "vLLM"),
    "prompt": Goal("times", 2.5, "vLLM"),
    "ready": Goal("at most", 1.0),
    "installed": Goal("at most", 190),
}
TITLES = {
    "1 stream": "1 stream",
    "16 streams": "16 streams",
    "64 streams": "64 streams",
    "shared prefix": "48 requests over one 1,000-token prefix, 16 at once, 32 out",
    "prompt": "prompt of 1,900 tokens, alone",
    "ready": "start to ready, not the first start",
    "memory": "memory (PSS) after all of it",
    "installed": "installed size",
}


def rows(found: dict[str, Any]) -> dict[str, Row]:
    """By the keys of `TITLES`. A quantity that nobody has is left out."""
    systems: dict[str, dict[str, Any]] = found["systems"]

    def row(key: str, unit: str, more_is_better: bool, spread: dict[str, list[float]]) -> Row:
        kept = {name: sorted(values) for name, values in spread.items() if values}
        return Row(TITLES[key], unit, more_is_better, {name: statistics.median(values) for name, values in kept.items()}, kept)

    made = {}
    for case in CASES:
        runs = {name: [run[case.figure] for run in system["runs"].get(case.name, ())] for name, system in systems.items()}
        made[case.name] = row(case.name, case.unit, case.more_is_better, runs)
    made["ready"] = row("ready", "s", False, {name: system["ready_s"] for name, system in systems.items()})
    for key, field in (("memory", "memory_mb"), ("installed", "installed_mb")):
        made[key] = row(key, "MB", False, {name: [system[field]] for name, system in systems.items() if field in system})
    return {key: each for key, each in made.items() if each.values}


def table(found: dict[str, Any]) -> str:
    """Markdown, which reads well enough in a terminal."""
    names = list(found["systems"])
    lines = [["", *names, f"{OURS} better than the best peer", "asked"]]
    for key, row in rows(found).items():
        cells = [row.cell(name) for name in names]
        best = row.best_peer()
        times = f"{row.times_better(best):.2f} × ({best})" if best else ""
        goal = GOALS[key].verdict(row) if key in GOALS else ""
        lines.append([f"{row.title}, {row.unit}", *cells, times, goal])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    padded = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([padded[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *padded[1:]])


def section(found: dict[str, Any]) -> str:
    """The document's section on the peers, markers included."""
    return "\n".join([BEGIN, "", *_paragraphs(found), END])


def _paragraphs(found: dict[str, Any]) -> Iterator[str]:
    taken = f"{found['date']}, {machine.summary(found['machine'])}"
    yield f"{taken}. Medians of {found['repeat']} and their range; all took turns in every round (`make bench ARGS=peers`)."
    yield ""
    yield table(found)
    yield ""
    yield f"![The same figures as bars]({PLOT.name})"
    yield ""
    yield "How each ran, at its best on this machine:"
    yield ""
    for name, system in found["systems"].items():
        yield f"- **{name}** {system['version']}: {system['settings']}"
    for name, reason in found["absent"].items():
        yield f"- **{name}** is absent (from here on): {reason}"
    yield ""
    disturbed = [run["disturbed"] for system in found["systems"].values() for runs in system["runs"].values() for run in runs]
    yield f"Of {len(disturbed)} runs, {sum(disturbed)} were disturbed: something else took more than 5% of the cores' time meanwhile."
    yield ""
    yield _ceilings(found["ceilings"])
    yield ""


def _ceilings(ceilings: dict[str, Any]) -> str:
    parts = [f"reading {', '.join(f'{speed:g} GB/s from {size}' for size, speed in ceilings['read_gb_s'].items())}"]
    for kind, label in (("int8_tops", "int8, TOPS"), ("bf16_tflops", "bf16, TFLOPS"), ("fp32_tflops", "fp32, TFLOPS")):
        if ceilings[kind]:
            parts.append(f"{label}: " + ", ".join(f"{name} {rate:.2f}" for name, rate in ceilings[kind].items()))
    return f"The machine's ceilings in the same run, {ceilings['threads']} threads (`bench/ceilings.py`): {'; '.join(parts)}."


def rewrite(document: Path, found: dict[str, Any]) -> None:
    """Replace the section between the markers. Raises ValueError where they aren't there."""
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{document}: the markers of the section are gone")
    document.write_text(before + section(found) + after)


def publish(found: dict[str, Any]) -> None:
    """The document and its plot."""
    rewrite(DOCUMENT, found)
    PLOT.write_text(plot.bars(rows(found), list(found["systems"]), f"{found['date']}, {machine.summary(found['machine'])}"))


if __name__ == "__main__":
    publish(json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else RESULTS).read_text()))
