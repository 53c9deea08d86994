"""Small tokenizers of every decoder kind, made without any model."""

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import Decoder

from sterna.text.tokenizer import Tokenizer

MARK = "\u2581"
PIECES = ("a", "b", "the", " ", "\n", ".", "?\n", "  ", "世", "界世", "ก็", "👩", "\u200d", "\ufffd", "é", "")


def _printable(byte: int) -> str:
    """GPT-2's alphabet, from the library rather than from ours."""
    return ALPHABET[byte]


def _alphabet() -> list[str]:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    known = {}
    for code in [*range(0x80), *range(0x80, 0x800, 7), *range(0x800, 0xD800, 64), *range(0x10000, 0x110000, 4096)]:
        encoded = chr(code).encode()
        spelled = "".join(piece for piece, _ in level.pre_tokenize_str(chr(code)))
        known.update(zip(encoded, spelled, strict=True))
    # Bytes that never stand in UTF-8: the alphabet is known to be in order of the bytes that aren't printable, then the rest.
    return [known.get(byte, chr(byte)) for byte in range(256)]


ALPHABET = _alphabet()


def byte_level() -> Tokenizer:
    """Every byte, some words, pieces that begin or end inside a character; two special tokens, one added that isn't."""
    spelled = [_printable(byte) for byte in range(256)]
    halves = [b"\xe4\xb8", b"\x96a", b"\xb8\x96\xe4", b" \xf0\x9f", b"\x91\xa9", b"\xff\xfe", b"x\xe4"]
    words = [bytes(piece, "utf-8") for piece in PIECES if piece] + halves
    spelled += ["".join(map(_printable, word)) for word in words]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(spelled))}
    inner = RustTokenizer(models.BPE(vocab, []))
    inner.decoder = decoders.ByteLevel()
    return _with_added(inner)


def sentencepiece(*, strip: bool = True) -> Tokenizer:
    """Llama 2's decoder: every byte as a byte token, and pieces."""
    steps: list[Decoder] = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
    return _pieces(decoders.Sequence(steps))


def metaspace() -> Tokenizer:
    return _pieces(decoders.Metaspace(replacement=MARK, prepend_scheme="always"))


def word_piece() -> Tokenizer:
    return _pieces(decoders.WordPiece(prefix="##", cleanup=True))


def joined_by_spaces() -> Tokenizer:
    return _pieces(None)


def _pieces(decoder: Decoder | None) -> Tokenizer:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    for piece in PIECES:
        tokens += [piece.replace(" ", MARK), MARK + piece, "##" + piece]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    inner = RustTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", MARK)
    if decoder is not None:
        inner.decoder = decoder
    return _with_added(inner)


def _with_added(inner: RustTokenizer) -> Tokenizer:
    inner.add_special_tokens([AddedToken("<s>", special=True, normalized=False), AddedToken("</s>", special=True, normalized=False)])
    inner.add_tokens([AddedToken("<think>", special=False, normalized=False), AddedToken("<世 é>", special=False, normalized=False)])
    return Tokenizer.from_json(inner.to_str())


ALL = {
    "byte_level": byte_level(),
    "sentencepiece": sentencepiece(),
    "sentencepiece_unstripped": sentencepiece(strip=False),
    "metaspace": metaspace(),
    "word_piece": word_piece(),
    "joined_by_spaces": joined_by_spaces(),
}
