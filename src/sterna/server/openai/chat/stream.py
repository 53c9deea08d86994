"""Hop 9, streaming: deltas → the bytes of chat completion chunks.

Role chunk with empty content → content chunks → one finish chunk → usage chunk without choices (where asked for) → `[DONE]`.
A chunk's constant parts are encoded once per stream; what is left per delta is one JSON string and one format.
With logprobs there is a content chunk for every token, also for one whose text is held back or is none.
"""

from __future__ import annotations

import msgspec

from sterna.protocol.finish import openai_name
from sterna.server.openai.chat.response import ChatEntries
from sterna.server.openai.fields import StreamOptions, matched_stop, usage_of
from sterna.server.sse import DONE
from sterna.tokenizer_manager.req_state import JournalReader, OutputDelta

_encode = msgspec.json.encode


class ChatChunks:
    """The chunks of one stream of one choice."""

    __slots__ = ("_content", "_continuous", "_entries", "_head", "_include_usage", "_opened", "_plain_end")

    def __init__(self, rid: str, created: int, model: str, options: StreamOptions, entries: ChatEntries | None) -> None:
        """Chunks have logprobs where there are `entries` to write them with."""
        self._include_usage = bool(options.include_usage)
        self._continuous = bool(options.continuous_usage_stats)
        self._head = b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":[' % (
            _encode(rid),
            created,
            _encode(model),
        )
        self._content = self._head + b'{"index":0,"delta":{"content":'
        self._plain_end = b',"usage":null}\n\n' if self._include_usage else b"}\n\n"
        self._entries = entries
        self._opened = False

    def delta(self, index: int, delta: OutputDelta, reader: JournalReader) -> bytes:
        data = b""
        end = b',"usage":%b}\n\n' % _encode(usage_of([reader])) if self._continuous else self._plain_end
        if not self._opened:
            self._opened = True
            data = b'%b{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]%b' % (self._head, end)
        logprobs = None
        if self._entries is not None and delta.output_ids:
            self._entries.clear()
            self._entries.add(delta.output_ids, delta.logprobs)
            logprobs = _encode(self._entries.shown())
        if delta.text or logprobs is not None:
            text, logprobs = _encode(delta.text), logprobs or b"null"
            data += b'%b%b},"logprobs":%b,"finish_reason":null}]%b' % (self._content, text, logprobs, end)
        if delta.finished_reason is not None:
            reason = delta.finished_reason
            name = openai_name(reason).encode()
            ending = b'"logprobs":null,"finish_reason":"%b","matched_stop":%b}]' % (name, _encode(matched_stop(reason)))
            data += b'%b{"index":0,"delta":{},%b%b' % (self._head, ending, end)
        return data

    def held(self, readers: list[JournalReader]) -> bytes:
        return b""

    def end(self, readers: list[JournalReader]) -> bytes:
        if not self._include_usage:
            return DONE
        return b'%b],"usage":%b}\n\n%b' % (self._head, _encode(usage_of(readers)), DONE)
