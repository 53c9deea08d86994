"""Models for these tests, each made, resolved and asked once in a session."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import tiny_models
from e2e.engine import THREADS
from e2e.reference import Oracle
from sterna.files.cache import cache_root
from sterna.models.resolve import resolve_model
from tiny_gguf import write_gguf


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


class TinyModels:
    """The variants of `tiny_models` as files, as resolved folders, and as transformers runs them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.hf = cache(self._write_hf)
        self.gguf = cache(self._write_gguf)
        self.oracle = cache(self._oracle)

    @property
    def cache_dir(self) -> Path:
        return self._folder / "cache"

    def resolve(self, model: Path) -> Path:
        return resolve_model(str(model), cache_dir=self.cache_dir, context_length=None, progress=False)

    def _write_hf(self, name: str, dtype: str = "float32", sharded: bool = False) -> Path:
        folder = self._folder / f"{name}-{dtype}{'-sharded' * sharded}"
        return tiny_models.write_hf(folder, name, dtype=dtype, sharded=sharded)  # type: ignore[arg-type]

    def _write_gguf(self, name: str, quant: str = "F32") -> Path:
        return write_gguf(self._folder / f"{name}-{quant}.gguf", name, quant=quant)

    def _oracle(self, folder: Path) -> Oracle:
        return Oracle(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, resolved; fetched where this machine hasn't got it."""
    return resolve_model("smollm2", cache_dir=cache_root(), context_length=None, progress=False)
