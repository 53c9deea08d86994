"""Deaths that somebody must notice: of the server, of a child that nobody replaces, of the engine at one request's hands."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faults import checks
from faults.conftest import TRIES, Bench
from faults.faults import Fault, Process
from faults.load import Answer, Ask
from faults.served import Struck
from running_server import PROMPTLY_S, until

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Struck]]:
    """A ready server of one's own; whatever is left of it at the end is killed."""
    started: list[Struck] = []

    def begin(*flags: str, run_folder: Path | None = None) -> Struck:
        started.append(Struck(tmp_path / f"log{len(started)}", *flags, run_folder=run_folder))
        return started[-1].wait_ready()

    yield begin
    for struck in started:
        for pid in checks.processes_of(struck.folder):
            os.kill(pid, signal.SIGKILL)
        checks.nobody_lives(struck.folder, PROMPTLY_S)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def test_when_the_server_is_killed_its_group_ends_with_it(start: Callable[..., Struck], asks: list[Ask]) -> None:
    """No orphan, no held port, and what lies in the temporary directory is cleared away by the next start."""
    struck = start()
    answers, (strike,) = struck.play(asks, [Fault("server", "kill", "in full flow")])
    assert strike.happened
    checks.nobody_lives(struck.folder, PROMPTLY_S)
    assert struck.server.process.wait() == -signal.SIGKILL
    assert is_free(struck.server.port)
    assert all(answer.broken or answer.finish is not None for answer in answers), "somebody was told nothing"
    (left,) = struck.run_folder.iterdir()
    os.utime(left / "lock", (0, 0))  # a minute later
    next_one = start(run_folder=struck.run_folder)
    until(lambda: not left.exists())
    assert next_one.end() == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("process", ["scheduler", "detokenizer"])
def test_without_recovery_everybody_is_told_and_the_group_ends(
    start: Callable[..., Struck], bench: Callable[..., Bench], asks: list[Ask], process: Process
) -> None:
    """Who has ended has all of his answer; who hasn't has a beginning of it and one error."""
    reference = bench().reference
    cut = 0
    for _ in range(TRIES):  # all may have been answered, though the clients don't know it yet
        struck = start("--no-recovery")
        answers, (strike,) = struck.play(asks, [Fault(process, "kill", "some have ended")])
        assert strike.happened
        checks.each_is_answered_once(answers)
        cut = checks.each_has_its_undisturbed_answer_or_an_honest_error(answers, reference)
        assert struck.server.process.wait(PROMPTLY_S) == 1
        assert struck.end() == 1
        if cut:
            break
    assert 0 < cut < len(answers)


@pytest.mark.parametrize("point", ["intake", pytest.param("output", marks=pytest.mark.exhaustive)])
def test_a_request_that_kills_the_engine_ends_alone(bench: Callable[..., Bench], point: str) -> None:
    """Everyone else has the answer that he would have had; the culprit has a 500 of its own."""
    here = bench()
    poison = Ask("poison", "/generate", {"rid": "poison", "text": "die", "sampling_params": {"max_new_tokens": 5}})
    with here.struck.poisoned(f"scheduler.{point}", "poison"):
        answers, _ = here.struck.play([*here.asks, poison])
    checks.each_is_answered_once(answers)
    checks.each_has_its_undisturbed_answer(answers[:-1], here.reference)
    assert answers[-1].status == 500
    assert answers[-1].error is not None
    assert answers[-1].error["code"] == "engine_crashed"
    here.is_as_before()
    assert "now with no other in flight" in here.struck.server.read_log(), "the culprit's parameters are in the log"


def converse(here: Bench, *faults: Fault) -> list[Answer]:
    """Three turns of a session, the second one among all the others and disturbed."""
    session = here.struck.server.post("/open_session", {}).json()
    answers = []
    for turn in range(3):
        params = {"id": session} | ({"rid": f"{session}-{turn - 1}"} if turn else {})
        sampling = {"max_new_tokens": 40, "temperature": 0.8, "sampling_seed": turn}
        body = {"rid": f"{session}-{turn}", "text": f" Then {turn}:", "sampling_params": sampling, "session_params": params, "stream": True}
        crowd = here.asks if turn == 1 else []
        played, strikes = here.struck.play([*crowd, Ask(f"turn {turn}", "/generate", body)], faults if turn == 1 else ())
        assert all(strike.happened for strike in strikes)
        checks.each_is_answered_once(played)
        answers.append(played[-1])
    assert here.struck.server.post("/close_session", {"session_id": session}).status_code == 200
    return answers


@pytest.mark.exhaustive
@pytest.mark.parametrize("process", ["scheduler", "detokenizer"])
def test_a_session_outlives_the_engine(bench: Callable[..., Bench], process: Process) -> None:
    here = bench()
    disturbed, undisturbed = converse(here, Fault(process, "kill", "in full flow")), converse(here)
    checks.each_has_its_undisturbed_answer(disturbed, undisturbed)
    assert disturbed[2].usage["prompt_tokens"] > disturbed[1].usage["prompt_tokens"] > 40, "each turn goes on from the one before"
    here.is_as_before()


@pytest.mark.exhaustive
def test_a_signal_during_a_recovery_still_drains(start: Callable[..., Struck], asks: list[Ask], bench: Callable[..., Bench]) -> None:
    reference = bench().reference
    struck = start()

    def both(process: str) -> int:
        os.kill(struck.server.process.pid, signal.SIGTERM)
        return struck.server.children()[process]

    struck.pid_of = both  # type: ignore[method-assign]
    answers, (strike,) = struck.play(asks, [Fault("scheduler", "kill", "all speak")])
    assert strike.happened
    checks.each_has_its_undisturbed_answer(answers, reference)
    assert struck.server.process.wait(PROMPTLY_S) == 0
    assert struck.end() == 0
