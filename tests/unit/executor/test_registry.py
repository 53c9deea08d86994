from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from byte_model import make_byte_model
from sterna.config.server_args import ServerArgs
from sterna.errors import ConfigError, ModelError
from sterna.executor import registry
from sterna.executor.registry import EXECUTORS, create_executor


def test_an_unknown_executor_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="native, scripted, torch, not 'cuda'"):
        create_executor(ServerArgs(executor="cuda"), tmp_path)


def test_a_missing_extra_is_named_with_the_command_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(registry, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'sterna\[torch\]'"):
        create_executor(ServerArgs(executor="torch"), tmp_path)


@pytest.mark.parametrize("fault", [ModuleNotFoundError("No module"), ImportError("undefined symbol: _Py")])
def test_an_engine_that_was_not_built_is_named_with_the_command_that_builds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: ImportError
) -> None:
    fault.name = "sterna.executor.native._native"

    def missing(name: str) -> None:
        raise fault

    monkeypatch.setattr(registry, "import_module", missing)
    with pytest.raises(ConfigError, match=r"not built.* `make serve` .*apt-get install g\+\+ python3-dev.*--executor torch"):
        create_executor(ServerArgs(executor="native"), tmp_path)


def test_a_module_that_is_missing_for_another_reason_is_not_blamed_on_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for executor in ("torch", "native"):
        monkeypatch.setitem(EXECUTORS, executor, (f"sterna.executor.{executor}.absent", "create"))
        with pytest.raises(ModuleNotFoundError):
            create_executor(ServerArgs(executor=executor), tmp_path)


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_a_folder_that_is_not_a_model_is_a_model_error(tmp_path: Path, executor: str) -> None:
    with pytest.raises(ModelError, match="not a resolved model folder"):
        create_executor(ServerArgs(executor=executor), tmp_path)


def test_the_scripted_executor_is_made_without_importing_torch(tmp_path: Path) -> None:
    folder = make_byte_model(tmp_path / "bytes")
    code = (
        "import sys; from pathlib import Path; from sterna.config.server_args import ServerArgs;"
        "from sterna.executor.registry import create_executor;"
        f"made = create_executor(ServerArgs(executor='scripted', context_length=64), Path({str(folder)!r}));"
        "assert made.info.name == 'scripted', made.info; assert 'torch' not in sys.modules"
    )
    source = Path(registry.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(source)})
