"""What a JSON body may hold, looked at before it is decoded: the decoder runs on the event loop, and nothing else runs meanwhile.

Decoding costs up to 0.6 µs per array or object, 0.3 µs per key and 0.1 µs per value, so that a body of a few bytes per container would
hold everybody up for seconds. Counting bytes runs at gigabytes per second. A body inside these bounds takes 0.1 to 0.2 s at most
(measured on a shared core), and the largest honest ones fit: a prompt of a million ids, a chat of ten thousand messages, a text as
long as the body may be.
"""

from __future__ import annotations

from sterna.errors import InvalidRequest

MAX_CONTAINERS = 1 << 16
"""Arrays and objects."""
MAX_KEYS = 1 << 17
"""Fields of all objects together."""
MAX_VALUES = (1 << 20) + (1 << 16)
"""Elements and fields together."""
MAX_FIELDS = 256
"""Fields of the body itself. No API defines half as many."""

# So few bytes can't hold enough of anything.
SMALL_BYTES = 1 << 16


def check_bounds(body: bytes) -> None:
    """Raises InvalidRequest where `body` holds more than the bounds allow. Says nothing about whether it is JSON."""
    if len(body) <= SMALL_BYTES or not _excess(body):
        return
    # Long texts are full of brackets and commas: only those outside strings count. Escapes go first, then every second part between
    # quotes is outside. (Bytes that aren't JSON may be cut wrongly after their first fault, and no decoder gets that far.)
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') > 2 * (MAX_VALUES + MAX_KEYS):
        raise _refusal("strings", MAX_VALUES + MAX_KEYS)
    excess = _excess(b"".join(unescaped.split(b'"')[::2]))
    if excess is not None:
        raise _refusal(*excess)


def _excess(body: bytes) -> tuple[str, int] | None:
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        return "arrays and objects", MAX_CONTAINERS
    if body.count(b":") > MAX_KEYS:
        return "object fields", MAX_KEYS
    if body.count(b",") > MAX_VALUES:
        return "values", MAX_VALUES
    return None


def _refusal(what: str, most: int) -> InvalidRequest:
    return InvalidRequest(f"the body holds more than {most} {what}", code="body_too_complex")
