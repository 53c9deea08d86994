"""A list of prompts: one message, in order, all or nothing; and its journals read as one."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from sterna.errors import DuplicateRid, InvalidRequest, SternaError
from sterna.protocol.finish import ABORTED, SHUTTING_DOWN, FinishAbort, FinishLength
from sterna.protocol.generate import AbortReq, BatchTokenizedGenerateReqInput, StrRow, TokenizedGenerateReqInput
from sterna.tokenizer_manager.fan_out import JournalMerge
from sterna.tokenizer_manager.req_state import JournalReader
from unit.tokenizer_manager.fakes import ManagerWithFakes, output, request, scenario, settled


async def generate(group: ManagerWithFakes, *objs: Any) -> list[JournalReader]:
    return await group.manager.generate_batch(objs, [group.admit() for _ in objs])


class Gate:
    """Tokenizing that stops before the member `rid` until `open` is set."""

    def __init__(self, group: ManagerWithFakes, rid: str) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()
        self.members = 0
        inner = group.manager.run_blocking

        async def run_blocking(fn: Callable[..., Any], obj: Any, *args: Any, **kwargs: Any) -> Any:
            self.members += 1
            if obj.rid == rid:
                self.reached.set()
                await self.open.wait()
            return await inner(fn, obj, *args, **kwargs)

        group.manager.run_blocking = run_blocking  # type: ignore[assignment]


def test_the_members_go_out_in_one_message_in_their_order_and_each_has_its_reader() -> None:
    async def test(group: ManagerWithFakes) -> None:
        gate = Gate(group, "r 0")
        gate.open.set()
        readers = await generate(group, *(request(f"r {index}", text="x" * (index + 1)) for index in range(5)))
        (message,) = group.scheduler.sent
        assert isinstance(message, BatchTokenizedGenerateReqInput)
        assert [(req.rid, len(req.input_ids)) for req in message.reqs] == [(f"r {index}", index + 1) for index in range(5)]
        assert [reader.rid for reader in readers] == [req.rid for req in message.reqs]
        assert gate.members == 5, "a job for each member"
        for reader in readers:
            reader.close()
        assert [abort.rid for abort in group.scheduler.of(AbortReq)] == [reader.rid for reader in readers]
        assert group.manager.num_live == 5, "the scheduler owes a terminal row for each"
        group.inbox.put(output(*(StrRow(reader.rid, 0, [], "", ABORTED) for reader in readers)))
        await settled(group.manager.idle_event.is_set)
        assert group.manager.num_live == 0

    scenario(test)


def test_a_request_alone_goes_out_as_it_is() -> None:
    async def test(group: ManagerWithFakes) -> None:
        await generate(group, request())
        assert [type(message) for message in group.scheduler.sent] == [TokenizedGenerateReqInput]

    scenario(test)


@pytest.mark.parametrize(
    ("last", "fault"),
    [
        (request("r 2", text=None, input_ids=[999]), InvalidRequest),  # type: ignore[arg-type]
        (request("r 2", text=""), InvalidRequest),
        (request("live"), DuplicateRid),
        (request("r 0"), DuplicateRid),
        (request("other list"), DuplicateRid),
    ],
    ids=["bad ids", "no text", "live rid", "same rid twice", "a list's name"],
)
def test_one_bad_member_refuses_the_list_and_leaves_nothing(last: Any, fault: type[SternaError]) -> None:
    async def test(group: ManagerWithFakes) -> None:
        await group.generate(request("live"), group.admit())
        before = list(group.scheduler.sent)
        outcomes: list[str] = []
        group.manager.on_finish.append(lambda state, outcome: outcomes.append(outcome))
        with group.manager.named("other list", ["a", "b"]), pytest.raises(fault):
            await generate(group, request("r 0"), request("r 1"), last)
        assert group.scheduler.sent == before
        assert group.manager.num_live == 1
        assert outcomes == ([] if fault is DuplicateRid else ["error"] * 3)
        assert group.manager.accounts.live == 1
        assert len(await generate(group, request("r 0"), request("r 1"))) == 2

    scenario(test)


def test_a_member_that_is_aborted_while_the_list_is_tokenized_is_left_out_and_the_others_run() -> None:
    async def test(group: ManagerWithFakes) -> None:
        gate = Gate(group, "r 1")
        task = asyncio.create_task(generate(group, *(request(f"r {index}") for index in range(4))))
        await gate.reached.wait()
        assert [group.manager.abort_request(f"r {index}") for index in (0, 1, 2)] == [1, 1, 1]
        gate.open.set()
        readers = await task
        assert [req.rid for req in group.scheduler.sent] == ["r 3"]  # type: ignore[union-attr]
        assert [(await reader.next_delta()).finished_reason for reader in readers[:3]] == [ABORTED] * 3
        for reader in readers[:3]:
            reader.close()
        assert group.manager.num_live == 1
        assert not group.scheduler.of(AbortReq)

    scenario(test)


def test_an_engine_that_dies_while_a_list_is_tokenized_is_told_to_every_member() -> None:
    async def test(group: ManagerWithFakes) -> None:
        gate = Gate(group, "r 1")
        task = asyncio.create_task(generate(group, *(request(f"r {index}") for index in range(3))))
        await gate.reached.wait()
        group.manager.fail("the scheduler process died (signal 9)")
        await group.manager.failed_event.wait()
        gate.open.set()
        reasons = [(await reader.next_delta()).finished_reason for reader in await task]
        assert [reason.code for reason in reasons if isinstance(reason, FinishAbort)] == ["engine_dead"] * 3
        assert group.scheduler.sent == []

    scenario(test)


def test_a_shutdown_while_a_list_is_tokenized_gives_its_own_reason() -> None:
    async def test(group: ManagerWithFakes) -> None:
        gate = Gate(group, "r 1")
        task = asyncio.create_task(generate(group, *(request(f"r {index}") for index in range(3))))
        await gate.reached.wait()
        group.manager.end_all(SHUTTING_DOWN)
        gate.open.set()
        assert [(await reader.next_delta()).finished_reason for reader in await task] == [SHUTTING_DOWN] * 3
        assert group.scheduler.sent == []

    scenario(test)


def test_a_client_that_goes_while_its_list_is_tokenized_leaves_nothing() -> None:
    async def test(group: ManagerWithFakes) -> None:
        outcomes: list[str] = []
        group.manager.on_finish.append(lambda state, outcome: outcomes.append(outcome))
        gate = Gate(group, "r 1")
        task = asyncio.create_task(generate(group, *(request(f"r {index}") for index in range(3))))
        await gate.reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (group.manager.num_live, group.manager.accounts.live, group.scheduler.sent) == (0, 0, [])
        assert outcomes == ["abort"] * 3

    scenario(test)


def test_a_scheduler_that_takes_nothing_leaves_nothing_of_the_list() -> None:
    async def test(group: ManagerWithFakes) -> None:
        def send(message: object) -> None:
            raise OSError("full")

        group.scheduler.send = send  # type: ignore[method-assign]
        with pytest.raises(OSError, match="full"):
            await generate(group, request("r 0"), request("r 1"))
        assert (group.manager.num_live, group.manager.accounts.live) == (0, 0)

    scenario(test)


def test_a_list_s_name_stands_for_its_members_while_it_is_read_and_is_taken_so_long() -> None:
    async def test(group: ManagerWithFakes) -> None:
        with group.manager.named("list", ["list 0", "list 1"]):
            await generate(group, request("list 0"), request("list 1"))
            for taken in ("list", "list 0"):
                with pytest.raises(DuplicateRid), group.manager.named(taken, ["x"]):
                    pass
            with pytest.raises(DuplicateRid):
                await generate(group, request("list"))
            assert group.manager.abort_request("list") == 2
            assert [abort.rid for abort in group.scheduler.of(AbortReq)] == ["list 0", "list 1"]
        assert group.manager.abort_request("list") == 0
        await generate(group, request("list"))

    scenario(test)


def test_merged_journals_give_every_delta_and_the_counts_that_go_with_it() -> None:
    async def test(group: ManagerWithFakes) -> None:
        readers = await generate(group, request("r 0"), request("r 1"))
        merge = JournalMerge(readers)
        rows = [StrRow(f"r {index}", start, [97], "ab"[index], None) for start in range(3) for index in (0, 1)]
        group.inbox.put(output(*rows, *(StrRow(f"r {index}", 3, [97], ".", FinishLength(4)) for index in (0, 1))))
        texts, counts, ends = ["", ""], [0, 0], 0
        while ends < 2:
            index, delta = await merge.next()
            texts[index] += delta.text
            counts[index] += len(delta.output_ids)
            assert readers[index].completion_tokens == counts[index]
            ends += delta.finished_reason is not None
        merge.close()
        assert texts == ["aaa.", "bbb."]

    scenario(test)
