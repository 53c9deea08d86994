"""Hop 9, streaming: deltas → `/generate`'s events.

By default each event holds the whole text so far, as SGLang's do: its size grows with the output. Incremental events hold what is new.
With logprobs a whole event may have megabytes: the next one then waits until there is a good deal to add, so that all of them together are
no more than so many times the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sterna.protocol.finish import FinishReason
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

    __slots__ = ("_due", "_held", "_ids", "_is_list", "_rows", "_texts")

    def __init__(self, rows: Sequence[LogprobRows | None], *, is_list: bool, incremental: bool) -> None:
        """`rows` are the logprobs of each prompt's output, where they are asked for."""
        count = len(rows)
        self._rows = rows
        self._is_list = is_list
        self._texts: list[list[str]] | None = None if incremental else [[] for _ in range(count)]
        self._ids: list[list[int]] = [[] for _ in range(count)]
        self._due = [LARGE] * count
        """Bytes of logprobs that make the next event due, once they are large."""
        self._held: set[int] = set()
        """Prompts that have gained what no event has told yet."""

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
                self._held.add(index)
                return b""
            self._held.discard(index)
        return self._event(index, text, ids, delta.finished_reason, reader)

    def _event(self, index: int, text: str, ids: list[int], reason: FinishReason | None, reader: JournalReader) -> bytes:
        output = GenerateOutput(
            text=text,
            output_ids=ids,
            meta_info=to_meta_info(reader, reason, self._rows[index]),
            index=index if self._is_list else None,
        )
        return event(msgspec.json.encode(output))

    def held(self, readers: list[JournalReader]) -> bytes:
        texts = self._texts or []
        return b"".join(self._event(index, "".join(texts[index]), self._ids[index], None, readers[index]) for index in sorted(self._held))

    def _is_due(self, index: int, size: int) -> bool:
        if size <= LARGE:
            return True
        if size < self._due[index]:
            return False
        self._due[index] = int(size * (1 + GROWTH))
        return True

    def end(self, readers: list[JournalReader]) -> bytes:
        return DONE
