"""Hop 9, streaming: deltas → `/generate`'s events.

By default each event holds the whole text so far, as SGLang's do: its size grows with the output. Incremental events hold what is new.
With logprobs a whole event may have megabytes: the next one then waits until there is a good deal to add, so that all of them together are
no more than so many times the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sterna.server.native.generate.protocol import GenerateOutput
from sterna.server.native.generate.response import LogprobRows, to_meta_info
from sterna.server.sse import DONE, event
from sterna.tokenizer_manager.req_state import JournalReader, OutputDelta

LARGE = 256 * 1024
"""Bytes of logprobs, above which they aren't repeated for every token."""
GROWTH = 1 / 8
"""By how much they have then grown when they are repeated."""


class GenerateChunks:
    """The events of one stream; those of a list say their `index`."""

    __slots__ = ("_due", "_ids", "_is_list", "_rows", "_texts")

    def __init__(self, rows: Sequence[LogprobRows | None], *, is_list: bool, incremental: bool) -> None:
        """`rows` are the logprobs of each prompt's output, where they are asked for."""
        count = len(rows)
        self._rows = rows
        self._is_list = is_list
        self._texts: list[list[str]] | None = None if incremental else [[] for _ in range(count)]
        self._ids: list[list[int]] = [[] for _ in range(count)]
        self._due = [LARGE] * count
        """Bytes of logprobs that make the next event due, once they are large."""

    def delta(self, index: int, delta: OutputDelta, reader: JournalReader) -> bytes:
        text, ids, rows = delta.text, delta.output_ids, self._rows[index]
        if rows is not None:
            if self._texts is None:
                rows.clear()
            rows.add(ids, delta.logprobs)
        if self._texts is not None:
            self._texts[index].append(text)
            text = "".join(self._texts[index])
            self._texts[index] = [text]
            self._ids[index] += ids
            ids = self._ids[index]
            if rows is not None and delta.finished_reason is None and not self._is_due(index, rows.size):
                return b""
        output = GenerateOutput(
            text=text,
            output_ids=ids,
            meta_info=to_meta_info(reader, delta.finished_reason, rows),
            index=index if self._is_list else None,
        )
        return event(msgspec.json.encode(output))

    def _is_due(self, index: int, size: int) -> bool:
        if size <= LARGE:
            return True
        if size < self._due[index]:
            return False
        self._due[index] = int(size * (1 + GROWTH))
        return True

    def end(self, readers: list[JournalReader]) -> bytes:
        return DONE
