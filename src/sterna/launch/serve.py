"""From settings to a server that runs: resolve the model, bind the port, and hand over to the group of processes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import msgspec

from sterna.config.log import setup_logging
from sterna.config.model_config import ModelConfig
from sterna.config.resolve import check, complete
from sterna.config.server_args import ServerArgs
from sterna.errors import ConfigError
from sterna.files.cache import cache_root
from sterna.ipc.addresses import RunDirectory
from sterna.launch.group import Group
from sterna.models.resolve import resolve_model
from sterna.server.http_server import BACKLOG
from sterna.tokenizer_manager.manager import TokenizerManager


async def serve(args: ServerArgs, announce: Callable[[ServerArgs, TokenizerManager, float], None]) -> int:
    """Serve until told to stop. `announce` is called once, when the first request can be answered, with the seconds it took.

    Returns the exit code. Raises StartupError for whatever is wrong before serving.
    """
    began = time.monotonic()
    args = check(args)
    setup_logging(args.log_level, "server")
    folder = resolve_model(args.model, cache_dir=cache_root(args.cache_dir), context_length=args.context_length)
    args = complete(args, ModelConfig.load(folder))
    listener = _listen(args.host, args.port)
    args = msgspec.structs.replace(args, port=listener.getsockname()[1])
    run = RunDirectory.create()
    try:
        group = Group.create(args, folder, run, listener)
        try:
            await group.startup()
            if group.manager.ready:
                announce(args, group.manager, time.monotonic() - began)
            await group.main_loop()
        finally:
            code = await group.shutdown()
        return code
    finally:
        run.remove()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as fault:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {fault.strerror or fault}; another port: --port N (or PORT=N make serve)"
        ) from fault
    listener.setblocking(False)
    return listener
