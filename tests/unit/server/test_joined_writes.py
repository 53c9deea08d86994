import asyncio

from sterna.server.joined_writes import JoinedWrites

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class FakeTransport:
    def __init__(self) -> None:
        self.packets: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.packets.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def joined() -> tuple[JoinedWrites, FakeTransport]:
    transport = FakeTransport()
    return JoinedWrites(transport, asyncio.get_running_loop()), transport  # type: ignore[arg-type]


async def test_a_head_goes_with_the_body_that_follows_at_once_and_the_rest_by_itself() -> None:
    writes, transport = joined()
    for data in (HEAD, b"one", b"two"):
        writes.write(data)
    assert transport.packets == [HEAD + b"one", b"two"]
    await asyncio.sleep(0)
    assert transport.packets == [HEAD + b"one", b"two"]


async def test_a_head_waits_for_nobody() -> None:
    writes, transport = joined()
    writes.write(HEAD)
    await asyncio.sleep(0)
    assert transport.packets == [HEAD]
    writes.write(b"later")
    assert transport.packets == [HEAD, b"later"]


async def test_what_is_kept_back_goes_before_the_connection_is_closed_and_nothing_after_it() -> None:
    writes, transport = joined()
    writes.write(HEAD)
    writes.close()
    assert transport.packets == [HEAD]
    await asyncio.sleep(0)
    writes.write(HEAD)
    await asyncio.sleep(0)
    assert transport.packets == [HEAD]


async def test_a_body_that_looks_like_a_head_stays_in_its_place() -> None:
    writes, transport = joined()
    for data in (HEAD, HEAD, HEAD, b"end"):
        writes.write(data)
    await asyncio.sleep(0)
    assert b"".join(transport.packets) == 3 * HEAD + b"end"


async def test_it_is_the_transport_in_all_else() -> None:
    writes, transport = joined()
    assert writes.is_closing() is False
    assert writes.packets is transport.packets
