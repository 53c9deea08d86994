"""Hop 9, streaming: deltas → the bytes of completion chunks, those of several prompts interleaved.

Text chunks → one finish chunk per prompt → usage chunk without choices (where asked for) → `[DONE]`.
With logprobs there is a text chunk for every token, also for one whose text is held back or is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sterna.protocol.finish import openai_name
from sterna.server.openai.completion.response import LogprobLists
from sterna.server.openai.fields import StreamOptions, matched_stop, usage_of
from sterna.server.sse import DONE
from sterna.tokenizer_manager.req_state import JournalReader, OutputDelta

_encode = msgspec.json.encode


class CompletionChunks:
    """The chunks of one stream."""

    __slots__ = ("_continuous", "_head", "_include_usage", "_lists", "_plain_end")

    def __init__(self, rid: str, created: int, model: str, options: StreamOptions, lists: Sequence[LogprobLists | None]) -> None:
        """Chunks of each prompt have logprobs where there are `lists` to write them with."""
        self._include_usage = bool(options.include_usage)
        self._continuous = bool(options.continuous_usage_stats)
        self._head = b'data: {"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":[' % (
            _encode(rid),
            created,
            _encode(model),
        )
        self._plain_end = b',"usage":null}\n\n' if self._include_usage else b"}\n\n"
        self._lists = lists

    def delta(self, index: int, delta: OutputDelta, reader: JournalReader) -> bytes:
        data = b""
        end = b',"usage":%b}\n\n' % _encode(usage_of([reader])) if self._continuous else self._plain_end
        logprobs = self._logprobs(index, delta)
        if delta.text or logprobs is not None:
            text, logprobs = _encode(delta.text), logprobs or b"null"
            data = b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}]%b' % (self._head, index, text, logprobs, end)
        if delta.finished_reason is not None:
            reason = delta.finished_reason
            data += b'%b{"index":%d,"text":"","logprobs":null,"finish_reason":"%b","matched_stop":%b}]%b' % (
                self._head,
                index,
                openai_name(reason).encode(),
                _encode(matched_stop(reason)),
                end,
            )
        return data

    def _logprobs(self, index: int, delta: OutputDelta) -> bytes | None:
        lists = self._lists[index]
        if lists is None or not delta.output_ids:
            return None
        lists.clear()
        lists.add(delta.output_ids, delta.logprobs)
        return _encode(lists.shown())

    def held(self, readers: list[JournalReader]) -> bytes:
        return b""

    def end(self, readers: list[JournalReader]) -> bytes:
        if not self._include_usage:
            return DONE
        return b'%b],"usage":%b}\n\n%b' % (self._head, _encode(usage_of(readers)), DONE)
