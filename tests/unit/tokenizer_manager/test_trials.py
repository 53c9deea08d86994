"""The search for who makes the engine crash. The engine is a simulation: it dies when a culprit among those it has reaches his token."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from sterna.config.server_args import ServerArgs
from sterna.protocol.channels import ToScheduler
from sterna.protocol.control import PROCESSES, NewDetokenizerReq
from sterna.protocol.finish import ENGINE_CRASHED, FinishLength
from sterna.protocol.generate import AbortReq, BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
from sterna.protocol.sampling import SamplingParams
from sterna.tokenizer_manager.admission import ANY_TERMS, Accounts
from sterna.tokenizer_manager.flight_recorder import FlightRecorder
from sterna.tokenizer_manager.recovery import Recovery
from sterna.tokenizer_manager.req_state import ReqState, RequestTimes
from sterna.tokenizer_manager.trials import PROGRESS_TOKENS, Trials

LENGTH = 100


@dataclass
class Simulation:
    """Requests of `LENGTH` tokens. `fatal[rid]` is the output token at which the engine dies; `lag` tokens of each die with it."""

    fatal: dict[str, int]
    lag: int
    rows: int
    """Requests that run at once."""
    crashes: int = 0
    running: dict[str, int] = field(default_factory=dict)
    """rid -> tokens made; those of them that have been accepted stand in the journal."""
    states: dict[str, ReqState] = field(default_factory=dict)
    sent: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accounts = Accounts(ServerArgs())
        self.recovery = Recovery(self.states, self, 1, FlightRecorder(1), lambda state: None)
        self.ready()

    def ready(self) -> None:
        for process in PROCESSES:
            self.recovery.note_ready(process, self.recovery.epoch)

    def send(self, message: ToScheduler) -> None:
        match message:
            case TokenizedGenerateReqInput():
                assert message.epoch == self.recovery.epoch
                assert message.resume_output_ids == self.states[message.rid].output_ids
                assert message.resume_chars == len(message.resume_output_ids)
                assert message.rid not in self.running
                self.running[message.rid] = len(message.resume_output_ids)
            case BatchTokenizedGenerateReqInput():
                for each in message.reqs:
                    self.send(each)
            case NewDetokenizerReq():
                assert not self.running
            case AbortReq():
                raise AssertionError("nobody aborts")

    def submit(self, rid: str) -> ReqState:
        params = SamplingParams(max_new_tokens=LENGTH)
        tokenized = TokenizedGenerateReqInput(rid=rid, input_ids=[1], sampling_params=params, stream=True, reply_to="", epoch=1)
        state = ReqState(rid, RequestTimes(0.0), self.recovery.epoch, self.accounts.admit(ANY_TERMS)[0], tokenized=tokenized)
        self.states[rid] = state
        self.recovery.dispatch([state])
        return state

    def step(self) -> None:
        for rid in list(self.running)[: self.rows]:
            self.running[rid] += 1
            if self.fatal.get(rid) == self.running[rid]:
                return self.crash()
            state = self.states[rid]
            made = self.running[rid]
            accepted = made if made == LENGTH else max(made - self.lag, len(state.output_ids))
            if accepted > len(state.output_ids):
                state.text_chunks.append("x" * (accepted - len(state.output_ids)))
                state.output_ids += [0] * (accepted - len(state.output_ids))
            if accepted == LENGTH:
                state.finished_reason = FinishLength(LENGTH)
                del self.running[rid]
        self.recovery.advance()
        return None

    def crash(self, process: str = "scheduler") -> None:
        self.crashes += 1
        self.running.clear()
        assert self.recovery.lost(process, self, "")
        assert self.recovery.recovering
        self.recovery.note_ready(process, self.recovery.epoch)

    def run(self) -> None:
        for _ in range(100_000):
            if all(state.finished for state in self.states.values()):
                return
            assert self.running, "nothing runs and somebody waits"
            self.step()
        raise AssertionError("endless")


@given(
    st.integers(1, 12),
    st.dictionaries(st.integers(0, 11), st.integers(1, LENGTH), max_size=3),
    st.integers(0, 31),
    st.integers(1, 12),
)
def test_exactly_the_culprits_end_with_500_and_everyone_else_finishes(num: int, fatal: dict[int, int], lag: int, rows: int) -> None:
    simulation = Simulation({str(i): token for i, token in fatal.items()}, lag, rows)
    for i in range(num):
        simulation.submit(str(i))
    simulation.run()
    for i in range(num):
        state = simulation.states[str(i)]
        assert state.finished_reason == (ENGINE_CRASHED if i in fatal else FinishLength(LENGTH))
        assert len(state.output_ids) < fatal.get(i, LENGTH + 1)
    assert not simulation.recovery.trials.searching
    assert not simulation.recovery.recovering


def test_one_among_many_is_found_in_a_logarithm_of_crashes() -> None:
    simulation = Simulation({"37": 5}, 2, 64)
    for i in range(64):
        simulation.submit(str(i))
    simulation.run()
    assert simulation.crashes <= 2 + 6 + 1


def test_who_comes_during_a_search_waits_for_its_end() -> None:
    simulation = Simulation({"a": 5}, 0, 8)
    first = [simulation.submit(rid) for rid in ("a", "b")]
    while simulation.crashes < 2:
        simulation.step()
    late = simulation.submit("late")
    assert simulation.recovery.trials.searching
    assert not late.dispatched
    while not first[0].finished:
        simulation.step()
        assert not late.dispatched
    simulation.run()
    assert late.finished_reason == FinishLength(LENGTH)
    assert first[1].finished_reason == FinishLength(LENGTH)


def test_kills_from_outside_convict_nobody_who_makes_progress() -> None:
    """However many, where a few tokens come between them."""
    simulation = Simulation({}, 1, 8)
    state = simulation.submit("only")
    while not state.finished:
        for _ in range(PROGRESS_TOKENS // 2 + 2):
            if not state.finished:
                simulation.step()
        if not state.finished:
            simulation.crash()
    assert simulation.crashes > 10
    assert state.finished_reason == FinishLength(LENGTH)
    assert state.replays == simulation.crashes


def test_crashes_of_different_processes_are_not_one_request_s_fault() -> None:
    simulation = Simulation({}, 0, 8)
    state = simulation.submit("only")
    for process in ("scheduler", "detokenizer") * 4:
        simulation.crash(process)
    simulation.run()
    assert state.finished_reason == FinishLength(LENGTH)


def test_two_kills_convict_nobody_however_close() -> None:
    simulation = Simulation({}, 0, 8)
    simulation.submit("only")
    simulation.crash()
    simulation.crash()
    simulation.run()
    assert simulation.states["only"].finished_reason == FinishLength(LENGTH)


def test_both_processes_dying_count_as_one_crash() -> None:
    simulation = Simulation({}, 0, 8)
    state = simulation.submit("only")
    recovery = simulation.recovery
    simulation.running.clear()
    recovery.lost("scheduler", simulation, "")
    scheduler_epoch = recovery.epoch
    recovery.lost("detokenizer", _Ignored(), "")
    assert state.strikes == 1
    assert recovery.note_ready("scheduler", scheduler_epoch)
    assert not state.dispatched
    assert not recovery.note_ready("detokenizer", scheduler_epoch), "it was started in a later epoch"
    recovery.scheduler = simulation
    assert recovery.note_ready("detokenizer", recovery.epoch)
    assert state.dispatched


class _Ignored:
    def send(self, message: ToScheduler) -> None:
        """A scheduler that only hears of its new detokenizer."""


def test_nobody_is_convicted_of_a_crash_at_which_an_aborted_one_was_still_there() -> None:
    simulation = Simulation({}, 0, 1)
    simulation.submit("a")
    state, trials = simulation.states["a"], Trials()
    for _ in range(2):
        assert trials.crashed("scheduler", [state]) is None
    assert trials.crashed("scheduler", [state], ending=1) is None
    assert trials.crashed("scheduler", [state]) is state
