"""POST /v1/chat/completions."""

from __future__ import annotations

import time

from sterna.protocol.generate import GenerateReqInput
from sterna.server.context import AppContext
from sterna.server.exchange import Exchange
from sterna.server.fields import check_model, to_rid
from sterna.server.generation import write_stream
from sterna.server.logprobs import Spelling
from sterna.server.openai.chat.convert import to_generate
from sterna.server.openai.chat.protocol import decode
from sterna.server.openai.chat.response import ChatEntries, to_response
from sterna.server.openai.chat.stream import ChatChunks
from sterna.server.openai.fields import check_stream_options
from sterna.server.terms import to_terms

# What the core calls a field, and what a chat's body does.
PARAMS = {"prompt": "messages", "input_ids": "messages"}
COMPLETION_PARAMS = {**PARAMS, "max_tokens": "max_completion_tokens"}


async def chat_completions(exchange: Exchange, context: AppContext) -> None:
    manager = context.manager
    request = decode(await exchange.body(), context.unknown_fields)
    exchange.release_body()
    body = request.body
    check_model(body.model, manager)
    options = check_stream_options(body.stream, body.stream_options)
    rid = to_rid(body.rid, "chatcmpl-")
    created = int(time.time())
    terms = to_terms(exchange, context.args, priority=body.priority, timeout=body.timeout)
    model = manager.served_model_name

    def convert() -> list[GenerateReqInput]:
        return [to_generate(request, rid=rid, received_time=exchange.received, template=manager.chat_template, sampling=context.sampling)]

    params = PARAMS if body.max_completion_tokens is None else COMPLETION_PARAMS
    user = body.user or body.safety_identifier
    threads = context.threads.rendering
    entries = ChatEntries(Spelling(context.token_names, body.skip_special_tokens)) if body.logprobs else None
    async with context.generations.run(exchange, rid, 1, convert, terms=terms, user=user, params=params, threads=threads) as outputs:
        if body.stream:
            await write_stream(exchange, outputs, ChatChunks(rid, created, model, options, entries), context.args)
        else:
            response = to_response(rid, created, model, await outputs.all([entries]), [entries])
            outputs.mark_first_byte()
            await exchange.respond_json(response)
