"""A new epoch: what the scheduler drops, and what comes of a request that goes on in it."""

import pytest

from sterna.protocol.control import NewDetokenizerReq
from sterna.protocol.finish import FinishLength, FinishMatchedStr, FinishMatchedToken
from sterna.scheduler.req import ReqState
from sterna.scheduler.scheduler import MAX_BATCHES_IN_FLIGHT
from unit.scheduler.harness import EOS, Harness, echo

pytestmark = pytest.mark.usefixtures("either_way")

LONG = list(range(1, 90))


def detokenizer_dies(h: Harness, epoch: int = 8) -> dict[str, list[int]]:
    """What of each request had come out."""
    outputs = {rid: h.output(rid) for rid in h.outbox.rows}
    h.outbox.rows.clear()  # the next row of a rid opens it again
    h.inbox.messages.append(NewDetokenizerReq(epoch=epoch, detokenizer="ipc://next"))
    return outputs


def test_everyone_alive_is_dropped_without_a_word_and_goes_on_from_the_cache() -> None:
    h = Harness(max_running_requests=3)
    for rid in ("a", "b", "waits", "waits too"):
        h.send(rid, LONG, 60)
    h.run_until("b", ReqState.RUNNING)
    for _ in range(20):
        h.turn()
    before = detokenizer_dies(h)
    for rid in ("a", "b", "waits", "waits too"):
        h.send(rid, LONG, 60, resume=before.get(rid, []))
    h.run()
    assert h.outbox.detokenizers == ["ipc://next"]
    for rid in ("a", "b", "waits", "waits too"):
        assert [*before.get(rid, []), *h.output(rid)] == echo(LONG, 60)
        assert h.reason(rid) == FinishLength(60)
    assert len(before["a"]) > 10
    assert h.cached("a") >= 80, "its prompt and more lay in the cache"
    assert h.outbox.stats is not None
    assert h.outbox.stats.epoch == 8
    h.assert_at_baseline()


def test_who_is_dropped_and_not_sent_again_leaves_nothing() -> None:
    h = Harness()
    for rid in ("a", "b"):
        h.send(rid, LONG, 60, stop=("x",) if rid == "a" else ())
    h.run_until("b", ReqState.RUNNING)
    h.abort("b")
    detokenizer_dies(h)
    h.run()
    assert h.outbox.rows == {}
    h.assert_at_baseline()


def test_credits_that_were_on_their_way_come_back_with_the_new_epoch() -> None:
    h = Harness()
    h.send("a", [1, 2], 500)
    h.scheduler.receive()
    for _ in range(MAX_BATCHES_IN_FLIGHT + 5):
        h.scheduler.step()
    assert h.scheduler.credits == 0
    before = detokenizer_dies(h)
    h.send("a", [1, 2], 500, resume=before["a"])
    h.run()
    assert before["a"] + h.output("a") == echo([1, 2], 500)


@pytest.mark.parametrize("accepted", range(9))
def test_wherever_a_request_is_interrupted_it_ends_as_it_would_have(accepted: int) -> None:
    """By a stop that the interruption may cut, an end token, length; held off by `min_new_tokens`, or not."""
    text = list(b"ab.cd.stop")
    for prompt, count, fields in (
        (text, 10, {"stop": ("d.st",)}),
        (text, 10, {"stop": (".",), "min_new_tokens": 4}),
        ([*text[:8], EOS], 20, {}),
        ([*text[:2], EOS, *text[:6], EOS], 20, {"min_new_tokens": 9}),
        (text, 9, {}),
    ):
        whole = Harness()
        whole.send("r", prompt, count, **fields)
        whole.run()
        output = whole.output("r")
        if accepted >= len(output):
            continue  # it had ended
        h = Harness()
        h.send("r", prompt, count, resume=output[:accepted], **fields)
        h.run()
        assert output[:accepted] + h.output("r") == output
        assert h.reason("r") == whole.reason("r")
        assert isinstance(h.reason("r"), FinishLength | FinishMatchedStr | FinishMatchedToken)
        h.assert_at_baseline()
