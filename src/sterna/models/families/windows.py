"""Sliding windows: how wide, and on which layers."""

from __future__ import annotations

from collections.abc import Sequence

from sterna.models.fields import Fields

_MAX_WINDOW = 1 << 28
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_window(fields: Fields, name: str, default: int | None, *, context_len: int) -> int | None:
    """A sliding window in tokens; None where the setting is null or 0, or where the context never outgrows it."""
    if fields.get(name) in (None, 0) and (default is None or fields.mentions(name)):
        return None
    window = fields.integer(name, default, high=_MAX_WINDOW)
    return window if window < context_len else None


def sliding_layers_from_hf(fields: Fields, num_layers: int, default: Sequence[bool]) -> tuple[bool, ...]:
    """Which layers have the window: `layer_types`, or else `default`."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return tuple(default)
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(map(str, kinds)) <= {_FULL, _SLIDING}:
        raise fields.fault("layer_types", f"must be {num_layers} times {_FULL!r} or {_SLIDING!r}")
    return tuple(kind == _SLIDING for kind in kinds)


def sliding_layers_from_gguf(fields: Fields, num_layers: int, period: int) -> tuple[bool, ...]:
    """Which layers have the window: `attention.sliding_window_pattern`, a flag for each layer or a period, whose last layer sees all."""
    name = "attention.sliding_window_pattern"
    flags = fields.get(name)
    if isinstance(flags, list):
        if len(flags) != num_layers or not all(isinstance(flag, bool) for flag in flags):
            raise fields.fault(name, f"must be {num_layers} times true or false, or a number")
        return tuple(flags)
    period = fields.integer(name, period, high=1 << 20)
    return tuple((layer + 1) % period != 0 for layer in range(num_layers))
