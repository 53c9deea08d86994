"""Hop 9, in full: outputs → `/generate`'s answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypedDict

from sterna.protocol.finish import FinishAbort, FinishLength, FinishMatchedStr, FinishMatchedToken, FinishReason
from sterna.protocol.logprobs import LogprobWish, TokenLogprobs
from sterna.server.generation import Full
from sterna.server.logprobs import Spelling
from sterna.server.native.generate.protocol import GenerateOutput, LogprobRow, MetaInfo
from sterna.tokenizer_manager.req_state import JournalReader


def to_response(outputs: list[Full], rows: Sequence[LogprobRows | None], *, is_list: bool) -> GenerateOutput | list[GenerateOutput]:
    """`rows`, one per output: how its logprobs are shown, where they are asked for."""
    answers = []
    for output, shown in zip(outputs, rows, strict=True):
        if shown is not None:
            shown.take(output.output_ids, output.logprobs)
        meta_info = to_meta_info(output.reader, output.finished_reason, shown)
        answers.append(GenerateOutput(text=output.text, output_ids=output.output_ids, meta_info=meta_info))
    return answers if is_list else answers[0]


def to_meta_info(reader: JournalReader, reason: FinishReason | None, rows: LogprobRows | None) -> MetaInfo:
    times = reader.times
    # Without a terminal row it ended in the server (an abort or a deadline while the engine was away), now; its last token may be older.
    end = time.monotonic() if times.detokenized is None else times.last_token or times.detokenized
    return MetaInfo(
        id=reader.rid,
        finish_reason=None if reason is None else finish_dict(reason),
        prompt_tokens=reader.prompt_tokens,
        completion_tokens=reader.completion_tokens,
        cached_tokens=reader.cached_tokens,
        e2e_latency=None if reason is None else end - times.received,
        **({} if rows is None else rows.fields()),
    )


def finish_dict(reason: FinishReason) -> dict[str, str | int]:
    """SGLang's shape."""
    match reason:
        case FinishMatchedToken() | FinishMatchedStr():
            return {"type": "stop", "matched": reason.matched}
        case FinishLength():
            return {"type": "length", "length": reason.length}
        case FinishAbort():
            return {"type": "abort", "message": reason.message}


class LogprobFields(TypedDict, total=False):
    """Of `MetaInfo`."""

    input_token_logprobs: list[LogprobRow]
    output_token_logprobs: list[LogprobRow]
    input_top_logprobs: list[list[LogprobRow]]
    output_top_logprobs: list[list[LogprobRow]]
    input_token_ids_logprobs: list[list[LogprobRow]]
    output_token_ids_logprobs: list[list[LogprobRow]]


class LogprobRows:
    """The rows of one prompt's output, for its `meta_info`."""

    def __init__(self, wish: LogprobWish, spelling: Spelling | None) -> None:
        """Rows hold texts where there is a `spelling`."""
        self._wish = wish
        self._spelling = spelling
        self.clear()

    def clear(self) -> None:
        """Forget the rows so far."""
        self._chosen: list[LogprobRow] = []
        self._top: list[list[LogprobRow]] = []
        self._of_ids: list[list[LogprobRow]] = []

    def take(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Add the next tokens, `ids`."""
        row, wish = self._row, self._wish
        for token_id, each in zip(ids, logprobs, strict=True):
            self._chosen.append(row(each.chosen, token_id))
            if wish.top:
                self._top.append(list(map(row, each.top, each.top_ids)))
            if wish.token_ids:
                self._of_ids.append(list(map(row, each.of_ids, wish.token_ids)))

    def fields(self) -> LogprobFields:
        fields = LogprobFields(input_token_logprobs=[], output_token_logprobs=self._chosen)
        if self._wish.top:
            fields |= {"input_top_logprobs": [], "output_top_logprobs": self._top}
        if self._wish.token_ids:
            fields |= {"input_token_ids_logprobs": [], "output_token_ids_logprobs": self._of_ids}
        return fields

    def _row(self, logprob: float, token_id: int) -> LogprobRow:
        return logprob, token_id, None if self._spelling is None else self._spelling.name(token_id).text
