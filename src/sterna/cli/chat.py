"""`sterna chat`: talk to a running server in the terminal, streaming."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from sterna.cli.client import DEFAULT_URL, ServerClient, printable
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
    parser.add_argument("--url", default=DEFAULT_URL, help=f"where the server is [{DEFAULT_URL}]")
    parser.add_argument("--model", help="one of /v1/models (default: its first)")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--api-key", help="also from STERNA_API_KEY")
    return parser


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


class ChatClient(ServerClient):
    """The conversation's side of the API."""

    def first_model(self) -> str:
        with self.request("GET", "/v1/models") as response:
            return str(json.load(response)["data"][0]["id"])

    def stream_chat(self, body: dict[str, Any]) -> Iterator[str]:
        """Content deltas. Leaving the iterator closes the connection, which ends the request.

        Raises StartupError with the server's message.
        """
        with self.request("POST", "/v1/chat/completions", body | {"stream": True}) as response:
            for line in response:
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    raise StartupError(event["error"]["message"])
                for choice in event["choices"]:
                    if choice["delta"].get("content"):
                        yield choice["delta"]["content"]
