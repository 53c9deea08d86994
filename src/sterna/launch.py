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
from sterna.errors import ConfigError, Draining, StartupError
from sterna.files.cache import cache_root
from sterna.ipc.addresses import RunDirectory
from sterna.ipc.channel import Receiver, Sender
from sterna.models.resolve import resolve_model
from sterna.protocol.channels import ToDetokenizer, ToScheduler, ToServer
from sterna.protocol.control import ShutdownReq
from sterna.protocol.finish import FinishAbort
from sterna.server.app import create_app
from sterna.server.http_server import HTTPServer
from sterna.text.chat_template import ChatTemplate
from sterna.text.tokenizer import Tokenizer
from sterna.tokenizer_manager.manager import TokenizerManager

log = logging.getLogger(__name__)

EPOCH = 1
STOP_TIMEOUT_S = 3.0
"""For a child that was told to stop; then it is killed."""
LAST_WORDS_S = 1.0
"""For clients to be told that the engine is dead, before the group ends."""


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
    """NumPy's BLAS does nothing in our processes but hold threads and their memory."""
    return {"OPENBLAS_NUM_THREADS": "1"} | dict(os.environ)


class Group:
    """The processes of one server, and its own HTTP."""

    def __init__(self, args: ServerArgs, folder: Path, run: RunDirectory, listener: socket.socket) -> None:
        self.args = args
        self._run = run
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        addresses = {name: run.address(name, EPOCH) for name in ("server", "scheduler", "detokenizer")}
        self._inbox: Receiver[ToServer] = Receiver(self._context, addresses["server"], ToServer)
        self._to_scheduler: Sender[ToScheduler] = Sender(self._context, addresses["scheduler"])
        self._to_detokenizer: Sender[ToDetokenizer] = Sender(self._context, addresses["detokenizer"])
        self._starts = {name: self._start_message(folder, addresses, name) for name in ("scheduler", "detokenizer")}
        self._children = [Child("scheduler", "sterna.scheduler.process"), Child("detokenizer", "sterna.detokenizer.process")]
        model = ModelConfig.load(folder)
        self.manager = TokenizerManager(
            args, model, Tokenizer.load(folder), ChatTemplate.load(folder, model), self._inbox, self._to_scheduler, EPOCH
        )
        self._http = HTTPServer(create_app(self.manager, args), args, listener)
        self._stopping = asyncio.Event()
        self._second_signal = asyncio.Event()
        self._watchers: list[asyncio.Task[None]] = []

    def _start_message(self, folder: Path, addresses: dict[str, str], name: str) -> ProcessStart:
        return ProcessStart(
            args=msgspec.structs.replace(self.args, api_key=None),
            folder=str(folder),
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
            await child.spawn(self._starts[child.name])
        self._watchers = [asyncio.create_task(self._watch(child)) for child in self._children]
        ready = asyncio.create_task(self.manager.ready_event.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({ready, stopping}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        stopping.cancel()
        if self.manager.failure is not None:
            raise StartupError(self.manager.failure)

    async def main_loop(self) -> None:
        """Until a signal, or a child's death."""
        await self._stopping.wait()

    async def shutdown(self) -> int:
        """The exit code: 0 after a signal, 1 after a failure."""
        if self.manager.alive:
            await self._drain()
        else:
            await asyncio.sleep(LAST_WORDS_S)
        await self._http.shutdown()
        for watcher in self._watchers:
            watcher.cancel()
        self._to_scheduler.send(ShutdownReq())
        self._to_detokenizer.send(ShutdownReq())
        await asyncio.gather(*(child.stop() for child in self._children))
        self.manager.shutdown()
        self._to_scheduler.close(linger_ms=0)
        self._to_detokenizer.close(linger_ms=0)
        self._inbox.close()
        self._context.term()
        return 0 if self.manager.alive else 1

    async def _drain(self) -> None:
        """New work is refused; streams have `--drain-timeout` to finish, then end with an error event."""
        self.manager.draining = True
        if self.manager.num_live:
            log.info("draining %d requests for up to %g s", self.manager.num_live, self.args.drain_timeout)
        idle = asyncio.create_task(self.manager.idle_event.wait())
        hurry = asyncio.create_task(self._second_signal.wait())
        await asyncio.wait({idle, hurry}, timeout=self.args.drain_timeout, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        hurry.cancel()
        if self.manager.num_live:
            self.manager.end_all(FinishAbort("the server is shutting down", Draining.status, Draining.code))
            await asyncio.sleep(0.1)  # the last event of every stream reaches its socket

    async def _watch(self, child: Child) -> None:
        """Until `shutdown` tells children to stop; an end before that is a death, while draining too."""
        code = await child.wait()
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        log.error("the %s process died (%s)", child.name, cause)
        self.manager.fail(f"the {child.name} process died ({cause})")
        self._stopping.set()

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._second_signal.set()
        self._stopping.set()


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
        group = Group(args, folder, run, listener)
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
