"""POST /generate."""

from __future__ import annotations

from collections.abc import Sequence

from sterna.protocol.generate import GenerateReqInput
from sterna.protocol.logprobs import LogprobWish
from sterna.server.context import AppContext
from sterna.server.exchange import Exchange
from sterna.server.generation import write_stream
from sterna.server.logprobs import Spelling
from sterna.server.native.generate.convert import to_generate, to_rids, to_wishes
from sterna.server.native.generate.protocol import GenerateRequest, decode
from sterna.server.native.generate.response import LogprobRows, to_response
from sterna.server.native.generate.stream import GenerateChunks
from sterna.server.terms import to_terms

# What the core calls a field, and what this body does.
PARAMS = {"prompt": "text", "max_tokens": "sampling_params.max_new_tokens", "min_tokens": "sampling_params.min_new_tokens"}


async def generate(exchange: Exchange, context: AppContext) -> None:
    request = decode(await exchange.body(), context.unknown_fields)
    exchange.release_body()
    body = request.body
    rid, rids = to_rids(request)
    terms = to_terms(exchange, context.args, priority=body.priority, timeout=body.timeout)
    wishes = to_wishes(body, len(rids), context.sampling.vocab_size)
    rows = _rows(request, wishes, context)
    incremental = context.args.incremental_streaming_output if body.incremental is None else body.incremental

    def convert() -> list[GenerateReqInput]:
        return to_generate(request, rids=rids, received_time=exchange.received, sampling=context.sampling, wishes=wishes)

    async with context.generations.run(exchange, rid, len(rids), convert, terms=terms, user=body.user, params=PARAMS) as outputs:
        if body.stream:
            chunks = GenerateChunks(rows, is_list=request.is_list, incremental=incremental)
            await write_stream(exchange, outputs, chunks, context.args)
        else:
            response = to_response(await outputs.all(), rows, is_list=request.is_list)
            outputs.mark_first_byte()
            await exchange.respond_json(response)


def _rows(request: GenerateRequest, wishes: Sequence[LogprobWish | None], context: AppContext) -> list[LogprobRows | None]:
    """One per prompt; None where it has no wish."""
    rows: list[LogprobRows | None] = []
    for wish, params in zip(wishes, request.sampling_params, strict=True):
        spelling = Spelling(context.token_names, params.skip_special_tokens) if request.body.return_text_in_logprobs else None
        rows.append(None if wish is None else LogprobRows(wish, spelling))
    return rows
