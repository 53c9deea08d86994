"""`sterna cache`: what is kept is shown, and cleared without harm to whoever uses it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest

from sterna.cli.cache import ago, run
from sterna.errors import ConfigError
from sterna.executor.native.pack import open_packed
from sterna.executor.native.packed_file import PackedModel
from sterna.files import cache as files_cache
from sterna.files.inventory import items
from sterna.models.resolve import resolve_model
from tiny_gguf import write_gguf

HUB_ID = "org/name:file.gguf"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache with two models of every kind but the hub's, which has one."""
    root = tmp_path / "cache"
    for name in ("one", "two"):
        keep(write_gguf(tmp_path / f"{name}.gguf", "llama" if name == "one" else "qwen2", quant="Q8_0"), root)
        folder = root / "models" / name
        folder.mkdir(parents=True)
        (folder / "model.gguf").write_bytes(b"x" * 2048)
        (folder / "lock").touch()
    downloaded = tmp_path / "hub-cache" / "file.gguf"
    downloaded.parent.mkdir()
    downloaded.write_bytes(b"y" * 1024)
    (root / "hub").mkdir()
    record = {"model": str(downloaded), "sizes": {str(downloaded): 1024}}
    (root / "hub" / (quote(HUB_ID, safe="") + ".json")).write_bytes(msgspec.json.encode(record))
    return root


def keep(model: Path, root: Path) -> PackedModel:
    return open_packed(resolve_model(str(model), cache_dir=root, context_length=None, progress=False), root, "none")


def cache(root: Path, *argv: str) -> int:
    return run([*argv, "--cache-dir", str(root)])


def kept(root: Path) -> list[tuple[str, str]]:
    return [(item.kind, item.label) for item in items(root)]


def test_the_list_has_everything_with_its_size_and_last_use(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = next(item for item in items(root) if (item.kind, item.label) == ("packed", "two.gguf"))
    os.utime(packed.path, (time.time() - 3 * 86_400 - 60,) * 2)
    assert cache(root, "list") == 0
    rows = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert [(kind, label) for kind, label, *_ in rows[1:-1]] == [
        ("download", "one"),
        ("download", "two"),
        ("hub", "org-name-file.gguf"),
        ("packed", "one.gguf"),
        ("packed", "two.gguf"),
        ("resolved", "one.gguf"),
        ("resolved", "two.gguf"),
    ]
    by_name = {(kind, label): (size, rest) for kind, label, size, rest in rows[1:-1]}
    assert by_name["download", "one"] == ("2", f"KiB      just now    {root / 'models' / 'one'}")
    assert "3 days ago" in by_name["packed", "two.gguf"][1]
    assert packed.nbytes == packed.path.stat().st_size


def test_the_list_of_a_cache_that_isnt_there_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache(tmp_path / "absent", "list") == 0
    assert capsys.readouterr().out.splitlines()[1:] == [f"0 kept in {tmp_path / 'absent'}: 0 B"]
    assert not (tmp_path / "absent").exists()


def test_clearing_a_model_leaves_the_others(root: Path, tmp_path: Path) -> None:
    before = kept(root)
    cache(root, "clear", "--model", str(tmp_path / "one.gguf"))
    assert [each for each in before if each not in kept(root)] == [("packed", "one.gguf"), ("resolved", "one.gguf")]
    cache(root, "clear", "--model", "two")
    assert ("download", "two") not in kept(root)
    assert ("packed", "two.gguf") in kept(root)


def test_clearing_a_kind_leaves_the_others(root: Path) -> None:
    cache(root, "clear", "--all", "--kind", "packed")
    assert {kind for kind, _ in kept(root)} == {"download", "hub", "resolved"}


def test_clearing_all_leaves_the_hubs_own_files_and_locks_that_another_may_hold(root: Path, tmp_path: Path) -> None:
    assert cache(root, "clear", "--all") == 0
    assert kept(root) == []
    assert (tmp_path / "hub-cache" / "file.gguf").is_file()
    left = {path.name for path in root.rglob("*") if path.is_file()}
    assert left == {"lock", "one.gguf.lock", "two.gguf.lock", "org%2Fname%3Afile.gguf.lock", "sources.json", "sources.json.lock"}


def test_what_is_mapped_stays_readable_and_is_made_again_for_the_next(root: Path, tmp_path: Path) -> None:
    mapped = keep(tmp_path / "one.gguf", root)
    assert mapped.path is not None
    content = mapped.path.read_bytes()
    cache(root, "clear", "--all")
    assert not mapped.path.exists()
    assert mapped.matrix_bytes("embed").tobytes() in content
    again = keep(tmp_path / "one.gguf", root)
    assert again.path == mapped.path
    assert again.path.read_bytes() == content


def test_clearing_waits_for_a_start_that_is_making_something(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()
    monkeypatch.setattr(files_cache, "say", lambda message: waiting.set())
    clearing = threading.Thread(target=cache, args=(root, "clear", "--model", "one.gguf", "--kind", "packed"))
    with files_cache.exclusive(root / "packed" / "one.gguf.lock", "not this one"):
        clearing.start()
        assert waiting.wait(30)
        assert ("packed", "one.gguf") in kept(root)
    clearing.join()
    assert ("packed", "one.gguf") not in kept(root)


def test_a_model_of_which_nothing_is_kept_is_an_error(root: Path) -> None:
    with pytest.raises(ConfigError, match="nothing of other is kept"):
        cache(root, "clear", "--model", "other")


@pytest.mark.parametrize(
    "argv", [[], ["clear"], ["clear", "--all", "--model", "one"], ["list", "--all"], ["clear", "--all", "--kind", "x"]]
)
def test_wrong_usage_clears_nothing_and_ends_with_2(root: Path, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = kept(root)
    with pytest.raises(SystemExit) as caught:
        cache(root, *argv) if argv else run([])
    assert caught.value.code == 2
    assert "usage: sterna cache" in capsys.readouterr().err
    assert kept(root) == before


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-5, "just now"), (59, "just now"), (60, "1 minute ago"), (7300, "2 hours ago"), (86_400, "1 day ago"), (200_000, "2 days ago")],
)
def test_a_last_use_is_said_in_its_largest_unit(seconds: float, shown: str) -> None:
    assert ago(seconds) == shown
