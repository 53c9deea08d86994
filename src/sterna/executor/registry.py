"""The executors by name; a module is imported only when its executor is asked for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import cast

from sterna.config.server_args import ServerArgs
from sterna.errors import ConfigError
from sterna.executor.base import Executor

EXECUTORS: dict[str, tuple[str, str]] = {
    "native": ("sterna.executor.native.executor", "create"),
    "torch": ("sterna.executor.torch.executor", "create"),
    "scripted": ("sterna.executor.scripted", "create"),
}
"""Name -> (module, function); the function is `create(args: ServerArgs, folder: Path) -> Executor`."""

_EXTRAS = {"torch": "torch"}
"""Name -> the extra that brings what the executor imports; the extra's main package has the same name."""


def create_executor(args: ServerArgs, folder: Path) -> Executor:
    """Make `args.executor` for the resolved model `folder`, weights loaded and KV pool allocated.

    Raises ConfigError for an unknown name, a missing extra or settings that it can't serve, ModelError for a model it can't read.
    """
    row = EXECUTORS.get(args.executor)
    if row is None:
        raise ConfigError(f"--executor must be one of {', '.join(sorted(EXECUTORS))}, not {args.executor!r}")
    module_name, function = row
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as fault:
        extra = _EXTRAS.get(args.executor)
        if extra is None or fault.name is None or fault.name.partition(".")[0] != extra:
            raise
        raise ConfigError(f"the {args.executor} executor needs PyTorch: pip install 'sterna[{extra}]'") from fault
    return cast(Executor, getattr(module, function)(args, folder))
