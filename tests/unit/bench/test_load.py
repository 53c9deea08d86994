"""The load: the same prompts for all, and figures that mean what they say."""

import asyncio
import json
from dataclasses import replace

import pytest

import cases
from cases import CASES, Case
from peers.openvino import closed_loop, prompts


async def _recorded(case: Case, seed: int, status: str = "200 OK") -> tuple[list[str], dict[str, object] | RuntimeError]:
    """What the load generator sends to a server that answers each request with two tokens, and what `drive` makes of it."""
    seen: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.partition("Content-Length: ")[2].partition("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        seen.append(body["prompt"])
        writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode())
        for text in ("a", "b"):
            writer.write(b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n")
        usage = {"prompt_tokens": case.prompt_tokens + case.shared_prefix, "completion_tokens": body["max_tokens"]}
        writer.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        try:
            return seen, await asyncio.to_thread(cases.drive, f"http://127.0.0.1:{port}", "m", case.flags(seed))
        except RuntimeError as fault:
            return seen, fault


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=lambda case: case.name)
def test_a_peer_in_process_gets_the_load_generators_prompts(case: Case) -> None:
    case = replace(case, requests=5, concurrency=1)
    seen, figures = asyncio.run(_recorded(case, 7))
    assert seen == prompts(case, 7)
    assert len(set(seen)) == 5
    assert isinstance(figures, dict)
    assert figures["ok"] == 5


def test_prompt_speed_is_the_prompts_length_over_the_time_to_the_first_token() -> None:
    figures = {"in_tok": 5700, "ok": 3, "ttft_ms": {"p50": 500.0}}
    assert cases.with_prompt_speed(figures)["prompt_tok_s"] == 3800.0
    _, driven = asyncio.run(_recorded(replace(CASES[4], requests=1), 1))
    assert isinstance(driven, dict)
    assert driven["prompt_tok_s"] > 0


def test_a_run_with_a_failed_request_is_no_figure() -> None:
    _, fault = asyncio.run(_recorded(replace(CASES[0], requests=2), 1, status="503 Service Unavailable"))
    assert isinstance(fault, RuntimeError)
    assert "503" in str(fault)


class _Handle:
    def __init__(self, tokens: int) -> None:
        self.left = tokens
        self.ready = 0

    def can_read(self) -> bool:
        return self.ready > 0

    def read(self) -> dict[int, object]:
        self.ready -= 1
        return {0: type("Output", (), {"generated_ids": [1]})()}


class _Pipeline:
    """One token for every request at every step."""

    def __init__(self) -> None:
        self.handles: list[_Handle] = []
        self.most = 0

    def add_request(self, number: int, text: str, config: object) -> _Handle:
        self.handles.append(_Handle(3))
        return self.handles[-1]

    def step(self) -> None:
        live = [handle for handle in self.handles if handle.left]
        self.most = max(self.most, len(live))
        for handle in live:
            handle.left -= 1
            handle.ready += 1


def test_the_closed_loop_keeps_so_many_requests_going_and_counts_every_token() -> None:
    pipeline = _Pipeline()
    config = type("Config", (), {"max_new_tokens": 3})()
    figures = closed_loop(pipeline, config, ["x"] * 10, 4, len)
    assert pipeline.most == 4
    assert len(pipeline.handles) == 10
    assert (figures["ok"], figures["out_tok"], figures["in_tok"]) == (10, 30, 10)
