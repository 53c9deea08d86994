"""A file and a folder served by real processes. The models are random, and so are their texts: most bytes form no character, tokens end
inside characters, ids have no text. What a stream adds up to is what the whole answer is, is what the ids decode to."""

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

import tiny_models
from e2e.conftest import TinyModels
from e2e.engine import THREADS
from e2e.reference import assert_agrees
from running_server import RunningServer, running_server

PROMPT = "The cat and the dog went to the sea."
ODD_FLAGS = ["--stream-interval", "3", "--chunked-prefill-size", "7", "--page-size", "4"]


@pytest.fixture(scope="module")
def fast(tiny: TinyModels) -> Any:
    return PreTrainedTokenizerFast(tokenizer_file=str(tiny.hf("llama") / "tokenizer.json"), clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module", params=["folder", "file"])
def server(request: pytest.FixtureRequest, tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("files")
    model = tiny.hf("llama", sharded=True) if request.param == "folder" else tiny.gguf("llama")
    flags = ["--executor", "torch", "--dtype", "float32", "--device", "cpu", "--threads", str(THREADS), "--max-total-tokens", "8192"]
    flags += ["--cache-dir", str(folder / "cache"), "--served-model-name", "tiny"]
    with running_server(model, *flags, *(ODD_FLAGS if request.param == "file" else []), log=folder / "log") as running:
        yield running


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, verify=False) as client:
        yield client


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", "/generate", json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_it_says_what_transformers_says(http: httpx.Client, tiny: TinyModels, fast: Any) -> None:
    ids = fast.encode(PROMPT)
    params = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
    answer = post(http, "/generate", {"text": PROMPT, "sampling_params": params})
    assert answer["meta_info"]["prompt_tokens"] == len(ids)
    assert assert_agrees(answer["output_ids"], tiny.oracle(tiny.hf("llama")).greedy(ids, 32)) > 0


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7, 60])
def test_every_way_to_ask_gives_the_text_of_the_ids(server: RunningServer, http: httpx.Client, fast: Any, tokens: int) -> None:
    def ask(seed: int) -> str:
        params = {"temperature": 1.0, "max_new_tokens": tokens, "sampling_seed": seed, "ignore_eos": True}
        body = {"text": PROMPT, "sampling_params": params}
        whole = post(http, "/generate", body)
        cumulative, deltas = events(http, body), events(http, {**body, "incremental": True})
        assert len(whole["output_ids"]) == tokens
        assert cumulative[-1]["output_ids"] == whole["output_ids"] == [token for event in deltas for token in event["output_ids"]]
        assert all(after["text"].startswith(before["text"]) for before, after in itertools.pairwise(cumulative))
        options: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 1, "seed": seed, "max_tokens": tokens}
        options["extra_body"] = {"ignore_eos": True}
        full = client.completions.create(**options).choices[0].text
        stream = "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True))
        joined = "".join(event["text"] for event in deltas)
        known = [token for token in whole["output_ids"] if token < tiny_models.tokenizer().get_vocab_size()]
        assert cumulative[-1]["text"] == joined == whole["text"] == full == stream == fast.decode(known, skip_special_tokens=True)
        return full

    with server.openai() as client, ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(16)))
    assert len(set(texts)) > 3
    assert any("\ufffd" in text for text in texts)


@pytest.mark.parametrize("stop", ["th", " ", "e"])
def test_a_stop_in_any_text_cuts_it_where_it_begins(http: httpx.Client, stop: str) -> None:
    """Letters are made likely, so that stops of common ones appear early and late."""
    vocab = tiny_models.tokenizer().get_vocab()
    bias = {str(token): 3.0 for piece, token in vocab.items() if piece.replace("Ġ", "a").isalpha() and piece.isascii()}
    found = 0
    for seed in range(6):
        body = {"prompt": PROMPT, "seed": seed, "temperature": 1.0, "max_tokens": 40, "ignore_eos": True, "logit_bias": bias}
        free = post(http, "/v1/completions", body)["choices"][0]
        stopped = post(http, "/v1/completions", {**body, "stop": stop})["choices"][0]
        if stop in free["text"]:
            found += 1
            assert (stopped["text"], stopped["finish_reason"]) == (free["text"][: free["text"].index(stop)], "stop")
        else:
            assert (stopped["text"], stopped["finish_reason"]) == (free["text"], "length")
    assert found >= 2


def test_a_chat_goes_through_the_folder_s_template(http: httpx.Client, fast: Any) -> None:
    messages = [{"role": "user", "content": "hello"}]
    fast.chat_template = tiny_models.CHAT_TEMPLATE
    rendered = fast.encode(fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    params = {"temperature": 0, "max_new_tokens": 12}
    chat = post(http, "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 12})
    generated = post(http, "/generate", {"input_ids": rendered, "sampling_params": params})
    assert chat["usage"]["prompt_tokens"] == len(rendered)
    assert chat["choices"][0]["message"]["content"] == generated["text"]


@pytest.mark.parametrize("excess", [-1, 0, 1])
@pytest.mark.parametrize("route", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_prompt_and_output_may_fill_the_context_and_no_more(http: httpx.Client, route: str, excess: int) -> None:
    context, tokens = 512, 3
    word = tiny_models.tokenizer().encode(" the").ids
    assert len(word) == 1
    body: dict[str, Any]
    if route == "/v1/chat/completions":
        around = post(http, route, {"messages": [{"role": "user", "content": ""}], "max_tokens": 1})["usage"]["prompt_tokens"]
        content = " the" * (context - tokens + excess - around)
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "ignore_eos": True}
    elif route == "/generate":
        body = {"input_ids": word * (context - tokens + excess), "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
    else:
        body = {"prompt": word * (context - tokens + excess), "max_tokens": tokens, "ignore_eos": True}
    answer = http.post(route, json=body)
    if excess > 0:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    else:
        assert answer.status_code == 200, answer.text
        usage = answer.json().get("usage") or answer.json()["meta_info"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (context - tokens + excess, tokens)
