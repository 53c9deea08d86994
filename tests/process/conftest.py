"""Servers over the byte model and the scripted executor: real processes and sockets, no weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from byte_model import make_byte_model
from running_server import RunningServer, running_server

STEP_MS = 5


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def fast_server(byte_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """An executor that takes no time."""
    with running_server(byte_model, "--executor", "scripted", log=tmp_path_factory.mktemp("fast") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def slow_server(byte_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Steps of a few milliseconds that overlap, and room for four requests at once: time to interfere."""
    options = f"step_ms={STEP_MS},overlap=1,threaded=1"
    flags = ["--executor", "scripted", "--executor-options", options, "--max-running-requests", "4"]
    with running_server(byte_model, *flags, log=tmp_path_factory.mktemp("slow") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def paced_server(byte_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Steps slow enough for many clients to be in one, and room for them."""
    flags = ["--executor", "scripted", "--executor-options", "step_ms=20"]
    with running_server(byte_model, *flags, log=tmp_path_factory.mktemp("paced") / "log") as server:
        yield server
