"""What each token of a vocabulary adds to the text, where the decoder lets that be said token by token.

Three kinds of decoder (`tokenizers` names):

- `ByteLevel`: a token is a run of bytes; the text is their concatenation read as UTF-8, each maximal ill-formed subsequence
  replaced by one U+FFFD (both Rust's `from_utf8_lossy` and Python's `replace` follow the Unicode standard, chapter 3.9, in this).
- `Replace`, `ByteFallback`, `Fuse`, `Strip` (SentencePiece), or `Metaspace`: a token is a string or one byte; a run of byte tokens is
  decoded as a whole, and where it isn't UTF-8 each of its bytes becomes one U+FFFD.
- anything else: the text of a token may depend on its left neighbour, and only the library knows how.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sterna.errors import ModelError

REPLACEMENT = "\ufffd"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


@dataclass(frozen=True, slots=True)
class ByteTable:
    """Token id -> its bytes; an id that isn't there has no text."""

    pieces: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class PieceTable:
    """Token id -> its string, or its byte; an id that isn't there is passed over and doesn't end a run of bytes."""

    pieces: dict[int, str | int]
    first_pieces: dict[int, str]
    """What differs where the token is the first of all (`Metaspace`)."""
    strip: str
    """Stripped from the start of the text, up to `strip_count` times; one character."""
    strip_count: int


@dataclass(frozen=True, slots=True)
class WindowTable:
    """No table: the library decodes windows of tokens; an id that isn't in `shown` has no text."""

    shown: frozenset[int]


TokenTable = ByteTable | PieceTable | WindowTable


def build_table(decoder_steps: Sequence[Mapping[str, Any]], tokens: Mapping[int, str]) -> TokenTable:
    """`decoder_steps` is the decoder's description, sequences flattened; `tokens` are those that have text, as the vocabulary spells
    them. Takes about 0.3 µs a token. Raises ModelError for a decoder that can't be run token by token."""
    kinds = [step["type"] for step in decoder_steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return ByteTable({token_id: _bytes_of(token) for token_id, token in tokens.items()})
    if kinds == ["Metaspace"]:
        return _metaspace_table(decoder_steps[0], tokens)
    pieces = _piece_table(decoder_steps, tokens)
    if pieces is not None:
        return pieces
    if not set(kinds) <= {"WordPiece", "BPEDecoder", "Replace", "Strip", "Metaspace"}:
        raise ModelError(f"tokenizer.json: a decoder of {', '.join(kinds)} isn't supported")
    return WindowTable(frozenset(tokens))


# ---- ByteLevel ----


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


_BYTE_OF = {stand_in: byte for byte, stand_in in byte_alphabet().items()}


def _bytes_of(token: str) -> bytes:
    """A token with a character outside the alphabet (an added token) is its own UTF-8."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


# ---- SentencePiece ----


def _metaspace_table(step: Mapping[str, Any], tokens: Mapping[int, str]) -> PieceTable:
    mark = step["replacement"]
    pieces: dict[int, str | int] = {token_id: token.replace(mark, " ") for token_id, token in tokens.items()}
    first: dict[int, str] = {}
    if step["prepend_scheme"] != "never":
        first = {token_id: token.replace(mark, "") for token_id, token in tokens.items() if mark in token}
    return PieceTable(pieces, first, "", 0)


def _piece_table(steps: Sequence[Mapping[str, Any]], tokens: Mapping[int, str]) -> PieceTable | None:
    """None where the steps aren't `Replace`*, then perhaps `ByteFallback`, `Fuse` and, after `Fuse`, a `Strip` of the start."""
    order = {"Replace": 0, "ByteFallback": 1, "Fuse": 2, "Strip": 3}
    ranks = [order.get(step["type"], -1) for step in steps]
    single = all(ranks.count(rank) <= 1 for rank in (1, 2, 3))
    if not ranks or -1 in ranks or ranks != sorted(ranks) or not single or (3 in ranks and 2 not in ranks):
        return None
    replacements = [(step["pattern"].get("String"), step["content"]) for step in steps if step["type"] == "Replace"]
    no_strip: Mapping[str, Any] = {"content": "", "start": 0, "stop": 0}
    strip = next((step for step in steps if step["type"] == "Strip"), no_strip)
    if any(not pattern for pattern, _ in replacements) or strip["stop"]:
        return None
    pieces: dict[int, str | int] = {}
    for token_id, token in tokens.items():
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        byte = _BYTE_TOKEN.fullmatch(token) if 1 in ranks else None
        pieces[token_id] = int(byte[1], 16) if byte else token
    return PieceTable(pieces, {}, strip["content"], strip["start"])
