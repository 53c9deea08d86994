"""`sterna chat`: talk to a running server in the terminal, streaming."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from sterna.errors import StartupError

HELP = "/new forgets the conversation, /system TEXT sets the system message, /exit leaves (so does Ctrl-D); Ctrl-C stops an answer"

Message = dict[str, str]


def run(argv: Sequence[str]) -> int:
    """A conversation until end of input; the exit code. Raises StartupError where no server answers."""
    args = _parser().parse_args(argv)
    client = ChatClient(args.url, args.api_key or os.environ.get("STERNA_API_KEY"))
    model = args.model or client.first_model()
    console = Console(highlight=False)
    options = {name: value for name in ("temperature", "max_tokens", "seed") if (value := getattr(args, name)) is not None}
    conversation = Conversation(args.system)
    interactive = sys.stdin.isatty()
    if interactive:
        console.print(f"{printable(model)} at {args.url}", style="bold", markup=False)
        console.print(HELP, style="dim", markup=False)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            return 0
        if line == "/exit":
            return 0
        if not line or conversation.command(line, console):
            continue
        conversation.messages.append({"role": "user", "content": line})
        answer = _answer(client, {"model": model, "messages": conversation.messages, **options}, console)
        if answer is None:
            conversation.messages.pop()
            if not interactive:
                return 1
        else:
            conversation.messages.append({"role": "assistant", "content": answer})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sterna chat", description="Talk to a running server.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server is [http://127.0.0.1:8000]")
    parser.add_argument("--model", help="one of /v1/models (default: its first)")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--api-key", help="also from STERNA_API_KEY")
    return parser


def printable(text: str) -> str:
    """`text` without what a terminal would obey: every control character but newline and tab.

    Without its escape character a control sequence is plain text, so nothing has to be remembered from one piece to the next.
    """
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")


class Conversation:
    """The messages so far, and the commands that change them."""

    def __init__(self, system: str | None) -> None:
        self._system = system
        self.messages: list[Message] = []
        self._reset()

    def _reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def command(self, line: str, console: Console) -> bool:
        """Obey `line` if it is a command."""
        word, _, rest = line.partition(" ")
        match word:
            case "/new":
                self._reset()
            case "/system":
                self._system = rest or None
                self._reset()
            case "/help":
                console.print(HELP, style="dim", markup=False)
            case _:
                return False
        return True


def _answer(client: ChatClient, body: dict[str, Any], console: Console) -> str | None:
    """Print the answer as it comes; None where there was none. An answer that Ctrl-C cut short counts."""
    pieces: list[str] = []
    try:
        for piece in client.stream_chat(body):
            pieces.append(piece)
            console.out(printable(piece), end="", highlight=False)
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/]", end="")
    except StartupError as fault:
        console.print(printable(str(fault)), style="red", markup=False)
        return None
    console.print()
    return "".join(pieces)


class ChatClient:
    """As much of HTTP and SSE as a conversation needs, from the standard library: starting takes no time."""

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StartupError(f"not an http address: {url}")
        self._url = url
        self._parts = parts
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    def first_model(self) -> str:
        with self._request("GET", "/v1/models", None) as response:
            return str(json.load(response)["data"][0]["id"])

    def stream_chat(self, body: dict[str, Any]) -> Iterator[str]:
        """Content deltas. Leaving the iterator closes the connection, which ends the request.

        Raises StartupError with the server's message.
        """
        with self._request("POST", "/v1/chat/completions", body | {"stream": True}) as response:
            for line in response:
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    raise StartupError(event["error"]["message"])
                for choice in event["choices"]:
                    if choice["delta"].get("content"):
                        yield choice["delta"]["content"]

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        connection = kind(self._parts.hostname, self._parts.port)
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
        except OSError as fault:
            raise StartupError(f"no server at {self._url} ({fault.strerror or fault}); start one with: sterna serve") from fault
        if response.status != 200:
            raise StartupError(_error_message(response))
        return response


def _error_message(response: http.client.HTTPResponse) -> str:
    text = response.read().decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status}: {text[:200]}"
