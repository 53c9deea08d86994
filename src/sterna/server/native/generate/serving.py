"""POST /generate."""

from __future__ import annotations

from sterna.protocol.generate import GenerateReqInput
from sterna.server.context import AppContext
from sterna.server.exchange import Exchange
from sterna.server.generation import write_stream
from sterna.server.native.generate.convert import to_generate, to_rids
from sterna.server.native.generate.protocol import decode
from sterna.server.native.generate.response import LogprobRows, to_response, to_rows
from sterna.server.native.generate.stream import GenerateChunks
from sterna.server.terms import to_terms

# What the core calls a field, and what this body does.
PARAMS = {
    "prompt": "text",
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "logprobs": "return_logprob",
}


async def generate(exchange: Exchange, context: AppContext) -> None:
    request = decode(await exchange.body(), context.unknown_fields)
    exchange.release_body()
    body = request.body
    rid, rids = to_rids(request)
    terms = to_terms(exchange, context.args, priority=body.priority, timeout=body.timeout)
    incremental = context.args.incremental_streaming_output if body.incremental is None else body.incremental

    rows: list[LogprobRows | None] = []

    def convert() -> list[GenerateReqInput]:
        objs = to_generate(request, rids=rids, received_time=exchange.received, sampling=context.sampling)
        rows.extend(to_rows(obj.sampling_params, context.token_names, with_text=bool(body.return_text_in_logprobs)) for obj in objs)
        return objs

    async with context.generations.run(exchange, rid, len(rids), convert, terms=terms, user=body.user, params=PARAMS) as outputs:
        if body.stream:
            chunks = GenerateChunks(rows, is_list=request.is_list, incremental=incremental)
            await write_stream(exchange, outputs, chunks, context.args)
        else:
            response = to_response(await outputs.all(rows), rows, is_list=request.is_list)
            outputs.mark_first_byte()
            await exchange.respond_pieces(response)
