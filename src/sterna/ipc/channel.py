"""One-way pipelines of typed messages: ZeroMQ PUSH/PULL over Unix sockets, msgspec-encoded MessagePack. Never pickle.

A `Receiver[T]` binds its inbox; any number of `Sender[T]`s connect to it. Order holds per sender. A message that isn't a `T`
raises `ChannelError` at the boundary and reaches nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec
import zmq

T = TypeVar("T")


class ChannelError(Exception):
    """Bytes that don't decode as the channel's union, or a receiver that isn't taking any."""


class Sender(Generic[T]):
    """Sends `T` to one inbox. `send` doesn't wait: credits bound the queue, and ZeroMQ's own limit stands behind them."""

    def __init__(self, context: zmq.Context[Any], address: str, *, high_water_mark: int = 100_000) -> None:
        self.address = address
        self._encoder = msgspec.msgpack.Encoder()
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, high_water_mark)
        self._socket.setsockopt(zmq.LINGER, 1000)
        # Senders connect before their reader has bound: the default of 100 ms between tries would show in the time to ready.
        self._socket.setsockopt(zmq.RECONNECT_IVL, 5)
        self._socket.connect(address)

    def send(self, message: T) -> None:
        """Raises ChannelError where the receiver has stopped taking messages and the bound is reached."""
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise ChannelError(f"{self.address}: the receiver takes no more messages") from None

    def close(self, *, linger_ms: int = 1000) -> None:
        self._socket.close(linger=linger_ms)


class Receiver(Generic[T]):
    """The inbox `address`, decoded as `union`."""

    def __init__(self, context: zmq.Context[Any], address: str, union: Any, *, high_water_mark: int = 100_000) -> None:
        self.address = address
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, high_water_mark)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)

    @property
    def fd(self) -> int:
        """Readable (edge-triggered: drain until empty) when a message may be there."""
        return int(self._socket.getsockopt(zmq.FD))

    def wait(self, timeout_ms: int | None = None) -> bool:
        """Sleep until a message is there; False after `timeout_ms`."""
        return bool(self._socket.poll(timeout_ms, zmq.POLLIN))

    def drain(self, limit: int = 1_000_000) -> Iterator[T]:
        """Every message that is there now, `limit` at most, without waiting.

        Raises ChannelError for one that isn't a `T`; the rest stay.
        """
        for _ in range(limit):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                yield self._decoder.decode(frame)
            except msgspec.MsgspecError as fault:
                raise ChannelError(f"{self.address}: {fault}") from fault

    def close(self) -> None:
        self._socket.close(linger=0)
