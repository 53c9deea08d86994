"""Which instruction set the engine computes with."""

from __future__ import annotations

import os

import sterna.executor.native._native as _native
from sterna.config.server_args import ServerArgs
from sterna.errors import ConfigError

_VARIABLE = "STERNA_ISA"
"""Where the flag's value may have come from: a message names what its reader has to change."""


def choose_isa(args: ServerArgs) -> str:
    """The best that the processor has, or what --isa or STERNA_ISA says; `--arithmetic portable` passes over those whose sums differ.

    Raises ConfigError for one that the processor or this build lacks.
    """
    available: list[str] = _native.available_isas()
    portable = args.arithmetic == "portable"
    if args.isa == "auto":
        return next(isa for isa in available if not portable or _native.has_portable_bf16(isa))
    said = _VARIABLE if os.environ.get(_VARIABLE) == args.isa else "--isa"
    if args.isa not in available:
        raise ConfigError(f"{said} must be auto or one of {', '.join(available)} on this machine, not {args.isa!r}")
    if portable and not _native.has_portable_bf16(args.isa):
        raise ConfigError(f"{said} {args.isa} has an arithmetic of its own, so it can't be combined with --arithmetic portable")
    return args.isa
