"""Joined stream deltas are the whole text, byte for byte, on every surface, however the output was split."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.protocol.finish import FinishLength
from sterna.protocol.logprobs import TokenLogprobs
from sterna.protocol.sampling import SamplingParams
from sterna.server.generation import Chunks
from sterna.server.native.generate.response import LogprobRows
from sterna.server.native.generate.stream import GROWTH, LARGE, GenerateChunks
from sterna.server.openai.chat.stream import ChatChunks
from sterna.server.openai.completion.stream import CompletionChunks
from sterna.server.openai.fields import StreamOptions
from sterna.tokenizer_manager.req_state import OutputDelta, RequestTimes

OPTIONS = [StreamOptions(), StreamOptions(include_usage=True), StreamOptions(include_usage=True, continuous_usage_stats=True)]
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


class Reader:
    rid = 'quoted "rid"\n'
    prompt_tokens = 3
    cached_tokens = 1
    completion_tokens = 2
    times = RequestTimes(0.0)


def events(chunks: Chunks, texts: list[str]) -> list[Any]:
    reader: Any = Reader()
    last = len(texts) - 1
    data = b""
    for index, text in enumerate(texts):
        data += chunks.delta(0, OutputDelta(text, [index], FinishLength(1) if index == last else None), reader)
    data += chunks.end([reader])
    assert data.endswith(b"\n\n")
    blocks = data[:-2].decode().split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


@given(st.lists(UNICODE, min_size=1, max_size=8), st.sampled_from(OPTIONS))
def test_chat(texts: list[str], options: StreamOptions) -> None:
    found = events(ChatChunks('quoted "rid"\n', 1, "mödel", options, None), texts)
    contents = [choice["delta"].get("content", "") for event in found for choice in event["choices"]]
    assert "".join(contents) == "".join(texts)
    assert {(event["id"], event["model"]) for event in found} == {('quoted "rid"\n', "mödel")}
    assert [choice["finish_reason"] for event in found for choice in event["choices"]].count("length") == 1


@given(st.lists(UNICODE, min_size=1, max_size=8), st.sampled_from(OPTIONS))
def test_completion(texts: list[str], options: StreamOptions) -> None:
    found = events(CompletionChunks("r", 1, "m", options, [None]), texts)
    assert "".join(choice["text"] for event in found for choice in event["choices"]) == "".join(texts)


@pytest.mark.parametrize("incremental", [False, True])
@given(texts=st.lists(UNICODE, min_size=1, max_size=8))
def test_generate(incremental: bool, texts: list[str]) -> None:
    found = events(GenerateChunks([None], is_list=False, incremental=incremental), texts)
    if incremental:
        assert "".join(event["text"] for event in found) == "".join(texts)
    else:
        assert [event["text"] for event in found] == ["".join(texts[: n + 1]) for n in range(len(texts))]
        assert found[-1]["output_ids"] == list(range(len(texts)))


TOKENS = 3000
ASKING = SamplingParams(return_logprob=True, top_logprobs_num=20)


def test_a_cumulative_stream_with_logprobs_is_bounded_by_its_last_event_and_ends_with_all_of_it() -> None:
    """A megabyte is not repeated for every token; nor are the first events held back."""
    rows = LogprobRows(ASKING, None)
    chunks = GenerateChunks([rows], is_list=False, incremental=False)
    reader: Any = Reader()
    each = TokenLogprobs.pack(-0.5, range(20), [-0.25] * 20)
    sizes = []
    for index in range(TOKENS):
        last = FinishLength(TOKENS) if index == TOKENS - 1 else None
        data = chunks.delta(0, OutputDelta("a", [index], last, [each]), reader)
        sizes.append(len(data))
        if data:
            output = json.loads(data.removeprefix(b"data: "))
            meta = output["meta_info"]
            assert len(output["text"]) == len(meta["output_token_logprobs"]) == len(meta["output_top_logprobs"]) == index + 1
    assert all(sizes[:100])
    assert sizes[-1] > 3 * LARGE
    large = [size for size in sizes if size > 1.1 * LARGE]
    assert sum(large) <= (1 / GROWTH + 2) * sizes[-1]
