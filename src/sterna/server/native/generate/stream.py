"""Hop 9, streaming: deltas → `/generate`'s events.

By default each event holds the whole text so far, as SGLang's do: its size grows with the output. Incremental events hold what is new.
"""

from __future__ import annotations

import msgspec

from sterna.server.native.generate.protocol import GenerateOutput
from sterna.server.native.generate.response import to_meta_info
from sterna.server.sse import DONE, event
from sterna.tokenizer_manager.req_state import JournalReader, OutputDelta


class GenerateChunks:
    """The events of one stream; those of a list say their `index`."""

    __slots__ = ("_ids", "_is_list", "_texts")

    def __init__(self, count: int, *, is_list: bool, incremental: bool) -> None:
        self._is_list = is_list
        self._texts: list[list[str]] | None = None if incremental else [[] for _ in range(count)]
        self._ids: list[list[int]] = [[] for _ in range(count)]

    def delta(self, index: int, delta: OutputDelta, reader: JournalReader) -> bytes:
        text, ids = delta.text, delta.output_ids
        if self._texts is not None:
            self._texts[index].append(text)
            text = "".join(self._texts[index])
            self._texts[index] = [text]
            self._ids[index] += ids
            ids = self._ids[index]
        output = GenerateOutput(
            text=text,
            output_ids=ids,
            meta_info=to_meta_info(reader, delta.finished_reason),
            index=index if self._is_list else None,
        )
        return event(msgspec.json.encode(output))

    def end(self, readers: list[JournalReader]) -> bytes:
        return DONE
