"""From a model's name to the folder that every process opens (its content: `config/model_config.py`), made once and found again.

    cache_dir/resolved/<name>-<key>/

The key covers what the folder was made from: the source's files as the file system knows them, the wished context length, and the code
that translates. So a changed file or another Sterna makes another folder, and nothing has to be declared out of date. Folders hold a
few MB (weights stay where they are).

Processes read the folder while they start and not after, so any may be deleted while no server is starting from it. Making one deletes
those of the same name that no start has used for `KEEP_DAYS`: a folder's time of change is that of the last start that used it.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

import sterna
from sterna.config.model_config import ModelConfig
from sterna.errors import ModelError
from sterna.files import cache
from sterna.files.hub import ModelSource, locate
from sterna.files.layout import INDEX_FILE, SETTINGS_FILES, weight_files

REQUIRED_FILES = ("tokenizer.json", "spec.json", "weights.json")
"""Besides facts.json, whose content is checked too."""
KEEP_DAYS = 30
_TRANSLATING_PACKAGES = ("config", "files", "models", "text")


def resolve_model(name: str, *, cache_dir: Path, context_length: int | None, progress: bool = True) -> Path:
    """The resolved folder of a model, fetched and made where it isn't there.

    `context_length` in tokens; None takes the model's own. More than the model's own is allowed as far as linear or dynamic rope
    scaling stretches it. Safe against other processes that do the same. A second start takes milliseconds and touches no network.
    A folder that is a resolved one is returned as it is.
    Raises ModelError for a model that can't be found, fetched, read or supported, ConfigError for a context that it can't have.
    """
    if (Path(name) / "facts.json").is_file():
        return Path(name)
    source = locate(name, cache_dir, progress)
    root = cache_dir / cache.RESOLVED_DIR
    label = cache.label_of(source.name)
    folder = root / f"{label}-{_key(source, context_length)}"
    if _is_whole(folder):
        with suppress(OSError):  # a cache that can't be written to is as good to read
            os.utime(folder)
        return folder
    with cache.faults_named(root):
        root.mkdir(parents=True, exist_ok=True)
        with cache.exclusive(root / f"{label}.lock", f"waiting: another start of Sterna is preparing {name}"):
            if not _is_whole(folder):
                _sweep(root, label)
                _make(source, folder, context_length)
    return folder


def _make(source: ModelSource, folder: Path, context_length: int | None) -> None:
    """With the lock held: a folder that is there is damaged, and parts that are there were left by a process that was killed."""
    # Imported here, so that a start that finds its folder loads neither NumPy nor the readers of model files.
    from sterna.models.assemble import assemble

    for leftover in folder.parent.glob(glob.escape(folder.name) + ".part-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=folder.name + ".part-"))
    try:
        assemble(source, part, context_length)
        if folder.exists():
            folder.rename(part / "damaged")
            shutil.rmtree(part / "damaged")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sweep(root: Path, label: str) -> None:
    """With the label's lock held: delete what no start has used for `KEEP_DAYS`, whole folders and parts of them."""
    oldest = time.time() - KEEP_DAYS * 86_400
    of_label = re.compile(rf"{re.escape(label)}-[0-9a-f]{{{cache.KEY_DIGITS}}}(\.part-.*)?")
    for folder in root.iterdir():
        if of_label.fullmatch(folder.name) and folder.stat().st_mtime < oldest:
            shutil.rmtree(folder, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    try:
        ModelConfig.load(folder)
    except ModelError:
        return False
    return all((folder / name).is_file() for name in REQUIRED_FILES)


def _key(source: ModelSource, context_length: int | None) -> str:
    made_from = [
        source.name,
        source.kind,
        str(source.path),
        context_length,
        _identities(_files_of(source)),
        _identities(_translating_code()),
    ]
    return hashlib.sha256(msgspec.json.encode(made_from)).hexdigest()[: cache.KEY_DIGITS]


def _files_of(source: ModelSource) -> Iterable[Path]:
    if source.kind == "gguf":
        return (source.path,)
    return (*(source.path / name for name in (*SETTINGS_FILES, INDEX_FILE)), *weight_files(source.path))


def _translating_code() -> Iterable[Path]:
    package = Path(sterna.__file__).parent
    return sorted(path for name in _TRANSLATING_PACKAGES for path in (package / name).rglob("*.py"))


def _identities(files: Iterable[Path]) -> list[tuple[str, int, int, int, int]]:
    """What changes whenever a file's content does: the time of the inode's change can't be set back."""
    found = []
    for path in files:
        try:
            status = os.stat(path)
        except OSError:
            continue  # an absent file has no identity; appearing later changes the key
        found.append((str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
    return found
