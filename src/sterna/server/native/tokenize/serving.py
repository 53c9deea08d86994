"""POST /tokenize, POST /detokenize: what hop 3 and the detokenizer would do, in a thread that no prompt waits for."""

from __future__ import annotations

from sterna.server.context import AppContext
from sterna.server.exchange import Exchange
from sterna.server.fields import check_model
from sterna.server.native.tokenize.protocol import (
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    decode_detokenize,
    decode_tokenize,
)
from sterna.text.tokenizer import Tokenizer


async def tokenize(exchange: Exchange, context: AppContext) -> None:
    """Raises InvalidRequest, ModelNotFound; QueueFull where too many others wait."""
    manager = context.manager
    request = decode_tokenize(await exchange.body(), context.unknown_fields)
    check_model(request.model, manager)
    async with exchange.until_gone():
        response = await context.threads.tokenizing.run(_tokenize, request, manager.tokenizer, manager.context_len)
    await exchange.respond_json(response)


def _tokenize(request: TokenizeRequest, tokenizer: Tokenizer, context_len: int) -> TokenizeResponse:
    texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    tokens = [tokenizer.encode(text, add_special_tokens=request.add_special_tokens is not False) for text in texts]
    strings = [[tokenizer.id_to_token(token) or "" for token in ids] for ids in tokens] if request.return_token_strs else None
    if isinstance(request.prompt, str):
        return TokenizeResponse(
            tokens=tokens[0], count=len(tokens[0]), max_model_len=context_len, token_strs=None if strings is None else strings[0]
        )
    return TokenizeResponse(tokens=tokens, count=[len(ids) for ids in tokens], max_model_len=context_len, token_strs=strings)


async def detokenize(exchange: Exchange, context: AppContext) -> None:
    """Raises as `tokenize` does."""
    manager = context.manager
    body = await exchange.body()
    request, lists, is_list = decode_detokenize(body, context.unknown_fields, vocab_size=manager.model.vocab_size)
    check_model(request.model, manager)
    async with exchange.until_gone():
        texts = await context.threads.tokenizing.run(_detokenize, lists, manager.tokenizer, request.skip_special_tokens is not False)
    await exchange.respond_json(DetokenizeResponse(text=texts if is_list else texts[0]))


def _detokenize(lists: list[list[int]], tokenizer: Tokenizer, skip_special_tokens: bool) -> list[str]:
    return [tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) for ids in lists]
