"""Hop 9, in full: outputs → `/generate`'s answer."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sterna.protocol.finish import FinishAbort, FinishLength, FinishMatchedStr, FinishMatchedToken, FinishReason
from sterna.server.generation import Full
from sterna.server.native.generate.logprobs import LogprobRows
from sterna.server.native.generate.protocol import GenerateOutput, MetaInfo
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
