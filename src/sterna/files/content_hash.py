"""The hash of large files' content, without reading them at every start.

folder/sources.json    path -> what the file system says of the file, and the SHA-256 that its content had then
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from sterna.errors import ModelError
from sterna.files import cache

INDEX_FILE = "sources.json"

log = logging.getLogger(__name__)


class _Known(msgspec.Struct, frozen=True, array_like=True):
    """The time of the inode's change can't be set back, so a file that has all of these as before has its content as before."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    sha256: str


_decoder = msgspec.json.Decoder(dict[str, _Known])


def content_hash(files: Iterable[Path], folder: Path) -> str:
    """One SHA-256 for the contents of `files`, in the order of their paths; what is learnt is remembered in `folder`.

    Reads only files that are new or changed. Where `folder` can't be written to, nothing is remembered.
    Raises ModelError for a file that can't be read, or that changes while it is.
    """
    paths = sorted(files)
    known = _load(folder)
    learnt = {str(path): _learn(path) for path in paths if not _is_known(path, known.get(str(path)))}
    if learnt:
        with suppress(OSError):
            _remember(folder, learnt)
    digest = hashlib.sha256()
    for path in paths:
        digest.update((learnt.get(str(path)) or known[str(path)]).sha256.encode())
    return digest.hexdigest()


def _is_known(path: Path, known: _Known | None) -> bool:
    return known is not None and known == _as_found(path, known.sha256)


def _as_found(path: Path, sha256: str) -> _Known:
    try:
        status = os.stat(path)
    except OSError as fault:
        raise ModelError(f"{path}: can't be read: {fault.strerror}") from fault
    return _Known(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, sha256)


def _learn(path: Path) -> _Known:
    before = _as_found(path, "")
    log.info("reading %s once, to know it by its content", path)
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as fault:
        raise ModelError(f"{path}: can't be read: {fault.strerror}") from fault
    after = _as_found(path, "")
    if before != after:
        raise ModelError(f"{path}: the file changed while it was being read")
    return msgspec.structs.replace(after, sha256=sha256)


def _load(folder: Path) -> dict[str, _Known]:
    try:
        return _decoder.decode((folder / INDEX_FILE).read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def _remember(folder: Path, learnt: dict[str, _Known]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with cache.exclusive(folder / f"{INDEX_FILE}.lock", "waiting: another start of Sterna is noting what it read"):
        present = {path: known for path, known in _load(folder).items() if os.path.exists(path)}
        cache.write_whole(folder / INDEX_FILE, msgspec.json.encode(present | learnt))
