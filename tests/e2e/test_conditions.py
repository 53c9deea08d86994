"""Invariant 7: a request's tokens depend on its prompt, parameters and seed, whatever the cache holds, however it is chunked, whoever
runs beside it and whether memory runs out. Greedy tokens against transformers', seeded ones against the request alone."""

from collections.abc import Sequence

import numpy as np
import pytest

import tiny_models
from e2e.conftest import TinyModels
from e2e.engine import Answer, Ask, Engine, cached_again, random_ids
from e2e.reference import assert_agrees
from sterna.protocol.sampling import SamplingParams
from sterna.scheduler.prefill import NewTokenRatio

TOKENS = 24
PAGE = 16
MODELS = ["llama", "mistral-window", "qwen2-window", "qwen3"]
"""Every family; windows of 16 in all layers and in some."""
WINDOW_MODELS = ["mistral-window", "qwen2-window", "qwen3-window"]
WINDOW = 16
VOCAB_SIZE = tiny_models.VARIANTS["llama"].config["vocab_size"]


def ids(length: int, seed: int = 0) -> list[int]:
    return random_ids(np.random.RandomState(seed * 1000 + length), length, VOCAB_SIZE)


def engine(tiny: TinyModels, model: str, **settings: object) -> Engine:
    return Engine(tiny.resolve(tiny.hf(model)), **settings)


def check(tiny: TinyModels, model: str, asks: Sequence[Ask], answers: Sequence[Answer]) -> None:
    """Every one of greedy `asks` got what transformers says."""
    oracle = tiny.oracle(tiny.hf(model))
    for ask, answer in zip(asks, answers, strict=True):
        assert assert_agrees(answer.ids, oracle.greedy(ask.prompt, ask.tokens), f"{model} after {len(ask.prompt)}") > 0


class Calm:
    """What each gets alone, on a cold cache, its steps in turn. Asked once: tests that vary the rest share it."""

    def __init__(self, tiny: TinyModels) -> None:
        self._tiny = tiny
        self._known: dict[tuple[str, str], list[int]] = {}

    def answers(self, model: str, asks: Sequence[Ask]) -> list[list[int]]:
        keys = [(model, repr((ask.prompt, ask.tokens, ask.params))) for ask in asks]
        unknown = [(key, ask) for key, ask in zip(keys, asks, strict=True) if key not in self._known]
        quiet = engine(self._tiny, model, radix_cache=False) if unknown else None
        for key, ask in unknown:
            assert quiet is not None
            (answer,) = quiet.run(Ask(ask.prompt, ask.tokens, params=ask.params))
            assert (answer.batch_size, answer.cached_tokens, answer.retractions) == (1, 0, 0)
            self._known[key] = answer.ids
        return [self._known[key] for key in keys]


@pytest.fixture(scope="module")
def calm(tiny: TinyModels) -> Calm:
    return Calm(tiny)


# ---- the cache ----


@pytest.mark.parametrize("page_size", [1, 4, PAGE])
@pytest.mark.parametrize("model", MODELS)
def test_a_warm_cache_changes_no_token(tiny: TinyModels, model: str, page_size: int) -> None:
    under_test = engine(tiny, model, page_size=page_size)
    for length in (page_size - 1 or 4, page_size, page_size + 1, 3 * page_size, 100):
        ask = Ask(ids(length), TOKENS)
        cold, warm = under_test.run(ask)[0], under_test.run(ask)[0]
        check(tiny, model, [ask, ask], [cold, warm])
        assert cold.cached_tokens == 0
        assert warm.cached_tokens == cached_again(under_test, length, TOKENS)


@pytest.mark.parametrize("model", MODELS)
def test_a_shared_beginning_of_any_length_changes_no_token(tiny: TinyModels, model: str) -> None:
    under_test = engine(tiny, model)
    known = Ask(ids(5 * PAGE), TOKENS)
    check(tiny, model, [known], under_test.run(known))
    for shared in (PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1):
        ask = Ask([*known.prompt[:shared], *ids(20, seed=shared)], TOKENS)
        (answer,) = under_test.run(ask)
        assert answer.cached_tokens == shared
        check(tiny, model, [ask], [answer])


@pytest.mark.parametrize("model", MODELS)
def test_a_conversation_that_goes_on_finds_its_answers_cached(tiny: TinyModels, model: str) -> None:
    under_test = engine(tiny, model)
    first = Ask(ids(100), 50)
    (answer,) = under_test.run(first)
    second = Ask([*first.prompt, *answer.ids, *ids(50, seed=1)], TOKENS)
    (again,) = under_test.run(second)
    # 149 of 150 have KV: the last token's is not yet computed.
    assert again.cached_tokens == 149
    check(tiny, model, [first, second], [answer, again])


@pytest.mark.parametrize("model", MODELS)
def test_requests_that_arrive_together_compute_a_common_beginning_once(tiny: TinyModels, model: str) -> None:
    under_test = engine(tiny, model, chunked_prefill_size=32)
    asks = [Ask([*ids(128), *ids(9, seed=i)], TOKENS) for i in range(1, 5)]
    answers = under_test.run(*asks)
    assert [answer.cached_tokens for answer in answers] == [0, 128, 128, 128]
    check(tiny, model, asks, answers)


@pytest.mark.parametrize("model", MODELS)
def test_without_the_cache_nothing_is_found_and_nothing_changes(tiny: TinyModels, model: str) -> None:
    under_test = engine(tiny, model, radix_cache=False)
    ask = Ask(ids(100), TOKENS)
    answers = [*under_test.run(ask), *under_test.run(ask)]
    assert [answer.cached_tokens for answer in answers] == [0, 0]
    check(tiny, model, [ask, ask], answers)


@pytest.mark.parametrize("model", MODELS)
def test_prefixes_that_were_evicted_leave_nothing_behind(tiny: TinyModels, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    under_test = engine(tiny, model, max_total_tokens=20 * PAGE)
    tree, evicted = under_test.scheduler.ledger.cache, []
    evict = tree.evict
    monkeypatch.setattr(tree, "evict", lambda group, tokens: evicted.append(evict(group, tokens)) or evicted[-1])
    for turn in range(8):
        asks = [Ask([*ids(40, seed=turn % 3), *ids(20, seed=100 + turn)], 8), Ask(ids(60, seed=turn), 8)]
        check(tiny, model, asks, under_test.run(*asks))
    assert sum(evicted) > 20 * PAGE


# ---- chunks ----


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 0])
@pytest.mark.parametrize("model", MODELS)
def test_chunks_of_any_size_change_no_token(tiny: TinyModels, model: str, chunk_size: int) -> None:
    under_test = engine(tiny, model, chunked_prefill_size=chunk_size)
    long, other = Ask(ids(200), TOKENS), Ask([*ids(200)[:100], *ids(60, seed=1)], TOKENS)
    cold, warm = under_test.run(long)[0], under_test.run(other)[0]
    assert cold.chunks == (-(-200 // chunk_size) if chunk_size else 1)
    assert warm.cached_tokens == 100
    assert warm.chunks == (-(-60 // chunk_size) if chunk_size else 1)
    check(tiny, model, [long, other], [cold, warm])


@pytest.mark.parametrize("chunk_size", [7, 64])
@pytest.mark.parametrize("model", MODELS)
def test_prompts_beside_generated_tokens_change_neither(tiny: TinyModels, model: str, chunk_size: int) -> None:
    under_test = engine(tiny, model, chunked_prefill_size=chunk_size)
    asks = [Ask(ids(30 + 40 * i, seed=i), TOKENS, turn=3 * i) for i in range(5)]
    answers = under_test.run(*asks)
    assert under_test.saw_a_mixed_step
    assert max(answer.chunks for answer in answers) > 1
    check(tiny, model, asks, answers)


# ---- neighbours ----

STYLES = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_p=0.8, seed=2),
    SamplingParams(temperature=1.3, top_k=20, min_p=0.05, seed=3),
    SamplingParams(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, seed=4),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, logit_bias={40: 5.0, 41: -100.0}),
]


def neighbours(count: int, seed: int, *, last_turn: int = 0) -> list[Ask]:
    """Random ones of every style."""
    draw = np.random.RandomState(seed)
    return [
        Ask(
            random_ids(draw, draw.randint(1, 90), VOCAB_SIZE),
            int(draw.randint(TOKENS, 2 * TOKENS)),
            turn=int(draw.randint(0, last_turn + 1)),
            params=STYLES[draw.randint(len(STYLES))],
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("last_turn", [0, 10])
@pytest.mark.parametrize("model", MODELS)
def test_fifteen_random_neighbours_change_no_token(tiny: TinyModels, model: str, last_turn: int) -> None:
    under_test = engine(tiny, model)
    ask = Ask(ids(50), 2 * TOKENS)
    others = neighbours(15, seed=last_turn, last_turn=last_turn)
    answer = under_test.run(*others[:8], ask, *others[8:])[8]
    assert answer.batch_size >= 16
    check(tiny, model, [ask], [answer])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("style", range(len(STYLES)))
def test_every_style_of_sampling_gives_the_same_tokens_alone_and_among_sixteen(
    tiny: TinyModels, calm: Calm, style: int, overlap: bool
) -> None:
    ask = Ask(ids(33), 2 * TOKENS, params=STYLES[style])
    among = engine(tiny, "qwen3", chunked_prefill_size=64, overlap=overlap).run(*neighbours(15, seed=style), ask)[-1]
    assert among.batch_size == 16
    assert [among.ids] == calm.answers("qwen3", [ask])
    assert len(set(among.ids)) > 5


def test_two_seeds_differ_and_one_repeats(tiny: TinyModels) -> None:
    under_test = engine(tiny, "llama")
    asks = [Ask(ids(20), TOKENS, params=SamplingParams(temperature=1.0, seed=seed)) for seed in (1, 2, 1, 2**64 - 1)]
    first, second, again, last = (answer.ids for answer in under_test.run(*asks))
    assert first == again
    assert len({tuple(each) for each in (first, second, last)}) == 3


@pytest.mark.parametrize("model", MODELS)
def test_neighbours_that_leave_in_the_middle_change_no_token(tiny: TinyModels, model: str) -> None:
    under_test = engine(tiny, model, chunked_prefill_size=32)
    ask = Ask(ids(50), TOKENS)
    others = neighbours(15, seed=7)
    answers = under_test.run(ask, *others, aborts={index: index for index in range(1, 16)})
    assert sum(len(answer.ids) < other.tokens for answer, other in zip(answers[1:], others, strict=True)) >= 10
    check(tiny, model, [ask], answers[:1])
    assert under_test.run(ask)[0].ids == answers[0].ids


# ---- memory ----

SHORT = 40 * PAGE
"""Room for six of `too_many` if each makes 7/10 of the tokens that it may, which is what the scheduler expects; all make more."""
SHORT_WINDOWS = {"page_size": 4, "max_total_tokens": 32 * 4}
"""The same for a model whose layers all have a window: of that they never hold more than six pages each, and need five."""


def too_many(params: SamplingParams) -> list[Ask]:
    return [Ask(ids(9 + i, seed=i), 100, params=params) for i in range(8)]


def expect_no_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that expects no output of anybody admits too many, and has to take memory back."""
    monkeypatch.setattr(NewTokenRatio, "INITIAL", 0.0)
    monkeypatch.setattr(NewTokenRatio, "FLOOR", 0.0)


@pytest.mark.parametrize("radix_cache", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_requests_that_were_retracted_lose_nothing(
    tiny: TinyModels, model: str, radix_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_no_outputs(monkeypatch)
    asks = too_many(STYLES[0])
    memory = SHORT_WINDOWS if model == "mistral-window" else {"max_total_tokens": SHORT}
    under_test = engine(tiny, model, radix_cache=radix_cache, chunked_prefill_size=32, **memory)
    answers = under_test.run(*asks)
    assert sum(answer.retractions for answer in answers) > 0
    check(tiny, model, asks, answers)


@pytest.mark.parametrize("style", range(1, len(STYLES)))
def test_sampling_goes_on_after_a_retraction_as_if_nothing_had_been(tiny: TinyModels, style: int) -> None:
    asks = too_many(STYLES[style])
    roomy = engine(tiny, "llama").run(*asks)
    for overlap in (False, True):
        short = engine(tiny, "llama", max_total_tokens=SHORT, overlap=overlap).run(*asks)
        assert sum(answer.retractions for answer in short) > sum(answer.retractions for answer in roomy) == 0
        assert [answer.ids for answer in short] == [answer.ids for answer in roomy]


@pytest.mark.parametrize("params", STYLES, ids=range(len(STYLES)))
def test_a_request_that_resumes_goes_on_where_it_was(tiny: TinyModels, params: SamplingParams) -> None:
    ask = Ask(ids(40), 40, params=params)
    (whole,) = engine(tiny, "qwen2").run(ask)
    for done in (1, 15, 39):
        resumed = Ask(ask.prompt, ask.tokens, params=params, resume=tuple(whole.ids[:done]))
        (rest,) = engine(tiny, "qwen2").run(resumed)
        assert rest.ids == whole.ids[done:]


# ---- penalties, windows, ends ----


@pytest.mark.parametrize("model", MODELS)
def test_a_repetition_penalty_is_transformers(tiny: TinyModels, model: str) -> None:
    asks = [Ask(ids(length), TOKENS, params=SamplingParams(temperature=0.0, repetition_penalty=1.3)) for length in (5, 60)]
    answers = engine(tiny, model, chunked_prefill_size=32).run(*asks)
    oracle = tiny.oracle(tiny.hf(model))
    for ask, answer in zip(asks, answers, strict=True):
        assert answer.ids != oracle.greedy(ask.prompt, TOKENS).ids
        assert assert_agrees(answer.ids, oracle.greedy(ask.prompt, TOKENS, repetition_penalty=1.3)) > 0


@pytest.mark.parametrize("length", [1, WINDOW - 8, WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW])
@pytest.mark.parametrize("model", WINDOW_MODELS)
def test_a_window_longer_or_shorter_than_the_prompt(tiny: TinyModels, model: str, length: int) -> None:
    under_test = engine(tiny, model, chunked_prefill_size=10)
    ask = Ask(ids(length), 2 * WINDOW)
    answers = [*under_test.run(ask), *under_test.run(ask)]
    check(tiny, model, [ask, ask], answers)


def test_the_window_matters(tiny: TinyModels) -> None:
    """What is beyond it is not seen: in one layer, outputs past it would otherwise be as those of the full model."""
    prompt = ids(5 * WINDOW)
    with_window, without = (engine(tiny, model).run(Ask(prompt, TOKENS))[0].ids for model in ("mistral-window", "mistral"))
    assert with_window != without


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_an_end_token_ends_where_the_reference_has_one(tiny: TinyModels, model: str, overlap: bool) -> None:
    """An end token that the model says by itself is rare in random models: a bias makes it likely, and the reference is the request
    that ignores it."""
    params = SamplingParams(temperature=1.0, seed=5, logit_bias={tiny_models.EOS_ID: 6.0})
    going_on, ending = (Ask(ids(20), 60, params=params, ignore_eos=ignore) for ignore in (True, False))
    on, end = engine(tiny, model, overlap=overlap).run(going_on, ending)
    assert tiny_models.EOS_ID in on.ids[:-1]
    assert end.ids == on.ids[: on.ids.index(tiny_models.EOS_ID) + 1]


# ---- everything at once ----


def traffic(seed: int) -> list[Ask]:
    """Sixteen of every style that begin in one of three ways and come over forty turns."""
    draw = np.random.RandomState(seed)
    beginnings = [ids(40, seed=which) for which in range(3)]
    return [
        Ask(
            [*beginnings[index % 3], *random_ids(draw, draw.randint(1, 20), VOCAB_SIZE)],
            int(draw.randint(30, 60)),
            turn=int(draw.randint(0, 40)),
            params=STYLES[index % len(STYLES)],
        )
        for index in range(16)
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("model", "page_size", "chunk_size", "policy"),
    [("llama", 1, 16, "fcfs"), ("mistral-window", 4, 3, "lpm"), ("qwen2-window", 16, 100, "fcfs"), ("qwen3", 4, 16, "lpm")],
)
def test_in_any_traffic_each_gets_what_it_gets_alone(
    tiny: TinyModels,
    calm: Calm,
    model: str,
    page_size: int,
    chunk_size: int,
    policy: str,
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expect_no_outputs(monkeypatch)
    memory = 96 if model == "mistral-window" else 288
    settings = {"page_size": page_size, "chunked_prefill_size": chunk_size, "schedule_policy": policy}
    aborts = {2: 20, 7: 33, 11: 45}
    asks = traffic(page_size * chunk_size)
    under_test = engine(tiny, model, max_total_tokens=memory, overlap=overlap, **settings)
    answers = under_test.run(*asks, aborts=aborts)
    assert (under_test.executor.steps_on_top > 0) == overlap
    assert sum(answer.retractions for answer in answers) > 0
    assert sum(answer.cached_tokens > 0 for answer in answers) > 5
    assert max(answer.chunks for answer in answers) > 1
    assert max(answer.batch_size for answer in answers) > 4
    for index, (answer, ids_alone) in enumerate(zip(answers, calm.answers(model, asks), strict=True)):
        assert answer.ids == (ids_alone[: len(answer.ids)] if index in aborts else ids_alone), index
    greedy = [index for index, ask in enumerate(asks) if ask.params == STYLES[0] and index not in aborts]
    check(tiny, model, [asks[index] for index in greedy], [answers[index] for index in greedy])
