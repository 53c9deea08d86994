"""Hop 7: `BatchTokenIDOutput` → `BatchStrOutput`. Owns one `Decoding` per rid; knows the tokenizer, no protocol and no KV.

Text leaves once and is never withdrawn. What could still turn out to be the beginning of a stop string is held back; where a stop
string ends the text is the scheduler's word (`FinishMatchedStr.char_offset`): here it is cut, never searched.

A `Decoding` is a function of the ids alone. One of a request that resumes is made from all of its output, so that it is what the one before
it was; it begins to send where the text that the server has ends, in the middle of what was held back, if need be.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from sterna.errors import QueueFull
from sterna.protocol.control import DecodeRefused
from sterna.protocol.finish import FAULT, FinishAbort, FinishMatchedStr, FinishMatchedToken, FinishReason, to_finish
from sterna.protocol.generate import BatchStrOutput, BatchTokenIDOutput, DecodeOpening, StrRow, TokenIDRow
from sterna.text.incremental import DecodeStatus, push_batch
from sterna.text.stop import StopMatcher
from sterna.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

NO_ROOM = to_finish(QueueFull("too many requests are being decoded"))


@dataclass(slots=True, eq=False)
class Decoding:
    """One rid's text on its way out."""

    opening: DecodeOpening
    status: DecodeStatus
    matcher: StopMatcher | None
    next_token: int = 0
    """`start` of the row that must come next."""
    held: str = ""
    """Stable text that hasn't: it could be the beginning of a stop string."""

    def resume(self) -> None:
        """Take in the output before the first row. Raises ValueError where the server has more of its text than there is."""
        opening = self.opening
        text = self.status.push(opening.resume_output_ids)
        if self.matcher is not None:
            self.matcher.push(text)
        if len(text) < opening.resume_chars:
            raise ValueError(f"{opening.resume_chars} characters were sent of a text that has {len(text)}")
        self.held = text[opening.resume_chars :]

    def release(self, text: str) -> str:
        """Take `text` in; return what may leave."""
        pending = self.held + text
        if self.matcher is None:
            self.held = ""
            return pending
        self.matcher.push(text)
        keep = max(len(pending) - self.matcher.held, 0)
        out, self.held = pending[:keep], pending[keep:]
        return out

    def conclude(self, text: str, reason: FinishReason) -> str:
        """The last text to leave: all that is held, cut where `reason` says."""
        pending = self.held + text
        if isinstance(reason, FinishMatchedStr):
            sent = self.status.sent_offset - len(pending)
            end = reason.char_offset + (len(reason.matched) if self.opening.no_stop_trim else 0)
            pending = pending[: max(end - sent, 0)]
        return pending


@dataclass(slots=True, frozen=True)
class Refusal:
    """A rid that isn't decoded: its terminal row, when it comes, leaves with `reason`."""

    opening: DecodeOpening
    reason: FinishAbort


class DetokenizerManager:
    """Bounded: at most `max_states` rids are decoded at once; one more is refused when its first row comes, never decoded wrongly."""

    def __init__(self, tokenizer: Tokenizer, max_states: int) -> None:
        self._tokenizer = tokenizer
        self.max_states = max_states
        self._decodings: dict[str, Decoding] = {}
        self._refused: dict[str, Refusal] = {}
        self._epoch = 0
        """The latest that rows have come of."""

    @property
    def num_states(self) -> int:
        return len(self._decodings)

    def to_str_output(self, batch: BatchTokenIDOutput) -> Iterator[tuple[str, BatchStrOutput | DecodeRefused]]:
        """(address, message) for every server that owns a rid of `batch`, refusals first.

        A batch of an earlier epoch, or a row seen already, is dropped; a gap or a fault refuses its rid and no other.
        """
        if batch.epoch < self._epoch:
            return
        if batch.epoch > self._epoch:
            self._begin_epoch(batch.epoch)
        refusals: list[tuple[str, DecodeRefused]] = []
        rows: list[tuple[Decoding, TokenIDRow]] = []
        outputs: dict[str, list[StrRow]] = defaultdict(list)
        for row in batch.rows:
            decoding = self._admit(row, refusals)
            if decoding is not None:
                rows.append((decoding, row))
            elif row.finished_reason is not None:
                self._pass_refusal(row, outputs)
        for (decoding, row), text in zip(rows, self._decode(rows), strict=True):
            try:
                self._output(decoding, row, text, outputs, refusals)
            except Exception:
                log.exception("%s: its text could not be released", row.rid)
                self._output(decoding, row, None, outputs, refusals)
        yield from refusals
        now = time.monotonic()
        for address, strs in outputs.items():
            yield address, BatchStrOutput(epoch=batch.epoch, detokenized_time=now, rows=strs)

    def _begin_epoch(self, epoch: int) -> None:
        """What the epoch before made is over: who goes on opens again, and of the others no ending comes."""
        self._epoch = epoch
        self._decodings.clear()
        self._refused.clear()

    # ---- admission ----

    def _admit(self, row: TokenIDRow, refusals: list[tuple[str, DecodeRefused]]) -> Decoding | None:
        decoding = self._decodings.get(row.rid)
        if decoding is None:
            return None if row.opening is None else self._open(row, row.opening, refusals)
        if row.start < decoding.next_token:
            return None
        if row.start > decoding.next_token:
            log.error("%s: row at %d where %d was due", row.rid, row.start, decoding.next_token)
            self._refuse(row.rid, decoding.opening, FAULT, refusals)
            return None
        return decoding

    def _open(self, row: TokenIDRow, opening: DecodeOpening, refusals: list[tuple[str, DecodeRefused]]) -> Decoding | None:
        self._refused.pop(row.rid, None)
        if len(self._decodings) >= self.max_states:
            self._refuse(row.rid, opening, NO_ROOM, refusals)
            return None
        try:
            decoding = Decoding(opening, self._new_status(opening), StopMatcher(opening.stop) if opening.stop else None, row.start)
            decoding.resume()
        except Exception:
            log.exception("%s: can't begin to decode", row.rid)
            self._refuse(row.rid, opening, FAULT, refusals)
            return None
        self._decodings[row.rid] = decoding
        return decoding

    def _new_status(self, opening: DecodeOpening) -> DecodeStatus:
        return DecodeStatus(
            self._tokenizer,
            opening.prompt_tail,
            skip_special_tokens=opening.skip_special_tokens,
            spaces_between_special_tokens=opening.spaces_between_special_tokens,
        )

    def _refuse(self, rid: str, opening: DecodeOpening, reason: FinishAbort, refusals: list[tuple[str, DecodeRefused]]) -> None:
        self._decodings.pop(rid, None)
        self._refused[rid] = Refusal(opening, reason)
        refusals.append((opening.reply_to, DecodeRefused(rid=rid, epoch=self._epoch)))

    def _pass_refusal(self, row: TokenIDRow, outputs: dict[str, list[StrRow]]) -> None:
        refusal = self._refused.pop(row.rid, None)
        if refusal is not None:
            opening = refusal.opening
            # It claims no token: the journal holds only what was decoded.
            outputs[opening.reply_to].append(
                StrRow(row.rid, 0, [], "", refusal.reason, opening.prompt_tokens, opening.cached_tokens, row.times)
            )

    # ---- decoding ----

    def _decode(self, rows: list[tuple[Decoding, TokenIDRow]]) -> list[str | None]:
        """The newly stable text of each row; None where decoding it failed."""
        statuses = [decoding.status for decoding, _ in rows]
        ids = [_shown(decoding, row) for decoding, row in rows]
        try:
            return list(push_batch(statuses, ids))
        except Exception:
            # One bad row must not take its neighbours along: a status takes nothing of a batch that failed.
            log.exception("batch decode failed; decoding row by row")
            return [_push_alone(status, shown) for status, shown in zip(statuses, ids, strict=True)]

    def _output(
        self,
        decoding: Decoding,
        row: TokenIDRow,
        text: str | None,
        outputs: dict[str, list[StrRow]],
        refusals: list[tuple[str, DecodeRefused]],
    ) -> None:
        opening = decoding.opening
        reason = row.finished_reason
        if text is None:
            self._refuse(row.rid, opening, FAULT, refusals)
            if reason is not None:
                self._pass_refusal(row, outputs)
            return
        decoding.next_token = row.start + len(row.output_ids)
        if reason is None:
            out = decoding.release(text)
        else:
            out = decoding.conclude(text + decoding.status.finish(), reason)
            del self._decodings[row.rid]
        outputs[opening.reply_to].append(
            StrRow(row.rid, row.start, row.output_ids, out, reason, opening.prompt_tokens, opening.cached_tokens, row.times, row.logprobs)
        )


def _shown(decoding: Decoding, row: TokenIDRow) -> list[int]:
    """The ids whose text is shown: without the end token that ended it, unless the request keeps it."""
    if isinstance(row.finished_reason, FinishMatchedToken) and not decoding.opening.no_stop_trim:
        return row.output_ids[:-1]
    return row.output_ids


def _push_alone(status: DecodeStatus, ids: list[int]) -> str | None:
    try:
        return status.push(ids)
    except Exception:
        log.exception("a row can't be decoded")
        return None
