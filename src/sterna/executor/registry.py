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

_NEEDS = {
    "torch": ("torch", "the torch executor needs PyTorch: pip install 'sterna[torch]'"),
    "native": (
        "sterna.executor.native._native",
        "the native executor was not built for this Python. `make serve` or `pip install .` in Sterna's repository builds it; that takes a "
        "C++17 compiler and Python's header files (Debian, Ubuntu: apt-get install g++ python3-dev). Without it: --executor torch",
    ),
}
"""Name -> the module that may be missing where the executor is, and what to do then."""


def create_executor(args: ServerArgs, folder: Path) -> Executor:
    """Make `args.executor` for the resolved model `folder`, weights loaded and KV pool allocated.

    Raises ConfigError for an unknown name, an executor that isn't installed or settings that it can't serve, ModelError for a model that it
    can't read.
    """
    row = EXECUTORS.get(args.executor)
    if row is None:
        raise ConfigError(f"--executor must be one of {', '.join(sorted(EXECUTORS))}, not {args.executor!r}")
    module_name, function = row
    try:
        module = import_module(module_name)
    except ImportError as fault:
        needed, advice = _NEEDS.get(args.executor, (None, ""))
        if needed is None or fault.name is None or not f"{fault.name}.".startswith(f"{needed}."):
            raise
        raise ConfigError(advice if isinstance(fault, ModuleNotFoundError) else f"{fault}: {advice}") from fault
    return cast(Executor, getattr(module, function)(args, folder))
