"""Settings checked and completed, once and purely: everything after this trusts them."""

from __future__ import annotations

import msgspec

from sterna.config.model_config import ModelConfig
from sterna.config.server_args import ServerArgs
from sterna.errors import ConfigError

_RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "threads": (1, 4096),
    "context_length": (2, 1 << 30),
    "max_total_tokens": (1, 1 << 31),
    "page_size": (1, 4096),
    "max_running_requests": (1, 65536),
    "max_queued_requests": (0, 10_000_000),
    "max_queued_tokens": (1, 1 << 40),
    "max_concurrent_per_key": (1, 10_000_000),
    "waiting_timeout": (0.001, 86_400),
    "running_timeout": (0.001, 86_400),
    "priority_ageing": (0.001, 86_400),
    "max_sessions": (0, 1_000_000),
    "max_session_tokens": (0, 1 << 40),
    "session_timeout": (0.01, 604_800),
    "chunked_prefill_size": (0, 1 << 30),
    "max_body_bytes": (1024, 1 << 40),
    "max_detokenizer_states": (1, 10_000_000),
    "sse_keep_alive": (0.01, 3600),
    "sse_commit_after": (0, 3600),
    "drain_timeout": (0, 86_400),
    "flight_recorder": (0, 16_384),
    "stream_interval": (1, 65536),
}


_ONLY_FOR = {"quantization": "native", "arithmetic": "native", "dtype": "torch"}
"""Settings that would change the output, so that another executor than theirs must not ignore them."""


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def check(args: ServerArgs) -> ServerArgs:
    """What needs no model to be checked. Raises ConfigError naming the flag."""
    for field, (low, high) in _RANGES.items():
        value = getattr(args, field)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{flag_of(field)} must be between {low:g} and {high:g}, not {value}")
    if not args.host:
        raise ConfigError("--host is empty")
    for field in ("api_key", "admin_api_key"):
        if getattr(args, field) == "":
            raise ConfigError(f"{flag_of(field)} is empty")
    for field, executor in _ONLY_FOR.items():
        if args.executor != executor and getattr(args, field) != getattr(ServerArgs(), field):
            raise ConfigError(f"{flag_of(field)} is for the {executor} executor, not for {args.executor} (see --executor)")
    if args.executor != "torch" and args.device not in ("auto", "cpu"):
        raise ConfigError(f"--device {args.device}: the {args.executor} executor runs on the CPU (see --executor torch)")
    return args


def complete(args: ServerArgs, model: ModelConfig) -> ServerArgs:
    """Fill in what the model decides. Raises ConfigError where the named folder was resolved for another context length."""
    if args.context_length not in (None, model.context_len):
        raise ConfigError(f"--context-length {args.context_length}: {args.model} was resolved for {model.context_len} tokens")
    return msgspec.structs.replace(args, context_length=model.context_len)
