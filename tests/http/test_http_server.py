"""The HTTP server itself: deadlines, limits, and who owns signals."""

import asyncio
import contextlib
import json
import signal
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sterna.protocol.finish import FinishLength
from sterna.protocol.generate import TokenizedGenerateReqInput
from sterna.server import http_server
from sterna.server.http_server import MAX_HEADERS, HTTPServer
from unit.server.engine import Engine, running, silence

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = json.dumps({"prompt": "hi", "rid": "r"}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)


@contextlib.asynccontextmanager
async def serving(**args: Any) -> AsyncIterator[tuple[Engine, HTTPServer, int]]:
    async with running(**args) as engine:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        port = listener.getsockname()[1]
        server = HTTPServer(engine.app, engine.args, listener)
        await server.startup()
        try:
            yield engine, server, port
        finally:
            await server.shutdown()


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        """One response that says its length."""
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 30)
        status, *lines = head.decode().strip().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        body = await self._reader.readexactly(int(headers["content-length"]))
        return int(status.split()[1]), headers, body

    async def lines(self) -> AsyncIterator[bytes]:
        """Of a chunked body, as they come; of any length."""
        rest = b""
        while data := await asyncio.wait_for(self._reader.read(1 << 20), 30):
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                yield line.rstrip(b"\r")

    async def closed(self) -> bytes:
        """What came before the server closed."""
        return await asyncio.wait_for(self._reader.read(), 30)


@contextlib.asynccontextmanager
async def connected(port: int, data: bytes = b"") -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_answers_carry_a_date_and_connections_are_kept() -> None:
    async with serving() as (_, _, port), connected(port) as connection:
        for _ in range(2):
            connection.writer.write(GET)
            status, headers, body = await connection.response()
            assert (status, body) == (200, b'{"status":"ok"}')
            assert "date" in headers
            assert "server" not in headers


async def test_an_offer_to_upgrade_is_passed_over_and_the_body_is_read() -> None:
    body = b'{"prompt": "Upgrade: nothing here"}'
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (offer, len(body))
    async with serving() as (engine, _, port), connected(port) as connection:
        for data in ([head + body], [head, body]):
            for part in data:
                connection.writer.write(part)
                await connection.writer.drain()
            status, _, _ = await connection.response()
            assert status == 200
        assert [bytes(request.input_ids) for request in engine.received] == [b"Upgrade: nothing here"] * 2


@pytest.mark.parametrize("data", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: x\r\n"], ids=["nothing", "half", "headers"])
async def test_headers_that_never_end_are_given_up(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(http_server, "HEADER_DEADLINE_S", 0.05)
    async with serving() as (_, _, port), connected(port, data) as connection:
        status, headers, body = await connection.response()
        assert (status, headers["connection"]) == (408, "close")
        assert json.loads(body)["error"]["code"] == "request_timeout"
        assert await connection.closed() == b""


@pytest.mark.parametrize("deadline", ["BODY_DEADLINE_S", "BODY_IDLE_S"])
async def test_a_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch, deadline: str) -> None:
    monkeypatch.setattr(http_server, deadline, 0.05)
    async with serving() as (engine, _, port), connected(port, POST + BODY[:5]) as connection:
        status, _, _ = await connection.response()
        assert status == 408
        assert await connection.closed() == b""
        assert engine.received == []
        assert engine.app._budget.held == 0


async def test_a_request_in_progress_outlives_every_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    for deadline in ("HEADER_DEADLINE_S", "BODY_DEADLINE_S", "BODY_IDLE_S"):
        monkeypatch.setattr(http_server, deadline, 0.02)
    async with serving() as (engine, _, port):
        engine.script = silence
        async with connected(port, POST + BODY) as connection:
            while not engine.received:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.1)  # five deadlines: that none of them fires is what is tested
            engine.put("r", "done", reason=FinishLength(4))
            status, _, body = await connection.response()
            assert (status, json.loads(body)["choices"][0]["text"]) == (200, "done")


async def test_a_client_that_never_reads_loses_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "WRITE_STALL_S", 0.05)
    async with serving() as (engine, _, port):

        async def flood(engine: Engine, request: Any) -> None:
            while True:
                engine.put("r", "x" * 100_000)
                await asyncio.sleep(0.001)

        engine.script = flood
        body = json.dumps({"prompt": "hi", "rid": "r", "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        client = socket.create_connection(("127.0.0.1", port))
        try:
            client.sendall(head + body)
            await asyncio.wait_for(engine.abort_seen.wait(), 30)
            await asyncio.wait_for(engine.manager.idle_event.wait(), 30)
        finally:
            client.close()


async def test_a_slow_reader_bounds_its_own_buffer_and_holds_up_nobody() -> None:
    async with serving() as (engine, server, port):
        engine.script = silence
        slow = json.dumps({"prompt": "hi", "rid": "slow", "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        async with connected(port, head % len(slow) + slow) as unread, connected(port, POST + BODY) as connection:
            unread.writer.transport.pause_reading()
            while len(engine.received) < 2:
                await asyncio.sleep(0.001)
            held = []
            for _ in range(1000):
                engine.put("slow", "x" * 20_000)
                await asyncio.sleep(0)
                held += [each.transport.get_write_buffer_size() for each in server._server.server_state.connections]
            assert 0 < max(held) < 2_000_000, "of 20 MB that the request said"
            engine.put("r", "done", reason=FinishLength(4))
            status, _, body = await connection.response()
            assert (status, json.loads(body)["choices"][0]["text"]) == (200, "done")
            engine.put("slow", "end", reason=FinishLength(20_000_003))
            unread.writer.transport.resume_reading()
            text = 0
            async for line in unread.lines():
                if line == b"data: [DONE]":
                    break
                if line.startswith(b"data: "):
                    text += len(json.loads(line[6:])["choices"][0]["text"])
            assert text == 20_000_003, "nothing is lost by merging"


async def test_headers_without_end_are_refused() -> None:
    async with serving() as (_, _, port), connected(port, b"GET /health HTTP/1.1\r\n") as connection:
        connection.writer.write((b"x-filler: " + b"y" * 990 + b"\r\n") * 66)
        status, _, body = await connection.response()
        assert (status, json.loads(body)["error"]["code"]) == (431, "headers_too_large")
        assert await connection.closed() == b""


@pytest.mark.parametrize(("query", "value"), [(b"?" + b"q" * 70_000, b""), (b"", b"y" * 70_000)], ids=["path", "header"])
async def test_headers_that_are_too_large_are_refused_though_they_come_at_once(query: bytes, value: bytes) -> None:
    head = b"GET /health" + query + b" HTTP/1.1\r\nx: " + value + b"\r\n\r\n"
    async with serving() as (_, _, port), connected(port, head) as connection:
        status, _, body = await connection.response()
        assert (status, json.loads(body)["error"]["code"]) == (431, "headers_too_large")
        assert await connection.closed() == b""


@pytest.mark.parametrize("half_closed", [False, True])
async def test_an_answer_without_a_body_reaches_a_client_that_has_said_its_last(half_closed: bool) -> None:
    async with serving() as (_, _, port):
        for _ in range(20):
            async with connected(port, b"HEAD /health HTTP/1.1\r\nconnection: close\r\n\r\n") as connection:
                if half_closed:
                    connection.writer.write_eof()
                assert (await connection.closed()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("lines", [MAX_HEADERS + 1, 20_000])
async def test_too_many_headers_are_too_large_however_short(lines: int) -> None:
    head = b"GET /health HTTP/1.1\r\n" + b"a:\r\n" * lines + b"\r\n"
    async with serving() as (_, _, port), connected(port, head) as connection:
        assert (await connection.response())[0] == 431


async def test_trailers_are_dropped_and_bounded() -> None:
    chunked = b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n10\r\n" + b'{"prompt": "hi"}' + b"\r\n0\r\n"
    async with serving() as (_, _, port):
        async with connected(port, chunked + b"x-request-timeout: nonsense\r\n\r\n") as connection:
            assert (await connection.response())[0] == 200
        async with connected(port, chunked) as connection:
            answer = asyncio.create_task(connection.response())
            while not answer.done():  # one read may pass that comes with what is before it
                connection.writer.write(b"x: " + b"y" * 30_000 + b"\r\n")
                await asyncio.wait([answer], timeout=0.05)
            status, _, body = await answer
            assert (status, json.loads(body)["error"]["code"]) == (431, "headers_too_large")


async def test_a_large_body_in_small_chunks_is_no_header() -> None:
    body = json.dumps({"prompt": "hi", "user": "u" * 200, "metadata": None, "stop": ["x" * 50] * 4}).encode() + b" " * 200_000
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[at : at + 4] for at in range(0, len(body), 4)))
    head = b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving() as (_, _, port), connected(port, head + chunks + b"0\r\n\r\n") as connection:
        assert (await connection.response())[0] == 200


async def test_an_empty_line_after_an_answer_keeps_no_connection_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADER_DEADLINE_S", 0.2)
    async with serving() as (_, _, port), connected(port, GET) as connection:
        await connection.response()
        connection.writer.write(b"\r\n")
        assert await connection.closed() == b""


@pytest.mark.parametrize("bad", [b"BAD\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n"], ids=["not HTTP", "too large"])
@pytest.mark.parametrize("together", [False, True])
async def test_a_bad_request_behind_a_good_one_takes_nothing_from_it(bad: bytes, together: bool) -> None:
    async with serving() as (engine, _, port):
        go_on = asyncio.Event()

        async def slow(engine: Engine, request: TokenizedGenerateReqInput) -> None:
            await go_on.wait()
            engine.put(request.rid, "fine", reason=FinishLength(4))

        engine.script = slow
        waiting = GET + bad  # a good one waits between them
        async with connected(port, POST + BODY + (waiting if together else b"")) as connection:
            while not engine.received:
                await asyncio.sleep(0)
            if not together:
                connection.writer.write(waiting)
                await connection.writer.drain()
                await asyncio.sleep(0.05)
            go_on.set()
            status, _, body = await connection.response()
            assert (status, json.loads(body)["choices"][0]["text"]) == (200, "fine")
            assert (await connection.response())[0] == 200
            assert await connection.closed() == b""
        assert not engine.aborted


async def test_two_timeouts_are_one_too_many() -> None:
    body = b'{"prompt": "hi"}'
    head = b"POST /v1/completions HTTP/1.1\r\nx-request-timeout: 5\r\nX-Request-Timeout: 9\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with serving() as (_, _, port), connected(port, head + body) as connection:
        status, _, answer = await connection.response()
        assert (status, json.loads(answer)["error"]["param"]) == (400, "X-Request-Timeout")


async def test_what_is_not_http_is_a_400_in_openai_s_shape() -> None:
    async with serving() as (_, _, port), connected(port, b"\x16\x03\x01\x02\x00\r\n\r\n") as connection:
        status, _, body = await connection.response()
        assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_http")


async def test_a_body_over_the_limit_is_answered_before_it_has_been_sent() -> None:
    async with serving(max_body_bytes=1000) as (_, _, port):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n"
        async with connected(port, head) as connection:
            status, _, body = await connection.response()
            assert (status, json.loads(body)["error"]["code"]) == (413, "payload_too_large")


async def test_a_pipelined_request_waits_for_the_answer_before_it() -> None:
    async with serving() as (engine, _, port):
        engine.script = silence
        async with connected(port, POST + BODY + GET) as connection:
            while not engine.received:
                await asyncio.sleep(0.001)
            engine.put("r", "done", reason=FinishLength(4))
            assert json.loads((await connection.response())[2])["id"] == "r"
            assert (await connection.response())[2] == b'{"status":"ok"}'


async def test_who_pipelines_and_goes_is_gone() -> None:
    body = json.dumps({"prompt": "hi", "rid": "r", "stream": True}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with serving() as (engine, _, port):
        engine.script = silence
        async with connected(port, post + body + GET) as connection:
            while not engine.received:
                await asyncio.sleep(0.001)
            connection.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.writer.transport.abort()
        async with asyncio.timeout(30):
            while not engine.aborted:
                engine.put("r", "text")  # the server reads no further while an answer is due: it finds out when it writes
                await asyncio.sleep(0.001)
        (record,) = engine.manager.recorder.find("r")
        assert record.abort_cause == "client_gone"


async def test_signals_stay_the_caller_s_and_shutdown_closes_the_port_and_the_app() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    async with serving() as (engine, server, port):
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
        async with connected(port, GET) as idle:
            await idle.response()
            await server.shutdown()
            assert await idle.closed() == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        with pytest.raises(RuntimeError, match="shutdown"):
            await engine.app.context.threads.rendering.run(int)
