"""A program that is built for these tests. Its tokens and logprobs of small models, to the bit, on every instruction set and on another
architecture, in an emulator; and its object files: those of one instruction set give nothing away but their table, for the linker could
else bring their instructions to all callers."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from unit.executor.native.conftest import build

CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

no_cross = not (shutil.which(CROSS_COMPILER) and shutil.which(EMULATOR)) and "CI" not in os.environ
"""`.ci/run` has installed them, or fails here."""
pytestmark = pytest.mark.timeout(600)


def digests(*command: str) -> dict[str, dict[str, str]]:
    """Model -> digest, by instruction set."""
    found: dict[str, dict[str, str]] = {}
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        isa, model, digest = line.split()
        found.setdefault(isa, {})[model] = digest
    return found


@pytest.fixture(scope="module")
def here(program: Path) -> dict[str, dict[str, str]]:
    return digests(str(program))


def test_models_give_the_same_bits_on_every_instruction_set(here: dict[str, dict[str, str]]) -> None:
    portable = here["portable"]
    assert len(set(portable.values())) == len(portable) == 4
    for isa, each in here.items():
        # AMX's tiles sum bfloat16 products, and so attention's, in an order of their own.
        assert (each == portable) == (isa != "amx"), isa


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the suite itself runs on another architecture")
@pytest.mark.skipif(no_cross, reason="no cross compiler, or no emulator")
def test_aarch64_gives_the_same_bits(here: dict[str, dict[str, str]], tmp_path: Path) -> None:
    crossed = build(tmp_path, "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={CROSS_COMPILER}")
    assert digests(EMULATOR, str(crossed)) == {"portable": here["portable"]}


@pytest.fixture(scope="module")
def objects(program: Path) -> list[Path]:
    found = sorted(program.parent.rglob("isa_*.o"))
    assert "isa_portable.cpp.o" in {path.name for path in found}
    return found


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """(type, demangled name) of each symbol."""
    out = subprocess.run(["nm", "-C", *options, str(path)], check=True, capture_output=True, text=True).stdout
    return [(kind, name) for line in out.splitlines() for kind, name in [line[17:].split(" ", 1)]]


def test_objects_of_an_instruction_set_export_their_table_and_nothing_else(objects: list[Path]) -> None:
    for path in objects:
        isa = path.name.removeprefix("isa_").split(".", 1)[0]
        exported = [name for _, name in symbols(path, "--defined-only", "--extern-only")]
        assert exported == [f"sterna::make_kernels_{isa}(sterna::Kernels&)"], path


def test_objects_of_an_instruction_set_need_nothing_but_c(objects: list[Path]) -> None:
    """No C++ library: what it has inline would be emitted here. Names of the compiler's own runtime begin with underscores."""
    for path in objects:
        needed = {name for _, name in symbols(path, "--undefined-only") if not name.startswith("_")}
        assert needed <= {"memset", "memcpy", "fmaf", "sqrtf"}, path
