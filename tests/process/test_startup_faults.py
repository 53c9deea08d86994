"""What keeps a server from starting is said to whoever started it, in words, and soon."""

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from running_server import PROMPTLY_S, RunningServer
from tiny_gguf import write_gguf


def nonsense_options(byte_model: Path, scratch: Path) -> tuple[Path, list[str], str]:
    return byte_model, ["--executor", "scripted", "--executor-options", "nonsense"], "has no 'nonsense'"


def too_little_memory(byte_model: Path, scratch: Path) -> tuple[Path, list[str], str]:
    return write_gguf(scratch / "tiny.gguf", "llama"), ["--kv-memory", "1KB"], "--kv-memory is too small"


def weights_that_are_none(byte_model: Path, scratch: Path) -> tuple[Path, list[str], str]:
    """Resolved, as far as the launcher looks; only the engine opens the weights."""
    return byte_model, [], str(byte_model)


def a_model_cut_short(byte_model: Path, scratch: Path) -> tuple[Path, list[str], str]:
    whole = write_gguf(scratch / "whole.gguf", "llama").read_bytes()
    cut = scratch / "cut.gguf"
    cut.write_bytes(whole[: len(whole) // 2])
    return cut, [], "cut short?"


def weights_that_are_no_numbers(byte_model: Path, scratch: Path) -> tuple[Path, list[str], str]:
    path = write_gguf(scratch / "nan.gguf", "llama")
    whole = bytearray(path.read_bytes())
    whole[-4096:-4092] = struct.pack("<f", math.nan)
    path.write_bytes(whole)
    return path, ["--executor", "native"], "NaN or infinite"


def an_embedding_with_a_row_too_few(byte_model: Path, scratch: Path) -> tuple[Path, list[str], str]:
    path = write_gguf(scratch / "short.gguf", "llama")
    whole = path.read_bytes()
    for before, kind in ((b"token_embd.weight" + struct.pack("<IQ", 2, 64), "<Q"), (b"llama.vocab_size" + struct.pack("<I", 4), "<I")):
        assert whole.count(before + struct.pack(kind, 336)) == 1
        whole = whole.replace(before + struct.pack(kind, 336), before + struct.pack(kind, 335))
    path.write_bytes(whole)
    return path, [], "short.gguf: the tokenizer has 336 tokens (ids up to 335), but the embedding has 335 rows"


def an_instruction_set_that_is_none(byte_model: Path, scratch: Path) -> tuple[Path, list[str], str]:
    return write_gguf(scratch / "tiny.gguf", "llama"), ["--executor", "native", "--isa", "mmx"], "--isa must be auto or one of"


def a_setting_of_another_engine(byte_model: Path, scratch: Path) -> tuple[Path, list[str], str]:
    return byte_model, ["--executor", "native", "--dtype", "float32"], "--dtype is for the torch executor"


def an_engine_s_own_fault(case: Callable[[Path, Path], tuple[Path, list[str], str]], executor: str) -> Any:
    def make(byte_model: Path, scratch: Path) -> tuple[Path, list[str], str]:
        model, flags, reason = case(byte_model, scratch)
        return model, ["--executor", executor, *flags], reason

    return pytest.param(make, id=f"{case.__name__}-{executor}")


def no_such_executor(byte_model: Path, scratch: Path) -> tuple[Path, list[str], str]:
    return byte_model, ["--executor", "abacus"], "'abacus'"


@pytest.mark.parametrize(
    "make",
    [
        nonsense_options,
        no_such_executor,
        weights_that_are_no_numbers,
        an_embedding_with_a_row_too_few,
        an_instruction_set_that_is_none,
        a_setting_of_another_engine,
        *(
            an_engine_s_own_fault(case, executor)
            for case in (too_little_memory, weights_that_are_none, a_model_cut_short)
            for executor in ("native", "torch")
        ),
    ],
    ids=lambda make: make.__name__,
)
def test_a_fault_at_the_start_ends_the_group_with_its_reason(
    byte_model: Path, tmp_path: Path, make: Callable[[Path, Path], tuple[Path, list[str], str]]
) -> None:
    model, flags, reason = make(byte_model, tmp_path)
    server = RunningServer(model, *flags, log=tmp_path / "log", env={"STERNA_CACHE_DIR": str(tmp_path / "cache")})
    assert server.process.wait(PROMPTLY_S) == 1
    said = server.read_log()
    assert "Traceback" not in said
    [last] = [line for line in said.splitlines() if line.startswith("sterna: ")]
    assert reason in last
    assert server.children() == {}


def test_a_second_start_on_a_port_leaves_the_first_serving(byte_model: Path, tmp_path: Path, fast_server: RunningServer) -> None:
    second = RunningServer(byte_model, "--executor", "scripted", "--port", str(fast_server.port), log=tmp_path / "log")
    assert second.process.wait(PROMPTLY_S) == 1
    assert f":{fast_server.port}" in second.read_log()
    assert "Traceback" not in second.read_log()
    assert fast_server.get("/ready").status_code == 200
