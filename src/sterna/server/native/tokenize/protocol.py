"""Bodies and answers of POST /tokenize and POST /detokenize (SGLang's fields, and vLLM's `return_token_strs`)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sterna.errors import InvalidRequest
from sterna.server.body import BodyDecoder, UnknownFields

MAX_TEXTS = 1024
MAX_CHARS = 1 << 21
"""Of all texts together: a second per megabyte is how long tokenizing takes, and others wait for the same thread."""


class TokenizeRequest(msgspec.Struct, kw_only=True):
    prompt: str | list[str]
    model: str | None = None
    add_special_tokens: bool | None = None
    """Default true."""
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Lists of lists where `prompt` is a list."""

    tokens: Sequence[int | list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: Sequence[str | list[str]] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int | list[int]]
    """Token ids, or lists of them."""
    model: str | None = None
    skip_special_tokens: bool | None = None
    """Default true."""


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    text: str | list[str]


_tokenize = BodyDecoder(TokenizeRequest, unbuilt={"messages": ()})
_detokenize = BodyDecoder(DetokenizeRequest, unbuilt={})


def decode_tokenize(body: bytes, unknown: UnknownFields) -> TokenizeRequest:
    """Raises InvalidRequest."""
    request, _ = _tokenize.decode(body, unknown)
    texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    if len(texts) > MAX_TEXTS:
        raise InvalidRequest(f"prompt: at most {MAX_TEXTS} texts", param="prompt")
    if sum(map(len, texts)) > MAX_CHARS:
        raise InvalidRequest(f"prompt: at most {MAX_CHARS} characters", param="prompt")
    return request


def decode_detokenize(body: bytes, unknown: UnknownFields, *, vocab_size: int) -> tuple[DetokenizeRequest, list[list[int]], bool]:
    """The request, its lists of ids, and whether the client sent a list of lists. Raises InvalidRequest."""
    request, _ = _detokenize.decode(body, unknown)
    ids = [entry for entry in request.tokens if isinstance(entry, int)]
    lists = [entry for entry in request.tokens if not isinstance(entry, int)]
    if ids and lists:
        raise InvalidRequest("tokens: ids, or lists of ids, not both", param="tokens")
    if len(lists) > MAX_TEXTS:
        raise InvalidRequest(f"tokens: at most {MAX_TEXTS} lists", param="tokens")
    result = lists or [ids]
    for entry in result:
        if entry and not 0 <= min(entry) <= max(entry) < vocab_size:
            raise InvalidRequest(f"tokens: ids must be in [0, {vocab_size})", param="tokens")
    return request, result, bool(lists)
