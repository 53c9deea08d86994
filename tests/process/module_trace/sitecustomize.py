"""Put on PYTHONPATH of a server under test: each process, as it ends, writes the names of its modules to $MODULE_TRACE/<pid>."""

import atexit
import os
import sys
from pathlib import Path


def dump() -> None:
    (Path(os.environ["MODULE_TRACE"]) / str(os.getpid())).write_text("\n".join(sys.modules))


if "MODULE_TRACE" in os.environ:
    atexit.register(dump)
