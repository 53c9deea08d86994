"""What the readers of weight files share: a file that is mapped, not read, and the records of its tensors."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from sterna.errors import ModelError


class TensorRecord(Protocol):
    """Where a tensor lies; a format's own record says more of it."""

    @property
    def offset(self) -> int:
        """Bytes from the start of the file."""

    @property
    def nbytes(self) -> int: ...


RecordT = TypeVar("RecordT", bound=TensorRecord)


class MappedFile(Generic[RecordT]):
    """One mapped file. The mapping lives as long as this object or any array from `raw`.

    Whoever makes one has checked that every record lies within the file.
    """

    def __init__(self, path: Path, tensors: Mapping[str, RecordT], data: mmap.mmap) -> None:
        self.path = path
        self.tensors = tensors
        """Name -> record."""
        self._data = data

    def tensor(self, name: str) -> RecordT:
        """The record of a tensor. Raises ModelError where the file has none of that name."""
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelError(f"{self.path}: there is no tensor {name!r}") from None

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes as stored, (nbytes,): a read-only view of the mapping."""
        tensor = self.tensor(name)
        return np.frombuffer(self._data, np.uint8, tensor.nbytes, tensor.offset)


def map_file(path: Path) -> mmap.mmap:
    """The whole file, read-only. Raises ModelError where it can't be opened or is empty."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelError(f"{path}: the file is empty") from None
    except OSError as fault:
        raise ModelError(f"{path}: can't be opened: {fault.strerror}") from fault


def bfloat16_to_float32(values: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 bit patterns of any shape -> the same numbers, exactly: bfloat16 is the upper half of a float32."""
    return (values.astype(np.uint32) << 16).view(np.float32)
