"""The file of packed weights: matrices as the kernels read them, to be mapped by every process of every server that runs the model.

    magic "STERNAPK" | version u32 | header length u32 | checksum of all blobs u64 | SHA-256 of the header
    header: MessagePack of `PackedHeader`
    padding to 4,096 | blobs, each at a multiple of 64 from here; vectors are float32

Little-endian throughout. The file belongs to the cache: it can always be made again, and is never changed in place.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

import sterna.executor.native._native as _native
from sterna.config.cores import usable_cores

MAGIC = b"STERNAPK"
VERSION = 3
"""To be raised by whoever changes the layout in csrc/kernels/matrix.h, or what the packer writes into it for a given model."""
ALIGNMENT = 64
DATA_ALIGNMENT = 4096
_PREFIX = struct.Struct("<8sIIQ32s")


class MatrixRecord(msgspec.Struct, frozen=True, array_like=True):
    quant: int
    has_min: bool
    float32_scales: bool
    scale_group: int
    rows: int
    cols: int
    offset: int
    """Bytes from where the blobs begin."""
    nbytes: int


class VectorRecord(msgspec.Struct, frozen=True, array_like=True):
    offset: int
    count: int


class PackedHeader(msgspec.Struct, frozen=True):
    quantization: str
    data_bytes: int
    """Of all blobs, with their padding."""
    matrices: dict[str, MatrixRecord]
    vectors: dict[str, VectorRecord]


class MatrixView(NamedTuple):
    """One packed matrix; the fields of C++'s `Matrix`, with the address of its data. Valid as long as its `PackedModel` is."""

    quant: int
    has_min: bool
    float32_scales: bool
    scale_group: int
    rows: int
    cols: int
    address: int


class Damaged(Exception):
    """A file that isn't what it should be; says why."""


def align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def prelude(header: PackedHeader, checksum: int) -> bytes:
    """What stands before the blobs, whose checksum (csrc/pack/checksum.h) changes nothing of its length."""
    encoded = msgspec.msgpack.encode(header)
    content = _PREFIX.pack(MAGIC, VERSION, len(encoded), checksum, hashlib.sha256(encoded).digest()) + encoded
    return content.ljust(align(len(content), DATA_ALIGNMENT), b"\0")


def blobs_of(memory: mmap.mmap, header: PackedHeader) -> NDArray[np.uint8]:
    """The blobs, (data_bytes,), where they are the end of `memory`, which the array holds."""
    return np.frombuffer(memory, np.uint8, header.data_bytes, len(memory) - header.data_bytes)


def advise_huge_pages(memory: mmap.mmap) -> None:
    """Where the system has them, and for a file its file system too: they are found in less time (docs/performance.md)."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)


def checksum_of(blobs: NDArray[np.uint8]) -> int:
    checksum: int = _native.checksum(blobs, usable_cores())
    return checksum


def _read_header(file: IO[bytes]) -> tuple[PackedHeader, int]:
    """And the blobs' checksum. Raises Damaged for a file that isn't a whole one of this version."""
    start = file.read(_PREFIX.size)
    if len(start) < _PREFIX.size:
        raise Damaged("it is cut short")
    magic, version, length, checksum, digest = _PREFIX.unpack(start)
    if magic != MAGIC or version != VERSION:
        raise Damaged("it isn't a file of packed weights of this version")
    encoded = file.read(length)
    if hashlib.sha256(encoded).digest() != digest:
        raise Damaged("its header is damaged")
    try:
        header = msgspec.msgpack.decode(encoded, type=PackedHeader)
    except msgspec.MsgspecError as fault:
        raise Damaged(f"its header is damaged: {fault}") from fault
    size, expected = file.seek(0, os.SEEK_END), align(_PREFIX.size + length, DATA_ALIGNMENT) + header.data_bytes
    if size != expected:
        raise Damaged(f"it has {size} bytes instead of {expected}")
    return header, checksum


class PackedModel:
    """A model's packed weights, read-only, in a mapped file or in memory of this process's own."""

    def __init__(self, header: PackedHeader, memory: mmap.mmap, path: Path | None) -> None:
        """The blobs are the end of `memory`."""
        self.header = header
        self.path = path
        """The mapped file; None where the weights lie in this process's own memory."""
        # It holds the mapping, and whatever is made of it holds the array.
        self._data = blobs_of(memory, header)
        self._data.flags.writeable = False

    @staticmethod
    def map(path: Path, expected: PackedHeader) -> PackedModel:
        """Map a file that was made for `expected`, and read it all: its pages are wanted anyway, and a forward wouldn't notice bytes
        that changed. Raises Damaged where it wasn't or isn't what was written, OSError where it can't be read."""
        if path.exists() and not path.is_file():
            raise Damaged("it isn't a file")  # opening a pipe would wait for somebody to write into it
        with path.open("rb") as file:
            header, checksum = _read_header(file)
            if header != expected:
                raise Damaged("it was made for another model")
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        advise_huge_pages(memory)
        if hasattr(memory, "madvise"):
            memory.madvise(mmap.MADV_WILLNEED)  # from a cold disk: in long reads
        packed = PackedModel(header, memory, path)
        if checksum_of(packed._data) != checksum:
            raise Damaged("its weights are not what was written")
        return packed

    @property
    def nbytes(self) -> int:
        """Of matrices and vectors."""
        return self.header.data_bytes

    def matrix(self, name: str) -> MatrixView:
        """Raises KeyError for a name that isn't a matrix of the model; a tied head is `embed`."""
        record = self.header.matrices[name]
        address = self._data.ctypes.data + record.offset
        return MatrixView(record.quant, record.has_min, record.float32_scales, record.scale_group, record.rows, record.cols, address)

    def vector(self, name: str) -> NDArray[np.float32]:
        """A norm or a bias, (count,): a read-only view. Raises KeyError for a name that isn't a vector of the model."""
        record = self.header.vectors[name]
        return self._data[record.offset : record.offset + 4 * record.count].view(np.float32)

    def matrix_bytes(self, name: str) -> NDArray[np.uint8]:
        """A matrix's data, (nbytes,): a read-only view. Raises KeyError as `matrix` does."""
        record = self.header.matrices[name]
        return self._data[record.offset : record.offset + record.nbytes]
