"""Mixed clients: what each asks, and exactly what it was answered.

An `Ask` is data; a `Load` runs many at once in one event loop, tells whoever watches of every event that a client saw, and returns one
`Answer` per ask. Clients judge nothing but their own protocol (`checks.py` judges the rest): a text that is withdrawn, a second ending or
an event after the end is in `Answer.faults`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 90.0
"""Of a whole answer: nobody may hang."""

WORDS = ["the", "sea", "a", "tern", "flies", "over", "cold", "water", "and", "sees", "land", "far", "below", "it", "ice", "where", "light"]


@dataclass(frozen=True)
class Ask:
    """One request."""

    name: str
    path: str
    body: dict[str, Any]

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def wants_logprobs(self) -> bool:
        return "return_logprob" in self.body or "logprobs" in self.body

    @property
    def cumulative(self) -> bool:
        """Whether each event holds the whole text so far."""
        return self.path == "/generate" and not self.body.get("incremental")


@dataclass
class Answer:
    """What one client saw."""

    ask: Ask
    status: int | None = None
    """None: no status line came."""
    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    """/generate only."""
    logprobs: list[Any] = field(default_factory=list)
    """One entry per output token, each as its surface shows it."""
    finish: Any = None
    usage: dict[str, int] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    retry_after: str | None = None
    broken: str | None = None
    """How the connection ended, where it wasn't as HTTP ends one."""
    faults: list[str] = field(default_factory=list)
    events: int = 0

    @property
    def content(self) -> tuple[Any, ...]:
        """All that must not depend on what happened meanwhile."""
        return self.text, self.output_ids, self.logprobs, self.finish, self.usage


class Load:
    """`asks`, all at once. `watch` is called with this after every event of any client."""

    def __init__(self, url: str, asks: Sequence[Ask], watch: Callable[[Load], None] = lambda _: None) -> None:
        self._url = url
        self.answers = [Answer(ask) for ask in asks]
        self._watch = watch
        self.begun = 0
        """Requests that have been written."""
        self.events = 0
        """Pieces of output, over all clients."""
        self.characters = 0
        """What stands in them. (How many pieces a text comes in is up to who is slow.)"""
        self.ended = 0

    @property
    def spoken(self) -> int:
        """Clients that have got a piece of output."""
        return sum(answer.events > 0 for answer in self.answers)

    async def run(self) -> list[Answer]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S, limits=limits, verify=False) as client:
            await asyncio.gather(*(self._play(client, answer) for answer in self.answers))
        return self.answers

    async def _play(self, client: httpx.AsyncClient, answer: Answer) -> None:
        request = client.build_request("POST", answer.ask.path, json=answer.ask.body)
        self.begun += 1
        self._watch(self)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                response = await client.send(request, stream=True)
                try:
                    answer.status = response.status_code
                    answer.retry_after = response.headers.get("retry-after")
                    await self._read(response, answer)
                finally:
                    await response.aclose()
        except TimeoutError:
            answer.broken = "no end"
        except httpx.HTTPError as fault:
            answer.broken = type(fault).__name__
        self.ended += 1
        self._watch(self)

    async def _read(self, response: httpx.Response, answer: Answer) -> None:
        if not (answer.ask.streams and response.status_code == 200):
            read_whole(answer, json.loads(await response.aread()))
            return
        done = False
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if done:
                answer.faults.append(f"after the end: {line:.200}")
            if line == "data: [DONE]":
                done = True
                continue
            had = len(answer.text)
            read_event(answer, json.loads(line.removeprefix("data: ")))
            answer.events += 1
            self.events += 1
            self.characters += len(answer.text) - had
            self._watch(self)
        if not done and answer.error is None:
            answer.faults.append("the stream ended without saying so")


def read_whole(answer: Answer, body: Any) -> None:
    """A body that is no stream."""
    if "error" in body:
        answer.error = body["error"]
    elif answer.ask.path == "/generate":
        take_generate(answer, body)
    else:
        choice = body["choices"][0]
        answer.text = choice["text"] if "text" in choice else choice["message"]["content"]
        take_logprobs(answer, choice["logprobs"])
        take_finish(answer, choice["finish_reason"])
        take_usage(answer, body["usage"])


def read_event(answer: Answer, event: Any) -> None:
    """One event of a stream."""
    if answer.error is not None:
        answer.faults.append("an event after the error")
    if "error" in event:
        answer.error = event["error"]
        if answer.finish is not None:
            answer.faults.append("an error after the end")
    elif answer.ask.path == "/generate":
        take_generate(answer, event)
    elif event["choices"]:
        choice = event["choices"][0]
        answer.text += (choice["text"] if "text" in choice else choice["delta"].get("content")) or ""
        take_logprobs(answer, choice["logprobs"])
        take_finish(answer, choice["finish_reason"])
    else:
        take_usage(answer, event["usage"])


def take_generate(answer: Answer, output: Any) -> None:
    text, ids, meta = output["text"], output["output_ids"], output["meta_info"]
    names = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
    logprobs = list(zip(*(meta[name] for name in names if name in meta), strict=True))
    if answer.ask.cumulative:
        if not text.startswith(answer.text) or ids[: len(answer.output_ids)] != answer.output_ids:
            answer.faults.append(f"{answer.text!r} was withdrawn: {text!r}")
        if logprobs[: len(answer.logprobs)] != answer.logprobs:
            answer.faults.append(f"logprobs were withdrawn: {answer.logprobs}")
        answer.text, answer.output_ids, answer.logprobs = text, ids, logprobs
    else:
        answer.text += text
        answer.output_ids = answer.output_ids + ids
        answer.logprobs += logprobs
    reason = meta["finish_reason"]
    if reason is not None and reason["type"] == "abort":
        answer.error = answer.error or {"message": reason["message"], "code": "aborted"}
    take_finish(answer, reason)
    answer.usage = {name: meta[name] for name in ("prompt_tokens", "completion_tokens")}


def take_logprobs(answer: Answer, logprobs: Any) -> None:
    """Of a choice."""
    if logprobs is None:
        return
    if "content" in logprobs:
        answer.logprobs += logprobs["content"]
    else:
        answer.logprobs += zip(*(logprobs[name] for name in sorted(logprobs)), strict=True)


def take_finish(answer: Answer, reason: Any) -> None:
    if answer.finish is not None and reason is not None:
        answer.faults.append(f"a second ending: {reason}")
    answer.finish = answer.finish if reason is None else reason


def take_usage(answer: Answer, usage: Any) -> None:
    if answer.usage:
        answer.faults.append("usage twice")
    answer.usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}


# ---- what is asked ----


def mixed_asks(
    count: int,
    model: str,
    *,
    seed: int = 0,
    max_tokens: tuple[int, int] = (24, 72),
    prompt_words: int = 300,
    ignore_eos: bool = False,
) -> list[Ask]:
    """`count` different requests: every surface, streamed in every way and not, greedy and sampled, with and without logprobs and stops
    that are held back and sometimes match, short prompts and long ones, some of which share a prefix (of `prompt_words`)."""
    rng = random.Random(seed)
    shared = " ".join(rng.choices(WORDS, k=prompt_words))
    return [_ask(rng, index, model, shared, rng.randint(*max_tokens), ignore_eos or index % 8 == 0) for index in range(count)]


def _ask(rng: random.Random, index: int, model: str, shared: str, length: int, ignore_eos: bool) -> Ask:
    prompt = f"Number {index}: " + " ".join(rng.choices(WORDS, k=rng.randrange(5, 40)))
    if index % 4 == 3:
        prompt = f"{shared} {prompt}"
    sampling: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95} if index % 2 else {"temperature": 0.0}
    sampling["ignore_eos"] = ignore_eos
    if index % 3 == 0:
        sampling["stop"] = [". The", "\n\n\n", " and the sea"]  # their beginnings are common: text is held back all the time
    name = f"{index}"
    wants_logprobs = index // 16 % 2 == 0  # in each of the forms below
    match index // 2 % 4:
        case 0:
            params = {**sampling, "max_new_tokens": length, "sampling_seed": index}
            body: dict[str, Any] = {"text": prompt, "sampling_params": params, "stream": index % 16 != 0, "incremental": index % 16 > 8}
            if wants_logprobs:
                body |= {
                    "return_logprob": True,
                    "top_logprobs_num": index % 3,
                    "token_ids_logprob": [1, index],
                    "return_text_in_logprobs": True,
                }
            return Ask(f"{name} generate", "/generate", body)
        case 1:
            body = {"model": model, "prompt": prompt, "max_tokens": length, "seed": index, **sampling, "stream": True}
            if wants_logprobs:
                body["logprobs"] = index % 5
            return Ask(f"{name} completion", "/v1/completions", body | {"stream_options": {"include_usage": True}})
        case 2:
            body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": length, "seed": index, **sampling}
            if wants_logprobs:
                body |= {"logprobs": True, "top_logprobs": index % 4}
            return Ask(f"{name} whole chat", "/v1/chat/completions", body)
        case _:
            body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": length, "seed": index, **sampling}
            if wants_logprobs:
                body |= {"logprobs": True, "top_logprobs": index % 4}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            return Ask(f"{name} chat", "/v1/chat/completions", body)
