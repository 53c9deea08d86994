"""The default model behind real processes, through the official SDK: tokens, text, stops, seeds and usage, alone and in a crowd."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from e2e.engine import THREADS
from e2e.served import CHATS, KNOWN, SHORT_CHATS, TEXTS, Client, Known, fast_tokenizer
from running_server import running_server, until
from unit.text.corpus import LINES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def client(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    flags = ["--executor", "torch", "--dtype", "float32", "--device", "cpu", "--threads", str(THREADS), "--max-total-tokens", "32768"]
    log = tmp_path_factory.mktemp("serving") / "log"
    with running_server("smollm2", *flags, log=log) as server:
        made = Client(server)
        yield made
        made.close()


@pytest.fixture(scope="module")
def fast(smollm2: Path) -> "PreTrainedTokenizerFast":
    return fast_tokenizer(smollm2)


def at_once(ask: Callable[[Any], Any], each: Iterable[Any]) -> list[Any]:
    """`ask` of each, from as many threads."""
    each = list(each)
    with ThreadPoolExecutor(len(each)) as pool:
        return list(pool.map(ask, each))


def shown(fast: "PreTrainedTokenizerFast", ids: list[int]) -> str:
    return str(fast.decode(ids, skip_special_tokens=True))


# ---- what the model says ----


def test_there_is_enough_that_is_known() -> None:
    assert len(CHATS) >= 15
    assert len(TEXTS) >= 15
    assert len(SHORT_CHATS) >= 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("known", SHORT_CHATS[:2], ids=lambda known: known.messages[-1]["content"][:20])
def test_a_chat_is_what_transformers_says(client: Client, fast: Any, known: Known, stream: bool) -> None:
    reply = client.chat(known.messages, max_tokens=64, stream=stream)
    assert (reply.text, reply.finish_reason) == (shown(fast, known.answer), "stop")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(known.prompt_ids), len(known.answer))
    assert reply.usage.total_tokens == len(known.prompt_ids) + len(known.answer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("known", TEXTS[:2], ids=lambda known: known.text[:20])
def test_a_completion_is_what_transformers_says(client: Client, fast: Any, known: Known, stream: bool) -> None:
    reply = client.complete(known.text, max_tokens=20, stream=stream)
    ids = known.ids[:20]
    assert reply.text == shown(fast, ids)
    assert reply.finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(known.prompt_ids), len(ids))
    assert len(reply.pieces) > 1 or not stream


def test_sixty_four_clients_at_once_each_get_what_transformers_says(client: Client, fast: Any) -> None:
    def ask(index: int) -> tuple[str, str]:
        known, tokens, stream = KNOWN[index % len(KNOWN)], 6 + index % 5, index % 2 == 0
        if known.messages is not None and index % 3:
            reply = client.chat(known.messages, max_tokens=tokens, stream=stream)
        else:
            reply = client.complete(known.prompt_ids if index % 4 else known.text, max_tokens=tokens, stream=stream)
        return reply.text, shown(fast, known.answer[:tokens])

    for got, expected in at_once(ask, range(64)):
        assert got == expected
    assert until(lambda: client.server.metrics()["sterna_max_batch_size"]) >= 16


def test_a_prompt_is_answered_alike_alone_in_a_crowd_cold_and_warm(client: Client, fast: Any) -> None:
    known = max(CHATS, key=lambda known: len(known.prompt_ids))
    expected = shown(fast, known.answer[:16])
    client.flush()
    replies = [client.chat(known.messages, max_tokens=16, stream=stream) for stream in (False, True)]
    with client.crowd(15):
        replies += [client.chat(known.messages, max_tokens=16, stream=stream) for stream in (False, True)]
    assert [reply.text for reply in replies] == [expected] * 4
    cached = [reply.usage.prompt_tokens_details.cached_tokens for reply in replies]
    assert cached[0] == 0
    assert cached[1] == len(known.prompt_ids) - 1


def test_prompts_are_shared_only_under_one_salt(client: Client, fast: Any) -> None:
    known = max(CHATS, key=lambda known: len(known.prompt_ids))
    replies = [client.chat(known.messages, max_tokens=3, cache_salt=salt) for salt in ("a", "b", "a")]
    assert [reply.text for reply in replies] == [shown(fast, known.ids[:3])] * 3
    cached = [reply.usage.prompt_tokens_details.cached_tokens for reply in replies]
    assert cached == [0, 0, len(known.prompt_ids) - 1]


# ---- seeds ----


def test_a_seed_repeats_its_text_alone_and_in_a_crowd_and_two_seeds_differ(client: Client) -> None:
    def sample(seed: int, stream: bool) -> str:
        return client.chat(CHATS[3].messages, temperature=1, seed=seed, max_tokens=16, stream=stream).text

    alone = [sample(1, False), sample(2, True)]
    with client.crowd(15):
        crowded = [sample(1, True), sample(2, False)]
    assert crowded == alone
    assert alone[0] != alone[1]


def test_without_a_seed_each_request_draws_its_own(client: Client) -> None:
    texts = at_once(lambda _: client.complete("Once upon a time", temperature=1, max_tokens=12).text, range(3))
    assert len(set(texts)) == 3


def test_one_seed_over_a_list_of_prompts_is_each_as_if_alone(client: Client) -> None:
    prompts = [known.text for known in TEXTS[:3]]
    options = {"temperature": 1, "seed": 7, "max_tokens": 12}
    together = client.sdk.completions.create(model="smollm2", prompt=prompts, **options)
    assert [choice.text for choice in together.choices] == [client.complete(prompt, **options).text for prompt in prompts]
    assert len({choice.text for choice in together.choices}) == 3


# ---- text ----


def multibyte(fast: Any) -> Known:
    """The answer that begins with most bytes per character."""
    return max(KNOWN, key=lambda known: len(shown(fast, known.ids[:16]).encode()) - len(shown(fast, known.ids[:16])))


def test_what_is_streamed_is_the_whole_text_is_the_decoded_ids_at_every_length(client: Client, fast: Any) -> None:
    known = multibyte(fast)

    def ask(tokens: int) -> None:
        generated = client.generate(known.prompt_ids, max_new_tokens=tokens, ignore_eos=True)
        assert generated["output_ids"] == known.ids[:tokens]
        streamed = client.complete(known.text, max_tokens=tokens, stream=True, ignore_eos=True)
        whole = client.complete(known.text, max_tokens=tokens, ignore_eos=True)
        assert generated["text"] == streamed.text == whole.text == shown(fast, known.ids[:tokens])

    at_once(ask, range(1, 13))


def test_some_of_these_texts_end_inside_a_character(fast: Any) -> None:
    known = multibyte(fast)
    texts = [shown(fast, known.ids[:tokens]) for tokens in range(1, 13)]
    assert any(text.endswith("\ufffd") for text in texts)
    assert not texts[-1].isascii()


def test_a_run_of_tokens_that_form_no_character_is_exact(client: Client, fast: Any) -> None:
    continuation_byte = fast.convert_tokens_to_ids("Ģ")  # byte 0x80
    forced = {"max_tokens": 50, "ignore_eos": True, "logit_bias": {str(continuation_byte): 100}}
    streamed, whole = at_once(lambda stream: client.complete("Once", stream=stream, **forced).text, [True, False])
    assert streamed == whole == shown(fast, [continuation_byte] * 50) == "\ufffd" * 50


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_ends_inside_a_character_is_completed(client: Client, fast: Any, stream: bool) -> None:
    first, second = (fast.convert_tokens_to_ids(piece) for piece in "Ã©")  # the two bytes of é
    prompt = [*fast.encode("caf"), first]
    reply = client.complete(prompt, max_tokens=1, logit_bias={str(second): 100}, stream=stream)
    assert reply.text == "é"


def test_special_tokens_show_when_asked(client: Client, fast: Any) -> None:
    known = SHORT_CHATS[0]
    ids = known.ids[: len(known.answer) + 5]
    options = {"max_tokens": len(ids), "ignore_eos": True}
    assert client.chat(known.messages, skip_special_tokens=False, **options).text == fast.decode(ids, skip_special_tokens=False)
    assert client.chat(known.messages, **options).text == shown(fast, ids)


def test_texts_of_many_scripts_are_tokenized_as_transformers_does_and_come_back(client: Client, fast: Any) -> None:
    tokenized = client.server.post("/tokenize", {"prompt": LINES}).json()
    assert tokenized["tokens"] == [fast.encode(line) for line in LINES]
    assert tokenized["count"] == [len(ids) for ids in tokenized["tokens"]]
    detokenized = client.server.post("/detokenize", {"tokens": tokenized["tokens"], "skip_special_tokens": False}).json()
    assert detokenized["text"] == LINES


# ---- stops ----


def stop_cases(fast: Any) -> list[tuple[Known, str, str]]:
    """(prompt, stop, the text before it): stops of 1 to 12 characters from the middle of what is said, wherever tokens begin."""
    cases = []
    for index, known in enumerate(TEXTS):
        text = shown(fast, known.answer[:30])
        begin = 9 + index
        stop = text[begin : begin + 1 + index % 12]
        if stop and "\ufffd" not in text:
            cases.append((known, stop, text[: text.index(stop)]))
    return cases


def test_clients_with_different_stops_at_once_each_end_at_their_own(client: Client, fast: Any) -> None:
    cases = stop_cases(fast)
    assert len(cases) >= 12

    def ask(at: int) -> None:
        known, stop, before = cases[at // 2]
        reply = client.complete(known.text, stop=[stop, "never said"], max_tokens=30, stream=at % 2 == 0)
        assert (reply.text, reply.finish_reason) == (before, "stop"), stop

    at_once(ask, range(2 * len(cases)))


def test_stops_begin_and_end_inside_tokens_and_span_several(fast: Any) -> None:
    """What the test above relies on."""
    inside, spanning = 0, 0
    for known, stop, before in stop_cases(fast):
        ends = set(itertools.accumulate(len(fast.decode([token])) for token in known.answer[:30]))
        inside += len(before) not in ends and len(before) + len(stop) not in ends
        spanning += sum(len(before) < end < len(before) + len(stop) for end in ends) >= 2
    assert inside >= 2
    assert spanning >= 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_ends_on_the_beginning_of_a_stop_is_sent(client: Client, fast: Any, stream: bool) -> None:
    known = TEXTS[0]
    text = shown(fast, known.answer[:12])
    reply = client.complete(known.text, max_tokens=12, stop=text[-4:] + "…never", stream=stream)
    assert (reply.text, reply.finish_reason) == (text, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_of_one_s_own_adds_to_the_model_s_end_token(client: Client, fast: Any, stream: bool) -> None:
    known = SHORT_CHATS[0]
    reply = client.chat(known.messages, max_tokens=64, stop="never said", stop_token_ids=[9], stream=stream)
    assert (reply.text, reply.finish_reason) == (shown(fast, known.answer), "stop")


def test_a_stop_token_of_one_s_own_ends_there_and_counts(client: Client, fast: Any) -> None:
    known = TEXTS[1]
    end = known.answer.index(known.answer[8])
    reply = client.complete(known.text, max_tokens=30, stop_token_ids=[known.answer[8]])
    assert (reply.text, reply.finish_reason) == (shown(fast, known.answer[:end]), "stop")
    assert reply.usage.completion_tokens == end + 1


def test_min_tokens_hold_stops_and_end_tokens_off(client: Client, fast: Any) -> None:
    known = TEXTS[1]
    text = shown(fast, known.answer[:20])
    early = next(text[at : at + 4] for at in range(8) if text.count(text[at : at + 4]) == 1)
    assert client.complete(known.text, max_tokens=20, stop=early).text == text[: text.index(early)]
    assert client.complete(known.text, max_tokens=20, stop=early, min_tokens=12).text == text
    ending = SHORT_CHATS[0]
    longer = len(ending.answer) + 5
    assert client.chat(ending.messages, max_tokens=longer + 1, min_tokens=longer).usage.completion_tokens >= longer


# ---- templates ----

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "no system message"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a system message"}],
    [{"role": "user", "content": "first"}, {"role": "system", "content": "second"}, {"role": "user", "content": "third"}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "世界 😀 \n\n <|im_end|>"}],
    [{"role": "assistant", "content": " an answer first "}, {"role": "user", "content": ""}],
]


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_a_chat_asks_what_transformers_renders(client: Client, fast: Any, messages: list[dict[str, Any]]) -> None:
    text = fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    rendered = fast.encode(text, add_special_tokens=False)
    expected = client.generate(rendered, max_new_tokens=6)["text"]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    for reply in at_once(lambda asked: client.chat(asked, max_tokens=6), [messages, parts]):
        assert (reply.usage.prompt_tokens, reply.text) == (len(rendered), expected)


def test_a_last_message_that_is_continued_is_what_transformers_renders(client: Client, fast: Any) -> None:
    messages = [{"role": "user", "content": "Count to ten."}, {"role": "assistant", "content": "One, two, three,"}]
    rendered = fast.encode(fast.apply_chat_template(messages, tokenize=False, continue_final_message=True), add_special_tokens=False)
    reply = client.chat(messages, max_tokens=10, continue_final_message=True)
    assert (reply.usage.prompt_tokens, reply.text) == (len(rendered), client.generate(rendered, max_new_tokens=10)["text"])


# ---- what it says of itself ----


def test_the_server_says_which_model_it_is_and_how_exact(client: Client) -> None:
    assert [model.id for model in client.sdk.models.list()] == ["smollm2"]
    info = client.server.get("/server_info").json()
    assert info["processes"]["scheduler"]["dtype"] == "float32"
    assert info["processes"]["scheduler"]["exactness"] == "token"


def test_when_all_have_gone_nothing_is_held_and_the_books_agree(client: Client) -> None:
    held = ("sterna_requests_running", "sterna_scheduler_running", "sterna_scheduler_waiting", "sterna_kv_used_tokens")
    until(lambda: all(client.server.metrics()[name] == 0 for name in held))
    samples = client.server.metrics()
    ended = sum(value for name, value in samples.items() if name.startswith("sterna_requests_total{"))
    assert ended == samples["sterna_requests_started_total"] > 0
