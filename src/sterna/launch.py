"""Spawn, hand-shake, supervise, drain, stop.

The parent is the server's own process. Children are the scheduler and the detokenizer; they are told everything on their standard
input and end when it closes (`config/process_start.py`).

    resolve model ── bind port ── spawn children ── both ready ── serve ── SIGTERM: drain ── children told to stop ── exit 0
                                                                    └──── a child dies: every request ends, group ends, exit 1
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from sterna.config.log import setup_logging
from sterna.config.model_config import ModelConfig
from sterna.config.process_start import ProcessStart
from sterna.config.resolve import check, complete
from sterna.config.server_args import ServerArgs
from sterna.errors import ConfigError, StartupError
from sterna.files.cache import cache_root
from sterna.ipc.addresses import RunDirectory
from sterna.ipc.channel import Receiver, Sender
from sterna.models.resolve import resolve_model
from sterna.protocol.channels import ToDetokenizer, ToScheduler, ToServer
from sterna.protocol.control import ShutdownReq
from sterna.protocol.finish import SHUTTING_DOWN
from sterna.server.app import create_app
from sterna.server.http_server import HTTPServer
from sterna.text.chat_template import ChatTemplate
from sterna.text.tokenizer import Tokenizer
from sterna.tokenizer_manager.manager import TokenizerManager

log = logging.getLogger(__name__)

EPOCH = 1
CHILDREN = {"scheduler": "sterna.scheduler.process", "detokenizer": "sterna.detokenizer.process"}
CHILD_DEFAULTS = {
    # NumPy's BLAS does nothing in our processes but hold threads and their memory.
    "OPENBLAS_NUM_THREADS": "1",
    # PyTorch's threads spin between two operations, by default for longer than a time slice: whoever else wants a core (our own HTTP,
    # too) then stalls every operation. Long enough to bridge a gap, no longer: docs/performance.md has the figures.
    "GOMP_SPINCOUNT": "8000",
}
KEY_VARIABLES = frozenset({"STERNA_API_KEY", "STERNA_ADMIN_API_KEY"})
STOP_TIMEOUT_S = 2.0
"""For a child that was told to stop; then it is killed."""
LAST_WORDS_S = 1.0
"""For the last event of every stream to reach its socket, before the group ends."""


class Child:
    """One child process: spawned, watched, stopped."""

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        self._module = module
        self._process: asyncio.subprocess.Process | None = None

    async def spawn(self, start: ProcessStart) -> None:
        """It gets a session of its own, so that a terminal's signals reach it through us only."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._module, stdin=asyncio.subprocess.PIPE, env=_child_environment(), start_new_session=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(start) + b"\n")
        await self._process.stdin.drain()

    async def wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """Wait for its end; kill it if it takes too long."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            log.warning("%s did not stop; killing it", self.name)
            self.kill()
            await process.wait()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


def _child_environment() -> dict[str, str]:
    """Ours, without the keys, which no child needs; what the user has set wins over our defaults."""
    inherited = {name: value for name, value in os.environ.items() if name not in KEY_VARIABLES}
    return CHILD_DEFAULTS | inherited


class Sockets:
    """The server's ends of the pipelines, and where the children's are."""

    def __init__(self, run: RunDirectory) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.addresses = {name: run.address(name, EPOCH) for name in ("server", *CHILDREN)}
        self.inbox: Receiver[ToServer] = Receiver(self._context, self.addresses["server"], ToServer)
        self.to_scheduler: Sender[ToScheduler] = Sender(self._context, self.addresses["scheduler"])
        self.to_detokenizer: Sender[ToDetokenizer] = Sender(self._context, self.addresses["detokenizer"])

    def close(self) -> None:
        self.to_scheduler.close(linger_ms=0)
        self.to_detokenizer.close(linger_ms=0)
        self.inbox.close()
        self._context.term()


class Group:
    """The processes of one server, and its own HTTP."""

    def __init__(self, args: ServerArgs, folder: Path, sockets: Sockets, manager: TokenizerManager, http: HTTPServer) -> None:
        self.args = args
        self.manager = manager
        self._folder = folder
        self._sockets = sockets
        self._http = http
        self._children = [Child(name, module) for name, module in CHILDREN.items()]
        self._stopping = asyncio.Event()
        self._second_signal = asyncio.Event()
        self._watchers: list[asyncio.Task[None]] = []

    @staticmethod
    def create(args: ServerArgs, folder: Path, run: RunDirectory, listener: socket.socket) -> Group:
        """Everything that lives in this process; no child yet. Raises StartupError for a folder that can't be read."""
        model = ModelConfig.load(folder)
        tokenizer = Tokenizer.load(folder)
        chat_template = ChatTemplate.load(folder, model)
        sockets = Sockets(run)
        manager = TokenizerManager(args, model, tokenizer, chat_template, sockets.inbox, sockets.to_scheduler, EPOCH)
        return Group(args, folder, sockets, manager, HTTPServer(create_app(manager, args), args, listener))

    def _start_message(self, name: str) -> ProcessStart:
        addresses = self._sockets.addresses
        return ProcessStart(
            args=msgspec.structs.replace(self.args, api_key=None, admin_api_key=None),
            folder=str(self._folder),
            inbox=addresses[name],
            detokenizer=addresses["detokenizer"],
            server=addresses["server"],
            epoch=EPOCH,
        )

    async def startup(self) -> None:
        """Children spawned, HTTP answering (with 503 until they are ready). Returns when all is ready; raises StartupError."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        self.manager.startup()
        await self._http.startup()
        for child in self._children:
            await child.spawn(self._start_message(child.name))
        self._watchers = [asyncio.create_task(self._watch(child)) for child in self._children]
        await _first_of(None, self.manager.ready_event, self._stopping)
        if self.manager.failure is not None:
            raise StartupError(self.manager.failure)

    async def main_loop(self) -> None:
        """Until a signal, or a child's death."""
        await self._stopping.wait()

    async def shutdown(self) -> int:
        """The exit code: 0 after a signal, 1 after a failure."""
        if self.manager.alive:
            await self._drain()
            await _first_of(LAST_WORDS_S, self.manager.idle_event)
            await self._http.shutdown()
        else:
            # Whoever watches over us is waiting to start again: with STOP_TIMEOUT_S this stays under 5 seconds, whatever clients do.
            await _first_of(LAST_WORDS_S, self.manager.idle_event)
            await self._http.shutdown(grace_s=1)
        for watcher in self._watchers:
            watcher.cancel()
        self._sockets.to_scheduler.send(ShutdownReq())
        self._sockets.to_detokenizer.send(ShutdownReq())
        await asyncio.gather(*(child.stop() for child in self._children))
        self.manager.shutdown()
        self._sockets.close()
        return 0 if self.manager.alive else 1

    async def _drain(self) -> None:
        """New work is refused; streams have `--drain-timeout` to finish, then end with an error event."""
        self.manager.draining = True
        if self.manager.num_live:
            log.info("draining %d requests for up to %g s", self.manager.num_live, self.args.drain_timeout)
        await _first_of(self.args.drain_timeout, self.manager.idle_event, self._second_signal)
        self.manager.end_all(SHUTTING_DOWN)

    async def _watch(self, child: Child) -> None:
        """Until `shutdown` tells children to stop; an end before that is a death, while draining too."""
        code = await child.wait()
        if not self.manager.ready_event.is_set():
            await _first_of(LAST_WORDS_S, self.manager.failed_event)  # its own words are better, and may still be on their way
        if self.manager.alive:
            cause = f"signal {-code}" if code < 0 else f"exit code {code}"
            log.error("the %s process died (%s)", child.name, cause)
            self.manager.fail(f"the {child.name} process died ({cause})")
        self._stopping.set()

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._second_signal.set()
        self._stopping.set()


async def _first_of(timeout_s: float | None, *events: asyncio.Event) -> None:
    """Wait until one of `events` is set, or the time is over."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


async def serve(args: ServerArgs, announce: Callable[[ServerArgs, TokenizerManager, float], None]) -> int:
    """Serve until told to stop. `announce` is called once, when the first request can be answered, with the seconds it took.

    Returns the exit code. Raises StartupError for whatever is wrong before serving.
    """
    began = time.monotonic()
    args = check(args)
    setup_logging(args.log_level, "server")
    folder = resolve_model(args.model, cache_dir=cache_root(args.cache_dir), context_length=args.context_length)
    args = complete(args, ModelConfig.load(folder))
    listener = _listen(args.host, args.port)
    args = msgspec.structs.replace(args, port=listener.getsockname()[1])
    run = RunDirectory.create()
    try:
        group = Group.create(args, folder, run, listener)
        try:
            await group.startup()
            if group.manager.ready:
                announce(args, group.manager, time.monotonic() - began)
            await group.main_loop()
        finally:
            code = await group.shutdown()
        return code
    finally:
        run.remove()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as fault:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {fault.strerror or fault}; another port: --port N (or PORT=N make serve)"
        ) from fault
    listener.setblocking(False)
    return listener
