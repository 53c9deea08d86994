"""Where processes meet: Unix sockets in a private directory of one run."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO

from sterna.errors import ConfigError

# sun_path holds 108 bytes with its NUL.
MAX_IPC_PATH_BYTES = 107
PREFIX = "sterna-"
LOCK = "lock"
SWEEP_AGE_S = 60.0


class RunDirectory:
    """A directory that only this user can enter (0700), with one socket per inbox and epoch; removed at the end.

    A new epoch gets a new address: ZeroMQ would hand a dead reader's later messages to whoever binds the same path next.
    """

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock
        """Held as long as the server lives, however it ends."""

    @staticmethod
    def create() -> RunDirectory:
        """Make it under the system's temporary directory, and remove those that a killed server left there.

        Raises ConfigError where its paths would be too long for a socket.
        """
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        if len(bytes(path)) + len("/detokenizer-99999999") > MAX_IPC_PATH_BYTES:
            path.rmdir()
            raise ConfigError(f"TMPDIR is too long for Unix sockets: {path}")
        _sweep(path.parent)
        lock = (path / LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        return RunDirectory(path, lock)

    def address(self, inbox: str, epoch: int) -> str:
        return f"ipc://{self.path}/{inbox}-{epoch}"

    def release(self, address: str) -> None:
        """The process that had `address` is dead, and nobody will have it again."""
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _sweep(parent: Path) -> None:
    """Remove run directories of ours whose lock nobody holds. One that is being made has no lock file yet, or a young one."""
    for lock_path in parent.glob(f"{PREFIX}*/{LOCK}"):
        try:
            stat = lock_path.stat()
            if stat.st_uid != os.getuid() or time.time() - stat.st_mtime < SWEEP_AGE_S:
                continue
            with lock_path.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_path.parent, ignore_errors=True)
        except OSError:  # somebody lives there
            continue
