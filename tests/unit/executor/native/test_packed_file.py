"""A model's packed weights: right to the bit, made once whoever starts, found again, and made anew when damaged."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from sterna.errors import ConfigError, ModelError
from sterna.executor.native import formats, pack
from sterna.executor.native.formats import BF16, INT4, INT8, Format, format_of
from sterna.executor.native.pack import KEEP_DAYS, open_packed
from sterna.executor.native.packed_file import ALIGNMENT, DATA_ALIGNMENT, PackedModel
from sterna.files import cache as files_cache
from sterna.models.resolve import resolve_model
from sterna.models.weights import WEIGHTS_FILE, WeightEntry, WeightIndex, WeightStore
from tiny_gguf import write_gguf
from tiny_models import VARIANTS, FloatArray, tokenizer, weights, write_hf
from unit.executor.native.unpack import unpack

DAY = 86_400


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def resolve(model: Path, cache: Path) -> Path:
    return resolve_model(str(model), cache_dir=cache, context_length=None, progress=False)


@pytest.fixture
def folder(tmp_path: Path, cache: Path) -> Path:
    """A resolved model whose matrices are Q4_1."""
    return resolve(write_gguf(tmp_path / "tiny.gguf", "llama", quant="Q4_1"), cache)


def write_folder(folder: Path, changed: dict[str, FloatArray] | None = None) -> Path:
    """A float32 checkpoint in Hugging Face layout, with some of its tensors as given."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**VARIANTS["llama-untied"].config, "model_type": "llama"}))
    (folder / "tokenizer.json").write_text(tokenizer().to_str())
    safetensors_numpy.save_file({**weights("llama-untied"), **(changed or {})}, folder / "model.safetensors")
    return folder


def unpacked(packed: PackedModel, name: str) -> FloatArray:
    record = packed.header.matrices[name]
    form = (record.quant, record.has_min, record.float32_scales, record.scale_group)
    return unpack(form, record.rows, record.cols, packed.matrix_bytes(name))


def packed_files(cache: Path) -> list[Path]:
    return sorted((cache / "packed").glob("*.packed"))


def nearest_bfloat16(values: FloatArray) -> FloatArray:
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


GGUF_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32")
FAMILIES = ("qwen2", "qwen3-untied", "mixtral", "qwen3-moe", "gemma2", "gemma3")


@pytest.mark.parametrize(("variant", "quant"), [("llama-untied", quant) for quant in GGUF_TYPES] + [(name, "Q4_1") for name in FAMILIES])
def test_every_weight_of_a_gguf_is_there_with_its_numbers(tmp_path: Path, cache: Path, variant: str, quant: str) -> None:
    folder = resolve(write_gguf(tmp_path / "tiny.gguf", variant, quant=quant), cache)
    packed, store = open_packed(folder, cache, "none"), WeightStore.open(folder)
    matrices = {name for name in store.names() if len(store.shape(name)) == 2}
    vectors = set(store.names()) - matrices
    assert set(packed.header.matrices) == matrices
    assert set(packed.header.vectors) == vectors
    assert {store.index.entries[name].dtype for name in matrices} >= {quant}
    for name in vectors:
        np.testing.assert_array_equal(packed.vector(name), store.float32(name))
    for name in matrices:
        expected = store.float32(name)
        if store.index.entries[name].dtype in ("F16", "F32"):
            expected = nearest_bfloat16(expected)
        np.testing.assert_array_equal(unpacked(packed, name), expected)


@pytest.mark.parametrize("size", [1 << 20, 1 << 12, 7])
def test_a_model_larger_than_a_page_of_the_writer_is_written_whole(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    folder = resolve(write_gguf(tmp_path / "tiny.gguf", "llama-untied", quant="Q4_1"), cache)
    whole = open_packed(folder, cache, "none")
    content = packed_files(cache)[0].read_bytes()
    packed_files(cache)[0].unlink()
    monkeypatch.setattr(pack, "_HUGE_PAGE", size)
    assert open_packed(folder, cache, "none").header == whole.header
    assert packed_files(cache)[0].read_bytes() == content


@pytest.mark.parametrize("variant", ["qwen3-untied", "mixtral"])
def test_a_bfloat16_checkpoint_is_kept_exactly(tmp_path: Path, cache: Path, variant: str) -> None:
    folder = resolve(write_hf(tmp_path / "tiny", variant, dtype="bfloat16"), cache)
    packed, store = open_packed(folder, cache, "none"), WeightStore.open(folder)
    for name, record in packed.header.matrices.items():
        assert record.quant == BF16
        np.testing.assert_array_equal(unpacked(packed, name), store.float32(name))


@pytest.mark.parametrize(("quantization", "quant", "loss"), [("int8", INT8, 0.01), ("int4", INT4, 0.08)])
def test_a_checkpoint_is_quantized_where_that_is_asked_for(
    tmp_path: Path, cache: Path, quantization: formats.Quantization, quant: int, loss: float
) -> None:
    folder = resolve(write_folder(tmp_path / "tiny"), cache)
    packed, store = open_packed(folder, cache, quantization), WeightStore.open(folder)
    for name, record in packed.header.matrices.items():
        assert record.quant == (INT8 if name in ("embed", "head") else quant)
        values = store.float32(name)
        assert np.square(unpacked(packed, name) - values).mean() < loss**2 * np.square(values).mean()


def test_the_same_model_quantized_otherwise_is_another_file(tmp_path: Path, cache: Path) -> None:
    folder = resolve(write_folder(tmp_path / "tiny"), cache)
    files = {open_packed(folder, cache, quantization).path for quantization in ("none", "int8", "int4")}
    assert len(files) == len(packed_files(cache)) == 3


def test_a_router_stays_bfloat16() -> None:
    entry = WeightEntry("model.safetensors", "gate.weight", "F32", (8, 64), (8, 64))
    assert format_of("layers.0.mlp.router", entry, "int4") == Format(BF16, False, False, 32)


def test_quantizing_what_is_quantized_already_is_refused(folder: Path, cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"--quantization int4: .*tiny\.gguf is quantized already .* Q4_1"):
        open_packed(folder, cache, "int4")
    assert not packed_files(cache)


def test_a_type_without_a_packed_format_is_named_with_its_tensor(folder: Path, cache: Path) -> None:
    index = WeightIndex.load(folder)
    index.entries["layers.1.attn.q"] = msgspec.structs.replace(index.entries["layers.1.attn.q"], dtype="IQ1_S")
    index.save(folder)
    with pytest.raises(ModelError, match=r"tensor blk\.1\.attn_q\.weight is of type IQ1_S; the native engine can use .*Q4_K"):
        open_packed(folder, cache, "none")


def test_weights_that_arent_of_the_spec_are_refused(folder: Path, cache: Path) -> None:
    index = WeightIndex.load(folder)
    entries = {name: entry for name, entry in index.entries.items() if name != "layers.2.mlp.up"}
    msgspec.structs.replace(index, entries=entries).save(folder)
    with pytest.raises(ModelError, match="resolve it again"):
        open_packed(folder, cache, "none")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("model.layers.1.mlp.down_proj.weight", r"\(layers\.1\.mlp\.down\) has a weight or a scale that is NaN or infinite \(row 5\)"),
        ("model.norm.weight", r"\(final_norm\) has a number that is NaN or infinite"),
    ],
)
def test_a_weight_that_is_no_number_is_named_and_leaves_no_file(tmp_path: Path, cache: Path, tensor: str, message: str) -> None:
    values = weights("llama-untied")[tensor].copy()
    values[5] = np.nan
    folder = resolve(write_folder(tmp_path / "tiny", {tensor: values}), cache)
    with pytest.raises(ModelError, match=rf"model\.safetensors: tensor {tensor} {message}"):
        open_packed(folder, cache, "none")
    assert not [path for path in (cache / "packed").iterdir() if "packed" in path.name]


def test_memory_stays_flat_because_a_matrix_passes_in_ranges_of_rows(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = open_packed(folder, cache, "none")
    ranges = []
    pack_rows = pack._native.pack_rows

    def counting(kind: str, form: Format, cols: int, rows: np.ndarray, out: np.ndarray, threads: int) -> object:
        ranges.append(len(rows))
        return pack_rows(kind, form, cols, rows, out, threads)

    monkeypatch.setattr(pack._native, "pack_rows", counting)
    monkeypatch.setattr(pack, "_SCRATCH_BYTES", 1)
    in_ranges = open_packed(folder, cache / "other", "none")
    assert set(ranges) == {16}
    assert whole.path is not None
    assert in_ranges.path is not None
    assert whole.path.read_bytes() == in_ranges.path.read_bytes()


def test_a_second_start_maps_the_file_and_reads_no_weights(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_packed(folder, cache, "none")
    monkeypatch.setattr(pack, "_fill", pytest.fail)
    monkeypatch.setattr(pack.WeightStore, "open", pytest.fail)
    monkeypatch.setattr("sterna.files.content_hash._learn", pytest.fail)
    second = open_packed(folder, cache, "none")
    assert second.path == first.path
    np.testing.assert_array_equal(second.matrix_bytes("embed"), first.matrix_bytes("embed"))


def test_a_view_is_an_aligned_address_of_the_mapped_bytes(folder: Path, cache: Path) -> None:
    packed = open_packed(folder, cache, "none")
    for name, record in packed.header.matrices.items():
        view = packed.matrix(name)
        assert view.address % ALIGNMENT == 0
        assert view[:-1] == (record.quant, record.has_min, record.float32_scales, record.scale_group, record.rows, record.cols)
        assert ctypes.string_at(view.address, record.nbytes) == packed.matrix_bytes(name).tobytes()
    assert packed.nbytes >= sum(record.nbytes for record in packed.header.matrices.values())


def test_what_is_mapped_cant_be_written_to(folder: Path, cache: Path) -> None:
    packed = open_packed(folder, cache, "none")
    for array in (packed.matrix_bytes("embed"), packed.vector("final_norm")):
        with pytest.raises(ValueError):
            array[0] = 1


def test_a_model_that_moved_is_found_by_its_content(tmp_path: Path, cache: Path) -> None:
    first = open_packed(resolve(write_gguf(tmp_path / "a.gguf", "llama", quant="Q8_0"), cache), cache, "none")
    (tmp_path / "a.gguf").rename(tmp_path / "b.gguf")
    second = open_packed(resolve(tmp_path / "b.gguf", cache), cache, "none")
    assert first.path == second.path
    assert packed_files(cache) == [first.path]


def test_a_model_that_changed_is_another(tmp_path: Path, cache: Path) -> None:
    model = write_gguf(tmp_path / "a.gguf", "llama", quant="Q8_0")
    first = open_packed(resolve(model, cache), cache, "none")
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    second = open_packed(resolve(model, cache), cache, "none")
    assert first.path != second.path


def test_a_model_that_changes_while_it_is_packed_leaves_no_file(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_gguf(tmp_path / "a.gguf", "llama", quant="Q8_0")
    folder = resolve(model, cache)
    content, fill = model.read_bytes(), pack._fill

    def meanwhile(*args: object) -> None:
        fill(*args)  # type: ignore[arg-type]
        model.with_name("new").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        model.with_name("new").replace(model)

    monkeypatch.setattr(pack, "_fill", meanwhile)
    with pytest.raises(ModelError, match="changed while its weights were being packed"):
        open_packed(folder, cache, "none")
    assert not list((cache / "packed").glob("*.packed*"))


def damaged_prefix(path: Path) -> None:
    path.write_bytes(b"X" + path.read_bytes()[1:])


def damaged_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def other_byte(where: float) -> Callable[[Path], None]:
    """One changed byte of the blobs: at this share of them."""

    def other(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[DATA_ALIGNMENT + int(where * (len(content) - DATA_ALIGNMENT - 1))] ^= 0x10
        path.write_bytes(content)

    return other


def other_checksum(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[16] ^= 1
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def cut_to_nothing(path: Path) -> None:
    path.write_bytes(b"")


def of_another_model(path: Path) -> None:
    other = write_gguf(path.parent / "other.gguf", "llama-untied", quant="Q4_1")
    packed = open_packed(resolve(other, path.parent / "other"), path.parent / "other", "none")
    assert packed.path is not None
    packed.path.replace(path)


@pytest.mark.parametrize(
    "damage",
    [
        damaged_prefix,
        damaged_header,
        other_checksum,
        *(pytest.param(other_byte(where), id=f"byte-{where}") for where in (0, 0.3, 0.7, 1)),
        cut_short,
        cut_to_nothing,
        of_another_model,
    ],
)
def test_a_file_that_isnt_whole_or_right_is_made_anew(
    folder: Path, cache: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    first = open_packed(folder, cache, "none")
    assert first.path is not None
    content = first.path.read_bytes()
    replacement = first.path.with_name("damaged")  # not in place: `first` has the file mapped
    replacement.write_bytes(content)
    damage(replacement)
    replacement.replace(first.path)
    second = open_packed(folder, cache, "none")
    assert caplog.text.count("made anew") == 1
    assert second.path == first.path
    assert second.path.read_bytes() == content


def test_starts_at_the_same_time_make_one_file(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, fills = threading.Event(), []
    fill = pack._fill

    def slow(*args: object) -> None:
        fills.append(args)
        assert waiting.wait(30)  # until another has come and found the lock taken
        fill(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(pack, "_fill", slow)
    monkeypatch.setattr(files_cache, "say", lambda message: waiting.set())
    opened: list[PackedModel] = []
    starts = [threading.Thread(target=lambda: opened.append(open_packed(folder, cache, "none"))) for _ in range(4)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert len(fills) == 1
    assert len(opened) == 4
    assert {packed.path for packed in opened} == set(packed_files(cache))


def test_what_a_killed_start_left_is_cleared_by_the_next(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = open_packed(folder, cache, "none").path
    assert path is not None
    left = path.with_name(path.name + ".part-123")
    path.rename(left)
    assert open_packed(folder, cache, "none").path == path
    assert packed_files(cache) == [path]
    assert not left.exists()


def test_making_a_file_deletes_those_that_no_start_has_used_for_long(tmp_path: Path, folder: Path, cache: Path) -> None:
    old, used, unused = (cache / "packed" / f"{name}-{'0' * 24}.packed" for name in ("old", "used", "unused"))
    other = open_packed(resolve(write_gguf(tmp_path / "other.gguf", "qwen2", quant="Q8_0"), cache), cache, "none").path
    assert other is not None
    for path, days in ((old, KEEP_DAYS + 1), (used, KEEP_DAYS - 1), (unused, KEEP_DAYS + 1), (other, KEEP_DAYS + 1)):
        path.touch()
        os.utime(path, (time.time() - days * DAY,) * 2)
    open_packed(resolve(tmp_path / "other.gguf", cache), cache, "none")  # maps its file, which makes it used
    open_packed(folder, cache, "none")
    assert [path.exists() for path in (old, used, unused, other)] == [False, True, False, True]


def assert_in_memory(packed: PackedModel, folder: Path) -> None:
    assert packed.path is None
    store = WeightStore.open(folder)
    for name in packed.header.matrices:
        np.testing.assert_array_equal(unpacked(packed, name), store.float32(name))
    np.testing.assert_array_equal(packed.vector("final_norm"), store.float32("final_norm"))
    assert packed.matrix("embed").address % ALIGNMENT == 0


def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = pack.shutil.disk_usage("/")
    monkeypatch.setattr(pack.shutil, "disk_usage", lambda path: usage._replace(free=1000))


def test_a_disk_without_room_means_memory_and_a_warning(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_room(monkeypatch)
    assert_in_memory(open_packed(folder, cache, "none"), folder)
    assert "are needed and 1000 B are free" in caplog.text
    assert not packed_files(cache)


def test_a_disk_that_fills_meanwhile_means_memory_and_leaves_no_part(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill, faults = pack._fill, []

    def full_at_first(*args: object) -> None:
        if not faults:
            faults.append(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            raise faults[0]
        fill(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(pack, "_fill", full_at_first)
    assert_in_memory(open_packed(folder, cache, "none"), folder)
    assert "No space left on device" in caplog.text
    assert not list((cache / "packed").glob("*.packed*"))


def test_a_cache_that_cant_be_written_to_means_memory(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert_in_memory(open_packed(folder, tmp_path / "file" / "cache", "none"), folder)
    assert "Not a directory" in caplog.text


def test_a_folder_in_the_files_place_is_told_of_and_left_and_nothing_is_packed_twice(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = open_packed(folder, cache, "none").path
    assert path is not None
    path.unlink()
    path.mkdir()
    (path / "somebody's").touch()
    fill, fills = pack._fill, []

    def counting(*args: object) -> None:
        fills.append(args)
        fill(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(pack, "_fill", counting)
    assert_in_memory(open_packed(folder, cache, "none"), folder)
    assert len(fills) == 1
    assert f"{path}: a folder is in the way" in caplog.text
    assert [each.name for each in path.iterdir()] == ["somebody's"]


def pipe(path: Path) -> None:
    os.mkfifo(path)


def dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("gone"))


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [pipe, dangling_link, link_to_itself])
def test_what_cant_be_read_in_the_files_place_is_replaced(folder: Path, cache: Path, make: Callable[[Path], None]) -> None:
    path = open_packed(folder, cache, "none").path
    assert path is not None
    path.unlink()
    make(path)
    assert open_packed(folder, cache, "none").path == path
    assert path.is_file()
    assert not path.is_symlink()


def test_neither_disk_nor_memory_with_room_is_an_error_that_says_how_much(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room(monkeypatch)
    monkeypatch.setattr(pack, "available_memory_bytes", lambda: 2048)
    with pytest.raises(ConfigError, match=r"the packed weights take .* KiB: .* are needed and 1000 B are free.* only 2 KiB of memory"):
        open_packed(folder, cache, "none")


def test_a_folder_that_isnt_resolved_is_refused(tmp_path: Path, folder: Path, cache: Path) -> None:
    with pytest.raises(ModelError, match="not a resolved model folder"):
        open_packed(tmp_path, cache, "none")
    (folder / "spec.json").write_text("{}")
    assert (folder / WEIGHTS_FILE).is_file()
    with pytest.raises(ModelError, match="not a resolved model folder"):
        open_packed(folder, cache, "none")
