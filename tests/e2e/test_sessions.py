"""Sessions with the default model: the KV of what it said is reused, and a turn's ids are those of the whole conversation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.engine import THREADS
from e2e.served import CHATS, END_ID, KNOWN, SHORT_CHATS, Client, Known
from running_server import running_server, until
from sterna.config.model_config import ModelConfig
from sterna.protocol.finish import FinishMatchedToken
from sterna.text.chat_template import ChatTemplate
from sterna.text.chat_turn import render_turn
from sterna.text.tokenizer import Tokenizer
from unit.tokenizer_manager.session_turns import Group

PAGE = 16
NEXT = [{"role": "user", "content": "And why is that? Answer in 3 words."}]


@pytest.fixture(scope="module")
def client(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("sessions") / "log"
    with running_server("smollm2", "--threads", str(THREADS), "--max-total-tokens", "2048", log=log) as server:
        made = Client(server)
        yield made
        made.close()


def opened(client: Client) -> str:
    session = client.server.post("/open_session", {"capacity_of_str_len": 2000}).json()
    assert isinstance(session, str)
    return session


def generate(client: Client, ids: list[int], place: dict[str, Any] | None, **fields: Any) -> Any:
    params = {"temperature": 0, "max_new_tokens": 50, "ignore_eos": True, **fields.pop("sampling_params", {})}
    body = {"input_ids": ids, "sampling_params": params, "session_params": place, **fields}
    answer = client.server.post("/generate", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_ids(count: int, first: int = 0) -> list[int]:
    return [token for known in KNOWN for token in known.prompt_ids][first : first + count]


def flush(client: Client) -> None:
    assert client.server.post("/flush_cache", {}).status_code == 200


def test_the_kv_of_an_answer_serves_the_next_turn_and_the_tokens_are_those_of_plain_ids(client: Client) -> None:
    prompt, more = text_ids(100), text_ids(200, 300)
    flush(client)
    session = opened(client)
    first = generate(client, prompt, {"id": session}, rid="first")
    assert (first["meta_info"]["cached_tokens"], len(first["output_ids"])) == (0, 50)
    client.settle()
    second = generate(client, more, {"id": session, "rid": "first"}, rid="second")
    assert second["meta_info"]["prompt_tokens"] == 350
    assert second["meta_info"]["cached_tokens"] == 149  # the last token's KV has not been computed
    flush(client)
    plain = generate(client, prompt + first["output_ids"] + more, None)
    assert plain["meta_info"]["cached_tokens"] == 0
    assert plain["output_ids"] == second["output_ids"]
    third = generate(client, more[:10], {"id": session, "rid": "second", "offset": 200}, rid="third")
    flush(client)
    assert third["output_ids"] == generate(client, (prompt + first["output_ids"] + more)[:200] + more[:10], None)["output_ids"]


def test_a_chat_in_a_session_says_what_the_whole_conversation_says(client: Client) -> None:
    known = SHORT_CHATS[0]
    assert known.messages is not None
    session = opened(client)
    first = client.chat(known.messages, session_params={"id": session}, rid="c1", max_tokens=60)
    assert first.finish_reason == "stop"
    place = {"id": session, "rid": "c1"}
    client.settle()
    second = client.chat(NEXT, session_params=place, rid="c2", max_tokens=24, stream=True)
    whole = client.chat([*known.messages, {"role": "assistant", "content": first.text}, *NEXT], max_tokens=24)
    assert (second.text, second.finish_reason) == (whole.text, whole.finish_reason)
    assert second.usage.prompt_tokens == whole.usage.prompt_tokens
    cached = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == cached > 0


def test_a_turn_cut_off_by_a_disconnect_leaves_the_whole_context(client: Client) -> None:
    session = opened(client)
    first = generate(client, text_ids(60), {"id": session}, rid="whole")
    place = {"id": session, "rid": "whole"}
    body = {"text": " and", "session_params": place, "rid": "cut", "stream": True, "sampling_params": {"max_new_tokens": 1500}}
    with httpx.stream("POST", client.server.url + "/generate", json=body, timeout=60) as stream:
        next(stream.iter_lines())
    until(lambda: client.server.metrics()["sterna_requests_running"] == 0)
    again = generate(client, text_ids(5), place, rid="after")
    assert again["meta_info"]["prompt_tokens"] == 60 + 50 + 5
    flush(client)
    assert again["output_ids"] == generate(client, text_ids(60) + first["output_ids"] + text_ids(5), None)["output_ids"]


def test_a_pool_full_of_open_sessions_still_serves(client: Client) -> None:
    sessions = [opened(client) for _ in range(8)]
    prompts = [text_ids(300, 100 * index) for index in range(8)]  # more than the pool holds
    firsts = [
        generate(client, prompt, {"id": session}, rid=f"p{index}", sampling_params={"max_new_tokens": 4})
        for index, (session, prompt) in enumerate(zip(sessions, prompts, strict=True))
    ]
    evicted = generate(client, [5], {"id": sessions[0], "rid": "p0"}, sampling_params={"max_new_tokens": 4})
    assert evicted["meta_info"]["cached_tokens"] < 300 // PAGE * PAGE
    assert evicted["meta_info"]["prompt_tokens"] == 305
    plain = generate(client, [*prompts[0], *firsts[0]["output_ids"], 5], None, sampling_params={"max_new_tokens": 4})
    assert plain["output_ids"] == evicted["output_ids"]
    metrics = client.server.metrics()
    assert metrics["sterna_sessions"] >= 8
    assert metrics["sterna_session_tokens"] >= 8 * 304
    for session in sessions:
        assert client.server.post("/close_session", {"session_id": session}).status_code == 200


def stable(tokenizer: Tokenizer, known: Known) -> bool:
    """Whether the answer's text has the answer's ids."""
    return [*tokenizer.encode(tokenizer.decode(known.answer), add_special_tokens=False), END_ID] == known.answer


def test_a_turn_has_the_ids_of_the_whole_conversation(smollm2: Path) -> None:
    tokenizer, template = Tokenizer.load(smollm2), ChatTemplate.load(smollm2, ModelConfig.load(smollm2))
    assert template is not None
    compared = 0
    for known in CHATS:
        assert known.messages is not None
        if known.answer[-1] != END_ID or not stable(tokenizer, known):
            continue
        said = {"role": "assistant", "content": tokenizer.decode(known.answer)}
        conversation = [*known.messages, said, *NEXT]
        whole = tokenizer.encode(template.render(conversation), add_special_tokens=False)
        group = Group(tokenizer, context_len=8192)
        group.open()
        end = FinishMatchedToken(END_ID, True)
        group.turn("a", known.prompt_ids, known.answer, end)
        assert group.turn("b", render_turn(template, NEXT), known.answer, end, rid="a", closes_answer=True) == whole
        further = tokenizer.encode(template.render([*conversation, said, *NEXT]), add_special_tokens=False)
        assert group.turn("c", render_turn(template, NEXT), [], rid="b", closes_answer=True) == further
        compared += 1
    assert compared >= 5
