"""`sterna COMMAND`: one file per command, imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys

from sterna import __version__
from sterna.errors import StartupError

COMMANDS = {
    "serve": ("sterna.cli.serve", "serve a model over HTTP"),
    "chat": ("sterna.cli.chat", "talk to a running server in the terminal"),
    "trace": ("sterna.cli.trace", "show what became of a request, and when"),
    "pull": ("sterna.cli.pull", "fetch a model into the cache"),
    "cache": ("sterna.cli.cache", "list and clear what is kept on disk"),
}


def main(argv: list[str] | None = None) -> None:
    """Exit code 0, 1 for what `StartupError` says, 2 for wrong usage, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="sterna", description="An LLM serving engine.")
    parser.add_argument("--version", action="version", version=f"sterna {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    command = parser.parse_args(argv[:1]).command
    try:
        sys.exit(importlib.import_module(COMMANDS[command][0]).run(argv[1:]))
    except StartupError as fault:
        print(f"sterna: {fault}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
