"""The detokenizer process: receive, decode, send."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import zmq

from sterna.config.heap import trim
from sterna.config.process_start import ProcessStart, enter_process
from sterna.detokenizer.manager import DetokenizerManager
from sterna.ipc.channel import ChannelError, Receiver, Sender
from sterna.protocol.channels import ToDetokenizer, ToServer
from sterna.protocol.control import ProcessReady, ShutdownReq
from sterna.protocol.generate import BatchStrOutput, BatchTokenIDOutput
from sterna.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class DetokenizerProcess:
    """Owns the sockets; `DetokenizerManager` owns the text."""

    def __init__(
        self, manager: DetokenizerManager, inbox: Receiver[ToDetokenizer], context: zmq.Context[zmq.Socket[bytes]], server: str
    ) -> None:
        self._manager = manager
        self._server = server
        self._inbox = inbox
        self._context = context
        self._epoch = 0
        self._servers: dict[str, Sender[ToServer]] = {}

    def startup(self, epoch: int) -> None:
        self._epoch = epoch
        self._sender(self._server).send(ProcessReady(process="detokenizer", epoch=epoch, info={"max_states": self._manager.max_states}))

    def main_loop(self) -> None:
        """Until a `ShutdownReq`."""
        while True:
            self._inbox.wait()
            try:
                for message in self._inbox.drain():
                    match message:
                        case BatchTokenIDOutput():
                            self._handle(message)
                        case ShutdownReq():
                            return
            except ChannelError:
                log.exception("a message was dropped")
                self._return_credit(self._epoch)

    def _handle(self, batch: BatchTokenIDOutput) -> None:
        """Every batch is answered with at least one, perhaps empty, `BatchStrOutput`: it returns the scheduler's credit."""
        answered = False
        for address, output in self._manager.to_str_output(batch):
            self._sender(address).send(output)
            answered |= isinstance(output, BatchStrOutput)
        if not answered:
            self._return_credit(batch.epoch)

    def _return_credit(self, epoch: int) -> None:
        self._sender(self._server).send(BatchStrOutput(epoch=epoch, detokenized_time=time.monotonic(), rows=[]))

    def _sender(self, address: str) -> Sender[ToServer]:
        sender = self._servers.get(address)
        if sender is None:
            sender = self._servers[address] = Sender(self._context, address)
        return sender

    def shutdown(self) -> None:
        for sender in self._servers.values():
            sender.close()
        self._inbox.close()


def run_detokenizer(start: ProcessStart) -> None:
    """Decode until told to stop."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Receiver[ToDetokenizer] = Receiver(context, start.inbox, ToDetokenizer)
    tokenizer = Tokenizer.load(Path(start.folder))
    for skip_special_tokens in (True, False):
        tokenizer.table(skip_special_tokens=skip_special_tokens)  # made now, so that no request waits for it
    manager = DetokenizerManager(tokenizer, start.args.max_detokenizer_states)
    process = DetokenizerProcess(manager, inbox, context, start.server)
    try:
        process.startup(start.epoch)
        trim()  # who waits for the word that we are ready doesn't wait for this
        process.main_loop()
    finally:
        process.shutdown()
        context.term()


if __name__ == "__main__":
    enter_process("detokenizer", run_detokenizer)
