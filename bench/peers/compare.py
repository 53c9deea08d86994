"""Sterna and its peers under the same load, one after the other in every round, so that a drift of the machine hits all alike.

All stay up; while one is driven the others are stopped (SIGSTOP), since some go on looking for work for a while, and who uses one of
them runs that alone. What anything else used of the processor meanwhile stands beside each run.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ceilings
import machine
import processes
from cases import CASES, Case, seeds
from peers.base import MODEL, Absent, Peer, Running
from peers.llama_cpp import LlamaCpp
from peers.openvino import OpenVino
from peers.sterna import Sterna
from peers.vllm import Vllm
from sterna.config.cores import usable_cores
from sterna.files.cache import cache_root
from sterna.files.hub import locate
from sterna.models.resolve import resolve_model

DISTURBED = 0.05
"""Share of the cores' time, spent on anything but the measured server and its load, from which on a run is said to be disturbed."""


class Comparison:
    """Everything that is found out, as it will be written."""

    def __init__(self, peers: Sequence[Peer], cases: Sequence[Case], repeat: int) -> None:
        self._peers = list(peers)
        self._cases = cases
        self._repeat = repeat
        self._seeds = seeds()
        self._running: dict[str, Running] = {}
        self.absent: dict[str, str] = {}
        self.systems: dict[str, dict[str, Any]] = {}

    def run(self) -> dict[str, Any]:
        """All phases; whatever was started is stopped."""
        try:
            self._each(self._install)
            for attempt in range(self._repeat + 1):
                self._each(lambda peer, attempt=attempt: self._start(peer, counted=attempt > 0))
            self._each(self._warm_up)
            for case in self._cases:
                for turn in range(self._repeat):
                    seed = next(self._seeds)
                    self._each(lambda peer, case=case, seed=seed: self._measure(peer, case, seed), turn)
            self._each(self._memory)
        finally:
            for running in self._running.values():
                running.stop()
        return {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "machine": machine.describe(usable_cores()),
            "ceilings": ceilings.measure(),
            "repeat": self._repeat,
            "systems": self.systems,
            "absent": self.absent,
        }

    def _each(self, phase: Callable[[Peer], None], first: int = 0) -> None:
        """One phase over all that are left, `first` of them going last; whoever fails is absent from then on."""
        order = self._peers[first % len(self._peers) :] + self._peers[: first % len(self._peers)] if self._peers else []
        for peer in order:
            try:
                phase(peer)
            except (Absent, RuntimeError, OSError) as fault:
                say(f"{peer.name}: absent from here on: {fault}")
                self.absent[peer.name] = str(fault)
                self._peers.remove(peer)
                if running := self._running.pop(peer.name, None):
                    running.stop()

    def _install(self, peer: Peer) -> None:
        say(f"{peer.name}: installing, where it isn't yet")
        peer.install()
        self.systems[peer.name] = {
            "version": peer.version(),
            "settings": peer.settings,
            "installed_mb": round(peer.installed_mb()),
            "ready_s": [],
            "runs": {case.name: [] for case in self._cases},
        }

    def _start(self, peer: Peer, *, counted: bool) -> None:
        """The first start fills caches and doesn't count; the last one stays."""
        if running := self._running.pop(peer.name, None):
            running.stop()
        running = self._running[peer.name] = peer.start()
        say(f"{peer.name}: ready after {running.ready_s:.2f} s")
        if counted:
            self.systems[peer.name]["ready_s"].append(round(running.ready_s, 2))

    def _warm_up(self, peer: Peer) -> None:
        for case in self._cases:
            self._running[peer.name].measure(case.shortened(), next(self._seeds))

    def _measure(self, peer: Peer, case: Case, seed: int) -> None:
        running = self._running[peer.name]
        others = [other.process.pid for name, other in self._running.items() if name != peer.name]
        for other in others:
            processes.freeze(other)
        try:
            before = _account(running.process.pid, others)
            figures = running.measure(case, seed)
            own, idle, busy = (after - earlier for after, earlier in zip(_account(running.process.pid, others), before, strict=True))
        finally:
            for other in others:
                processes.thaw(other)
        figures |= {"server_cpu_s": round(own, 2), "idle_peers_cpu_s": round(idle, 2), "elsewhere_cpu_s": round(max(0.0, busy - own), 2)}
        figures["disturbed"] = figures["elsewhere_cpu_s"] > DISTURBED * figures["wall_s"] * usable_cores()
        self.systems[peer.name]["runs"][case.name].append(figures)
        say(f"{case.name:14} {peer.name:14} {figures[case.figure]:8.1f} {case.unit}{'   disturbed' if figures['disturbed'] else ''}")

    def _memory(self, peer: Peer) -> None:
        self.systems[peer.name]["memory_mb"] = round(processes.tree_memory_mb(self._running[peer.name].process.pid))


def _account(own: int, others: list[int]) -> tuple[float, float, float]:
    """CPU seconds so far: of a server, of its idle peers, and of the whole machine less its load generators (our ended children)."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = processes.machine_busy_seconds() - used.ru_utime - used.ru_stime
    return processes.tree_cpu_seconds(own), sum(map(processes.tree_cpu_seconds, others)), busy


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def all_peers(sterna_flags: list[str], isas: list[str], only: list[str]) -> list[Peer]:
    """Sterna first, then once more with each of `isas` forced; `only`, where given, are the names of the others that take part."""
    cache = cache_root()
    gguf = locate(MODEL, cache).path
    resolved = resolve_model(MODEL, cache_dir=cache, context_length=None)
    cores = sorted(os.sched_getaffinity(0))[: usable_cores()]
    others: list[Peer] = [LlamaCpp(gguf, len(cores)), Vllm(resolved, cores), OpenVino(gguf, len(cores))]
    ours = [Sterna(sterna_flags, isa) for isa in (None, *isas)]
    return [*ours, *(peer for peer in others if not only or peer.name.lower() in map(str.lower, only))]


def compare(peers: Sequence[Peer], repeat: int, quick: bool, out: Path) -> dict[str, Any]:
    """Run the comparison and write it to `out`; what was found is returned."""
    cases = [case.shortened() for case in CASES] if quick else CASES
    found = Comparison(peers, cases, repeat).run()
    found["quick"] = quick
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    return found
