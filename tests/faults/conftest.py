"""Undisturbed answers, asked once, and servers to disturb: one after the other, a new one where the last has ended or lost its baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from faults import checks
from faults.faults import Fault
from faults.load import Answer, Ask, mixed_asks
from faults.served import MODEL, Struck

CLIENTS = 32
TRIES = 5
TIGHT = ("--max-total-tokens", "1536", "--max-running-requests", "24")
"""Memory for some of the clients, when they ask for long answers: they queue, and they are retracted."""


@pytest.fixture(scope="session")
def asks() -> list[Ask]:
    return mixed_asks(CLIENTS, MODEL)


@dataclass
class Bench:
    """A server at rest, and what it answers when nobody disturbs it."""

    struck: Struck
    asks: list[Ask]
    reference: list[Answer]
    baseline: checks.Census

    def strike(self, *faults: Fault) -> None:
        """A run in which every one of `faults` comes to pass: each client gets a single answer, the one that it would have had.

        A moment is what clients have seen. Where they get little of the processor the server may be done by then: nothing was disturbed.
        """
        for _ in range(TRIES):
            answers, strikes = self.struck.play(self.asks, faults)
            checks.each_is_answered_once(answers)
            checks.each_has_its_undisturbed_answer(answers, self.reference)
            missed = [str(strike.fault) for strike in strikes if not strike.happened]
            if not missed:
                return
        raise AssertionError(f"never happened, in {TRIES} runs: {missed}")

    def is_as_before(self) -> None:
        """Everything that a run held has been given back."""
        checks.gauges_are_at_their_baseline(self.struck.server)
        checks.exactly_the_group_lives(self.struck.server, self.struck.folder)
        checks.nothing_is_held(self.struck.server, self.struck.folder, self.baseline)


class Benches:
    """By the flags of their servers; only one at a time, so that they don't take each other's cores."""

    def __init__(self, folder: Path, asks: list[Ask], long_asks: list[Ask]) -> None:
        """`long_asks` are what is asked where memory is tight."""
        self._folder = folder
        self._asks = asks
        self._long_asks = long_asks
        self._count = 0
        self._current: tuple[tuple[str, ...], Bench] | None = None

    def with_flags(self, *flags: str) -> Bench:
        if self._current is not None:
            have, bench = self._current
            if have == flags and bench.struck.server.process.poll() is None:
                return bench
        self.close()
        self._count += 1
        struck = Struck(self._folder / f"log{self._count}", *flags)
        try:
            struck.wait_ready()
            asks = self._long_asks if flags == TIGHT else self._asks
            reference, _ = struck.play(asks)
            checks.each_is_answered_once(reference)
            checks.each_has_its_undisturbed_answer(reference, reference)  # none was an error
            checks.gauges_are_at_their_baseline(struck.server)
            bench = Bench(struck, asks, reference, struck.census())
        except BaseException:
            struck.end()
            raise
        self._current = flags, bench
        return bench

    def close(self) -> None:
        if self._current is not None:
            _, bench = self._current
            self._current = None
            bench.struck.end()


@pytest.fixture(scope="session")
def benches(tmp_path_factory: pytest.TempPathFactory, asks: list[Ask]) -> Iterator[Benches]:
    long_asks = mixed_asks(CLIENTS, MODEL, max_tokens=(120, 130), prompt_words=60, ignore_eos=True)
    benches = Benches(tmp_path_factory.mktemp("faults"), asks, long_asks)
    yield benches
    benches.close()


@pytest.fixture
def bench(benches: Benches, request: pytest.FixtureRequest) -> Iterator[Callable[..., Bench]]:
    """`with_flags`; a server that a failed test has used serves no other."""
    failed_before = request.session.testsfailed
    yield benches.with_flags
    if request.session.testsfailed > failed_before:
        benches.close()
