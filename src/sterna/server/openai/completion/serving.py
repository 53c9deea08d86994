"""POST /v1/completions."""

from __future__ import annotations

import time

from sterna.protocol.generate import GenerateReqInput
from sterna.server.context import AppContext
from sterna.server.exchange import Exchange
from sterna.server.fields import check_model, to_rid
from sterna.server.generation import write_stream
from sterna.server.logprobs import Spelling
from sterna.server.openai.completion.convert import to_generate
from sterna.server.openai.completion.protocol import decode, to_prompts
from sterna.server.openai.completion.response import LogprobLists, to_response
from sterna.server.openai.completion.stream import CompletionChunks
from sterna.server.openai.fields import check_stream_options
from sterna.server.terms import to_terms

# What the core calls a field, and what this body does.
PARAMS = {"input_ids": "prompt", "text": "prompt"}


async def completions(exchange: Exchange, context: AppContext) -> None:
    manager = context.manager
    request = decode(await exchange.body(), context.unknown_fields)
    exchange.release_body()
    check_model(request.model, manager)
    options = check_stream_options(request.stream, request.stream_options)
    rid = to_rid(request.rid, "cmpl-")
    created = int(time.time())
    terms = to_terms(exchange, context.args, priority=request.priority, timeout=request.timeout)
    model = manager.served_model_name

    def convert() -> list[GenerateReqInput]:
        return to_generate(request, rid=rid, received_time=exchange.received, sampling=context.sampling)

    count = len(to_prompts(request.prompt))
    user = request.user or request.safety_identifier
    lists: list[LogprobLists | None] = [None] * count
    if request.logprobs is not None:
        spelling = Spelling(context.token_names, request.skip_special_tokens)
        lists = [LogprobLists(spelling) for _ in range(count)]
    async with context.generations.run(exchange, rid, count, convert, terms=terms, user=user, params=PARAMS) as outputs:
        if request.stream:
            await write_stream(exchange, outputs, CompletionChunks(rid, created, model, options, lists), context.args)
        else:
            response = to_response(rid, created, model, await outputs.all(lists), lists)
            outputs.mark_first_byte()
            await exchange.respond_pieces(response)
