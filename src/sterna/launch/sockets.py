"""The server's ends of the pipelines, and where the children's are."""

from __future__ import annotations

import zmq

from sterna.ipc.addresses import RunDirectory
from sterna.ipc.channel import Receiver, Sender
from sterna.launch.child import CHILDREN
from sterna.protocol.channels import ToDetokenizer, ToScheduler, ToServer
from sterna.protocol.control import ProcessName


class Sockets:
    def __init__(self, run: RunDirectory, epoch: int) -> None:
        self._run = run
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.addresses = {name: run.address(name, epoch) for name in ("server", *CHILDREN)}
        self.inbox: Receiver[ToServer] = Receiver(self._context, self.addresses["server"], ToServer)
        self.to_scheduler: Sender[ToScheduler] = Sender(self._context, self.addresses["scheduler"])
        self.to_detokenizer: Sender[ToDetokenizer] = Sender(self._context, self.addresses["detokenizer"])

    def renew(self, name: ProcessName, epoch: int) -> None:
        """The child `name` has died: its successor of `epoch` gets an address and a sender of its own. What it hadn't read is gone."""
        self._run.release(self.addresses[name])
        self.addresses[name] = self._run.address(name, epoch)
        if name == "scheduler":
            self.to_scheduler.close(linger_ms=0)
            self.to_scheduler = Sender(self._context, self.addresses[name])
        else:
            self.to_detokenizer.close(linger_ms=0)
            self.to_detokenizer = Sender(self._context, self.addresses[name])

    def close(self) -> None:
        self.to_scheduler.close(linger_ms=0)
        self.to_detokenizer.close(linger_ms=0)
        self.inbox.close()
        self._context.term()
