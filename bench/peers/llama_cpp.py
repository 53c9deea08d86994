"""llama.cpp's server, through the package `xllamacpp`, on the default model's own Q4_1 file.

Its wheel is built for any x86-64 and uses nothing beyond AVX2; the source release, compiled on the machine itself, uses all that the
processor has. So it is compiled where there is a compiler, and taken as a wheel where there is none.

    python -m peers.llama_cpp MODEL PORT THREADS     (in the peer's environment) serves until it is ended
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path

import machine
from peers.base import BENCH, Absent, HttpRunning, Peer, start_http
from peers.environment import Environment

REQUIREMENT = "xllamacpp==2026.10.11549"
PORT = 8931
SLOTS = 64
CONTEXT = 32768
"""Tokens that all slots share: 64 streams of 192 tokens, 16 of 1,100, one of 1,900."""
START_LIMIT_S = 120
# Both are fetched from elsewhere while building, and serve TLS and grammars, which nothing here uses.
CMAKE_ARGS = "-DLLAMA_LLGUIDANCE=OFF -DLLAMA_BUILD_BORINGSSL=OFF"


class LlamaCpp(Peer):
    name = "llama.cpp"

    def __init__(self, gguf: Path, cores: int) -> None:
        self._gguf = gguf
        self._cores = cores
        self.settings = (
            f"Q4_1 file, {cores} threads, {SLOTS} slots with continuous batching, flash attention on and one KV cache for all slots (both "
            "faster here than without), prefix reuse on"
        )
        # What was compiled for one processor is of no use on another that shares the folder.
        self._environment = Environment("llama.cpp", f"{REQUIREMENT} {CMAKE_ARGS} {_processor(cores)}")

    def install(self) -> None:
        if self._environment.is_made():
            return
        try:
            self._compile()
        except Absent:
            # `version` tells which one it is: it lists the instruction sets in use.
            self._environment.begin()
            self._environment.pip("install", "--only-binary", ":all:", REQUIREMENT)
        self._environment.finish()

    def _compile(self) -> None:
        made = self._environment
        made.begin()
        flags = f"-include {BENCH / 'peers' / 'gcc12_amx.h'}"
        building = {"CMAKE_ARGS": CMAKE_ARGS, "CFLAGS": flags, "CXXFLAGS": flags, "NPROC": str(self._cores)}
        tools = [] if shutil.which("cmake") else ["cmake"]
        if tools:
            made.pip("install", *tools)
            building["PATH"] = f"{made.folder / 'bin'}:{os.environ.get('PATH', '')}"
        made.pip("install", "--no-cache-dir", "--no-binary", "xllamacpp", REQUIREMENT, environment=building)
        if tools:
            made.pip("uninstall", "--yes", *tools)

    def start(self) -> HttpRunning:
        command = [str(self._environment.python), "-m", "peers.llama_cpp", str(self._gguf), str(PORT), str(self._cores)]
        return start_http(command, {"PYTHONPATH": str(BENCH)}, PORT, self._environment.log, START_LIMIT_S)

    def installed_mb(self) -> float:
        return self._environment.installed_mb()

    def version(self) -> str:
        script = "import xllamacpp; print(xllamacpp.__version__, '|', xllamacpp.get_system_info())"
        return self._environment.run("-c", script)


def _processor(cores: int) -> str:
    described = machine.describe(cores)
    return " ".join([described["cpu"], *described["flags"]])


def serve(model: str, port: int, threads: int) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = port
    params.n_parallel = SLOTS
    params.n_ctx = CONTEXT
    params.kv_unified = True
    params.cont_batching = True
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
