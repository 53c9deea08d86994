"""Greedy continuations and tokenizations by llama.cpp, for `models_make.py`.

Run by a Python that has the package xllamacpp and nothing else.

stdin: JSON list of jobs, each {"path": GGUF file, "prompts": [[id, …], …], "texts": [str, …], "num_tokens": int}.
File named by the first argument: JSON list, one per job, {"outputs": [[id, …], …], "tokens": [[id, …], …]}.

The KV cache is float32 and flash attention is off, so that a float32 model is computed in float32 throughout. (Quantised matrices are not:
llama.cpp multiplies them with quantised activations.) An output may end early, at the model's end token.
"""

import json
import sys
import urllib.request
from typing import Any

import xllamacpp


def main() -> None:
    results = [run(job) for job in json.load(sys.stdin)]
    with open(sys.argv[1], "w") as file:
        json.dump(results, file)


def run(job: dict[str, Any]) -> dict[str, Any]:
    server = open_model(job["path"])
    return {
        "outputs": [continuation(server, prompt, job["num_tokens"]) for prompt in job["prompts"]],
        "tokens": [post(server, "/tokenize", {"content": text, "parse_special": True})["tokens"] for text in job["texts"]],
    }


def open_model(path: str) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = 512
    params.n_parallel = 1
    params.warmup = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params)


def continuation(server: xllamacpp.Server, prompt: list[int], num_tokens: int) -> list[int]:
    # Not `n_probs`, which would give gaps: it leaves out tokens that end inside a character.
    body = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    return post(server, "/completion", body)["tokens"]


def post(server: xllamacpp.Server, route: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(server.listening_address + route, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
