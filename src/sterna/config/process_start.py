"""How a child process begins: what it is told, on its standard input, and that it ends when its parent does.

    python -m sterna.scheduler.process  <  one line of JSON: ProcessStart

The parent keeps the pipe open for as long as it lives. End of file therefore means that the parent is gone, however it went, and
the child ends at once: no orphan outlives a kill -9.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

import msgspec
import zmq

from sterna.config.log import setup_logging
from sterna.config.server_args import ServerArgs
from sterna.errors import StartupError
from sterna.ipc.channel import Sender
from sterna.protocol.channels import ToServer
from sterna.protocol.control import ProcessFailed, ProcessName

log = logging.getLogger(__name__)


PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


class ProcessStart(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a child is told. Addresses are ipc:// URLs; keys are not among its settings."""

    args: ServerArgs
    folder: str
    """The resolved model (`config/model_config.py`)."""
    inbox: str
    """Where this process receives."""
    detokenizer: str
    server: str
    epoch: int


def enter_process(name: ProcessName, run: Callable[[ProcessStart], None]) -> None:
    """Read the start message and `run`. A fault before the process is ready is told to the server as `ProcessFailed`; exit code 1."""
    # A terminal's Ctrl-C, and the SIGTERM that service managers send to all processes of a group, are for the parent: it drains, with
    # our help, and then ends us in order.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    _ask_for_death_signal()
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=ProcessStart)
    setup_logging(start.args.log_level, name)
    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
    try:
        run(start)
    except Exception as fault:
        expected = isinstance(fault, StartupError)
        if not expected:  # an expected one is the user's to read, and the parent prints it
            log.exception("%s", fault)
        _report(start.server, ProcessFailed(process=name, message=str(fault) if expected else f"{name} failed: {fault!r}"))
        sys.exit(1)


def _ask_for_death_signal() -> None:
    """Linux: be killed when the parent dies. The end of the pipe says so everywhere, but to a process that is stopped or in the middle of a
    long call it says so late. (A parent that is dead already is told by the pipe.)"""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def _report(server: str, failure: ProcessFailed) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender: Sender[ToServer] = Sender(context, server)
    sender.send(failure)
    sender.close()
    context.term()
