"""Folders of safetensors: what the safetensors package writes is read as it reads it, and nothing that is damaged gets through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import numpy as reference

from sterna.errors import ModelError
from sterna.files.layout import INDEX_FILE, SINGLE_FILE
from sterna.files.safetensors import SafetensorsFolder

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.array([1.5, -2.5], np.float16)


def pack(header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    reference.save_file({"a": A, "b": B}, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    reference.save_file({"a": A}, tmp_path / "model-00001-of-00002.safetensors")
    reference.save_file({"b": B}, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 28}, "weight_map": weight_map}))
    return tmp_path


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_tensors_are_found_whichever_file_holds_them(layout: str, request: pytest.FixtureRequest) -> None:
    folder = SafetensorsFolder.open(request.getfixturevalue(layout))
    assert {name: (t.dtype, t.shape, t.nbytes) for name, t in folder.tensors.items()} == {"a": ("F32", (2, 3), 24), "b": ("F16", (2,), 4)}
    np.testing.assert_array_equal(folder.float32("a"), A)
    np.testing.assert_array_equal(folder.float32("b"), B)
    assert folder.float32("a").flags.writeable
    assert folder.raw("b").tobytes() == B.tobytes() == folder.tensors["b"].file.read_bytes()[folder.tensors["b"].offset :][:4]
    assert not folder.raw("b").flags.writeable


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_floats_are_read_as_the_safetensors_package_reads_them(tmp_path: Path, dtype: str) -> None:
    values = np.array([[0.1, -1e300 if dtype == "float64" else -3.0], [np.inf, 7.0]]).astype(dtype)
    reference.save_file({"w": values}, tmp_path / SINGLE_FILE)
    with np.errstate(over="ignore"):
        expected = reference.load_file(tmp_path / SINGLE_FILE)["w"].astype(np.float32)
    np.testing.assert_array_equal(SafetensorsFolder.open(tmp_path).float32("w"), expected)


def test_bfloat16_is_read_without_torch(tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(pack({"w": entry("BF16", [2], 0, 4)}, bytes.fromhex("803f00c0")))
    np.testing.assert_array_equal(SafetensorsFolder.open(tmp_path).float32("w"), np.array([1.0, -2.0], np.float32))


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3", "U8"])
def test_a_type_that_is_no_plain_float_is_refused_by_name(tmp_path: Path, dtype: str) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(pack({"w": entry(dtype, [4], 0, 4)}, bytes(4)))
    with pytest.raises(ModelError, match=rf"'w' is of type {dtype}"):
        SafetensorsFolder.open(tmp_path).float32("w")


def test_an_empty_tensor_is_no_fault(tmp_path: Path) -> None:
    reference.save_file({"w": np.zeros((0, 3), np.float32), "v": A}, tmp_path / SINGLE_FILE)
    assert SafetensorsFolder.open(tmp_path).float32("w").shape == (0, 3)


def test_only_the_index_says_where_a_tensor_is_read_from(sharded: Path) -> None:
    reference.save_file({"b": B, "a": A + 1}, sharded / "model-00002-of-00002.safetensors")
    np.testing.assert_array_equal(SafetensorsFolder.open(sharded).float32("a"), A)


def test_a_file_cut_anywhere_is_refused_by_name(single: Path) -> None:
    path = single / SINGLE_FILE
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            SafetensorsFolder.open(single)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors: the shard is missing"):
        SafetensorsFolder.open(sharded)


def test_a_damaged_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors: damaged"):
        SafetensorsFolder.open(sharded)


def test_a_tensor_that_its_shard_lacks_is_named(sharded: Path) -> None:
    reference.save_file({"c": B}, sharded / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors: tensor 'b'"):
        SafetensorsFolder.open(sharded)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/hostname", "sub/model.safetensors", "..", ".", "", "a\0b"])
def test_a_shard_outside_the_folder_is_refused(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    reference.save_file({"a": A}, tmp_path / "outside.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelError, match=r"isn't a file of this folder|is missing"):
        SafetensorsFolder.open(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}', "\udcff", "[" * 99])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=INDEX_FILE):
        SafetensorsFolder.open(tmp_path)


DAMAGED = {
    "empty": (b"", "empty"),
    "header beyond the end": (pack({}, length=1 << 60), "a header of 1152921504606846976 bytes"),
    "not JSON": (pack(b"{nonsense"), "header can't be read"),
    "not UTF-8": (pack(b'{"\xff": 1}'), "header can't be read"),
    "not an object": (pack(b"[1]"), "header can't be read"),
    "bottomless": (pack(b'{"w":' + b"[" * 100_000), "header can't be read"),
    "negative offset": (pack({"w": entry("F32", [1], -4, 0)}, bytes(8)), "bytes -4 to 0"),
    "ends before it begins": (pack({"w": entry("F32", [1], 8, 4)}, bytes(8)), "bytes 8 to 4"),
    "outside": (pack({"w": entry("F32", [1 << 40], 0, 1 << 42)}, bytes(8)), "which has 8"),
    "shape and bytes disagree": (pack({"w": entry("F32", [3], 0, 8)}, bytes(8)), "isn't what F32"),
    "negative shape": (pack({"w": entry("F32", [-1, -2], 0, 8)}, bytes(8)), "isn't what F32"),
    "huge shape": (pack({"w": entry("F32", [1 << 62, 1 << 62], 0, 8)}, bytes(8)), "isn't what F32"),
    "unknown type": (pack({"w": entry("Q7", [1], 0, 8)}, bytes(8)), "'Q7', which isn't known"),
    "overlap": (pack({"v": entry("F32", [2], 0, 8), "w": entry("F32", [1], 4, 8)}, bytes(8)), "'v' and 'w' overlap"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_by_name_and_reason(tmp_path: Path, case: str) -> None:
    content, reason = DAMAGED[case]
    (tmp_path / SINGLE_FILE).write_bytes(content)
    with pytest.raises(ModelError, match=rf"model\.safetensors.*{reason}"):
        SafetensorsFolder.open(tmp_path)


def test_pickled_weights_are_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(ModelError, match="convert them to safetensors"):
        SafetensorsFolder.open(tmp_path)


def test_an_absent_tensor_is_refused_by_name(single: Path) -> None:
    with pytest.raises(ModelError, match="no tensor 'c'"):
        SafetensorsFolder.open(single).float32("c")
