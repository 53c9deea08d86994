"""Logprobs of the native sampler against NumPy in float64 and against the torch executor's; and of the executor, to the bit, whatever is
around a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from sterna.config.server_args import ServerArgs
from sterna.executor.native import _native
from sterna.executor.native.executor import NativeExecutor, create
from sterna.executor.native.sampling import to_logprobs, to_options
from sterna.executor.torch.sampler import Sampler as TorchSampler
from sterna.models.resolve import resolve_model
from sterna.protocol.logprobs import LEAST_LOGPROB, TokenLogprobs
from sterna.protocol.sampling import SamplingParams
from tiny_gguf import write_gguf
from unit.executor.logprobs_reference import KINDS, Float32Array, assert_near, expected, logits_of
from unit.executor.native.lanes_reference import ISAS
from unit.executor.seam_driver import Row, SeamDriver

NO_IDS = np.zeros(0, dtype=np.int32)
PLAIN = SamplingParams(seed=3, return_logprob=True, top_logprobs_num=5)
EDITED = SamplingParams(
    temperature=0.7,
    top_k=5,
    repetition_penalty=1.5,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    logit_bias={0: 100.0, 1: -100.0},
    min_new_tokens=3,
    stop_token_ids=(2,),
    seed=4,
    return_logprob=True,
)
"""What a token is drawn from differs from the model's own distribution in every way."""


def sample(logits: Float32Array, params: SamplingParams, *, isa: str = ISAS[0], forbidden: int | None = None) -> _native.SampledToken:
    vocab = len(logits)
    sampler = _native.Sampler(vocab, isa)
    sampler.bind(0, to_options(params, vocab, ()), np.arange(min(vocab, 9), dtype=np.int32), NO_IDS)
    if forbidden is not None:
        allowed = np.full(-(-vocab // 32), 0xFFFFFFFF, dtype=np.uint32)
        allowed[forbidden // 32] ^= np.uint32(1 << forbidden % 32)
        sampler.set_mask(0, allowed)
    return sampler.sample(0, logits.copy())


def told(logits: Float32Array, params: SamplingParams, **options: object) -> tuple[int, TokenLogprobs | None]:
    sampled = sample(logits, params, **options)
    return sampled.token, to_logprobs([sampled.logprobs])[0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [PLAIN, EDITED], ids=["plain", "edited"])
def test_they_are_of_the_models_own_distribution_whatever_a_token_is_drawn_from(kind: str, params: SamplingParams, isa: str) -> None:
    rng = np.random.default_rng(1)
    for vocab in (5, 203, 20_000):
        for count in (0, 1, 5, 20, vocab + 3):
            logits = logits_of(kind, vocab, seed=vocab)
            ids = tuple(rng.integers(0, vocab, 7).tolist())
            wish = msgspec.structs.replace(params, top_logprobs_num=min(count, 300), token_ids_logprob=ids)
            token, logprobs = told(logits, wish, isa=isa, forbidden=4 if params is EDITED else None)
            assert_near(logprobs, expected(logits, wish, token))


def test_a_list_may_be_asked_for_that_is_longer_than_any_number_the_engine_holds() -> None:
    logits = logits_of("plain", 7, 0)
    params = SamplingParams(return_logprob=True, top_logprobs_num=2**40)
    token, logprobs = told(logits, params)
    assert_near(logprobs, expected(logits, params, token))
    assert logprobs is not None
    assert len(logprobs.top) == 7


def test_a_token_that_cannot_be_is_in_no_list_and_has_the_least_logprob_where_it_is_asked_for() -> None:
    logits = np.array([3e38, -np.inf, -3e38, 3e38], dtype=np.float32)
    params = SamplingParams(temperature=0.0, return_logprob=True, top_logprobs_num=4, token_ids_logprob=(1, 2, 1))
    half = float(np.float32(-np.log(2)))
    assert told(logits, params) == (0, TokenLogprobs.pack(half, [0, 3, 2], [half, half, LEAST_LOGPROB], [LEAST_LOGPROB] * 3))


def test_nobody_is_told_who_has_not_asked() -> None:
    logits = logits_of("plain", 40, 0)
    assert sample(logits, SamplingParams()).logprobs is None
    assert sample(logits, SamplingParams(return_logprob=True)).logprobs[1:] == (b"", b"", b"")
    logits[7] = np.nan
    assert sample(logits, PLAIN).logprobs is None


@pytest.mark.parametrize("token", [40, -1])
def test_a_token_outside_the_vocabulary_is_refused_where_the_row_is_bound(token: int) -> None:
    sampler = _native.Sampler(40, ISAS[0])
    options = to_options(SamplingParams(return_logprob=True, token_ids_logprob=(3, token)), 40, ())
    with pytest.raises(ValueError, match=f"logprob token {token} is not in a vocabulary of 40"):
        sampler.bind(0, options, NO_IDS, NO_IDS)
    assert not sampler.is_bound(0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [PLAIN, EDITED], ids=["plain", "edited"])
def test_they_are_the_torch_executors(kind: str, params: SamplingParams) -> None:
    vocab = 2050
    params = msgspec.structs.replace(params, top_logprobs_num=40, token_ids_logprob=(9, 0, 2049, 9))
    for seed in range(4):
        logits = logits_of(kind, vocab, seed)
        sampler = TorchSampler(vocab, (), torch.device("cpu"))
        sampler.bind(0, params, np.arange(9, dtype=np.int32), NO_IDS)
        sampled = sampler.sample(torch.from_numpy(logits.copy())[None], np.zeros(1, dtype=np.int32))
        token, logprobs = told(logits, params)
        assert sampled.logprobs is not None
        assert token == int(sampled.ids[0])
        assert_near(logprobs, sampled.logprobs.by_place()[0])


# ---- the executor ----

PROMPT: list[int] = np.random.RandomState(7).randint(3, 336, size=50).tolist()
NEW = 12
GREEDY = SamplingParams(temperature=0.0, return_logprob=True, top_logprobs_num=4, token_ids_logprob=(17, 300))
SEEDED = msgspec.structs.replace(GREEDY, temperature=1.0, seed=5, repetition_penalty=1.3)
ASKING = {"greedy": GREEDY, "seeded": SEEDED}
SILENT = SamplingParams(seed=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logprobs")
    return resolve_model(
        str(write_gguf(folder / "tiny.gguf", "llama", quant="Q4_1")), cache_dir=folder, context_length=None, progress=False
    )


@pytest.fixture
def driver(model: Path) -> Iterator[SeamDriver]:
    executor = start(model)
    yield SeamDriver(executor)
    executor.shutdown()


def start(model: Path) -> NativeExecutor:
    return create(ServerArgs(cache_dir=str(model.parent), threads=1, max_total_tokens=4096, context_length=512), model)


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, Row]:
    """PROMPT with nobody beside it, in one chunk, step by step."""
    rows = {}
    for name, params in ASKING.items():
        executor = start(model)
        driver = SeamDriver(executor)
        rows[name] = row = driver.add(PROMPT, params)
        driver.run(row, tokens=NEW)
        executor.shutdown()
        told = [each for each in row.logprobs if each is not None]
        assert len({each.chosen for each in told}) == NEW  # each token's can be told from another's
    return rows


def assert_same(row: Row, expected: Row, *, done: int = 0) -> None:
    """Equal floats are the same bits: none is 0."""
    assert row.output[:NEW] == expected.output
    assert row.logprobs[: NEW - done] == expected.logprobs[done:]


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
def test_neighbours_chunks_and_steps_in_flight_change_no_bit(
    driver: SeamDriver, alone: dict[str, Row], chunk: int, overlap: bool, name: str
) -> None:
    """And each token has its own, beside rows that ask for other things and rows that ask for nothing."""
    other = msgspec.structs.replace(SEEDED, seed=9, top_logprobs_num=20, token_ids_logprob=())
    neighbours = [driver.add(PROMPT[i : i + 20], SILENT if i % 2 else other) for i in range(10)]
    row = driver.add(PROMPT, ASKING[name])
    driver.run(*neighbours[:5], row, *neighbours[5:], tokens=NEW, chunk=chunk, overlap=overlap)
    assert (driver.steps_on_top > 0) == overlap
    assert_same(row, alone[name])
    for i, neighbour in enumerate(neighbours):
        lengths = {-1 if each is None else len(each.top) for each in neighbour.logprobs}
        assert lengths == {-1 if i % 2 else 20}
        assert len(neighbour.logprobs) == len(neighbour.output) >= NEW


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("done", [1, 5, NEW - 1])
def test_a_row_that_resumes_is_told_the_same_bits(driver: SeamDriver, alone: dict[str, Row], name: str, done: int) -> None:
    row = driver.add(PROMPT, ASKING[name], alone[name].output[:done])
    driver.run(row, tokens=NEW, chunk=16)
    assert_same(row, alone[name], done=done)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_of_which_no_row_asks_tells_nothing_at_all(driver: SeamDriver, overlap: bool) -> None:
    rows = [driver.add(PROMPT, SILENT), driver.add(PROMPT[:9], SILENT)]
    driver.run(*rows, tokens=NEW, overlap=overlap)
    assert driver.told_nothing == driver.steps > 0


def test_the_executor_refuses_a_token_outside_the_vocabulary_and_leaves_the_row_free(driver: SeamDriver, alone: dict[str, Row]) -> None:
    with pytest.raises(ValueError, match="logprob token 336"):
        driver.executor.bind(0, SamplingParams(return_logprob=True, token_ids_logprob=(336,)), NO_IDS, NO_IDS)
    row = driver.add(PROMPT, GREEDY)
    driver.run(row, tokens=NEW)
    assert_same(row, alone["greedy"])
