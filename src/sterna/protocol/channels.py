"""One union per direction: what a process may be told."""

from __future__ import annotations

from sterna.protocol.control import (
    DecodeRefused,
    FlushCacheOutput,
    FlushCacheReq,
    LookUpOutput,
    LookUpReq,
    OutputCredit,
    ProcessFailed,
    ProcessReady,
    SchedulerStats,
    SchedulingStarted,
    ShutdownReq,
)
from sterna.protocol.generate import (
    AbortReq,
    BatchStrOutput,
    BatchTokenIDOutput,
    BatchTokenizedGenerateReqInput,
    TokenizedGenerateReqInput,
)

ToScheduler = TokenizedGenerateReqInput | BatchTokenizedGenerateReqInput | AbortReq | FlushCacheReq | LookUpReq | OutputCredit | ShutdownReq
ToDetokenizer = BatchTokenIDOutput | ShutdownReq
ToServer = (
    BatchStrOutput | FlushCacheOutput | LookUpOutput | SchedulerStats | SchedulingStarted | DecodeRefused | ProcessReady | ProcessFailed
)
