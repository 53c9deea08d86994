"""Hop 6: what a step produced, and every ending that no step produced → `BatchTokenIDOutput`."""

from __future__ import annotations

from collections.abc import Iterable

from sterna.protocol.finish import FinishAbort
from sterna.protocol.generate import BatchTokenIDOutput, DecodeOpening, SchedulerTimes, TokenIDRow, TokenizedGenerateReqInput
from sterna.scheduler.req import Req
from sterna.text.incremental import PROMPT_TAIL_TOKENS


def to_token_id_output(epoch: int, reqs: Iterable[Req], refusals: list[TokenIDRow]) -> BatchTokenIDOutput:
    """One row per request with all that it hasn't sent, then `refusals`. Marks it as sent."""
    rows: list[TokenIDRow] = []
    for req in reqs:
        start = req.num_sent
        ids = req.output_ids[start:]
        req.num_sent = start + len(ids)
        if req.opened and req.finished_reason is None:
            rows.append(TokenIDRow(req.rid, start, ids))
        else:
            times = req.times() if req.finished_reason is not None else None
            rows.append(TokenIDRow(req.rid, start, ids, req.finished_reason, None if req.opened else _opening(req), times))
            req.opened = True
    return BatchTokenIDOutput(epoch=epoch, rows=rows + refusals)


def refusal_row(obj: TokenizedGenerateReqInput, reason: FinishAbort, received: float) -> TokenIDRow:
    """The only row of a request that never became a `Req`."""
    params = obj.sampling_params
    opening = DecodeOpening(
        prompt_tail=[],
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        no_stop_trim=params.no_stop_trim,
        stop=params.stop,
        reply_to=obj.reply_to,
        prompt_tokens=len(obj.input_ids),
        cached_tokens=0,
    )
    return TokenIDRow(obj.rid, len(obj.resume_output_ids), [], reason, opening, SchedulerTimes(received, None, None, None))


def _opening(req: Req) -> DecodeOpening:
    params = req.sampling_params
    return DecodeOpening(
        prompt_tail=_tail(req),
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        no_stop_trim=params.no_stop_trim,
        stop=params.stop,
        reply_to=req.reply_to,
        prompt_tokens=req.num_prompt,
        cached_tokens=req.cached_tokens,
        chars_before=0 if req.text_stops is None else req.text_stops.chars_before,
    )


def _tail(req: Req) -> list[int]:
    """What stands before the first output that leaves."""
    tail: list[int] = req.prompt_ids[-PROMPT_TAIL_TOKENS:].tolist()
    return (tail + req.output_ids[: req.first_output])[-PROMPT_TAIL_TOKENS:]
