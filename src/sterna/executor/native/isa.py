"""Which instruction set the engine computes with."""

from __future__ import annotations

import sterna.executor.native._native as _native
from sterna.config.server_args import ServerArgs
from sterna.errors import ConfigError

OWN_ORDER = "amx"
"""Sums bfloat16 products in an order of its own (csrc/kernels/kernels.h)."""


def choose_isa(args: ServerArgs) -> str:
    """The best that the processor has, or what STERNA_ISA says; `--arithmetic portable` passes over the one whose sums differ.

    Raises ConfigError for one that the processor or this build lacks.
    """
    available: list[str] = _native.available_isas()
    if args.isa == "auto":
        return next(isa for isa in available if isa != OWN_ORDER or args.arithmetic != "portable")
    if args.isa not in available:
        raise ConfigError(f"STERNA_ISA must be one of {', '.join(available)} on this machine, not {args.isa!r}")
    if args.isa == OWN_ORDER and args.arithmetic == "portable":
        raise ConfigError(f"STERNA_ISA={OWN_ORDER} has an arithmetic of its own, so it can't be combined with --arithmetic portable")
    return args.isa
