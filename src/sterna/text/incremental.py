"""`DecodeStatus`: text of a growing list of token ids, piece by piece, exactly. Run by the detokenizer and, for stops, by the scheduler.

Definition. The text of an output is decode(tail + output) minus decode(tail), where the tail is the prompt's last tokens
(`prompt_tail_of`). Where the tail ends inside a character, decode(tail) ends in U+FFFD:

- an output that completes the character: its text begins with the completed character, and holds nothing of the prompt before it;
- an output that doesn't: the U+FFFD is the prompt's, and the text begins after it.

Promises, for every split of the ids into pushes: the joined pushes and `finish()` are that text; what a push returned is never
withdrawn; work and memory per token are constant. (A run of SentencePiece byte tokens that is valid so far has to be held to its end,
because one bad byte turns all of it into U+FFFD.)
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections import defaultdict
from collections.abc import Sequence

from sterna.text.token_text import REPLACEMENT, ByteTable, PieceTable, WindowTable
from sterna.text.tokenizer import Tokenizer

PROMPT_TAIL_TOKENS = 64
"""Tokens of the prompt that give the output its left context: the first output token's text can depend on whether it is the very
first, on its left neighbour, and on the run of byte tokens that it continues."""


def prompt_tail_of(tokenizer: Tokenizer, input_ids: Sequence[int]) -> Sequence[int]:
    """The part of a prompt that a `DecodeStatus` begins with: its last `PROMPT_TAIL_TOKENS`, or of a prompt at least that long a few
    fewer, so that a run of byte tokens isn't cut inside a character. What it gives for a prompt's last tokens, that many, it gives for
    the whole prompt."""
    if len(input_ids) < PROMPT_TAIL_TOKENS:
        return input_ids
    tail = input_ids[len(input_ids) - PROMPT_TAIL_TOKENS :]
    table = tokenizer.table(skip_special_tokens=False)
    start = 0
    if isinstance(table, PieceTable):
        while start < 3 and _continues_character(table.pieces.get(tail[start])):
            start += 1
    return tail[start:]


def _continues_character(piece: str | int | None) -> bool:
    return isinstance(piece, int) and 0x80 <= piece < 0xC0


class DecodeStatus:
    """One request's decoder. Not safe for concurrent use."""

    __slots__ = ("_state", "sent_offset")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tail: Sequence[int],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        """`prompt_tail` is a prompt, or its last `PROMPT_TAIL_TOKENS`."""
        table = tokenizer.table(skip_special_tokens=skip_special_tokens)
        prompt_tail = prompt_tail_of(tokenizer, prompt_tail)
        self._state: _ByteState | _PieceState | _WindowState
        if isinstance(table, ByteTable):
            self._state = _ByteState(table, prompt_tail)
        elif isinstance(table, PieceTable):
            self._state = _PieceState(table, prompt_tail)
        else:
            self._state = _WindowState(table, tokenizer, (skip_special_tokens, spaces_between_special_tokens), prompt_tail)
        self.sent_offset: int = 0
        """Characters of output text that have been returned."""

    @property
    def surr_offset(self) -> int:
        """Tokens of tail and output: where the left context begins that later tokens are decoded with."""
        return self._state.surr_offset

    @property
    def read_offset(self) -> int:
        """Tokens of tail and output whose text is out."""
        return self._state.read_offset

    def push(self, ids: Sequence[int]) -> str:
        """Take the next output ids; return the text that they make stable: perhaps "", perhaps that of earlier ids."""
        text = self._state.push(ids)
        self.sent_offset += len(text)
        return text

    def finish(self) -> str:
        """The rest of the text: no more ids come. Called once, last."""
        text = self._state.finish()
        self.sent_offset += len(text)
        return text


def push_batch(statuses: Sequence[DecodeStatus], ids_per_status: Sequence[Sequence[int]]) -> list[str]:
    """`push` of each status; all are different. A status takes nothing where this raises, which lists of ints never make it do.

    Statuses whose decoder needs the library are decoded together, one call for each setting of the flags.
    """
    texts: list[str] = []
    windows: dict[tuple[bool, bool], list[int]] = defaultdict(list)
    for row, (status, ids) in enumerate(zip(statuses, ids_per_status, strict=True)):
        state = status._state
        if isinstance(state, _WindowState):
            windows[state.flags].append(row)
            text = ""
        else:
            text = state.push(ids)
            status.sent_offset += len(text)
        texts.append(text)
    for rows in windows.values():
        states = [state for row in rows if isinstance(state := statuses[row]._state, _WindowState)]
        for row, text in zip(rows, _push_windows(states, [ids_per_status[row] for row in rows]), strict=True):
            statuses[row].sent_offset += len(text)
            texts[row] = text
    return texts


class _ByteState:
    """The text is the tokens' bytes, read as UTF-8. Holds the at most three bytes of an unfinished character."""

    __slots__ = ("_pending", "_pieces", "_tail_unfinished", "_tokens", "read_offset")

    def __init__(self, table: ByteTable, prompt_tail: Sequence[int]) -> None:
        self._pieces = table.pieces
        self._pending = b""
        self._tail_unfinished = False
        self._tokens = 0
        self.read_offset = 0
        self.push(prompt_tail)
        self._tail_unfinished = bool(self._pending)

    @property
    def surr_offset(self) -> int:
        return self.read_offset

    def push(self, ids: Sequence[int]) -> str:
        pieces = self._pieces
        data = self._pending + b"".join([pieces.get(token_id, b"") for token_id in ids])
        text, used = utf_8_decode(data, "replace")
        self._pending = data[used:]
        self._tokens += len(ids)
        if used or not data:
            self.read_offset = self._tokens - self._unfinished_tokens(ids)
        if self._tail_unfinished and text:
            text = self._after_tail(text)
        return text

    def finish(self) -> str:
        text = self._pending.decode(errors="replace")
        self._pending = b""
        self.read_offset = self._tokens
        return self._after_tail(text) if self._tail_unfinished else text

    def _after_tail(self, text: str) -> str:
        """A character of the prompt that was never completed is the prompt's."""
        self._tail_unfinished = False
        return text.removeprefix(REPLACEMENT)

    def _unfinished_tokens(self, ids: Sequence[int]) -> int:
        """How many of the last `ids` hold the pending bytes."""
        missing = len(self._pending)
        count = 0
        while missing > 0 and count < len(ids):
            count += 1
            missing -= len(self._pieces.get(ids[-count], b""))
        return count


class _PieceState:
    """The text is the tokens' strings, and runs of byte tokens decoded as a whole. Holds a run that is valid so far."""

    __slots__ = (
        "_bad",
        "_first",
        "_partial",
        "_run_bytes",
        "_run_text",
        "_strip_left",
        "_table",
        "_tail_bytes",
        "_tail_chars",
        "_tokens",
        "read_offset",
    )

    def __init__(self, table: PieceTable, prompt_tail: Sequence[int]) -> None:
        self._table = table
        self._first = True
        self._strip_left = table.strip_count
        self._tokens = 0
        self.read_offset = 0
        self._bad = False
        """The run of byte tokens that we are in isn't UTF-8: each of its bytes is one U+FFFD, at once."""
        self._run_text: list[str] = []
        self._partial = b""
        """Of the run: its whole characters and the bytes after them."""
        self._run_bytes = 0
        self._tail_bytes = 0
        self._tail_chars = 0
        """Of the run: what belongs to the prompt's tail, should the run turn out bad, or good."""
        self.push(prompt_tail)
        self._tail_bytes = self._run_bytes
        self._tail_chars = sum(map(len, self._run_text))

    @property
    def surr_offset(self) -> int:
        return self.read_offset

    def push(self, ids: Sequence[int]) -> str:
        pieces = self._table.pieces
        out: list[str] = []
        for token_id in ids:
            self._tokens += 1
            piece = pieces.get(token_id)
            if piece is None:
                continue
            if self._first:
                piece = self._table.first_pieces.get(token_id, piece)
                self._first = False
            if isinstance(piece, int):
                out.append(self._take_byte(piece))
                continue
            if self._run_bytes or self._bad:
                out.append(self._end_run())
            out.append(self._strip(piece) if self._strip_left else piece)
        if not self._run_bytes:
            self.read_offset = self._tokens
        return "".join(out)

    def finish(self) -> str:
        self.read_offset = self._tokens
        return self._end_run()

    def _take_byte(self, byte: int) -> str:
        if self._bad:
            return REPLACEMENT
        if not self._run_bytes:
            self.read_offset = self._tokens - 1
        self._run_bytes += 1
        data = self._partial + bytes((byte,))
        try:
            text, used = utf_8_decode(data)
        except UnicodeDecodeError:
            text = self._bad_run()
            self._bad = True
            return text
        self._partial = data[used:]
        if text:
            self._run_text.append(text)
        return ""

    def _bad_run(self) -> str:
        text = self._strip(REPLACEMENT * self._run_bytes)[self._tail_bytes :]
        self._clear_run()
        return text

    def _end_run(self) -> str:
        """The text of the run of byte tokens that ends here, if we are in one."""
        if self._partial:
            text = self._bad_run()
        else:
            whole = "".join(self._run_text)
            text = self._strip(whole)
            text = text[max(self._tail_chars - (len(whole) - len(text)), 0) :]
        self._clear_run()
        self._bad = False
        return text

    def _clear_run(self) -> None:
        self._run_text.clear()
        self._partial = b""
        self._run_bytes = self._tail_bytes = self._tail_chars = 0

    def _strip(self, text: str) -> str:
        """`text` without what is stripped from the start of all text."""
        while self._strip_left and text.startswith(self._table.strip):
            text = text[1:]
            self._strip_left -= 1
        if text:
            self._strip_left = 0
        return text


class _WindowState:
    """The library decodes: a token's text depends on its left neighbour at most, which is therefore kept."""

    __slots__ = ("_context", "_table", "_tokens", "flags", "read_offset", "surr_offset", "tokenizer")

    def __init__(self, table: WindowTable, tokenizer: Tokenizer, flags: tuple[bool, bool], prompt_tail: Sequence[int]) -> None:
        self._table = table
        self.tokenizer = tokenizer
        self.flags = flags
        """(skip_special_tokens, spaces_between_special_tokens)"""
        self._context: list[int] = []
        self._tokens = 0
        self.surr_offset = 0
        self.read_offset = 0
        self.commit(prompt_tail)

    def window(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The ids to decode: the left context alone, and with `ids`."""
        return self._context, self._context + [token_id for token_id in ids if token_id in self._table.shown]

    def commit(self, ids: Sequence[int]) -> None:
        for token_id in ids:
            if token_id in self._table.shown:
                self._context = [token_id]
                self.surr_offset = self._tokens
            self._tokens += 1
        self.read_offset = self._tokens

    def push(self, ids: Sequence[int]) -> str:
        return _push_windows([self], [ids])[0]

    def finish(self) -> str:
        return ""


def _push_windows(states: Sequence[_WindowState], ids_per_state: Sequence[Sequence[int]]) -> list[str]:
    """New text of each; `states` share their tokenizer and flags."""
    windows = [state.window(ids) for state, ids in zip(states, ids_per_state, strict=True)]
    skip, spaces = states[0].flags
    decoded = states[0].tokenizer.decode_batch(
        [ids for window in windows for ids in window], skip_special_tokens=skip, spaces_between_special_tokens=spaces
    )
    for state, ids in zip(states, ids_per_state, strict=True):
        state.commit(ids)
    return [read[len(surr) :] for surr, read in zip(decoded[::2], decoded[1::2], strict=True)]
