"""The processes of one server, and its own HTTP: spawn, hand-shake, supervise, restart, drain, stop.

The parent is the server's own process. Children are the scheduler and the detokenizer; they are told everything on their standard
input and end when it closes (`config/process_start.py`).

    spawn children ── both ready ── serve ── SIGTERM: drain ── children told to stop ── exit 0
                                    │   ^         └──── a second one: nobody is waited for any more
                        a child dies└───┘restarted, in a new epoch (`tokenizer_manager/recovery.py`)
                                    └── too often for nothing, or --no-recovery: every request ends, group ends, exit 1
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from pathlib import Path

import msgspec

from sterna.config.heap import trim
from sterna.config.model_config import ModelConfig
from sterna.config.process_start import ProcessStart
from sterna.config.server_args import ServerArgs
from sterna.errors import StartupError
from sterna.ipc.addresses import RunDirectory
from sterna.launch.child import CHILDREN, Child, Death
from sterna.launch.events import first_of
from sterna.launch.restarts import RestartBudget
from sterna.launch.sockets import Sockets
from sterna.protocol.control import ProcessName, ShutdownReq
from sterna.protocol.finish import SHUTTING_DOWN
from sterna.server.app import create_app
from sterna.server.http_server import GRACE_S, HTTPServer
from sterna.text.chat_template import ChatTemplate
from sterna.text.tokenizer import Tokenizer
from sterna.tokenizer_manager.manager import TokenizerManager

log = logging.getLogger(__name__)

FIRST_EPOCH = 1
LAST_WORDS_S = 1.0
"""For the last event of every stream to reach its socket, before the group ends."""


class Group:
    def __init__(self, args: ServerArgs, folder: Path, sockets: Sockets, manager: TokenizerManager, http: HTTPServer) -> None:
        self.args = args
        self.manager = manager
        self._folder = folder
        self._sockets = sockets
        self._http = http
        self._children = [Child(name) for name in CHILDREN]
        self._budget = RestartBudget()
        self._stopping = asyncio.Event()
        self._second_signal = asyncio.Event()
        self._watchers: list[asyncio.Task[None]] = []

    @staticmethod
    def create(args: ServerArgs, folder: Path, run: RunDirectory, listener: socket.socket) -> Group:
        """Everything that lives in this process; no child yet. Raises StartupError for a folder that can't be read."""
        model = ModelConfig.load(folder)
        tokenizer = Tokenizer.load(folder)
        chat_template = ChatTemplate.load(folder, model)
        sockets = Sockets(run, FIRST_EPOCH)
        manager = TokenizerManager(args, model, tokenizer, chat_template, sockets.inbox, sockets.to_scheduler, FIRST_EPOCH)
        return Group(args, folder, sockets, manager, HTTPServer(create_app(manager, args), args, listener))

    def _start_message(self, name: ProcessName, epoch: int) -> ProcessStart:
        addresses = self._sockets.addresses
        return ProcessStart(
            args=msgspec.structs.replace(self.args, api_key=None, admin_api_key=None),
            folder=str(self._folder),
            inbox=addresses[name],
            detokenizer=addresses["detokenizer"],
            server=addresses["server"],
            epoch=epoch,
        )

    # ---- life ----

    async def startup(self) -> None:
        """Children spawned, HTTP answering (with 503 until they are ready). Returns when all is ready; raises StartupError."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        self.manager.startup()
        await self._http.startup()
        for child in self._children:
            await child.spawn(self._start_message(child.name, FIRST_EPOCH))
        trim()  # while the children load
        self._watchers = [asyncio.create_task(self._watch(child)) for child in self._children]
        await first_of(None, self.manager.ready_event.wait(), self._stopping.wait())
        if self.manager.failure is not None:
            raise StartupError(self.manager.failure)

    async def main_loop(self) -> None:
        """Until a signal, or a death that nothing follows."""
        await self._stopping.wait()

    async def shutdown(self) -> int:
        """The exit code: 0 after a signal, 1 after a failure."""
        if self.manager.alive:
            await self._drain()
        await first_of(LAST_WORDS_S, self.manager.idle_event.wait(), self._second_signal.wait())
        # Whoever watches over a group that has failed is waiting to start it again: this stays under 5 seconds then, whatever clients do.
        await self._end_http(GRACE_S if self.manager.alive else 1)
        for watcher in self._watchers:
            watcher.cancel()
        self._sockets.to_scheduler.send(ShutdownReq())
        self._sockets.to_detokenizer.send(ShutdownReq())
        await asyncio.gather(*(child.stop(self._second_signal) for child in self._children))
        self.manager.shutdown()
        self._sockets.close()
        return 0 if self.manager.alive else 1

    async def _drain(self) -> None:
        """New work is refused; streams have `--drain-timeout` to finish, then end with an error event."""
        self.manager.draining = True
        if self.manager.num_live:
            log.info("draining %d requests for up to %g s", self.manager.num_live, self.args.drain_timeout)
        await first_of(self.args.drain_timeout, self.manager.idle_event.wait(), self._second_signal.wait())
        self.manager.end_all(SHUTTING_DOWN)

    async def _end_http(self, grace_s: int) -> None:
        ending = asyncio.create_task(self._http.shutdown(grace_s))
        await first_of(None, asyncio.wait([ending]), self._second_signal.wait())
        if not ending.done():
            self._http.hurry()
        await ending

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._second_signal.set()
        self._stopping.set()

    # ---- deaths ----

    async def _watch(self, child: Child) -> None:
        """Until `shutdown` tells children to stop; an end before that is a death, while draining too."""
        while True:
            death = await child.wait()
            if not self.manager.ready_event.is_set():
                await first_of(LAST_WORDS_S, self.manager.failed_event.wait())  # its own words are better, and may still be on their way
            if not self.manager.alive:
                break
            log.error("the %s process died (%s)", child.name, death)
            try:
                restarted = await self._restart(child, death)
            except Exception:
                log.exception("the %s process can't be started again", child.name)
                restarted = False
            if not restarted:
                self.manager.fail(f"the {child.name} process died ({death})")
                break
        self._stopping.set()

    async def _restart(self, child: Child, death: Death) -> bool:
        """Whether another one has been started in its place. Raises OSError where the system gives no process."""
        if not self.args.recovery or not self.manager.ready_event.is_set():
            return False
        epoch = self.manager.recovery.epoch + 1
        self._sockets.renew(child.name, epoch)
        served = self.manager.lose(child.name, self._sockets.to_scheduler, self._sockets.addresses["detokenizer"])
        delay_s = self._budget.next_delay(served=served, lived_s=death.lived_s)
        if delay_s is None:
            log.error("the engine keeps dying without having served anybody: giving up")
            return False
        await asyncio.sleep(delay_s)
        await child.spawn(self._start_message(child.name, epoch))
        self.manager.recorder.restarted(child.name, death.cause)
        return True
