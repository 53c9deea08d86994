"""Typed pipelines: what goes in comes out, in order, and nothing else does."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from sterna.errors import ConfigError
from sterna.ipc.addresses import RunDirectory
from sterna.ipc.channel import ChannelError, Receiver, Sender
from sterna.protocol.channels import ToDetokenizer, ToScheduler, ToServer
from sterna.protocol.control import OutputCredit, ShutdownReq
from sterna.protocol.generate import AbortReq


@pytest.fixture
def run() -> Iterator[RunDirectory]:
    directory = RunDirectory.create()
    yield directory
    directory.remove()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_messages_arrive_in_order_and_typed(run: RunDirectory, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    sender: Sender[ToScheduler] = Sender(context, run.address("scheduler", 1))  # connects before its reader has bound
    receiver: Receiver[ToScheduler] = Receiver(context, run.address("scheduler", 1), ToScheduler)
    sent: list[ToScheduler] = [AbortReq(rid="a"), OutputCredit(batches=3), ShutdownReq()]
    for message in sent:
        sender.send(message)
    got: list[ToScheduler] = []
    while len(got) < len(sent):
        assert receiver.wait(60_000)
        got += receiver.drain()
    assert got == sent
    sender.close()
    receiver.close()


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"garbage", msgspec.msgpack.encode({"type": "nobody"}), msgspec.msgpack.encode([1])])
def test_what_is_not_of_the_union_stops_at_the_boundary(frame: bytes, run: RunDirectory, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    receiver: Receiver[ToDetokenizer] = Receiver(context, run.address("detokenizer", 1), ToDetokenizer)
    raw = context.socket(zmq.PUSH)
    raw.connect(receiver.address)
    raw.send(frame)
    raw.send(msgspec.msgpack.encode(ShutdownReq()))
    assert receiver.wait(60_000)
    with pytest.raises(ChannelError):
        list(receiver.drain(1))
    assert receiver.wait(60_000)
    assert list(receiver.drain()) == [ShutdownReq()]
    raw.close(linger=0)
    receiver.close()


def test_a_reader_that_takes_nothing_is_an_error_not_a_wait(run: RunDirectory, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    sender: Sender[ToServer] = Sender(context, run.address("server", 1), high_water_mark=1)

    def send_many() -> None:
        for _ in range(10_000):
            sender.send(ShutdownReq())  # type: ignore[arg-type]

    with pytest.raises(ChannelError):
        send_many()
    sender.close(linger_ms=0)


def test_only_this_user_enters_the_run_directory_and_epochs_have_their_own_addresses(run: RunDirectory) -> None:
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert run.address("scheduler", 1) != run.address("scheduler", 2)
    run.remove()
    assert not run.path.exists()


def test_a_temporary_directory_too_deep_for_sockets_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        RunDirectory.create()
    assert list(deep.iterdir()) == []


def test_what_a_killed_server_left_is_swept_and_the_living_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sterna.ipc.addresses.MAX_IPC_PATH_BYTES", 4096)
    living, killed, foreign = RunDirectory.create(), RunDirectory.create(), tmp_path / "sterna-other"
    killed._lock.close()  # as the end of its process would
    foreign.mkdir()
    for directory in (living, killed):
        os.utime(directory.path / "lock", (0, 0))
    new = RunDirectory.create()
    assert set(tmp_path.iterdir()) == {living.path, foreign, new.path}
    living.remove()
    new.remove()
