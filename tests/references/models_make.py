"""Makes `tests/data/models_tiny_gguf.json` and `models_smollm2.json`: greedy tokens of GGUF files by readers that share no code with ours.

    python tests/references/models_make.py --llama-python PYTHON tiny
    python tests/references/models_make.py --llama-python PYTHON smollm2 --gguf SmolLM2-135M-Instruct.Q4_1.gguf

This Python has torch, transformers, accelerate (which transformers wants for GGUF) and gguf; PYTHON has xllamacpp (`models_llama_cpp.py`
runs there). Who reads what:

- SmolLM2: weights, config and template by transformers (`gguf_file=`), run in float32 by transformers' `generate`. The prompts' ids are
  llama.cpp's, because transformers ignores which pre-tokenizer a GGUF asks for.
- Tiny models with nothing but what transformers reads from GGUF: transformers again, for every quantisation.
- Tiny models in F32, all of them: llama.cpp. (It alone reads rope scaling, biases of `llama`, and head_dim of `qwen3` from GGUF.)

Every F32 reading is also compared with the model that the file was written from, as transformers runs it without any file: so a mistake
that writer and reader shared would show. Nothing here imports Sterna.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from models_prompts import CHATS, TEXTS  # noqa: E402

import tiny_models  # noqa: E402  (found by the line above)
from tiny_gguf import has_gguf, write_gguf  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEAR_TIE = 1e-4
TINY_TOKENS, SMOLLM2_TOKENS, BATCH = 32, 64, 10

READ_BY_TRANSFORMERS = (
    "llama",
    "llama-untied",
    "llama-head-dim",
    "llama-every-head",
    "llama-one-kv-head",
    "llama-wide",
    "mistral",
    "qwen2",
)
QUANTS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--llama-python", required=True)
    parser.add_argument("what", choices=["tiny", "smollm2"])
    parser.add_argument("--gguf", type=Path, help="smollm2's file")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    if args.what == "tiny":
        save("models_tiny_gguf.json", make_tiny(args.llama_python))
    else:
        save("models_smollm2.json", make_smollm2(args.llama_python, args.gguf))


def make_tiny(llama_python: str) -> dict[str, Any]:
    prompts = tiny_prompts()
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        names = [name for name in tiny_models.VARIANTS if has_gguf(name)]
        files = {name: write_gguf(Path(folder) / f"{name}.gguf", name) for name in names}
        jobs = [{"path": str(path), "prompts": prompts, "texts": [], "num_tokens": TINY_TOKENS} for path in files.values()]
        for name, result in zip(names, ask_llama_cpp(llama_python, jobs), strict=True):
            written = tiny_models.torch_model(name)
            outputs = [
                agreed(name, ids, greedy(written, prompt, TINY_TOKENS)) for ids, prompt in zip(result["outputs"], prompts, strict=True)
            ]
            cases.append(case(name, "F32", "llama.cpp", outputs))
        for name in READ_BY_TRANSFORMERS:
            for quant in QUANTS:
                model = load_by_transformers(write_gguf(Path(folder) / f"{name}-{quant}.gguf", name, quant=quant))
                outputs = [greedy(model, prompt, TINY_TOKENS) for prompt in prompts]
                if quant == "F32":
                    written = tiny_models.torch_model(name)
                    outputs = [agreed(name, o["ids"], greedy(written, p, TINY_TOKENS)) for o, p in zip(outputs, prompts, strict=True)]
                cases.append(case(name, quant, "transformers", outputs))
    return {"prompts": prompts, "cases": cases}


def tiny_prompts() -> list[list[int]]:
    """One id; a sentence; and more tokens than the original windows of the variants with scaled rope."""
    sentence = tiny_models.tokenizer().encode("The cat and the dog went to the sea.\n  def f(x): return 12345").ids
    known = tiny_models.tokenizer().get_vocab_size()
    return [[40], sentence, np.random.RandomState(7).randint(3, known, 200).tolist()]


def case(name: str, quant: str, reader: str, outputs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "variant": name,
        "quant": quant,
        "reader": reader,
        "weights_sha256": tiny_models.weights_sha256(name),
        "outputs": rounded(outputs),
    }


def make_smollm2(llama_python: str, path: Path) -> dict[str, Any]:
    import hashlib

    from transformers import AutoTokenizer

    template = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    chats = [
        {"messages": messages, "text": template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)}
        for messages in CHATS
    ]
    prompts = [*chats, *[{"messages": None, "text": text} for text in TEXTS]]
    job = {"path": str(path), "prompts": [], "texts": [prompt["text"] for prompt in prompts], "num_tokens": 0}
    token_ids = ask_llama_cpp(llama_python, [job])[0]["tokens"]
    model = load_by_transformers(path)
    # Prompts of like length together, so that there is little padding; the near ties that it could tip are known by their gaps.
    order = sorted(range(len(prompts)), key=lambda i: len(token_ids[i]))
    outputs: dict[int, dict[str, Any]] = {}
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        outputs |= zip(batch, rounded(greedy_batch(model, [token_ids[i] for i in batch], SMOLLM2_TOKENS)), strict=True)
        print(f"{len(outputs)}/{len(prompts)}", file=sys.stderr)
    cases = [{**prompt, "prompt_ids": token_ids[i], **outputs[i]} for i, prompt in enumerate(prompts)]
    return {"gguf_sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "num_tokens": SMOLLM2_TOKENS, "cases": cases}


def load_by_transformers(path: Path) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    return greedy_batch(model, [prompt], num_tokens)[0]


def greedy_batch(model: PreTrainedModel, prompts: list[list[int]], num_tokens: int) -> list[dict[str, Any]]:
    """Per prompt `num_tokens` ids, going on past end tokens, and the difference of the two best logits at each. Padded on the left."""
    import torch

    width = max(map(len, prompts))
    with torch.inference_mode():
        made = model.generate(
            torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    ids = made.sequences[:, width:].tolist()
    best, second = torch.stack(made.logits, 1).topk(2).values.unbind(-1)
    return [{"ids": row, "gaps": gaps} for row, gaps in zip(ids, (best - second).tolist(), strict=True)]


def ask_llama_cpp(python: str, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        command = [python, str(Path(__file__).with_name("models_llama_cpp.py")), answer.name]
        subprocess.run(command, input=json.dumps(jobs), text=True, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return json.load(answer)  # type: ignore[no-any-return]


def agreed(name: str, ids: list[int], written: dict[str, Any]) -> dict[str, Any]:
    """What a reader got, as far as the model that the file was written from (whose gaps it takes) gets the same.

    They may part at a near tie; elsewhere it is an error. llama.cpp also stops at end tokens.
    """
    for step, (theirs, expected, gap) in enumerate(zip(ids, written["ids"], written["gaps"], strict=False)):
        if theirs != expected:
            assert gap < NEAR_TIE, f"{name}: the reader differs from the model at token {step}, where the gap is {gap}"
            ids = ids[:step]
            break
    assert ids, f"{name}: nothing was generated"
    return {"ids": ids, "gaps": written["gaps"][: len(ids)]}


def rounded(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"ids": output["ids"], "gaps": [float(f"{gap:.3g}") for gap in output["gaps"]]} for output in outputs]


def save(name: str, data: dict[str, Any]) -> None:
    """One case a line, so that a change shows as the lines it touches."""
    import torch
    import transformers

    data = {"made_with": {"transformers": transformers.__version__, "torch": torch.__version__}, **data}
    cases = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in data.pop("cases"))
    head = json.dumps(data, ensure_ascii=False)
    (TESTS / "data" / name).write_text(f'{head[:-1]}, "cases": [\n{cases}\n]}}\n')


if __name__ == "__main__":
    main()
