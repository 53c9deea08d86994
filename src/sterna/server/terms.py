"""The terms on which a generating request is let in: its priority, its deadline, whose it is. Known as soon as the body is decoded."""

from __future__ import annotations

import hashlib
import math
import secrets
from typing import Annotated

from msgspec import Meta

from sterna.config.server_args import ServerArgs
from sterna.errors import InvalidRequest
from sterna.server.exchange import Exchange
from sterna.tokenizer_manager.admission import Terms

MAX_PRIORITY = 100
MAX_TIMEOUT_S = 86_400

Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="higher goes first; needs --schedule-policy priority")]
Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S, description="seconds that the request may take, from its arrival to its end")]

TIMEOUT_HEADER = "X-Request-Timeout"
"""Seconds, as the field `timeout`; where a request has both, the shorter one holds."""

# Keys are told apart by digests under a secret of this process: nothing here holds one, and nobody can choose two that collide.
_SECRET = secrets.token_bytes(32)


def to_terms(exchange: Exchange, args: ServerArgs, *, priority: int | None, timeout: float | None) -> Terms:
    """Raises InvalidRequest for a priority where nothing goes by it, and for a header that isn't a number of seconds."""
    if priority and args.schedule_policy != "priority":
        raise InvalidRequest(
            f"priority: this server serves by {args.schedule_policy} (--schedule-policy); leave it out, or send 0",
            param="priority",
            code="unsupported_parameter",
        )
    limits = [seconds for seconds in (timeout, _header_timeout(exchange)) if seconds is not None]
    return Terms(
        priority=priority or 0,
        deadline=exchange.received + min(limits) if limits else None,
        key=b"" if args.max_concurrent_per_key is None else _digest(exchange.header(b"authorization")),
    )


def _header_timeout(exchange: Exchange) -> float | None:
    values = exchange.headers(TIMEOUT_HEADER.lower().encode())
    if not values:
        return None
    if len(values) > 1:
        raise InvalidRequest(f"{TIMEOUT_HEADER}: one value is expected, not {len(values)}", param=TIMEOUT_HEADER)
    (given,) = values
    try:
        seconds = math.nan if b"_" in given else float(given)  # Python reads 1_0 as 10; nobody else does
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise InvalidRequest(f"{TIMEOUT_HEADER}: seconds, more than 0 and at most {MAX_TIMEOUT_S}", param=TIMEOUT_HEADER)
    return seconds


def _digest(authorization: bytes | None) -> bytes:
    if authorization is None:
        return b""
    _, _, key = authorization.partition(b" ")
    return hashlib.blake2b(key.strip(), key=_SECRET, digest_size=16).digest()
