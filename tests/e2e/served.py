"""The default model behind a real server: what it is known to say, and ways to ask it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai

from e2e.reference import Reference
from running_server import RunningServer, until

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MODEL = "smollm2"
END_ID = 2
SURE = 1e-3
"""Where the reference's two best logits are farther apart than this, there is one right token."""


@dataclass(frozen=True)
class Known:
    """A prompt and what transformers says after it, as far as that is sure; 64 tokens at most, going on past end tokens."""

    messages: list[dict[str, str]] | None
    """None where the prompt is no conversation."""
    text: str
    prompt_ids: list[int]
    ids: list[int]

    @property
    def answer(self) -> list[int]:
        """Up to and with the first end token."""
        return self.ids[: self.ids.index(END_ID) + 1] if END_ID in self.ids else self.ids


def known_answers() -> list[Known]:
    """Those that are sure over at least 48 tokens."""
    data = json.loads((Path(__file__).parents[1] / "data" / "models_smollm2.json").read_text())
    found = []
    for case in data["cases"]:
        reference = Reference(case["ids"], case["gaps"])
        sure = next((at for at, gap in enumerate(reference.gaps) if gap < SURE), len(reference.ids))
        if sure >= 48:
            found.append(Known(case["messages"], case["text"], case["prompt_ids"], reference.ids[:sure]))
    return found


KNOWN = known_answers()
CHATS = [known for known in KNOWN if known.messages is not None]
TEXTS = [known for known in KNOWN if known.messages is None]
SHORT_CHATS = sorted((known for known in CHATS if END_ID in known.ids[:-5]), key=lambda known: len(known.answer))
"""Those that end, shortest answer first."""


def fast_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A resolved folder's tokenizer as transformers runs it, its chat template included."""
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), clean_up_tokenization_spaces=False)
    made.chat_template = (folder / "chat_template.jinja").read_text()
    return made


@dataclass(frozen=True)
class Reply:
    """One answer, whichever way it came."""

    text: str
    finish_reason: str
    usage: Any
    pieces: list[str]
    """The deltas; one where it was no stream."""


class Client:
    """The official SDK, greedy unless told otherwise. Safe to use from many threads."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.sdk = server.openai()
        self._http = httpx.Client(base_url=server.url, timeout=120, verify=False)

    def chat(self, messages: Any, *, stream: bool = False, **options: Any) -> Reply:
        body = {"model": MODEL, "messages": messages, "temperature": 0, **_body(options)}
        if not stream:
            answer = self.sdk.chat.completions.create(**body)
            content = answer.choices[0].message.content
            assert content is not None
            return Reply(content, answer.choices[0].finish_reason, answer.usage, [content])
        chunks = list(self.sdk.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        return self._streamed(chunks, [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices])

    def complete(self, prompt: Any, *, stream: bool = False, **options: Any) -> Reply:
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, **_body(options)}
        if not stream:
            answer = self.sdk.completions.create(**body)
            return Reply(answer.choices[0].text, answer.choices[0].finish_reason, answer.usage, [answer.choices[0].text])
        chunks = list(self.sdk.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        return self._streamed(chunks, [chunk.choices[0].text for chunk in chunks if chunk.choices])

    def generate(self, ids: list[int], **params: Any) -> Any:
        """/generate's answer: `text`, `output_ids`, `meta_info`."""
        answer = self._http.post("/generate", json={"input_ids": ids, "sampling_params": {"temperature": 0, **params}})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def close(self) -> None:
        self.sdk.close()
        self._http.close()

    def settle(self) -> None:
        """Until those that have gone hold nothing: their last page is in the cache once the step has returned that they were still in."""
        until(lambda: self.server.metrics()["sterna_kv_used_tokens"] == self.server.metrics()["sterna_requests_running"] == 0)

    def flush(self) -> None:
        """Empty the cache."""
        self.settle()
        assert self.server.post("/flush_cache", {}).status_code == 200

    @contextmanager
    def crowd(self, size: int) -> Iterator[None]:
        """`size` other requests that run before, during and after what is done in here."""
        streams = [self._neighbour(index) for index in range(size)]
        try:
            for stream in streams:
                next(stream)
            yield
            for stream in streams:
                assert next(stream).choices[0].finish_reason is None
        finally:
            for stream in streams:
                stream.close()

    def _neighbour(self, index: int) -> openai.Stream[openai.types.Completion]:
        # Tokens that end inside characters make chunks without text rare, not absent: a neighbour has tokens to spare.
        return self.sdk.completions.create(
            model=MODEL,
            prompt=KNOWN[index % len(KNOWN)].text,
            temperature=0.8 * (index % 2),
            seed=index,
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        )

    def _streamed(self, chunks: list[Any], pieces: list[str]) -> Reply:
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        assert set(reasons[:-1]) <= {None}
        assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].choices == []
        return Reply("".join(pieces), reasons[-1], chunks[-1].usage, pieces)


_OPENAI_FIELDS = {"max_tokens", "max_completion_tokens", "seed", "stop", "temperature", "top_p", "logit_bias"}


def _body(options: dict[str, Any]) -> dict[str, Any]:
    """What the SDK knows as arguments, and the rest as it wants that."""
    extra = {name: value for name, value in options.items() if name not in _OPENAI_FIELDS}
    return {name: value for name, value in options.items() if name in _OPENAI_FIELDS} | {"extra_body": extra}
