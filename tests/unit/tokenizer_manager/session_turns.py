"""Turns of sessions without a manager: journals that a test writes, hop 3 as it is, a clock that a test moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from byte_model import BOS, VOCAB_SIZE, tokenizer_json
from sterna.protocol.finish import ABORTED, FinishLength, FinishReason
from sterna.protocol.generate import GenerateReqInput, SessionTurn, TokenizedGenerateReqInput
from sterna.protocol.sampling import SamplingParams
from sterna.text.tokenizer import Tokenizer
from sterna.tokenizer_manager.session import Turn
from sterna.tokenizer_manager.sessions import Sessions
from sterna.tokenizer_manager.tokenize import to_tokenized

CONTEXT_LEN = 64


@cache
def byte_tokenizer() -> Tokenizer:
    return Tokenizer.from_json(tokenizer_json())


@dataclass(eq=False)
class FakeJournal:
    rid: str
    turn: Turn | None = None
    tokenized: TokenizedGenerateReqInput | None = None
    output_ids: list[int] = field(default_factory=list)
    finished_reason: FinishReason | None = None


class Group:
    """`Sessions`, and what the manager does with them."""

    def __init__(self, tokenizer: Tokenizer | None = None, context_len: int = CONTEXT_LEN, **bounds: Any) -> None:
        self.now = 0.0
        self.aborted: list[str] = []
        self.tokenizer = tokenizer or byte_tokenizer()
        self.context_len = context_len
        self.journals: dict[str, FakeJournal] = {}
        options = {"max_sessions": 4, "max_tokens": 10_000, "timeout": 10.0, "capacity": 1000, **bounds}
        self.sessions = Sessions(abort=self._abort, now=lambda: self.now, **options)

    def _abort(self, rid: str) -> None:
        self.aborted.append(rid)

    def open(self, session_id: str = "s", capacity: int | None = None, timeout: float | None = None) -> str:
        return self.sessions.open(session_id, capacity, timeout)

    def begin(self, *rids: str, session: str = "s", **params: Any) -> list[FakeJournal]:
        journals = [FakeJournal(rid) for rid in rids]
        self.sessions.begin(SessionTurn(id=session, **params), journals)
        self.journals |= {journal.rid: journal for journal in journals}
        return journals

    def tokenize(self, journal: FakeJournal, new: list[int] | str, *, max_new_tokens: int | None = 8, **params: Any) -> list[int]:
        """Hop 3; the ids that the scheduler would get."""
        assert journal.turn is not None
        obj = GenerateReqInput(
            rid=journal.rid,
            text=new if isinstance(new, str) else None,
            input_ids=None if isinstance(new, str) else new,
            sampling_params=SamplingParams(max_new_tokens=max_new_tokens, **params),
            session=journal.turn.params,
        )
        facts = {"vocab_size": self.tokenizer.vocab_size, "context_len": self.context_len, "reply_to": "", "epoch": 1}
        bos = BOS if self.tokenizer.vocab_size == VOCAB_SIZE else None
        tokenized = to_tokenized(obj, self.tokenizer, **facts, turn=journal.turn, leading_bos=bos)
        journal.tokenized = self.sessions.fit(journal.turn, tokenized, asked=max_new_tokens is not None)
        return journal.tokenized.input_ids

    def end(self, journal: FakeJournal, output: list[int], reason: FinishReason | None = None) -> None:
        """The journal ends; nobody tells the session."""
        journal.output_ids += output
        journal.finished_reason = reason or FinishLength(len(output))

    def turn(self, name: str, new: list[int] | str, output: list[int], reason: FinishReason | None = None, /, **params: Any) -> list[int]:
        """A whole turn; its prompt's ids."""
        options = {key: params.pop(key) for key in list(params) if key not in (*SessionTurn.__struct_fields__, "session")}
        (journal,) = self.begin(name, **params)
        ids = self.tokenize(journal, new, **options)
        self.end(journal, output, reason)
        return ids

    def fail(self, journal: FakeJournal) -> None:
        journal.finished_reason = ABORTED
