"""Hop 9, in full: outputs → `/generate`'s answer."""

from __future__ import annotations

import time

from sterna.protocol.finish import FinishAbort, FinishLength, FinishMatchedStr, FinishMatchedToken, FinishReason
from sterna.server.generation import Full
from sterna.server.native.generate.protocol import GenerateOutput, MetaInfo
from sterna.tokenizer_manager.req_state import JournalReader


def to_response(outputs: list[Full], *, is_list: bool) -> GenerateOutput | list[GenerateOutput]:
    answers = [
        GenerateOutput(text=output.text, output_ids=output.output_ids, meta_info=to_meta_info(output.reader, output.finished_reason))
        for output in outputs
    ]
    return answers if is_list else answers[0]


def to_meta_info(reader: JournalReader, reason: FinishReason | None) -> MetaInfo:
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
