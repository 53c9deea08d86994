"""What the system refuses the engine is said in words that name the setting."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sterna.config.cores import usable_cores
from sterna.config.server_args import ServerArgs
from sterna.errors import ConfigError
from sterna.executor.native import _native
from sterna.executor.native.executor import create
from sterna.executor.native.isa import choose_isa
from sterna.models.resolve import resolve_model
from tiny_gguf import write_gguf

STARVED = """
import resource, sys
from pathlib import Path
from sterna.config.server_args import ServerArgs
from sterna.errors import ConfigError
from sterna.executor.native.executor import create

args = ServerArgs(cache_dir=sys.argv[2], threads=4096, max_total_tokens=256, context_length=512)
in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (256 << 20), resource.RLIM_INFINITY))
try:
    create(args, Path(sys.argv[1]))
except ConfigError as fault:
    print(fault)
"""
"""Address space for 4,096 threads' stacks isn't there."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = write_gguf(tmp_path / "tiny.gguf", "llama", quant="Q4_1")
    return resolve_model(str(model), cache_dir=tmp_path, context_length=None, progress=False)


@pytest.mark.skipif(sys.platform != "linux", reason="limits address space as Linux does")
@pytest.mark.skipif("STERNA_SANITIZED" in os.environ, reason="a sanitizer needs the address space")
def test_threads_that_the_system_does_not_give_are_an_error_that_names_the_flag(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARVED, str(folder), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
    assert "4096 compute threads" in done.stdout
    assert "--threads" in done.stdout


@pytest.mark.parametrize("more", [0, 1])
def test_more_threads_than_cores_are_warned_of(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, more: int) -> None:
    cores = usable_cores()
    with caplog.at_level(logging.WARNING):
        create(ServerArgs(cache_dir=str(tmp_path), threads=cores + more, max_total_tokens=256, context_length=512), folder).shutdown()
    assert [record.args and record.args[0] for record in caplog.records] == [cores + more] * more


def test_an_instruction_set_that_is_not_here_is_refused_by_the_name_of_what_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STERNA_ISA", "portable")  # a flag wins over it
    with pytest.raises(ConfigError, match=r"^--isa must be auto or one of .*portable.* not 'nonsense'"):
        choose_isa(ServerArgs(isa="nonsense"))
    monkeypatch.setenv("STERNA_ISA", "nonsense")
    with pytest.raises(ConfigError, match=r"^STERNA_ISA must be auto or one of .*portable.* not 'nonsense'"):
        choose_isa(ServerArgs(isa="nonsense"))


def test_portable_arithmetic_has_what_is_best_of_those_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "available_isas", lambda: ["amx", "amx-int8", "avx512", "portable"])
    monkeypatch.setattr(_native, "has_portable_bf16", lambda isa: isa != "amx")
    assert choose_isa(ServerArgs()) == "amx"
    assert choose_isa(ServerArgs(arithmetic="portable")) == "amx-int8"
    assert choose_isa(ServerArgs(arithmetic="portable", isa="avx512")) == "avx512"
    with pytest.raises(ConfigError, match=r"^--isa amx has an arithmetic of its own, so it can't be combined with --arithmetic portable$"):
        choose_isa(ServerArgs(arithmetic="portable", isa="amx"))
