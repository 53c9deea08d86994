"""Tokens and logprobs of small models, to the bit, on every instruction set and on another architecture, in an emulator."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
CMAKE = (sys.executable, "-m", "cmake")

no_cross = not (shutil.which(CROSS_COMPILER) and shutil.which(EMULATOR)) and "CI" not in os.environ
"""`.ci/run` has installed them, or fails here."""
pytestmark = pytest.mark.timeout(600)


def build(folder: Path, *settings: str) -> Path:
    """The program and the folder's objects, little optimized: it is the bits that count."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "CXXFLAGS")}
    configure = (*CMAKE, "-S", str(ROOT / "csrc/tests"), "-B", str(folder), "-DSTERNA_OPTIMIZE=-O1", *settings)
    for command in (configure, (*CMAKE, "--build", str(folder), "-j2")):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "digest"


def digests(*command: str) -> dict[str, dict[str, str]]:
    """Model -> digest, by instruction set."""
    found: dict[str, dict[str, str]] = {}
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        isa, model, digest = line.split()
        found.setdefault(isa, {})[model] = digest
    return found


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("here"))


@pytest.fixture(scope="module")
def here(program: Path) -> dict[str, dict[str, str]]:
    return digests(str(program))


def test_models_give_the_same_bits_on_every_instruction_set(here: dict[str, dict[str, str]]) -> None:
    portable = here["portable"]
    assert len(set(portable.values())) == len(portable) == 4
    for isa, each in here.items():
        # AMX's tiles sum bfloat16 products in an order of their own.
        alike = [model for model in portable if isa != "amx" or model in ("int4", "int8-window")]
        assert {model: each[model] for model in alike} == {model: portable[model] for model in alike}, isa


def test_no_instruction_set_s_object_file_lends_its_code_to_others(program: Path) -> None:
    """A weak symbol (V, W, u) is an inline function of which the linker keeps any one copy, for callers on every processor."""
    objects = sorted(program.parent.rglob("isa_*.o"))
    assert len(objects) == (5 if platform.machine() == "x86_64" else 1)
    for path in objects:
        symbols = subprocess.run(["nm", "--defined-only", str(path)], check=True, capture_output=True, text=True).stdout
        kinds = {line.split()[-1]: line.split()[-2] for line in symbols.splitlines()}
        assert {name: kind for name, kind in kinds.items() if kind in "VvWwu"} == {}
        assert [name for name, kind in kinds.items() if kind == "T"] == [name for name in kinds if "make_kernels" in name]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the suite itself runs on another architecture")
@pytest.mark.skipif(no_cross, reason="no cross compiler, or no emulator")
def test_aarch64_gives_the_same_bits(here: dict[str, dict[str, str]], tmp_path: Path) -> None:
    crossed = build(tmp_path, "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={CROSS_COMPILER}")
    assert digests(EMULATOR, str(crossed)) == {"portable": here["portable"]}
