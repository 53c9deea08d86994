"""The scripted executor keeps the seam's contract, and notices when the other side doesn't."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sterna.config.server_args import ServerArgs
from sterna.errors import ConfigError
from sterna.executor.base import ROLE_GENERATED, ROLE_PROMPT, STATUS_NAN, STATUS_OK, WANT_SAMPLE, Executor, ForwardBatch, GroupSlots
from sterna.executor.registry import create_executor
from sterna.executor.scripted import ScriptViolation, scripted_logprobs
from sterna.protocol.logprobs import TokenLogprobs
from sterna.protocol.sampling import SamplingParams
from unit.executor.seam_driver import SeamDriver

TABLE = np.arange(64, dtype=np.int32).reshape(4, 16)
"""Row r's position p lies in slot 16 r + p."""


def make(options: str = "") -> Executor:
    args = ServerArgs(executor="scripted", executor_options=options, context_length=16, max_total_tokens=64)
    return create_executor(args, Path())


def bind(executor: Executor, row: int, prompt: list[int], output: tuple[int, ...] = ()) -> None:
    executor.bind(row, SamplingParams(), np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32))


def step(
    number: int, rows: list[tuple[int, int, list[int]]], *, role: int = ROLE_PROMPT, input_from: list[int] | None = None
) -> ForwardBatch:
    """`rows`: (req_pool_idx, prefix_len, input ids); all want a sample."""
    lengths = [len(ids) for _, _, ids in rows]
    return ForwardBatch(
        step=number,
        input_ids=np.array([token for _, _, ids in rows for token in ids], dtype=np.int32),
        input_from=None if input_from is None else np.array(input_from, dtype=np.int32),
        row_splits=np.cumsum([0, *lengths]).astype(np.int32),
        prefix_lens=np.array([prefix for _, prefix, _ in rows], dtype=np.int32),
        seq_lens=np.array([prefix + len(ids) for _, prefix, ids in rows], dtype=np.int32),
        req_pool_idx=np.array([row for row, _, _ in rows], dtype=np.int32),
        roles=np.full(len(rows), role, dtype=np.uint8),
        wants=np.full(len(rows), WANT_SAMPLE, dtype=np.uint8),
        groups=(GroupSlots(np.concatenate([TABLE[row, prefix : prefix + len(ids)] for row, prefix, ids in rows]), TABLE),),
    )


def tokens(executor: Executor, batch: ForwardBatch) -> list[int]:
    return executor.submit(batch).result().token_ids.tolist()


def test_it_echoes_each_rows_prompt_and_goes_on_after_replayed_output() -> None:
    executor = make()
    bind(executor, 0, [7, 8, 9])
    bind(executor, 1, [5, 6], (5,))
    assert tokens(executor, step(0, [(0, 0, [7, 8, 9])])) == [7]
    with pytest.raises(ScriptViolation, match="role"):  # prompt and output in one row
        tokens(executor, step(1, [(1, 0, [5, 6, 5])]))


def test_an_input_may_be_what_a_row_of_the_step_before_sampled() -> None:
    executor = make()
    bind(executor, 0, [7, 8])
    bind(executor, 1, [3, 4])
    assert tokens(executor, step(0, [(0, 0, [7, 8]), (1, 0, [3, 4])])) == [7, 3]
    swapped = step(1, [(1, 2, [0]), (0, 2, [0])], role=ROLE_GENERATED, input_from=[1, 0])
    assert tokens(executor, swapped) == [4, 8]
    with pytest.raises(ScriptViolation, match="takes tokens of step"):
        executor.submit(replace(swapped, step=9))


def test_a_scripted_nan_gives_no_token_and_leaves_its_neighbour_alone() -> None:
    executor = make("nan_token=7")
    bind(executor, 0, [7, 8])
    bind(executor, 1, [3, 4])
    output = executor.submit(step(0, [(0, 0, [7, 8]), (1, 0, [3, 4])])).result()
    assert output.status.tolist() == [STATUS_NAN, STATUS_OK]
    assert output.row_splits.tolist() == [0, 0, 1]
    assert output.token_ids.tolist() == [3]


def test_a_context_that_is_not_in_its_slots_is_a_violation() -> None:
    executor = make()
    bind(executor, 0, [7, 8, 9])
    with pytest.raises(ScriptViolation, match="slots hold"):
        executor.submit(step(0, [(0, 1, [8, 9])]))  # nobody wrote position 0


def test_generated_kv_serves_no_prompt_where_it_may_not() -> None:
    for reuse in (1, 0):
        executor = make(f"reuse_generated_kv={reuse}")
        bind(executor, 0, [7])
        tokens(executor, step(0, [(0, 0, [7])]))
        tokens(executor, step(1, [(0, 1, [7])], role=ROLE_GENERATED))
        executor.release(0)
        bind(executor, 0, [7, 7, 7])
        batch = step(2, [(0, 2, [7])])  # position 1 was generated
        if reuse:
            assert tokens(executor, batch) == [7]
        else:
            with pytest.raises(ScriptViolation, match="role"):
                executor.submit(batch)


def test_a_row_is_bound_once_and_released_as_often_as_one_likes() -> None:
    executor = make()
    bind(executor, 0, [1])
    with pytest.raises(ValueError, match="bound"):
        bind(executor, 0, [1])
    executor.release(0)
    executor.release(0)
    bind(executor, 0, [1])


@pytest.mark.parametrize("options", ["speed=9", "step_ms=fast", "verify"])
def test_options_that_do_not_exist_are_refused_by_name(options: str) -> None:
    with pytest.raises(ConfigError, match=options.split("=")[0]):
        make(options)


# ---- logprobs ----

ASKING = SamplingParams(return_logprob=True, top_logprobs_num=3, token_ids_logprob=(9, 2))


@pytest.mark.parametrize("options", ["", "threaded=1"])
@pytest.mark.parametrize("chunk", [2, 1000])
def test_who_asks_is_told_of_each_token_at_its_place(options: str, chunk: int) -> None:
    driver = SeamDriver(make(options), room=16)
    asking = driver.add([7, 8, 9], ASKING)
    silent = driver.add([5, 6], SamplingParams())
    resumed = driver.add([7, 8, 9], ASKING, (7, 8))
    driver.run(asking, silent, resumed, tokens=6, chunk=chunk, overlap=True)
    assert driver.steps_on_top > 0
    assert asking.logprobs == [scripted_logprobs(ASKING, 3 + at, token) for at, token in enumerate(asking.output)]
    assert resumed.logprobs == [scripted_logprobs(ASKING, 3 + at, token) for at, token in enumerate(resumed.output)][2:]
    assert len(asking.logprobs) >= 6
    assert silent.logprobs == [None] * len(silent.output)
    driver.executor.shutdown()


def test_where_nobody_asks_nothing_is_told_at_all() -> None:
    driver = SeamDriver(make(), room=16)
    driver.run(driver.add([7, 8, 9], SamplingParams()), tokens=6)
    assert driver.told_nothing == driver.steps > 0


def test_scripted_logprobs_tell_tokens_and_places_apart_and_are_what_a_model_could_say() -> None:
    told = {(position, token): scripted_logprobs(ASKING, position, token) for position in range(64) for token in range(256)}
    assert len({each.chosen for each in told.values()}) == len(told)
    places = {(token in each.top_ids, token in each.top_ids and each.top_ids.index(token)) for (_, token), each in told.items()}
    assert places == {(False, False), (True, 0), (True, 1), (True, 2)}
    for (position, token), each in told.items():
        assert each.top == sorted(each.top, reverse=True) == [told[position, other].chosen for other in each.top_ids]
        assert len(set(each.top_ids)) == 3
        assert set(each.top_ids) <= {0, 1, 2, token}
        assert token in each.top_ids or each.chosen < each.top[-1]
        assert each.of_ids == [told[position, 9].chosen, told[position, 2].chosen]
        assert all(-32 < value <= 0 and np.float32(value) == value for value in [each.chosen, *each.top, *each.of_ids])
    assert scripted_logprobs(SamplingParams(return_logprob=True), 3, 7) == TokenLogprobs(told[3, 7].chosen)


# ---- steps that aren't read yet ----


def first_step(executor: Executor) -> ForwardBatch:
    bind(executor, 0, [7, 8])
    return step(0, [(0, 0, [7, 8])])


def second_step() -> ForwardBatch:
    return step(1, [(0, 2, [0])], role=ROLE_GENERATED, input_from=[0])


@pytest.mark.parametrize("options", ["", "threaded=1"])
def test_a_step_may_be_submitted_on_top_of_one_that_is_not_read(options: str) -> None:
    executor = make(options)
    handles = [executor.submit(first_step(executor)), executor.submit(second_step())]
    assert [handle.result().token_ids.tolist() for handle in handles] == [[7], [8]]
    executor.shutdown()


def test_in_a_thread_a_step_runs_on_after_its_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make("threaded=1")
    go_on = threading.Event()
    monkeypatch.setattr(executor, "_wait", lambda batch: go_on.wait(60))
    handle = executor.submit(first_step(executor))
    go_on.set()  # nobody would, if `submit` had waited for the step
    assert handle.result().token_ids.tolist() == [7]
    executor.shutdown()


@pytest.mark.parametrize("options", ["", "threaded=1"])
def test_a_row_that_takes_the_token_of_a_nan_is_surplus(options: str) -> None:
    executor = make(f"nan_token=7,{options}")
    bind(executor, 1, [3, 4])
    bind(executor, 0, [7, 8])
    handles = [
        executor.submit(step(0, [(0, 0, [7, 8]), (1, 0, [3, 4])])),
        executor.submit(step(1, [(0, 2, [0]), (1, 2, [0])], role=ROLE_GENERATED, input_from=[0, 1])),
    ]
    outputs = [handle.result() for handle in handles]
    assert [output.token_ids.tolist() for output in outputs] == [[3], [4]]
    assert [output.status.tolist() for output in outputs] == [[STATUS_NAN, STATUS_OK]] * 2
    executor.shutdown()


def test_a_step_on_top_of_one_that_failed_fails_too() -> None:
    executor = make("threaded=1,raise_token=7")
    handles = [executor.submit(first_step(executor)), executor.submit(second_step())]
    for handle in handles:
        with pytest.raises(RuntimeError, match="fail"):
            handle.result()
    executor.shutdown()


def test_what_changes_under_a_step_that_is_not_read_is_a_violation() -> None:
    executor = make()
    table = TABLE.copy()
    batch = replace(first_step(executor), groups=(GroupSlots(table[0, :2].copy(), table),))
    handle = executor.submit(batch)
    with pytest.raises(ScriptViolation, match="bound or released"):
        executor.release(0)
    bind(executor, 1, [3])
    with pytest.raises(ScriptViolation, match="hasn't been read"):  # into a slot that the first one reads
        executor.submit(replace(step(1, [(1, 0, [3])]), groups=(GroupSlots(table[0, 1:2].copy(), table),)))
    table[0, 0] = 5
    with pytest.raises(ScriptViolation, match="changed"):
        handle.result()
    with pytest.raises(ScriptViolation, match="read twice"):
        handle.result()
    executor.release(0)


def test_more_than_one_step_ahead_is_a_violation() -> None:
    executor = make()
    executor.submit(first_step(executor))
    executor.submit(second_step())
    with pytest.raises(ScriptViolation, match="neither"):
        executor.submit(step(2, [(0, 3, [0])], role=ROLE_GENERATED, input_from=[0]))
