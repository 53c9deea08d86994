"""Invariant 7 on the native executor, through the real scheduler: a request's tokens, and to the bit their logprobs, are those that it gets
alone, on a cold cache, in one chunk, step by step and on one thread, whatever the weights' format. Freed pages are filled with NaN; slots
are counted after every step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import pytest

import tiny_models
from e2e.conftest import TinyModels
from e2e.engine import Answer, Ask, Engine, cached_again
from e2e.test_conditions import PAGE, STYLES, TOKENS, expect_no_outputs, ids, neighbours, too_many, traffic
from sterna.executor.native import _native
from sterna.mem_cache.window import most_window_tokens
from sterna.protocol.logprobs import TokenLogprobs
from sterna.protocol.sampling import SamplingParams


class Subject(NamedTuple):
    model: str
    quantization: str

    @property
    def all_windows(self) -> bool:
        return "mistral" in self.model


SUBJECTS = [
    Subject("llama", "int4"),
    Subject("mistral-window", "int8"),
    Subject("qwen2-window", "none"),
    Subject("qwen3", "int4"),
    Subject("gemma3", "int8"),
    Subject("qwen3-moe", "int4"),
]
"""Every format of weights; windows in all layers and in some; experts."""


class Said(NamedTuple):
    """What must not depend on anything but the request."""

    ids: list[int]
    logprobs: list[TokenLogprobs]

    @staticmethod
    def of(answer: Answer) -> Said:
        assert len(answer.ids) == len(answer.logprobs)
        return Said(answer.ids, answer.logprobs)

    def first(self, count: int) -> Said:
        return Said(self.ids[:count], self.logprobs[:count])

    def after(self, count: int) -> Said:
        return Said(self.ids[count:], self.logprobs[count:])


class Natives:
    """Engines over tiny models, and what each says to a request that is alone."""

    def __init__(self, tiny: TinyModels) -> None:
        self._tiny = tiny
        self._quiet = cache(lambda subject: self.engine(subject, overlap=False, radix_cache=False, chunked_prefill_size=0))
        self._known: dict[tuple[Subject, str], Said] = {}

    def engine(self, subject: Subject, *, overlap: bool = True, **settings: object) -> Engine:
        folder = self._tiny.resolve(self._tiny.hf(subject.model))
        settings = {"quantization": subject.quantization, "cache_dir": str(self._tiny.cache_dir), **settings}
        return Engine(folder, executor="native", overlap=overlap, logprobs=True, **settings)

    def alone(self, subject: Subject, ask: Ask) -> Said:
        key = (subject, repr((ask.prompt, ask.tokens, ask.params, ask.ignore_eos)))
        if key not in self._known:
            (answer,) = self._quiet(subject).run(Ask(ask.prompt, ask.tokens, params=ask.params, ignore_eos=ask.ignore_eos))
            assert (answer.batch_size, answer.cached_tokens, answer.chunks, answer.retractions) == (1, 0, 1, 0)
            self._known[key] = Said.of(answer)
        return self._known[key]

    def check(self, subject: Subject, asks: Sequence[Ask], answers: Sequence[Answer]) -> None:
        for index, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
            assert Said.of(answer) == self.alone(subject, ask), index


@pytest.fixture(scope="module")
def natives(tiny: TinyModels) -> Natives:
    return Natives(tiny)


@pytest.fixture(params=SUBJECTS, ids="-".join)
def subject(request: pytest.FixtureRequest) -> Subject:
    return request.param


def both_ways(length: int, seed: int = 0, *, turn: int = 0) -> list[Ask]:
    """The same prompt, greedy and sampled."""
    return [Ask(ids(length, seed), TOKENS, turn=turn, params=params) for params in (STYLES[0], STYLES[1])]


def test_random_models_have_something_to_say(natives: Natives, subject: Subject) -> None:
    """What the others rely on: tokens that wander, and differ from prompt to prompt."""
    said = [natives.alone(subject, ask).ids for ask in [*both_ways(50), *both_ways(51)]]
    assert all(len(set(tokens)) > 5 for tokens in said)
    assert len({tuple(tokens) for tokens in said}) == 4


def test_a_warm_cache_changes_no_token(natives: Natives, subject: Subject) -> None:
    under_test = natives.engine(subject)
    for length in (PAGE - 1, PAGE, PAGE + 1, 100, 300):
        for ask in both_ways(length):
            under_test.flush()
            cold, warm = under_test.run(ask)[0], under_test.run(ask)[0]
            assert cold.cached_tokens == 0
            assert warm.cached_tokens == cached_again(under_test, length, TOKENS)
            natives.check(subject, [ask, ask], [cold, warm])


def test_a_shared_beginning_of_any_length_changes_no_token(natives: Natives, subject: Subject) -> None:
    under_test = natives.engine(subject)
    known = Ask(ids(20 * PAGE), TOKENS)
    natives.check(subject, [known], under_test.run(known))
    for shared in (PAGE - 1, PAGE, PAGE + 1, 16 * PAGE, 16 * PAGE + 1, 20 * PAGE):
        asks = [Ask([*known.prompt[:shared], *ids(20, seed=shared + i)], TOKENS, params=STYLES[i]) for i in range(4)]
        answers = under_test.run(*asks)
        natives.check(subject, asks, answers)
        assert max(answer.cached_tokens for answer in answers) == shared


def test_a_conversation_that_goes_on_finds_its_answers_cached(natives: Natives, subject: Subject) -> None:
    under_test = natives.engine(subject)
    first = Ask(ids(100), 50, params=STYLES[1])
    (answer,) = under_test.run(first)
    second = Ask([*first.prompt, *answer.ids, *ids(50, seed=1)], TOKENS)
    (again,) = under_test.run(second)
    assert again.cached_tokens == 149
    natives.check(subject, [first, second], [answer, again])


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 0])
def test_chunks_of_any_size_change_no_token(natives: Natives, subject: Subject, chunk_size: int) -> None:
    under_test = natives.engine(subject, chunked_prefill_size=chunk_size, radix_cache=False)
    for ask in both_ways(290):
        (answer,) = under_test.run(ask)
        assert answer.chunks == (-(-290 // chunk_size) if chunk_size else 1)
        natives.check(subject, [ask], [answer])


@pytest.mark.parametrize("threads", [1, 3])
def test_neighbours_of_every_style_and_threads_change_no_token(natives: Natives, subject: Subject, threads: int) -> None:
    under_test = natives.engine(subject, chunked_prefill_size=64, threads=threads)
    asks = [Ask(ids(50 + 80 * i, seed=i), TOKENS, turn=2 * i, params=style) for i, style in enumerate(STYLES)]
    answers = under_test.run(*asks, *neighbours(15, seed=threads, last_turn=10))[: len(asks)]
    assert under_test.saw_a_mixed_step
    assert max(answer.batch_size for answer in answers) >= 16
    assert max(answer.chunks for answer in answers) > 1
    natives.check(subject, asks, answers)


def test_neighbours_that_leave_in_the_middle_change_no_token(natives: Natives, subject: Subject) -> None:
    under_test = natives.engine(subject, chunked_prefill_size=32)
    asks, others = both_ways(50), neighbours(14, seed=7)
    answers = under_test.run(*asks, *others, aborts={index: index for index in range(2, 16)})
    assert sum(len(answer.ids) < other.tokens for answer, other in zip(answers[2:], others, strict=True)) >= 10
    natives.check(subject, asks, answers[:2])


SHORT = 40 * PAGE
SHORT_WINDOWS = 12 * PAGE
"""Of a window of 16 no request holds more than three pages, and sixteen tokens of output later it holds no more."""


@pytest.mark.parametrize("style", range(len(STYLES)))
@pytest.mark.parametrize(("radix_cache", "overlap"), [(True, True), (False, True), (True, False)])
def test_requests_that_were_retracted_go_on_as_if_nothing_had_been(
    natives: Natives, style: int, radix_cache: bool, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_no_outputs(monkeypatch)
    subject = SUBJECTS[style]
    asks = too_many(STYLES[style])
    memory = SHORT_WINDOWS if subject.all_windows else SHORT
    settings = {"radix_cache": radix_cache, "overlap": overlap, "max_total_tokens": memory}
    answers = natives.engine(subject, chunked_prefill_size=32, **settings).run(*asks)
    assert sum(answer.retractions for answer in answers) > 0
    natives.check(subject, asks, answers)


@pytest.mark.parametrize("params", STYLES, ids=range(len(STYLES)))
def test_a_request_that_resumes_goes_on_where_it_was(natives: Natives, params: SamplingParams) -> None:
    subject, ask = SUBJECTS[2], Ask(ids(40), 40, params=params)
    whole = natives.alone(subject, ask)
    for done in (1, 15, 39):
        (rest,) = natives.engine(subject).run(Ask(ask.prompt, ask.tokens, params=params, resume=tuple(whole.ids[:done])))
        assert Said.of(rest) == whole.after(done)


@pytest.mark.parametrize(("chunk_size", "overlap"), [(16, False), (16, True), (100, True), (3, True)])
def test_in_any_traffic_each_gets_what_it_gets_alone(
    natives: Natives, subject: Subject, chunk_size: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_no_outputs(monkeypatch)
    settings = {"chunked_prefill_size": chunk_size, "overlap": overlap, "schedule_policy": "lpm" if chunk_size == 3 else "fcfs"}
    aborts = {2: 20, 7: 33, 11: 45}
    asks = traffic(chunk_size)
    under_test = natives.engine(subject, max_total_tokens=272 if subject.all_windows else 288, **settings)
    answers = under_test.run(*asks, aborts=aborts)
    assert (under_test.executor.steps_on_top > 0) == overlap
    # Where each page is a window, a request holds as many from its beginning to its end, and nobody is in for a surprise.
    assert sum(answer.retractions for answer in answers) > 0 or subject.all_windows
    assert sum(answer.cached_tokens > 0 for answer in answers) >= 5
    assert max(answer.chunks for answer in answers) > 1
    assert max(answer.batch_size for answer in answers) > 4
    for index, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        alone = natives.alone(subject, ask)
        assert Said.of(answer) == (alone.first(len(answer.ids)) if index in aborts else alone), index


@pytest.mark.parametrize("isa", [isa for isa in _native.available_isas() if _native.has_portable_bf16(isa)])
def test_every_instruction_set_says_the_same(natives: Natives, subject: Subject, isa: str) -> None:
    asks = [Ask(ids(40 + i, seed=i), TOKENS, params=style) for i, style in enumerate(STYLES)]
    portable = natives.engine(subject, arithmetic="portable").run(*asks)
    answers = natives.engine(subject, isa=isa).run(*asks)
    assert list(map(Said.of, answers)) == list(map(Said.of, portable))


@pytest.mark.parametrize("index", [1, 2, 4])
def test_a_request_holds_a_window_however_long_it_grows(natives: Natives, index: int) -> None:
    subject, chunk_size = SUBJECTS[index], 32
    window = tiny_models.VARIANTS[subject.model].config["sliding_window"]
    under_test = natives.engine(subject, chunked_prefill_size=chunk_size)
    ask = Ask(ids(300), 6 * window)
    natives.check(subject, [ask], under_test.run(ask))
    groups = [group for group, _ in under_test.scheduler.ledger.pools.windows]
    assert groups
    assert all(under_test.most_held[group] <= most_window_tokens(window, chunk_size, PAGE) for group in groups)
