"""The official SDK against real processes: what is streamed is what is not streamed is what the ids say."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tokenizers

from byte_model import tokenizer_json
from running_server import RunningServer

TOKENIZER = tokenizers.Tokenizer.from_str(tokenizer_json())
TEXTS = ["plain text", "世界 and ไทย", "👩‍👩‍👧‍👦 family", "tabs\tand\nlines  two  spaces. After", "é e\u0301 combining", "🏳️‍🌈"]


def one_shot(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 40])
def test_joined_deltas_are_the_full_text_byte_for_byte(fast_server: RunningServer, text: str, max_tokens: int) -> None:
    with fast_server.openai() as client:
        full = client.completions.create(model="bytes", prompt=text, max_tokens=max_tokens)
        chunks = list(client.completions.create(model="bytes", prompt=text, max_tokens=max_tokens, stream=True))
    generate = fast_server.post("/generate", {"text": text, "sampling_params": {"max_new_tokens": max_tokens}}).json()
    joined = "".join(chunk.choices[0].text for chunk in chunks)
    assert joined == full.choices[0].text == generate["text"] == one_shot(generate["output_ids"])
    assert full.usage is not None
    assert full.usage.completion_tokens == max_tokens == len(generate["output_ids"])
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) <= {None}


def test_a_list_of_prompts_gets_the_texts_of_its_members_alone_in_their_order(fast_server: RunningServer) -> None:
    with fast_server.openai() as client:
        together = client.completions.create(model="bytes", prompt=TEXTS, max_tokens=20)
        alone = [client.completions.create(model="bytes", prompt=text, max_tokens=20).choices[0].text for text in TEXTS]
    assert [choice.index for choice in together.choices] == list(range(len(TEXTS)))
    assert [choice.text for choice in together.choices] == alone
    assert len(set(alone)) == len(TEXTS)


def converse(server: RunningServer, index: int) -> tuple[str, str]:
    """(streamed, whole) of one chat whose echo is its own."""
    messages: list[Any] = [{"role": "user", "content": f"client {index}: " + TEXTS[index % len(TEXTS)]}]
    with server.openai() as client:
        stream = client.chat.completions.create(model="bytes", messages=messages, max_tokens=60, stream=True)
        joined = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        whole = client.chat.completions.create(model="bytes", messages=messages, max_tokens=60).choices[0].message.content
    assert whole is not None
    return joined, whole


def test_64_clients_at_once_each_get_their_own_text(paced_server: RunningServer) -> None:
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda index: converse(paced_server, index), range(64)))
    for index, (joined, whole) in enumerate(answers):
        assert joined == whole
        assert f"client {index}: " in whole
    assert paced_server.metrics()["sterna_max_batch_size"] >= 16


def test_usage_comes_once_in_a_chunk_without_choices(fast_server: RunningServer) -> None:
    with fast_server.openai() as client:
        chunks = list(
            client.chat.completions.create(
                model="bytes",
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=5,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "stop", "text"),
    [
        ("abcSTOPdef", "STOP", "abc"),
        ("abcSTOPdef", ["never", "STOP", "OPd"], "abc"),
        ("ends in STO", "STOP", "ends in STOends in STOends i"),
        ("世界。終わり", "。", "世界"),
        ("what?\nno", "\n", "what?"),
    ],
)
def test_no_byte_of_a_stop_is_sent(fast_server: RunningServer, prompt: str, stop: Any, text: str, stream: bool) -> None:
    body = {"model": "bytes", "prompt": prompt, "max_tokens": 28, "stop": stop}
    with fast_server.openai() as client:
        if stream:
            pieces = list(client.completions.create(**body, stream=True))
            got, reason = "".join(chunk.choices[0].text for chunk in pieces), pieces[-1].choices[0].finish_reason
        else:
            choice = client.completions.create(**body).choices[0]
            got, reason = choice.text, choice.finish_reason
    assert got == text
    assert reason == ("length" if prompt == "ends in STO" else "stop")


def test_min_tokens_hold_stops_off(fast_server: RunningServer) -> None:
    body = {"model": "bytes", "prompt": "ab.", "max_tokens": 20, "stop": ".", "min_tokens": 5}
    answer = fast_server.post("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == "ab.ab"
    assert answer["usage"]["completion_tokens"] == 6


def test_stop_untrimmed_when_asked(fast_server: RunningServer) -> None:
    body = {"model": "bytes", "prompt": "abcSTOPdef", "max_tokens": 20, "stop": "STOP", "no_stop_trim": True}
    assert fast_server.post("/v1/completions", body).json()["choices"][0]["text"] == "abcSTOP"


def test_a_prompt_of_ids_that_ends_inside_a_character_is_continued_with_that_character(fast_server: RunningServer) -> None:
    ids = list("世界".encode())[:4]  # 世 and the first byte of 界; the echo begins with 世
    answer = fast_server.post("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 4}}).json()
    assert answer["output_ids"] == ids
    # The prompt's unfinished byte is the prompt's own U+FFFD; what follows begins a character of its own.
    assert answer["text"] == "世�"


def test_a_repeated_prompt_is_served_from_the_cache_with_the_same_text(fast_server: RunningServer) -> None:
    prompt = "a prompt that is longer than a few pages of the cache, so that most of it can be found there again. " * 2
    first, second = (fast_server.post("/v1/completions", {"model": "bytes", "prompt": prompt, "max_tokens": 30}).json() for _ in range(2))
    assert first["choices"][0]["text"] == second["choices"][0]["text"] == prompt[:30]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) - 32
