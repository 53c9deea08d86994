"""OpenVINO GenAI, in process: it comes without an HTTP server, which its figures therefore don't pay for.

Its continuous batching is driven in a closed loop like the load generator's, with the same prompts.

    python -m peers.openvino GGUF THREADS     (in the peer's environment) reads cases as lines of JSON, answers each with its figures
"""

from __future__ import annotations

import ast
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cases import LOADGEN, Case, with_prompt_speed
from peers.base import Absent, Peer, Running, last_lines
from peers.environment import Environment

REQUIREMENT = "openvino-genai==2026.4.1.0"
KV_CACHE_GB = 4
READY = "ready"


class OpenVino(Peer):
    name = "OpenVINO GenAI"

    def __init__(self, gguf: Path, cores: int) -> None:
        self._gguf = gguf
        self._cores = cores
        self._environment = Environment("openvino", REQUIREMENT)
        self.settings = (
            f"Q4_1 file, in process (no HTTP), continuous batching of 64, {cores} threads, {KV_CACHE_GB} GB of KV cache, prefix caching on"
        )

    def install(self) -> None:
        made = self._environment
        if not made.is_made():
            made.begin()
            made.pip("install", REQUIREMENT)
            made.finish()

    def start(self) -> Running:
        began = time.monotonic()
        command = [str(self._environment.python), "-m", "peers.openvino", str(self._gguf), str(self._cores)]
        with self._environment.log.open("w") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=self._environment.variables(), text=True
            )
        for line in process.stdout:
            if line.strip() == READY:
                return InProcess(process, time.monotonic() - began)
        raise Absent(f"it ended with {process.wait()} at its start: {last_lines(self._environment.log)}")

    def installed_mb(self) -> float:
        return self._environment.installed_mb()

    def version(self) -> str:
        return self._environment.version("openvino-genai")


class InProcess(Running):
    def measure(self, case: Case, seed: int) -> dict[str, Any]:
        self.process.stdin.write(json.dumps({"case": asdict(case), "seed": seed}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                figures: dict[str, Any] = json.loads(line)
                return with_prompt_speed(figures)
        raise RuntimeError(f"its process ended with {self.process.wait()}")


def prompts(case: Case, seed: int) -> list[str]:
    """The load generator's. Its file runs when imported, and must stay as it is: all of it but the last statement is taken."""
    source = ast.parse(LOADGEN.read_text())
    source.body.pop()
    loadgen: dict[str, Any] = {}
    exec(compile(source, str(LOADGEN), "exec"), loadgen)
    text = loadgen["text"]
    shared = text(random.Random(seed), case.shared_prefix)
    own = [text(random.Random(seed * 1000003 + i), case.prompt_tokens) for i in range(case.requests)]
    return [f"{shared} {each}" if shared else each for each in own]


def closed_loop(pipeline: Any, config: Any, texts: list[str], concurrency: int, count_tokens: Any) -> dict[str, Any]:
    """All of `texts`, `concurrency` of them at any time: figures under the load generator's names."""
    waiting, running, first_s, out = list(enumerate(texts)), {}, [], 0
    began = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < concurrency:
            number, text = waiting.pop(0)
            running[number] = (pipeline.add_request(number, text, config), time.perf_counter(), [])
        pipeline.step()
        now = time.perf_counter()
        for number, (handle, since, ids) in list(running.items()):
            while handle.can_read():
                if not ids:
                    first_s.append(now - since)
                ids.extend(token for output in handle.read().values() for token in output.generated_ids)
            if len(ids) >= config.max_new_tokens:
                out += len(ids)
                del running[number]
    wall_s = time.perf_counter() - began
    return {
        "ok": len(texts),
        "wall_s": round(wall_s, 2),
        "out_tok": out,
        "in_tok": sum(map(count_tokens, texts)),
        "out_tok_s": round(out / wall_s, 1),
        "ttft_ms": {"p50": round(statistics.median(first_s) * 1000, 2)},
    }


def serve(gguf: str, threads: int) -> None:
    import openvino_genai

    scheduling = openvino_genai.SchedulerConfig()
    scheduling.max_num_seqs = 64
    scheduling.cache_size = KV_CACHE_GB
    scheduling.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(gguf, scheduling, "CPU", {"INFERENCE_NUM_THREADS": threads})
    tokenizer = pipeline.get_tokenizer()
    print(READY, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        case = Case(**asked["case"])
        config = openvino_genai.GenerationConfig(max_new_tokens=case.max_tokens, ignore_eos=True, do_sample=False)
        texts = prompts(case, asked["seed"])
        figures = closed_loop(pipeline, config, texts, case.concurrency, lambda text: tokenizer.encode(text).input_ids.shape[1])
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
