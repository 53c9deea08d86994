"""`sterna trace [RID]`: what became of a request, from a running server's flight recorder; without a RID, which ones it knows."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlencode

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sterna.cli.client import DEFAULT_URL, ServerClient, printable
from sterna.cli.timeline import describe_state, draw, show_ms

STATES = ("live", "tokenizing", "queued", "running", "finishing", "finished")


def run(argv: Sequence[str], console: Console | None = None) -> int:
    """Exit code 0. Raises StartupError where there is no server, no such request, or no right to see it."""
    args = _parser().parse_args(argv)
    # Everybody's requests are the admin's to see, where there is one.
    admin_key = os.environ.get("STERNA_ADMIN_API_KEY") if args.rid is None else None
    client = ServerClient(args.url, args.api_key or admin_key or os.environ.get("STERNA_API_KEY"))
    if args.rid is None:
        query = {"limit": args.limit} | ({"state": args.state} if args.state else {})
        answer = client.get(f"/v1/requests?{urlencode(query)}")
    else:
        answer = client.get(f"/v1/requests/{quote(args.rid, safe='')}")
    if args.json:
        print(json.dumps(answer, indent=2))
        return 0
    console = console or Console(highlight=False)
    if args.rid is None:
        _show_list(console, answer)
    else:
        _show_traces(console, answer)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sterna trace", description="Draw the stages of a live or recent request, process by process; without RID, list them."
    )
    parser.add_argument("rid", nargs="?", metavar="RID", help="the `id` or `rid` of an answer; a list's own stands for its members")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"where the server is [{DEFAULT_URL}]")
    parser.add_argument("--api-key", help="also from STERNA_API_KEY, for the list STERNA_ADMIN_API_KEY")
    parser.add_argument("--json", action="store_true", help="print what the server says, undrawn")
    parser.add_argument("--limit", type=int, default=20, help="requests in the list at most [20]")
    parser.add_argument("--state", choices=STATES, help="list only these; live is all but finished")
    return parser


def _show_traces(console: Console, answer: dict[str, Any]) -> None:
    traces = answer["requests"]
    for index, trace in enumerate(traces):
        if index:
            console.rule(style="dim")
        console.print(draw(trace, width=console.width, ascii_only=console.options.ascii_only))
    if answer["total"] > len(traces):
        console.print(f"and {answer['total'] - len(traces)} more members", style="dim")


def _show_list(console: Console, answer: dict[str, Any]) -> None:
    if not answer["data"]:
        console.print("no such requests", style="dim")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("STATE", "RID", "ROUTE"):
        table.add_column(title, overflow="fold")
    for title in ("PROMPT", "CACHED", "OUTPUT", "TOOK"):
        table.add_column(title, justify="right")
    for each in answer["data"]:
        tokens = [str(each[field]) for field in ("prompt_tokens", "cached_tokens", "output_tokens")]
        took = show_ms(each["duration_ms"]) + ("" if each["outcome"] else "…")
        table.add_row(describe_state(each), Text(printable(each["rid"]), style="bold"), Text(printable(each["route"] or "")), *tokens, took)
    console.print(table)
    if answer["next_before"] is not None:
        console.print("older ones: --limit", style="dim")
