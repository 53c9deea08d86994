"""What each process of a real server has loaded by its end: import-linter can't see a registry's strings, this can."""

from pathlib import Path

import pytest

from running_server import running_server
from sterna.models.resolve import resolve_model
from tiny_gguf import write_gguf

ENGINE = ("torch", "transformers", "sterna.executor", "sterna.models.weights")


def modules_by_process(model: Path, executor: str, scratch: Path) -> dict[str, set[str]]:
    """Serve one streamed and one whole request, stop, and read what server, scheduler and detokenizer had loaded."""
    traces = scratch / "modules"
    traces.mkdir()
    env = {"PYTHONPATH": str(Path(__file__).with_name("module_trace")), "MODULE_TRACE": str(traces)}
    with running_server(model, "--executor", executor, log=scratch / "log", env=env) as server:
        pids = {"server": server.process.pid, **server.children()}
        for stream in (True, False):
            answer = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 3, "stop": "never", "stream": stream})
            assert answer.status_code == 200, answer.text
        assert server.stop() == 0
    assert set(pids) == {"server", "scheduler", "detokenizer"}
    return {name: set((traces / str(pid)).read_text().split("\n")) for name, pid in pids.items()}


@pytest.mark.parametrize("executor", ["scripted", "native", "torch"])
def test_only_the_scheduler_loads_an_engine(byte_model: Path, tmp_path: Path, executor: str) -> None:
    model = byte_model
    if executor != "scripted":
        # Resolved beforehand: translating a model is the launcher's work, once, and not what a server does every time.
        model = resolve_model(str(write_gguf(tmp_path / "tiny.gguf", "llama")), cache_dir=tmp_path / "cache", context_length=None)
    loaded = modules_by_process(model, executor, tmp_path)
    assert f"sterna.executor.{executor}" in loaded["scheduler"]
    assert ("torch" in loaded["scheduler"]) == (executor == "torch")
    assert "transformers" not in loaded["scheduler"]
    assert "sterna.server.app" in loaded["server"]
    assert "sterna.detokenizer.manager" in loaded["detokenizer"]
    for name in ("server", "detokenizer"):
        assert {module for module in loaded[name] for root in ENGINE if module == root or module.startswith(root + ".")} == set()
