"""What Sterna's cache holds, and taking things out of it (the layout: `files/cache.py`).

Everything in it can be had again. Removing is safe while servers run: they keep what they have mapped, and read nothing else after their
start; the system frees the space when the last of them ends. A start that is just making something is waited for; one that has found what
is being removed fails, and succeeds when it is tried again.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from sterna.files import cache, hub_repo

Kind = Literal["download", "hub", "resolved", "packed"]

_KEYED = re.compile(rf"(?P<label>.+)-[0-9a-f]{{{cache.KEY_DIGITS}}}({re.escape(cache.PACKED_SUFFIX)})?(\.part-.*)?")


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that the cache holds."""

    kind: Kind
    """`hub`: only the record of a download is Sterna's; the files are in the hub's own cache, which other programs share."""
    label: str
    """`cache.label_of` the model's name."""
    path: Path
    """What is removed."""
    nbytes: int
    used: float
    """When it was last used, in seconds of Unix time; for downloads as exactly as the file system notes reading."""
    lock: Path
    """Held by whoever makes it."""


def items(root: Path) -> list[Item]:
    """By kind and label. Empty where there is no cache yet; what vanishes meanwhile is left out."""
    found = [*_downloads(root / cache.MODELS_DIR), *_hub(root / cache.HUB_DIR), *_keyed(root / cache.RESOLVED_DIR, "resolved")]
    return sorted([*found, *_keyed(root / cache.PACKED_DIR, "packed")], key=lambda item: (item.kind, item.label, item.path))


def remove(item: Item) -> None:
    """Delete it; nothing happens where it is gone. Raises ModelError where that isn't permitted."""
    if not item.path.exists():
        return
    with (
        cache.faults_named(item.path),
        cache.exclusive(item.lock, f"waiting: a start of Sterna is preparing {item.label}"),
        suppress(FileNotFoundError),
    ):
        if item.kind == "download":  # its folder stays, because the lock is in it
            for path in item.path.iterdir():
                if path != item.lock:
                    _delete(path)
        else:
            _delete(item.path)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _downloads(folder: Path) -> Iterator[Item]:
    for path in _entries(folder):
        lock = path / "lock"
        stats = [status for file in path.rglob("*") if file != lock and (status := _status(file))]
        if stats:
            used = max(max(status.st_atime, status.st_mtime) for status in stats)
            yield Item("download", cache.label_of(path.name), path, sum(status.st_size for status in stats), used, lock)


def _hub(folder: Path) -> Iterator[Item]:
    for path in _entries(folder):
        status = _status(path)
        if path.suffix == ".json" and status is not None:
            label, nbytes = cache.label_of(unquote(path.stem)), hub_repo.recorded_bytes(path)
            yield Item("hub", label, path, nbytes, status.st_mtime, path.with_suffix(".lock"))


def _keyed(folder: Path, kind: Kind) -> Iterator[Item]:
    for path in _entries(folder):
        name = _KEYED.fullmatch(path.name)
        if name is None:
            continue
        stats = [status for file in (path, *path.rglob("*")) if (status := _status(file))]
        try:
            used = path.stat().st_mtime
        except FileNotFoundError:
            continue
        yield Item(kind, name["label"], path, sum(status.st_size for status in stats), used, folder / f"{name['label']}.lock")


def _status(file: Path) -> os.stat_result | None:
    """None for what is no file, or is gone."""
    try:
        return file.stat() if file.is_file() else None
    except FileNotFoundError:
        return None


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
