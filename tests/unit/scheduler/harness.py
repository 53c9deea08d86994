"""A scheduler in this process, over the scripted executor: no sockets, every slot's owner checked after every step."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from byte_model import tokenizer_json
from model_facts import model_facts
from sterna.config.server_args import ServerArgs
from sterna.executor.scripted import ScriptedExecutor, create, scripted_logprobs
from sterna.protocol.channels import ToScheduler, ToServer
from sterna.protocol.control import OutputCredit, SchedulerStats, SchedulingStarted
from sterna.protocol.finish import FinishAbort, FinishReason
from sterna.protocol.generate import AbortReq, BatchTokenIDOutput, CacheNamespace, TokenIDRow, TokenizedGenerateReqInput
from sterna.protocol.sampling import SamplingParams
from sterna.scheduler.process import create_scheduler
from sterna.scheduler.req import ReqState
from sterna.text.tokenizer import Tokenizer

VOCAB_SIZE = 1000
EOS = 999


class Inbox:
    def __init__(self) -> None:
        self.messages: list[ToScheduler] = []

    def wait(self, timeout_ms: int | None = None) -> bool:
        return bool(self.messages)

    def drain(self, limit: int = 1_000_000) -> Iterator[ToScheduler]:
        taken, self.messages = self.messages[:limit], self.messages[limit:]
        yield from taken


class Outbox:
    """Folds rows as the server does: no gap, no overlap, one terminal row, nothing after it."""

    def __init__(self) -> None:
        self.batches = 0
        self.rows: dict[str, list[TokenIDRow]] = {}
        self.stats: SchedulerStats | None = None
        self.started: list[str] = []
        """Rids in the order in which they left the waiting queue."""
        self._begun: set[tuple[int, str]] = set()
        self.control: list[tuple[str | None, ToServer]] = []
        self.detokenizers: list[str] = []
        """Those that took the place of the first."""

    def to_detokenizer(self, message: BatchTokenIDOutput) -> None:
        self.batches += 1
        seen = [row.rid for row in message.rows]
        assert len(seen) == len(set(seen)), "two rows of one rid in a batch"
        for row in message.rows:
            rows = self.rows.setdefault(row.rid, [])
            assert (row.opening is not None) == (not rows), f"{row.rid}: an opening is on the first row and on no other"
            assert not rows or rows[-1].finished_reason is None, f"{row.rid}: a row after the end"
            assert not rows or row.start == rows[-1].start + len(rows[-1].output_ids), f"{row.rid}: a gap"
            assert (row.times is not None) == (row.opening is not None or row.finished_reason is not None)
            rows.append(row)
            if row.finished_reason is not None:
                self._begun -= {key for key in self._begun if key[1] == row.rid}

    def replace_detokenizer(self, address: str) -> None:
        self.detokenizers.append(address)

    def to_server(self, address: str | None, message: ToServer) -> None:
        if isinstance(message, SchedulerStats):
            self.stats = message
        elif isinstance(message, SchedulingStarted):
            self.started += message.rids
            begun = [(message.epoch, rid) for rid in message.rids]
            assert not self._begun.intersection(begun), "a request begins once"
            self._begun.update(begun)
        else:
            self.control.append((address, message))


class ScriptedOutbox(Outbox):
    """Knows what the scripted executor says: each token has its logprobs, where they are due."""

    def __init__(self) -> None:
        super().__init__()
        self.params: dict[str, SamplingParams] = {}
        """What each rid asked for."""

    def to_detokenizer(self, message: BatchTokenIDOutput) -> None:
        super().to_detokenizer(message)
        for row in message.rows:
            self._check_logprobs(row)

    def _check_logprobs(self, row: TokenIDRow) -> None:
        params = self.params[row.rid]
        if not params.return_logprob:
            assert row.logprobs is None
            return
        opening = self.rows[row.rid][0].opening
        assert opening is not None
        place = opening.prompt_tokens + row.start
        due = [scripted_logprobs(params, place + k, token) for k, token in enumerate(row.output_ids)]
        assert (row.logprobs or []) == due, f"{row.rid}: logprobs that aren't those of its tokens"


class Harness:
    overlap = False
    """Whether a step is submitted before the last one is read, where `options` don't say."""

    def __init__(self, *, options: str = "", eos: tuple[int, ...] = (EOS,), context_len: int = 4096, **settings: object) -> None:
        options = f"overlap={int(self.overlap)},{options}"
        values: dict[str, object] = {"executor": "scripted", "context_length": context_len, "executor_options": options} | settings
        self.args = ServerArgs(**values)  # type: ignore[arg-type]
        self.model = model_facts(vocab_size=VOCAB_SIZE, context_len=context_len, eos_token_ids=eos)
        executor = create(self.args, Path())
        assert isinstance(executor, ScriptedExecutor)
        self.executor = executor
        self.inbox = Inbox()
        self.outbox = ScriptedOutbox()
        self.tokenizers_loaded = 0
        self.scheduler = create_scheduler(
            self.args, self.model, executor, self.inbox, self.outbox, epoch=7, tokenizer=self._tokenizer, check_every_slot=True
        )

    def _tokenizer(self) -> Tokenizer:
        self.tokenizers_loaded += 1
        return Tokenizer.from_json(tokenizer_json())

    def send(
        self,
        rid: str,
        prompt: list[int],
        max_new_tokens: int = 4,
        *,
        stream: bool = True,
        salt: str = "",
        resume: list[int] | None = None,
        resume_chars: int = 0,
        priority: int = 0,
        arrival: float = 1.0,
        **params: object,
    ) -> None:
        """`arrival`: when the server got it. Of one moment unless said: what orders them is then what a test varies.

        About half of all rids ask for logprobs, unless `params` say: whatever a test is about, they mustn't get lost or mixed up.
        """
        params = logprob_wish(rid) | params
        sampling = SamplingParams(max_new_tokens=max_new_tokens, **params)  # type: ignore[arg-type]
        message = TokenizedGenerateReqInput(
            rid=rid,
            input_ids=prompt,
            sampling_params=sampling,
            stream=stream,
            reply_to="ipc://server",
            cache_namespace=CacheNamespace(salt=salt),
            resume_output_ids=resume or [],
            resume_chars=resume_chars,
            priority=priority,
            received_time=arrival,
        )
        self.outbox.params.setdefault(rid, sampling)
        self.inbox.messages.append(message)

    def abort(self, rid: str) -> None:
        self.inbox.messages.append(AbortReq(rid=rid))

    def turn(self) -> None:
        """One turn of the loop; the server folds at once."""
        before = self.outbox.batches
        self.scheduler.turn()
        if self.outbox.batches > before:
            self.inbox.messages.append(OutputCredit(batches=self.outbox.batches - before))

    def run(self, max_turns: int = 20_000) -> None:
        """Until nobody is alive."""
        for _ in range(max_turns):
            self.turn()
            if self.scheduler.is_idle and all(isinstance(message, OutputCredit) for message in self.inbox.messages):
                return
        raise AssertionError(f"still alive after {max_turns} turns: {sorted(self.scheduler.reqs)}")

    def run_until(self, rid: str, state: ReqState, max_turns: int = 1000) -> None:
        for _ in range(max_turns):
            self.turn()
            req = self.scheduler.reqs.get(rid)
            if req is not None and req.state is state:
                return
        raise AssertionError(f"{rid} never was {state}")

    # ---- what came out ----

    def output(self, rid: str) -> list[int]:
        return [token for row in self.outbox.rows[rid] for token in row.output_ids]

    def reason(self, rid: str) -> FinishReason:
        reason = self.outbox.rows[rid][-1].finished_reason
        assert reason is not None, f"{rid} has not ended"
        return reason

    def abort_code(self, rid: str) -> tuple[int, str]:
        reason = self.reason(rid)
        assert isinstance(reason, FinishAbort), reason
        return reason.status_code, reason.code

    def cached(self, rid: str) -> int:
        opening = self.outbox.rows[rid][0].opening
        assert opening is not None
        return opening.cached_tokens

    def assert_at_baseline(self) -> None:
        """Nobody holds anything: no KV, no lock, no row, no sampler state, no place in a queue."""
        scheduler = self.scheduler
        ledger = scheduler.ledger
        assert scheduler.is_idle
        assert not self.executor.violations
        assert ledger.used == 0
        for group, pool in enumerate(ledger.pools.groups):
            assert pool.available + ledger.cache.evictable(group) == pool.total
            assert ledger.cache.protected(group) == ledger.owned[group] == 0
        assert ledger.tables.available == ledger.tables.num_rows
        assert self.executor.num_bound == 0
        assert scheduler.prefill.num_waiting == 0
        assert not scheduler.prefill.active
        assert not scheduler.running.reqs
        assert self.outbox.stats is not None
        assert (self.outbox.stats.num_running_reqs, self.outbox.stats.num_waiting_reqs, self.outbox.stats.kv_used_tokens) == (0, 0, 0)


def logprob_wish(rid: str) -> dict[str, object]:
    """What a request of that name asks for, whenever it comes: it may come again after a crash."""
    code = zlib.crc32(rid.encode())
    return {"return_logprob": True, "top_logprobs_num": code % 3, "token_ids_logprob": (5, 6)[: code % 4]} if code & 8 else {}


def echo(prompt: list[int], count: int) -> list[int]:
    """What the scripted executor answers."""
    return [prompt[k % len(prompt)] for k in range(count)]
