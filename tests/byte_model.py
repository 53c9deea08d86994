"""A resolved model folder with no model in it: one token per byte, for the scripted executor, which echoes its prompt.

Ids 0..255 are bytes, then come BOS, EOS and ChatML's two. Text is therefore exactly what a test puts into a prompt.
"""

import json
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from model_facts import model_facts
from sterna.models.spec import AttentionSpec, GatedMLPSpec, KVGroup, LayerSpec, ModelSpec

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
VOCAB_SIZE = 260
SPECIAL = {"<|bos|>": BOS, "<|eos|>": EOS, "<|im_start|>": IM_START, "<|im_end|>": IM_END}

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte, by byte value."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def tokenizer_json() -> str:
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    assert all(tokenizer.token_to_id(token) == token_id for token, token_id in SPECIAL.items())
    return tokenizer.to_str()


def make_byte_model(folder: Path, *, context_len: int = 4096, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write the folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    attention = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2, scale=1.0, rope=None)
    spec = ModelSpec(
        vocab_size=VOCAB_SIZE,
        hidden_size=2,
        layers=(LayerSpec(attention, GatedMLPSpec(intermediate=2), norm_eps=1e-5),),
        kv_groups=(KVGroup("full", (0,), 4),),
        final_norm_eps=1e-5,
        tied_head=True,
    )
    facts = model_facts(
        source=str(folder),
        vocab_size=VOCAB_SIZE,
        context_len=context_len,
        bos_token_id=BOS,
        eos_token_ids=(EOS, IM_END),
        bos_token="<|bos|>",
        eos_token="<|eos|>",
    )
    (folder / "facts.json").write_bytes(msgspec.json.encode(facts))
    (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
    (folder / "weights.json").write_text(json.dumps({}))
    (folder / "tokenizer.json").write_text(tokenizer_json())
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder
