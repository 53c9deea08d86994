"""`sterna cache list|clear`: what is kept on disk."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from sterna.config.memory import show_bytes
from sterna.errors import ConfigError
from sterna.files.cache import cache_root, label_of
from sterna.files.inventory import Item, items, remove

KINDS = {
    "download": "fetched from the package index",
    "hub": "fetched from the hub (the files are in the hub's own cache, which other programs share)",
    "resolved": "translated for the servers' processes",
    "packed": "weights as the native engine maps them",
}
_SAFE = (
    "Safe while servers run: they keep what they have mapped, and its space is freed when they end. What is cleared is fetched or made "
    "again when it is next needed. Of hub models only Sterna's note is cleared: their files are in the hub's own cache."
)


def run(argv: Sequence[str]) -> int:
    """Exit code 0; 1 where `--model` names nothing that is kept."""
    args = _parser().parse_args(argv)
    root = cache_root(args.cache_dir)
    kept = [item for item in items(root) if args.kind in (None, item.kind)]
    if args.action == "list":
        _show(root, kept)
        return 0
    if args.model is not None:
        labels = {label_of(args.model), label_of(Path(args.model).name)}  # a file or folder is called by its own name
        kept = [item for item in kept if item.label in labels]
        if not kept:
            raise ConfigError(f"nothing of {args.model} is kept in {root}: sterna cache list")
    for item in kept:
        remove(item)
    cleared = [item for item in kept if item.kind != "hub"]
    print(f"cleared {len(kept)} of {root}: {show_bytes(sum(item.nbytes for item in cleared))}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sterna cache", description="List and clear what is kept on disk.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, summary in (("list", "show what is kept, its size and its last use"), ("clear", "delete what is kept of a model, or all")):
        command = actions.add_parser(action, help=summary, description=summary if action == "list" else f"{summary}. {_SAFE}")
        command.add_argument("--kind", choices=KINDS, help="only " + "; ".join(f"{kind}: {text}" for kind, text in KINDS.items()))
        command.add_argument("--cache-dir", help="where models are kept (also STERNA_CACHE_DIR; default ~/.cache/sterna)")
        command.set_defaults(model=None)
        if action == "clear":
            what = command.add_mutually_exclusive_group(required=True)
            what.add_argument("--model", help="as it was named when it was served or pulled")
            what.add_argument("--all", action="store_true", help="of every model")
    return parser


def _show(root: Path, kept: Sequence[Item]) -> None:
    now = time.time()
    rows = [("KIND", "MODEL", "SIZE", "LAST USE", "PATH")]
    rows += [(item.kind, item.label, show_bytes(item.nbytes), ago(now - item.used), str(item.path)) for item in kept]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join((*(text.ljust(width) for text, width in zip(row[:4], widths, strict=True)), row[4])))
    own = sum(item.nbytes for item in kept if item.kind != "hub")
    print(f"{len(kept)} kept in {root}: {show_bytes(own)}")


def ago(seconds: float) -> str:
    """`3 days ago`; what a clock that was set back makes lie in the future is `just now`."""
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // length)
        if count >= 1:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
