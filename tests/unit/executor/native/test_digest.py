"""Tokens and logprobs of small models, to the bit, on every instruction set and on another architecture, in an emulator."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
IN_CI = "CI" in os.environ


def build(folder: Path, *settings: str) -> Path:
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "CXXFLAGS")}
    subprocess.run(
        ["cmake", "-S", str(ROOT / "csrc/tests"), "-B", str(folder), *settings], check=True, env=environment, capture_output=True
    )
    made = subprocess.run(["cmake", "--build", str(folder), "-j2"], env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder / "digest"


def digests(*command: str) -> dict[str, dict[str, str]]:
    """Model -> digest, by instruction set."""
    found: dict[str, dict[str, str]] = {}
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        isa, model, digest = line.split()
        found.setdefault(isa, {})[model] = digest
    return found


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    return digests(str(build(tmp_path_factory.mktemp("here"))))


def test_models_give_the_same_bits_on_every_instruction_set(here: dict[str, dict[str, str]]) -> None:
    portable = here.pop("portable")
    assert len(set(portable.values())) == len(portable) == 4
    here.pop("amx", None)  # its bfloat16 products, attention's among them, sum in an order of their own
    assert all(each == portable for each in here.values())


@pytest.mark.skipif(not IN_CI and not (shutil.which(CROSS_COMPILER) and shutil.which(EMULATOR)), reason="no cross compiler, or no emulator")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="says something on another architecture only")
@pytest.mark.timeout(600)
def test_aarch64_gives_the_same_bits(here: dict[str, dict[str, str]], tmp_path: Path) -> None:
    program = build(tmp_path, "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={CROSS_COMPILER}")
    assert digests(EMULATOR, str(program)) == {"portable": here["portable"]}
