"""Hop 6: what a step produced, and every ending that no step produced → `BatchTokenIDOutput`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Literal

import msgspec

from sterna.protocol.control import LiveReq
from sterna.protocol.finish import FAULT, FinishAbort
from sterna.protocol.generate import BatchTokenIDOutput, DecodeOpening, SchedulerTimes, TokenIDRow, TokenizedGenerateReqInput
from sterna.protocol.sampling import SamplingParams
from sterna.scheduler.req import Req, ReqState
from sterna.text.incremental import PROMPT_TAIL_TOKENS

log = logging.getLogger(__name__)


def to_token_id_output(epoch: int, reqs: list[Req], refusals: list[TokenIDRow]) -> tuple[BatchTokenIDOutput, list[Req]]:
    """One row per request with all that it hasn't sent, then `refusals`. Changes nothing: `mark_sent` does, once it has left.

    Also those whose row could not be made. A terminal row with status 500 stands in its place: they have ended.
    """
    rows: list[TokenIDRow] = []
    failed: list[Req] = []
    for req in reqs:
        try:
            rows.append(_row(req))
        except Exception:
            log.exception("%s: its output could not be made", req.rid)
            failed.append(req)
            opening = None if req.opened else _bare_opening(req.sampling_params, req.reply_to, req.num_prompt)
            rows.append(TokenIDRow(req.rid, req.num_sent, [], FAULT, opening, req.times()))
    return BatchTokenIDOutput(epoch=epoch, rows=rows + refusals), failed


def mark_sent(reqs: Iterable[Req]) -> None:
    """All that `reqs` had to send has left."""
    for req in reqs:
        req.num_sent = len(req.output_ids)
        if req.unsent_logprobs:
            req.unsent_logprobs = []
        req.opened = True


def refusal_row(obj: TokenizedGenerateReqInput, reason: FinishAbort, received: float) -> TokenIDRow:
    """The only row of a request that never became a `Req`."""
    opening = _bare_opening(obj.sampling_params, obj.reply_to, len(obj.input_ids))
    return TokenIDRow(obj.rid, len(obj.resume_output_ids), [], reason, opening, SchedulerTimes(received, None, None, None))


_NAMES: dict[ReqState, Literal["waiting", "prefill", "running"]] = {
    ReqState.WAITING: "waiting",
    ReqState.PREFILL: "prefill",
    ReqState.RUNNING: "running",
}


def live_req(req: Req) -> LiveReq:
    """For `LookUpOutput`. `req` hasn't finished."""
    return LiveReq(req.rid, _NAMES[req.state], req.num_prompt, req.cached_tokens, len(req.output_ids), req.times())


def _row(req: Req) -> TokenIDRow:
    start = req.num_sent
    ids = req.output_ids[start:]
    logprobs = req.unsent_logprobs if req.sampling_params.return_logprob else None
    if req.opened and req.finished_reason is None:
        return TokenIDRow(req.rid, start, ids, logprobs=logprobs)
    return TokenIDRow(req.rid, start, ids, req.finished_reason, None if req.opened else _opening(req), req.times(), logprobs)


def _bare_opening(params: SamplingParams, reply_to: str, prompt_tokens: int) -> DecodeOpening:
    """Of a request that has no output."""
    return DecodeOpening(
        prompt_tail=[],
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        no_stop_trim=params.no_stop_trim,
        stop=params.stop,
        reply_to=reply_to,
        prompt_tokens=prompt_tokens,
        cached_tokens=0,
    )


def _opening(req: Req) -> DecodeOpening:
    return msgspec.structs.replace(
        _bare_opening(req.sampling_params, req.reply_to, req.num_prompt),
        prompt_tail=req.prompt_ids[-PROMPT_TAIL_TOKENS:].tolist(),
        cached_tokens=req.cached_tokens,
        resume_output_ids=req.output_ids[: req.num_resumed],
        resume_chars=req.resume_chars,
    )
