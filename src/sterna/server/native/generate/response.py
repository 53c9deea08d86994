"""Hop 9, in full: outputs → `/generate`'s answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypedDict

import msgspec

from sterna.protocol.finish import FinishAbort, FinishLength, FinishMatchedStr, FinishMatchedToken, FinishReason
from sterna.protocol.logprobs import TokenLogprobs
from sterna.protocol.sampling import SamplingParams
from sterna.server.generation import Full
from sterna.server.logprobs import JsonList, Spelling
from sterna.server.native.generate.protocol import GenerateOutput, LogprobRow, MetaInfo
from sterna.text.token_names import TokenNames
from sterna.tokenizer_manager.req_state import JournalReader


def to_response(outputs: list[Full], rows: Sequence[LogprobRows | None], *, is_list: bool) -> Iterator[bytes]:
    """The JSON of a `GenerateOutput`, or of a list of them, one at a time. `rows` are the logprobs of each, where they are asked for."""
    if is_list:
        yield b"["
    for index, (output, shown) in enumerate(zip(outputs, rows, strict=True)):
        if index:
            yield b","
        meta_info = to_meta_info(output.reader, output.finished_reason, shown)
        yield msgspec.json.encode(GenerateOutput(text=output.text, output_ids=output.output_ids, meta_info=meta_info))
    if is_list:
        yield b"]"


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

    __slots__ = ("_chosen", "_of_ids", "_params", "_spelling", "_top")

    def __init__(self, params: SamplingParams, spelling: Spelling | None) -> None:
        """`params` say what is asked for. Rows hold texts where there is a `spelling`."""
        self._params = params
        self._spelling = spelling
        self._chosen, self._top, self._of_ids = JsonList(), JsonList(), JsonList()

    @property
    def size(self) -> int:
        """Bytes of all rows so far."""
        return self._chosen.size + self._top.size + self._of_ids.size

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """See `LogprobSink`."""
        row, params = self._row, self._params
        self._chosen.add([row(each.chosen, token_id) for token_id, each in zip(ids, logprobs, strict=True)])
        if params.top_logprobs_num:
            self._top.add([list(map(row, each.top, each.top_ids)) for each in logprobs])
        if params.token_ids_logprob:
            self._of_ids.add([list(map(row, each.of_ids, params.token_ids_logprob)) for each in logprobs])

    def fields(self) -> LogprobFields:
        fields = LogprobFields(input_token_logprobs=[], output_token_logprobs=self._chosen.as_list())
        if self._params.top_logprobs_num:
            fields |= {"input_top_logprobs": [], "output_top_logprobs": self._top.as_list()}
        if self._params.token_ids_logprob:
            fields |= {"input_token_ids_logprobs": [], "output_token_ids_logprobs": self._of_ids.as_list()}
        return fields

    def clear(self) -> None:
        """Forget the rows so far."""
        for rows in (self._chosen, self._top, self._of_ids):
            rows.clear()

    def _row(self, logprob: float, token_id: int) -> LogprobRow:
        return logprob, token_id, None if self._spelling is None else self._spelling.name(token_id).text


def to_rows(params: SamplingParams, names: TokenNames, *, with_text: bool) -> LogprobRows | None:
    """How one prompt's logprobs are shown; None where it asks for none."""
    if not params.return_logprob:
        return None
    return LogprobRows(params, Spelling(names, params.skip_special_tokens) if with_text else None)
