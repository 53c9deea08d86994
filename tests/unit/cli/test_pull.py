"""`sterna pull`: afterwards the first start is a second one."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import msgspec
import pytest

from sterna.cli.pull import run
from sterna.errors import ConfigError, ModelError
from sterna.executor.native import pack
from sterna.executor.native.pack import open_packed
from sterna.models.resolve import resolve_model
from sterna.models.weights import WeightIndex
from tiny_gguf import write_gguf


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", "llama", quant="Q4_1")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def pull(model: Path, root: Path, *flags: str) -> int:
    return run([str(model), "--cache-dir", str(root), *flags])


def resolved(model: Path, root: Path) -> Path:
    return resolve_model(str(model), cache_dir=root, context_length=None, progress=False)


def packed(root: Path) -> list[Path]:
    return sorted(root.glob("packed/*.packed"))


def test_what_was_pulled_is_mapped_by_the_first_start(
    model: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pull(model, root) == 0
    [file] = packed(root)
    told, folder, last = capsys.readouterr().out.splitlines()
    assert told.startswith("tiny.gguf: llama, ")
    assert Path(folder) == resolved(model, root)
    assert last.startswith(f"{file} (")
    monkeypatch.setattr(pack, "_fill", pytest.fail)
    assert open_packed(Path(folder), root, "none").path == file


def test_pulling_again_packs_nothing(model: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pull(model, root) == 0
    monkeypatch.setattr(pack, "_fill", pytest.fail)
    assert pull(model, root) == 0


def test_no_pack_fetches_only(model: Path, root: Path) -> None:
    assert pull(model, root, "--no-pack") == 0
    assert not packed(root)
    assert resolved(model, root).is_dir()


def test_weights_are_packed_for_the_quantization_that_is_asked_for(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", "llama", quant="BF16")
    assert pull(model, root, "--quantization", "int8") == 0
    monkeypatch.setattr(pack, "_fill", pytest.fail)
    assert open_packed(resolved(model, root), root, "int8").path in packed(root)


def test_a_quantization_of_what_is_quantized_is_refused(model: Path, root: Path) -> None:
    with pytest.raises(ConfigError, match="--quantization int4"):
        pull(model, root, "--quantization", "int4")


def test_a_model_that_the_native_executor_cant_serve_is_pulled_and_not_packed(
    model: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = resolved(model, root)
    index = WeightIndex.load(folder)
    index.entries["layers.1.attn.q"] = msgspec.structs.replace(index.entries["layers.1.attn.q"], dtype="IQ1_S")
    index.save(folder)
    assert pull(model, root) == 0
    said = capsys.readouterr()
    assert str(folder) in said.out
    assert "weights not packed: " in said.err
    assert "IQ1_S" in said.err
    assert not packed(root)


def test_damaged_weights_are_a_fault_of_the_pull(tmp_path: Path, root: Path) -> None:
    model = write_gguf(tmp_path / "nan.gguf", "llama")
    whole = bytearray(model.read_bytes())
    whole[-4:] = struct.pack("<f", float("nan"))
    model.write_bytes(whole)
    with pytest.raises(ModelError, match="NaN or infinite"):
        pull(model, root)


def test_a_cache_without_room_is_a_fault_of_the_pull_and_nothing_is_packed_into_memory(
    model: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = pack.shutil.disk_usage("/")
    monkeypatch.setattr(pack.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr(pack, "_fill", pytest.fail)
    with pytest.raises(ModelError, match=r"can't keep files in the cache: .*1000 B are free"):
        pull(model, root)


def test_without_the_native_executor_a_model_is_pulled_all_the_same(
    model: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sterna.executor.native.pack", None)
    assert pull(model, root) == 0
    assert "weights not packed: the native executor can't be loaded here" in capsys.readouterr().err
