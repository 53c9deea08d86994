"""Where processes meet: Unix sockets in a private directory of one run."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from sterna.errors import ConfigError

# sun_path holds 108 bytes with its NUL.
MAX_IPC_PATH_BYTES = 107


class RunDirectory:
    """A directory that only this user can enter (0700), with one socket per inbox and epoch; removed at the end.

    A new epoch gets a new address: ZeroMQ would hand a dead reader's later messages to whoever binds the same path next.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def create() -> RunDirectory:
        """Make it under the system's temporary directory. Raises ConfigError where its paths would be too long for a socket."""
        path = Path(tempfile.mkdtemp(prefix="sterna-"))
        if len(bytes(path)) + len("/detokenizer-99999999") > MAX_IPC_PATH_BYTES:
            path.rmdir()
            raise ConfigError(f"TMPDIR is too long for Unix sockets: {path}")
        return RunDirectory(path)

    def address(self, inbox: str, epoch: int) -> str:
        return f"ipc://{self.path}/{inbox}-{epoch}"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
