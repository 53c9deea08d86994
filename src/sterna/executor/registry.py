"""Engines by name: `--executor`. Imported when chosen, so that nobody pays for one that they don't use."""

from __future__ import annotations

import importlib
from pathlib import Path

from sterna.config.server_args import ServerArgs
from sterna.errors import ConfigError
from sterna.executor.base import Executor

EXECUTORS: dict[str, tuple[str, str]] = {
    "torch": ("sterna.executor.torch.executor", "create"),
    "scripted": ("sterna.executor.scripted", "create"),
}
"""Name -> module and factory, `create(args: ServerArgs, folder: Path) -> Executor`."""


def create_executor(args: ServerArgs, folder: Path) -> Executor:
    """Make `args.executor` for the resolved model in `folder`. Raises ConfigError for a name that isn't in the table, or an engine whose
    packages aren't installed; else what the engine raises."""
    if args.executor not in EXECUTORS:
        raise ConfigError(f"--executor {args.executor}: there are {', '.join(EXECUTORS)}")
    module, factory = EXECUTORS[args.executor]
    try:
        create = getattr(importlib.import_module(module), factory)
    except ModuleNotFoundError as fault:
        if fault.name is None or fault.name.startswith("sterna"):
            raise
        raise ConfigError(f"--executor {args.executor} needs the package {fault.name}: pip install 'sterna[{args.executor}]'") from fault
    executor: Executor = create(args, folder)
    return executor
