"""Makes `tests/data/text_byte_level.json`, `text_sentencepiece.json` and `text_smollm2.json`: tokenizations by code that isn't ours.

    python tests/references/text_make.py --llama-python PYTHON --smollm2 SmolLM2-135M-Instruct.Q4_1.gguf

This Python has tokenizers, sentencepiece and gguf; PYTHON has xllamacpp (`models_llama_cpp.py` runs there). Nothing here imports Sterna.

- text_byte_level.json: one vocabulary, whose merges cross every kind of boundary, so that each way of splitting shows in the ids;
  and for each `tokenizer.ggml.pre` the ids that llama.cpp gives the corpus with it. Splittings whose regular expressions llama.cpp
  rewrites for its own engine with another meaning (tekken and gpt-4o: it takes upper and lower case in ASCII only) are left out.
- text_sentencepiece.json: a BPE model with byte fallback and the settings of Llama 2, trained and run by SentencePiece itself.
- text_smollm2.json: the default model's ids of the corpus by llama.cpp, from its own GGUF file.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from unit.text.corpus import LINES  # noqa: E402  (found by the line above)

PRES = (
    *("gpt-2", "smollm", "starcoder", "command-r", "llama-bpe", "smaug-bpe", "dbrx"),
    *("qwen2", "deepseek-r1-qwen", "deepseek-v3", "deepseek-coder"),
)
WIDTH = 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--llama-python", required=True)
    parser.add_argument("--smollm2", type=Path, required=True)
    arguments = parser.parse_args()
    vocabulary = learned_vocabulary()
    with tempfile.TemporaryDirectory() as folder:
        paths = {pre: write_model(Path(folder) / f"{pre}.gguf", pre, vocabulary) for pre in PRES}
        ids = llama_cpp_ids(arguments.llama_python, [*paths.values(), arguments.smollm2])
    save("text_byte_level", {**vocabulary, "ids": dict(zip(PRES, ids, strict=False))})
    digest = hashlib.sha256(arguments.smollm2.read_bytes()).hexdigest()
    save("text_smollm2", {"sha256": digest, "ids": ids[-1]})
    save("text_sentencepiece", sentencepiece_reference())


def save(name: str, value: dict[str, Any]) -> None:
    (TESTS / "data" / f"{name}.json").write_text(json.dumps(value, separators=(",", ":")) + "\n")


def learned_vocabulary() -> dict[str, Any]:
    """Learned without any splitting; the special tokens are the corpus's."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1400, min_frequency=1, show_progress=False, special_tokens=special, initial_alphabet=alphabet)
    pieces = [line[at : at + 6] for line in LINES for at in range(len(line))]
    inner.train_from_iterator(pieces, trainer)
    document = json.loads(inner.to_str())
    vocab = document["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokens": tokens,
        "types": [3 if token in special else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in document["model"]["merges"]],
    }


def write_model(path: Path, pre: str, vocabulary: dict[str, Any]) -> Path:
    """The vocabulary, and the least of a model that llama.cpp will load."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    writer.add_token_merges(vocabulary["merges"])
    writer.add_bos_token_id(3)
    writer.add_eos_token_id(4)
    writer.add_add_bos_token(False)
    writer.add_tensor("token_embd.weight", np.zeros((len(vocabulary["tokens"]), WIDTH), np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((WIDTH, WIDTH), np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_cpp_ids(python: str, paths: list[Path]) -> list[list[list[int]]]:
    jobs = [{"path": str(path), "prompts": [], "texts": LINES, "num_tokens": 0} for path in paths]
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answers:
        runner = Path(__file__).with_name("models_llama_cpp.py")
        subprocess.run([python, runner, answers.name], input=json.dumps(jobs), text=True, check=True)
        return [result["tokens"] for result in json.load(answers)]


def sentencepiece_reference() -> dict[str, Any]:
    """Pieces, scores, types (GGUF numbers them as SentencePiece does), and ids and texts of the corpus."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in LINES for _ in range(3)]),
        model_writer=model,
        model_type="bpe",
        vocab_size=640,
        character_coverage=0.98,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    count = processor.vocab_size()

    def kind(i: int) -> int:
        if processor.is_unknown(i):
            return 2
        if processor.is_control(i):
            return 3
        return 5 if processor.is_unused(i) else 6 if processor.is_byte(i) else 1

    lines = [line for line in LINES if "<s>" not in line and "\0" not in line]
    return {
        "tokens": [processor.id_to_piece(i) for i in range(count)],
        "scores": [processor.get_score(i) for i in range(count)],
        "types": [kind(i) for i in range(count)],
        "lines": lines,
        "ids": [processor.encode(line) for line in lines],
        "texts": [processor.decode(processor.encode(line)) for line in lines],
    }


if __name__ == "__main__":
    main()
