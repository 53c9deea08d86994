"""The engine without Python: a program, built once in a session, and the object files that it is made of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sterna.executor.native import _native

if "STERNA_SANITIZED" in os.environ:
    # What `make sanitize` says would be worth nothing if the installed engine had been found first.
    assert Path(_native.__file__).parent == Path(os.environ["STERNA_SANITIZED"]), _native.__file__

ROOT = Path(__file__).parents[4]
CMAKE = (sys.executable, "-m", "cmake")


def build(folder: Path, *settings: str) -> Path:
    """The program and the folder's objects, little optimized: it is the bits that count."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "CXXFLAGS")}
    configure = (*CMAKE, "-S", str(ROOT / "csrc/tests"), "-B", str(folder), "-DSTERNA_OPTIMIZE=-O1", *settings)
    for command in (configure, (*CMAKE, "--build", str(folder), "-j2")):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "digest"


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("here"))
