"""A resolved model's weights as the kernels want them: packed once, by whoever needs them first, and mapped by all.

    cache_dir/packed/<name>-<key>.packed

The key covers the content of the model's files, how weights were found in them, the quantization and the packed file's version: a model
that moved is found again, one that changed isn't. Files are used read-only, so that one may be deleted at any time: servers that run keep
what they have mapped. Making one deletes those that no start has used for `KEEP_DAYS`: a file's time of change is that of its last use.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import numpy as np

import sterna.executor.native._native as _native
from sterna.config.cores import usable_cores
from sterna.config.memory import available_memory_bytes, show_bytes
from sterna.config.model_config import ModelConfig
from sterna.errors import ConfigError, ModelError
from sterna.executor.native.formats import Quantization, format_of
from sterna.executor.native.packed_file import (
    ALIGNMENT,
    VERSION,
    Damaged,
    MatrixRecord,
    PackedHeader,
    PackedModel,
    VectorRecord,
    advise_huge_pages,
    align,
    blobs_of,
    checksum_of,
    prelude,
)
from sterna.files import cache
from sterna.files.cache import PACKED_SUFFIX
from sterna.files.content_hash import content_hash
from sterna.models.spec import ModelSpec, weight_shapes
from sterna.models.weights import WeightIndex, WeightStore

KEEP_DAYS = 30
_FILE = re.compile(rf"(?P<label>.+)-[0-9a-f]{{{cache.KEY_DIGITS}}}{re.escape(PACKED_SUFFIX)}(?P<part>\.part-.*)?")
_SCRATCH_BYTES = 8 << 20
"""Packed at a time: a large matrix passes through in ranges of rows."""
_HUGE_PAGE = 2 << 20

log = logging.getLogger(__name__)


def open_packed(folder: Path, cache_dir: Path, quantization: Quantization) -> PackedModel:
    """The packed weights of the resolved model `folder`, made where they aren't there.

    Safe against other processes that do the same. Where the cache has no room or can't be written to, they are made in memory of this
    process's own, with a warning. A second start maps the file and reads its header, nothing else.
    Raises ModelError for weights that can't be read, that aren't finite, that are of a type without a packed format, or that the spec has
    no place for; ConfigError for a quantization of what is quantized already, and where neither disk nor memory has room.
    """
    index = WeightIndex.load(folder)
    header = plan(index, load_spec(folder), quantization)
    root = cache_dir / cache.PACKED_DIR
    try:
        return _find_or_make(folder, index, header, root)
    except OSError as fault:
        return _make_in_memory(folder, header, f"{fault.filename or root}: {fault.strerror or fault}")


def pack_into_cache(folder: Path, cache_dir: Path, quantization: Quantization) -> PackedModel:
    """As `open_packed`, for whoever prepares a start: a cache that can't keep them is a ModelError."""
    index = WeightIndex.load(folder)
    header = plan(index, load_spec(folder), quantization)
    root = cache_dir / cache.PACKED_DIR
    with cache.faults_named(root):
        return _find_or_make(folder, index, header, root)


class _Source(NamedTuple):
    """What a packed file is made from."""

    folder: Path
    """The resolved model."""
    files: frozenset[Path]
    content: str
    """`content_hash` of `files`, which the key says."""


def load_spec(folder: Path) -> ModelSpec:
    """Raises ModelError where `folder` isn't a resolved model."""
    try:
        return msgspec.json.decode((folder / "spec.json").read_bytes(), type=ModelSpec)
    except (OSError, msgspec.MsgspecError) as fault:
        raise ModelError(f"{folder}: not a resolved model folder: {fault}") from fault


def plan(index: WeightIndex, spec: ModelSpec, quantization: Quantization) -> PackedHeader:
    """Where everything will lie. Raises as `open_packed` does, for what is known without reading the weights."""
    shapes = weight_shapes(spec)
    if shapes != {name: entry.shape for name, entry in index.entries.items()}:
        raise ModelError(f"{index.source}: the index of its weights isn't of its architecture: resolve it again")
    matrices: dict[str, MatrixRecord] = {}
    vectors: dict[str, VectorRecord] = {}
    offset = 0
    for name, entry in index.entries.items():
        if len(entry.shape) == 1:
            vectors[name] = VectorRecord(offset, entry.shape[0])
            nbytes = 4 * entry.shape[0]
        else:
            form = format_of(name, entry, quantization)
            rows, cols = entry.shape
            nbytes = _native.matrix_bytes(form, rows, cols)
            matrices[name] = MatrixRecord(*form, rows, cols, offset, nbytes)
        offset = align(offset + nbytes, ALIGNMENT)
    return PackedHeader(quantization, offset, matrices, vectors)


def _find_or_make(folder: Path, index: WeightIndex, header: PackedHeader, root: Path) -> PackedModel:
    """Raises OSError where the cache can't take it, and ModelError as `open_packed` does."""
    files = frozenset(Path(entry.file) for entry in index.entries.values())
    content = content_hash(files, root)
    key = _key(index, header.quantization, content)
    # What is damaged is told of by whoever makes it anew.
    return _map_existing(root, key, header) or _make(_Source(folder, files, content), header, root, key)


def _key(index: WeightIndex, quantization: str, content: str) -> str:
    found = [(name, entry.tensor, entry.dtype, entry.shape, entry.transforms) for name, entry in index.entries.items()]
    return hashlib.sha256(msgspec.msgpack.encode((VERSION, quantization, content, found))).hexdigest()[: cache.KEY_DIGITS]


def _map_existing(root: Path, key: str, header: PackedHeader, *, warn: bool = False) -> PackedModel | None:
    """None where there is none that is whole. The same model may have been packed under another name."""
    for path in root.glob(f"*-{key}{PACKED_SUFFIX}"):
        try:
            packed = PackedModel.map(path, header)
        except (OSError, Damaged) as fault:
            if warn:
                log.warning("packed weights are made anew: %s: %s", path, fault)
            continue
        with suppress(OSError):  # a cache that can't be written to is as good to read
            os.utime(path)
        return packed
    return None


def _make(source: _Source, header: PackedHeader, root: Path, key: str) -> PackedModel:
    """Raises OSError where the cache can't take it, ModelError as `open_packed` does and for files that change meanwhile."""
    label = cache.label_of(ModelConfig.load(source.folder).name)
    path = root / f"{label}-{key}{PACKED_SUFFIX}"
    root.mkdir(parents=True, exist_ok=True)
    with cache.exclusive(root / f"{label}.lock", f"waiting: another start of Sterna is packing the weights of {label}"):
        found = _map_existing(root, key, header, warn=True)
        if found is not None:
            return found
        if path.is_dir():
            raise OSError(errno.EISDIR, "a folder is in the way of this file, and not Sterna's to delete: remove it", str(path))
        _sweep(root, label)
        start = len(prelude(header, 0))
        size = start + header.data_bytes
        free = shutil.disk_usage(root).free
        if free < size:
            raise OSError(None, f"{show_bytes(size)} are needed and {show_bytes(free)} are free", str(root))
        log.info("packing weights once: %s into %s", show_bytes(size), path)
        with _whole_file(path) as file:
            file.truncate(size)
            pages = _PageWriter(file)
            _fill(source.folder, header, pages, start)
            pages.flush()
            file.flush()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as written:
                checksum = checksum_of(blobs_of(written, header))
            file.seek(0)
            file.write(prelude(header, checksum))
            if content_hash(source.files, root) != source.content:
                raise ModelError(f"{label}: the model's files changed while its weights were being packed")
        try:
            return PackedModel.map(path, header)
        except Damaged as fault:
            raise OSError(None, f"what was written there reads otherwise: {fault}", str(path)) from fault


def _make_in_memory(folder: Path, header: PackedHeader, reason: str) -> PackedModel:
    needed, available = header.data_bytes, available_memory_bytes()
    if needed > available:
        raise ConfigError(
            f"the packed weights take {show_bytes(needed)}: the cache can't keep them ({reason}), and only {show_bytes(available)} of "
            f"memory are available; free some space, or choose another cache with --cache-dir or {cache.CACHE_DIR_VARIABLE}"
        )
    log.warning("the cache can't keep the packed weights (%s): they take %s of this process's memory", reason, show_bytes(needed))
    memory = mmap.mmap(-1, needed, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    advise_huge_pages(memory)
    _fill(folder, header, memory, 0)
    return PackedModel(header, memory, None)


def _sweep(root: Path, label: str) -> None:
    """With the label's lock held: delete what no start has used for `KEEP_DAYS`, and what ended processes left of this label."""
    oldest = time.time() - KEEP_DAYS * 86_400
    for path in root.iterdir():
        file = _FILE.fullmatch(path.name)
        with suppress(OSError):  # another start may be deleting it too
            if file is not None and ((file["part"] and file["label"] == label) or path.stat().st_mtime < oldest):
                path.unlink()


@contextmanager
def _whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears at `path` at one instant, durably, or not at all. With a lock held."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        with part.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


class _PageWriter:
    """Writes a file from its beginning to its end, whole huge pages at a time: a file system that keeps files in large pages (ext4 from
    Linux 6.16 on, XFS) then has them in huge ones from the first start on, rather than from when they are read again."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._page = bytearray(_HUGE_PAGE)
        self._filled = 0
        self._start = 0
        """Of the page, in the file."""

    def seek(self, offset: int) -> None:
        """Forwards only; what is passed over is zeros."""
        self.write(bytes(offset - self._start - self._filled))

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            taken = min(len(view), _HUGE_PAGE - self._filled)
            self._page[self._filled : self._filled + taken] = view[:taken]
            self._filled += taken
            view = view[taken:]
            if self._filled == _HUGE_PAGE:
                self.flush()

    def flush(self) -> None:
        self._file.seek(self._start)
        self._file.write(memoryview(self._page)[: self._filled])
        self._start += self._filled
        self._filled = 0


def _fill(folder: Path, header: PackedHeader, sink: _PageWriter | mmap.mmap, start: int) -> None:
    """Write every weight where the header says. Memory stays flat: one range of one matrix's rows at a time."""
    store = WeightStore.open(folder)
    threads = usable_cores()
    for name in store.names():
        vector = header.vectors.get(name)
        if vector is not None:
            values = store.float32(name)
            if not np.isfinite(values).all():
                raise ModelError(f"{_where(store, name)} has a number that is NaN or infinite")
            sink.seek(start + vector.offset)
            sink.write(values.astype("<f4").tobytes())
        else:
            sink.seek(start + header.matrices[name].offset)
            for packed in _pack_matrix(store, name, header.matrices[name], threads):
                sink.write(packed)


def _pack_matrix(store: WeightStore, name: str, record: MatrixRecord, threads: int) -> Iterator[memoryview]:
    """The matrix's bytes, a range of rows at a time; each is overwritten by the next."""
    raw = store.raw(name)
    form = (record.quant, record.has_min, record.float32_scales, record.scale_group)
    block_bytes = _native.matrix_bytes(form, 1, record.cols)
    step = max(1, _SCRATCH_BYTES // block_bytes) * 16
    scratch = np.empty(min(-(-record.rows // 16) * block_bytes, step // 16 * block_bytes), np.uint8)
    for first in range(0, record.rows, step):
        rows = np.ascontiguousarray(raw.rows[first : first + step])
        packed = scratch[: _native.matrix_bytes(form, len(rows), record.cols)]
        fault = _native.pack_rows(raw.dtype, form, record.cols, rows, packed, threads)
        if fault is not None:
            row, what = fault
            raise ModelError(f"{_where(store, name)} has {what} (row {first + row})")
        yield packed.data


def _where(store: WeightStore, name: str) -> str:
    entry = store.index.entries[name]
    return f"{entry.file}: tensor {entry.tensor} ({name})"
