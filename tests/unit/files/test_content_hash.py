"""A large file's content is hashed once, and again whenever it may have changed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from sterna.errors import ModelError
from sterna.files import content_hash as module
from sterna.files.content_hash import INDEX_FILE, content_hash


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "packed"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read, as they are."""
    reads: list[Path] = []
    learn = module._learn

    def noting(path: Path) -> object:
        reads.append(path)
        return learn(path)

    monkeypatch.setattr(module, "_learn", noting)
    return reads


def test_the_hash_is_of_content_not_of_names(tmp_path: Path, file: Path, folder: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(file.read_bytes())
    (tmp_path / "other").write_bytes(b"two")
    assert content_hash([file], folder) == content_hash([copy], folder)
    assert content_hash([file], folder) != content_hash([tmp_path / "other"], folder)
    assert content_hash([file], folder) == hashlib.sha256(hashlib.sha256(b"one").hexdigest().encode()).hexdigest()


def test_several_files_are_taken_in_the_order_of_their_paths(tmp_path: Path, file: Path, folder: Path) -> None:
    second = tmp_path / "z"
    second.write_bytes(b"two")
    assert content_hash([second, file], folder) == content_hash([file, second], folder) != content_hash([file], folder)


def test_an_unchanged_file_is_read_once(file: Path, folder: Path, read: list[Path]) -> None:
    assert content_hash([file], folder) == content_hash([file], folder)
    assert read == [file]


def test_a_file_of_the_same_size_and_time_but_other_content_is_read_again(file: Path, folder: Path, read: list[Path]) -> None:
    before, status = content_hash([file], folder), file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_mtime_ns == status.st_mtime_ns
    assert content_hash([file], folder) != before
    assert read == [file, file]


def test_files_that_are_gone_are_forgotten(tmp_path: Path, file: Path, folder: Path) -> None:
    content_hash([file], folder)
    file.rename(tmp_path / "moved")
    content_hash([tmp_path / "moved"], folder)
    assert set(module._load(folder)) == {str(tmp_path / "moved")}


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"a": 1}', b"\xff"])
def test_a_damaged_index_is_made_anew(file: Path, folder: Path, read: list[Path], damage: bytes) -> None:
    expected = content_hash([file], folder)
    (folder / INDEX_FILE).write_bytes(damage)
    assert content_hash([file], folder) == expected
    content_hash([file], folder)
    assert read == [file, file]


def test_without_a_place_to_remember_the_hash_is_the_same(tmp_path: Path, file: Path, folder: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.touch()
    assert content_hash([file], blocked / "packed") == content_hash([file], folder)


def test_a_file_that_cant_be_read_is_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelError, match=r"absent: can't be read: No such file"):
        content_hash([tmp_path / "absent"], folder)


def test_a_file_that_changes_while_it_is_read_is_refused(file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.file_digest

    def growing(*args: object) -> object:
        with file.open("ab") as more:
            more.write(b"more")
        return digest(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module.hashlib, "file_digest", growing)
    with pytest.raises(ModelError, match="changed while it was being read"):
        content_hash([file], folder)
