"""GGUF files: what the gguf package writes is read as the gguf package reads it, and nothing that is damaged gets through."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType
from gguf import quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sterna.errors import ModelError
from sterna.files.gguf import GGUFFile
from sterna.files.mapped import bfloat16_to_float32

RNG = np.random.default_rng(7)
DEQUANTIZABLE = sorted(quants._type_traits, key=lambda kind: kind.value)
QUANTIZABLE = [GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.Q8_0, GGMLType.TQ1_0, GGMLType.TQ2_0, GGMLType.BF16]


def write(path: Path, tensors: dict[str, tuple[np.ndarray, GGMLType | None]], alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_bool("sterna.flag", True)
    writer.add_array("sterna.words", ["a", "", "é世"])
    writer.add_array("sterna.numbers", [1, -2, 3])
    writer.add_array("sterna.switches", [True, False])
    writer.add_array("sterna.halves", [0.5, -1.5])
    writer.add_uint64("sterna.large", 1 << 60)
    writer.add_float64("sterna.third", 1 / 3)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two tensors and every kind of metadata value."""
    return write(
        tmp_path / "small.gguf",
        {"a.weight": (np.arange(12, dtype=np.float32).reshape(3, 4), None), "b.weight": (np.arange(6, dtype=np.float32), None)},
    )


def test_metadata_has_plain_python_values(small: Path) -> None:
    metadata = GGUFFile.open(small).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["sterna.flag"] is True
    assert metadata["sterna.words"] == ["a", "", "é世"]
    assert metadata["sterna.numbers"] == [1, -2, 3]
    assert metadata["sterna.switches"] == [True, False]
    assert metadata["sterna.halves"] == [0.5, -1.5]
    assert metadata["sterna.large"] == 1 << 60
    assert metadata["sterna.third"] == 1 / 3


def test_records_agree_with_the_gguf_packages_reader(small: Path) -> None:
    ours = GGUFFile.open(small)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(small).tensors}
    assert list(ours.tensors) == list(theirs)
    for name, tensor in ours.tensors.items():
        assert tensor.shape == tuple(int(n) for n in theirs[name].shape)[::-1]
        assert (tensor.offset, tensor.nbytes) == (theirs[name].data_offset, theirs[name].n_bytes)
        np.testing.assert_array_equal(ours.float32(name), theirs[name].data)


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_the_files_own_alignment_is_obeyed(tmp_path: Path, alignment: int) -> None:
    data = {f"t{i}": (np.full((1, i + 1), i, np.float32), None) for i in range(5)}
    file = GGUFFile.open(write(tmp_path / "aligned.gguf", data, alignment))
    for i in range(5):
        np.testing.assert_array_equal(file.float32(f"t{i}"), np.full((1, i + 1), i, np.float32))


@pytest.mark.parametrize("kind", QUANTIZABLE, ids=lambda kind: kind.name)
def test_quantized_values_come_back_near_the_originals(tmp_path: Path, kind: GGMLType) -> None:
    values = RNG.standard_normal((4, 512), np.float32)
    file = GGUFFile.open(write(tmp_path / "q.gguf", {"w": (quants.quantize(values, kind), kind)}))
    assert (file.tensors["w"].type, file.tensors["w"].shape) == (kind.name, (4, 512))
    read = file.float32("w")
    assert read.dtype == np.float32
    correlation = np.corrcoef(read.ravel(), values.ravel())[0, 1]
    assert correlation > (0.6 if kind.name.startswith("TQ") else 0.99)  # TQ has three levels


@pytest.mark.parametrize("kind", DEQUANTIZABLE, ids=lambda kind: kind.name)
def test_every_type_that_the_gguf_package_reads_gives_its_values(tmp_path: Path, kind: GGMLType) -> None:
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    columns = 512 if block_elements == 1 else 2 * block_elements
    blocks = RNG.integers(0, 256, (2, 3, columns // block_elements * block_bytes), np.uint8)
    file = GGUFFile.open(write(tmp_path / "blocks.gguf", {"w": (blocks, kind)}))
    with np.errstate(all="ignore"):
        expected = quants.dequantize(blocks, kind)
    read = file.float32("w")
    assert read.shape == file.tensors["w"].shape == (2, 3, columns)
    assert read.flags.writeable
    np.testing.assert_array_equal(read, expected)
    np.testing.assert_array_equal(file.raw("w"), blocks.ravel())


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "int16", "int32", "int64"])
def test_plain_types_are_converted(tmp_path: Path, dtype: str) -> None:
    values = np.array([[-3, 0, 1], [2, 100, -100]]).astype(dtype)
    file = GGUFFile.open(write(tmp_path / "plain.gguf", {"w": (values, None)}))
    np.testing.assert_array_equal(file.float32("w"), values.astype(np.float32))


def test_bfloat16_bits_become_the_same_numbers() -> None:
    np.testing.assert_array_equal(bfloat16_to_float32(np.array([0x3F80, 0xC000, 0x7F80], np.uint16)), [1.0, -2.0, np.inf])


def test_raw_bytes_are_a_read_only_view_that_outlives_the_file_object(small: Path) -> None:
    raw = GGUFFile.open(small).raw("b.weight")
    assert not raw.flags.writeable
    np.testing.assert_array_equal(raw.view(np.float32), np.arange(6))


def test_a_type_without_a_dequantizer_is_refused_by_name(tmp_path: Path) -> None:
    blocks = np.zeros((1, 292), np.uint8)
    file = GGUFFile.open(write(tmp_path / "q8k.gguf", {"w": (blocks, GGMLType.Q8_K)}))
    with pytest.raises(ModelError, match=r"q8k\.gguf.*'w'.*Q8_K"):
        file.float32("w")


def test_an_absent_tensor_is_refused_by_name(small: Path) -> None:
    with pytest.raises(ModelError, match=r"small\.gguf.*'c\.weight'"):
        GGUFFile.open(small).raw("c.weight")


def test_a_file_cut_anywhere_is_refused(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    # The last tensor is followed by padding to the alignment, which carries nothing.
    end = max(tensor.offset + tensor.nbytes for tensor in GGUFFile.open(small).tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in range(end):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GGUFFile.open(cut)
    cut.write_bytes(whole[:end])
    assert GGUFFile.open(cut).float32("b.weight")[5] == 5


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_give_a_file_or_a_model_error(small: Path, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    with contextlib.suppress(ModelError):
        file = GGUFFile.open(path)
        for name in file.tensors:
            file.float32(name)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def pair(key: bytes, code: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", code) + value


def record(name: bytes, sizes: list[int], code: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, code, offset)


def hostile(
    num_tensors: int = 0, num_pairs: int = 0, body: bytes = b"", magic: bytes = b"GGUF", version: int = 3, tail: int = 512
) -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_pairs) + body + bytes(tail)


def array(code: int, count: int, body: bytes = b"") -> bytes:
    return struct.pack("<IQ", code, count) + body


F32 = GGMLType.F32.value
HOSTILE = {
    "empty": (b"", "empty"),
    "bad magic": (hostile(magic=b"GGML"), "begins with"),
    "version 1": (hostile(version=1), "version 1"),
    "version 4": (hostile(version=4), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "big-endian"),
    "2^60 tensors": (hostile(num_tensors=1 << 60), "1152921504606846976 tensors"),
    "2^60 pairs": (hostile(num_pairs=1 << 60), "1152921504606846976 metadata pairs"),
    "endless string": (hostile(0, 1, pair(b"k", 8, struct.pack("<Q", 1 << 60))), "claims 1152921504606846976 bytes"),
    "endless key": (hostile(0, 1, struct.pack("<Q", (1 << 64) - 1)), "metadata key 0"),
    "endless string array": (hostile(0, 1, pair(b"k", 9, array(8, 1 << 60))), "1152921504606846976 elements"),
    "endless float array": (hostile(0, 1, pair(b"k", 9, array(6, 1 << 60))), "1152921504606846976 elements"),
    "float array past the end": (hostile(0, 1, pair(b"k", 9, array(6, 1 << 20))), "k needs 4194304 bytes"),
    "string array past the end": (hostile(0, 1, pair(b"k", 9, array(8, 1 << 20))), "1048576 elements, more than the file can hold"),
    "arrays without bottom": (hostile(0, 1, pair(b"k", 9, array(9, 1) * 40)), "nests more than"),
    "unknown value type": (hostile(0, 1, pair(b"k", 99, b"")), "value type 99"),
    "unknown element type": (hostile(0, 1, pair(b"k", 9, array(99, 1))), "value type 99"),
    "key twice": (hostile(0, 2, pair(b"k", 4, bytes(4)) * 2), "'k' occurs twice"),
    "not UTF-8": (hostile(0, 1, pair(b"k", 8, string(b"\xff\xfe"))), "isn't UTF-8"),
    "alignment 0": (hostile(0, 1, pair(b"general.alignment", 4, struct.pack("<I", 0))), "power of two"),
    "alignment 48": (hostile(0, 1, pair(b"general.alignment", 4, struct.pack("<I", 48))), "power of two"),
    "alignment of text": (hostile(0, 1, pair(b"general.alignment", 8, string(b"32"))), "power of two"),
    "tensor twice": (hostile(2, 0, record(b"w", [4], F32, 0) + record(b"w", [4], F32, 32)), "'w' occurs twice"),
    "overlap": (hostile(2, 0, record(b"v", [16], F32, 0) + record(b"w", [4], F32, 32)), "'v' and 'w' overlap"),
    "outside": (hostile(1, 0, record(b"w", [4], F32, 1 << 40)), "'w' ends at byte"),
    "larger than the file": (hostile(1, 0, record(b"w", [1 << 40, 1 << 20], F32, 0)), "'w' ends at byte"),
    "unaligned": (hostile(1, 0, record(b"w", [4], F32, 4)), "multiple of the alignment"),
    "rank 0": (hostile(1, 0, record(b"w", [], F32, 0)), "0 dimensions"),
    "rank 2^30": (hostile(1, 0, string(b"w") + struct.pack("<I", 1 << 30)), "dimensions"),
    "size 0": (hostile(1, 0, record(b"w", [4, 0], F32, 0)), r"shape \(0, 4\)"),
    "broken block": (hostile(1, 0, record(b"w", [33], GGMLType.Q4_0.value, 0)), "blocks of 32"),
    "unknown tensor type": (hostile(1, 0, record(b"w", [4], 4_000, 0)), "ggml type 4000"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_by_name_and_reason(tmp_path: Path, case: str) -> None:
    content, reason = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"hostile\.gguf.*{reason}"):
        GGUFFile.open(path)


def test_an_absent_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.gguf.*No such file"):
        GGUFFile.open(tmp_path / "absent.gguf")


def test_version_2_is_read(small: Path, tmp_path: Path) -> None:
    older = bytearray(small.read_bytes())
    older[4] = 2
    path = tmp_path / "older.gguf"
    path.write_bytes(older)
    assert GGUFFile.open(path).float32("b.weight")[5] == 5
