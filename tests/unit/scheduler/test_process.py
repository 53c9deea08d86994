"""A real scheduler process on real sockets."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import zmq

from byte_model import BOS, make_byte_model
from sterna.config.process_start import ProcessStart
from sterna.config.server_args import ServerArgs
from sterna.ipc.addresses import RunDirectory
from sterna.ipc.channel import Receiver, Sender
from sterna.protocol.channels import ToDetokenizer, ToScheduler, ToServer
from sterna.protocol.control import ProcessFailed, ProcessReady, SchedulerStats, ShutdownReq
from sterna.protocol.finish import FinishLength, FinishMatchedStr
from sterna.protocol.generate import BatchTokenIDOutput, TokenIDRow, TokenizedGenerateReqInput
from sterna.protocol.sampling import SamplingParams
from sterna.scheduler.process import LazyTokenizer
from sterna.text.tokenizer import Tokenizer

TIMEOUT_MS = 60_000


@dataclass
class Peers:
    """Everything around the process."""

    process: subprocess.Popen[bytes]
    server: Receiver[ToServer]
    detokenizer: Receiver[ToDetokenizer]
    scheduler: Sender[ToScheduler]

    def next_of(self, kind: type) -> ToServer:
        while True:
            assert self.server.wait(TIMEOUT_MS), f"no {kind.__name__} came"
            for message in self.server.drain(1):
                if isinstance(message, kind):
                    return message

    def rows_until_end(self) -> list[TokenIDRow]:
        rows: list[TokenIDRow] = []
        while not rows or rows[-1].finished_reason is None:
            assert self.detokenizer.wait(TIMEOUT_MS), "no output came"
            for message in self.detokenizer.drain(1):
                assert isinstance(message, BatchTokenIDOutput)
                assert message.epoch == 3
                rows += message.rows
        return rows


def start(tmp_path: Path, context: "zmq.Context[zmq.Socket[bytes]]", run: RunDirectory, **settings: object) -> Peers:
    folder = make_byte_model(tmp_path / "model")
    addresses = {name: run.address(name, 3) for name in ("server", "detokenizer", "scheduler")}
    message = ProcessStart(
        args=ServerArgs(**({"executor": "scripted"} | settings)),  # type: ignore[arg-type]
        folder=str(folder),
        inbox=addresses["scheduler"],
        detokenizer=addresses["detokenizer"],
        server=addresses["server"],
        epoch=3,
    )
    server: Receiver[ToServer] = Receiver(context, addresses["server"], ToServer)
    detokenizer: Receiver[ToDetokenizer] = Receiver(context, addresses["detokenizer"], ToDetokenizer)
    process = subprocess.Popen([sys.executable, "-m", "sterna.scheduler.process"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(message) + b"\n")
    process.stdin.flush()
    return Peers(process, server, detokenizer, Sender(context, addresses["scheduler"]))


@pytest.fixture
def peers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Peers]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    run = RunDirectory.create()
    peers = start(tmp_path, context, run, **getattr(request, "param", {}))
    yield peers
    peers.process.kill()
    peers.process.communicate()
    for channel in (peers.server, peers.detokenizer):
        channel.close()
    peers.scheduler.close(linger_ms=0)
    context.term()
    run.remove()


@pytest.mark.parametrize("peers", [{}, {"executor_options": "overlap=1,threaded=1"}], ids=["in turn", "overlapped"], indirect=True)
def test_a_request_goes_in_and_its_tokens_come_out(peers: Peers) -> None:
    ready = peers.next_of(ProcessReady)
    assert isinstance(ready, ProcessReady)
    assert (ready.process, ready.epoch, ready.info["executor"]) == ("scheduler", 3, "scripted")
    params = SamplingParams(max_new_tokens=4)
    peers.scheduler.send(
        TokenizedGenerateReqInput(rid="a", input_ids=[1, 2, 3], sampling_params=params, stream=True, reply_to=peers.server.address)
    )
    rows = peers.rows_until_end()
    assert [token for row in rows for token in row.output_ids] == [1, 2, 3, 1]
    assert rows[-1].finished_reason == FinishLength(4)
    while True:
        stats = peers.next_of(SchedulerStats)
        assert isinstance(stats, SchedulerStats)
        if stats.num_running_reqs == 0:
            break
    assert stats.kv_used_tokens == 0
    peers.scheduler.send(ShutdownReq())
    assert peers.process.wait(60) == 0


def test_it_ends_when_its_parent_is_gone(peers: Peers) -> None:
    peers.next_of(ProcessReady)
    assert peers.process.stdin is not None
    peers.process.stdin.close()
    assert peers.process.wait(60) == 1


@pytest.mark.parametrize("peers", [{"executor_options": "nonsense=1"}, {"executor": "abacus"}], indirect=True)
def test_an_executor_that_cannot_be_made_is_told_to_the_server(peers: Peers) -> None:
    failed = peers.next_of(ProcessFailed)
    assert isinstance(failed, ProcessFailed)
    assert failed.process == "scheduler"
    assert "--executor" in failed.message
    assert peers.process.wait(60) == 1


@pytest.mark.parametrize("peers", [{"executor_options": f"raise_token={BOS}"}], indirect=True)
def test_a_model_whose_first_forward_fails_is_never_said_to_be_ready(peers: Peers) -> None:
    """Whichever message of its is first."""
    assert peers.server.wait(TIMEOUT_MS)
    (failed,) = peers.server.drain(1)
    assert isinstance(failed, ProcessFailed)
    assert "first forward failed" in failed.message
    assert peers.process.wait(60) == 1


def test_the_tokenizer_is_made_once_with_both_tables_whoever_asks_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = LazyTokenizer(make_byte_model(tmp_path / "model"))
    load, table = Tokenizer.load, Tokenizer.table
    loading, go_on = threading.Event(), threading.Event()
    loads: list[str] = []
    tables: list[bool] = []

    def slow_load(folder: Path) -> Tokenizer:
        loads.append(threading.current_thread().name)
        loading.set()
        assert go_on.wait(60)
        return load(folder)

    def noted_table(self: Tokenizer, *, skip_special_tokens: bool) -> object:
        tables.append(skip_special_tokens)
        return table(self, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "load", slow_load)
    monkeypatch.setattr(Tokenizer, "table", noted_table)
    warming = tokenizer.warm()
    assert loading.wait(60)
    got: list[Tokenizer] = []
    asking = threading.Thread(target=lambda: got.append(tokenizer()))
    asking.start()
    assert not got, "it is given out only when it is whole"
    go_on.set()
    warming.join(60)
    asking.join(60)
    assert got == [tokenizer()]
    assert loads == ["tokenizer"]
    assert sorted(tables) == [False, True]


def test_a_tokenizer_that_cannot_be_loaded_ends_no_thread_loudly_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = LazyTokenizer(tmp_path / "model")
    tokenizer.warm().join(60)
    assert "requests with stop strings will fail" in caplog.text
    make_byte_model(tmp_path / "model")
    assert tokenizer().vocab_size > 256


def test_a_request_with_a_stop_string_may_come_while_the_tokenizer_is_being_made(peers: Peers) -> None:
    peers.next_of(ProcessReady)
    params = SamplingParams(max_new_tokens=8, stop=("de",))
    peers.scheduler.send(
        TokenizedGenerateReqInput(rid="a", input_ids=list(b"abcdef"), sampling_params=params, stream=True, reply_to=peers.server.address)
    )
    assert peers.rows_until_end()[-1].finished_reason == FinishMatchedStr("de", 4, 3)
    peers.scheduler.send(ShutdownReq())
    assert peers.process.wait(60) == 0
