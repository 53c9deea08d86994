"""huggingface_hub itself against a hub of one's own: what is asked of it, and what its faults become."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .hub_server import hub_server

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "a[1].Q8_0.gguf": b"GGUF, eight bits",
    "a1.Q8_0.gguf": b"what the name above would match as a pattern",
    "README.md": b"read me",
    "pytorch_model.bin": b"pickle",
}
LOCATE = """
import sys; from pathlib import Path; from sterna.errors import ModelError; from sterna.files.hub import locate
try:
    print(locate(sys.argv[1], Path(sys.argv[2]), progress=sys.argv[3] == "True").path)
except ModelError as fault:
    print("ModelError:", fault.message)
"""


def locate(name: str, home: Path, url: str, *, progress: bool = False) -> tuple[str, str]:
    """(the path or the error, standard error) of a process that asks the hub at `url`."""
    # Whatever this machine's proxy is, it doesn't lead to the test's own server.
    environment = {key: value for key, value in os.environ.items() if not key.upper().startswith("HF_")}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(home / "hf"), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    command = [sys.executable, "-c", LOCATE, name, str(home / "cache"), str(progress)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


def test_a_model_is_fetched_once_and_only_what_it_needs(tmp_path: Path) -> None:
    with hub_server("org/name", FILES) as hub:
        folder, _ = locate("org/name", tmp_path, hub.url)
        assert sorted(hub.served) == ["config.json", "model.safetensors"]
        assert (Path(folder) / "model.safetensors").read_bytes() == b"weights"
    assert locate("org/name", tmp_path, hub.url)[0] == folder, "the hub is gone by now"


def test_a_file_is_fetched_by_its_exact_name(tmp_path: Path) -> None:
    with hub_server("org/name", FILES) as hub:
        path, _ = locate("org/name:a[1].Q8_0.gguf", tmp_path, hub.url)
        assert hub.served == ["a[1].Q8_0.gguf"]
    assert Path(path).read_bytes() == b"GGUF, eight bits"


def test_progress_is_shown_when_asked_for_only(tmp_path: Path) -> None:
    with hub_server("org/name", FILES) as hub:
        quiet = locate("org/name", tmp_path / "quiet", hub.url, progress=False)[1]
        shown = locate("org/name", tmp_path / "shown", hub.url, progress=True)[1]
    assert "%" not in quiet
    assert "%" in shown


@pytest.mark.parametrize(
    ("name", "problem"),
    [("org/gated", "accept their terms on the model's page, then set HF_TOKEN"), ("org/absent", "no such model, or it is private")],
)
def test_what_the_hub_refuses_is_said_with_what_to_do(tmp_path: Path, name: str, problem: str) -> None:
    with hub_server("org/name", FILES) as hub:
        said, _ = locate(name, tmp_path, hub.url)
    assert said.startswith(f"ModelError: {name}: ")
    assert problem in said
