"""A virtual environment of its own for each peer, in a cache folder outside the repository (`STERNA_BENCH_DIR`)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from peers.base import BENCH, Absent, last_lines

INSTALL_LIMIT_S = 3600
_INSTALLER = re.compile(r"(pip|setuptools|wheel|pkg_resources|_distutils_hack|distutils-precedence|activate|Activate)(\d*|[-.].*)")
"""What `venv` puts into a new environment: in `bin` and in `site-packages`."""


def bench_folder() -> Path:
    return Path(os.environ.get("STERNA_BENCH_DIR") or Path.home() / ".cache" / "sterna-bench")


class Environment:
    """Made once per name and `recipe`; a changed recipe, or an interrupted start, makes it anew."""

    def __init__(self, name: str, recipe: str) -> None:
        self.folder = bench_folder() / name
        self.python = self.folder / "bin" / "python"
        self.log = bench_folder() / f"{name}.log"
        self._recipe = recipe
        self._stamp = self.folder / ".made"

    @property
    def packages(self) -> Path:
        return next(self.folder.glob("lib/python3*/site-packages"))

    def is_made(self) -> bool:
        return self._stamp.exists() and self._stamp.read_text() == self._recipe

    def begin(self) -> None:
        """An empty environment, whatever was there."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        self._run([sys.executable, "-m", "venv", "--clear", str(self.folder)])

    def finish(self) -> None:
        """Bytecode compiled, as a first use would; stamped as whole."""
        # Some packages ship sources for other Pythons: what doesn't compile is never imported either.
        subprocess.run([self.python, "-m", "compileall", "-q", "-j", "0", self.packages], capture_output=True)
        self._stamp.write_text(self._recipe)

    def pip(self, *words: str, environment: dict[str, str] | None = None) -> None:
        """Raises Absent, with the log's end."""
        self._run([str(self.python), "-m", "pip", "--disable-pip-version-check", *words], environment)

    def run(self, *words: str) -> str:
        """What its Python prints. Raises Absent."""
        out = subprocess.run([self.python, *words], capture_output=True, text=True, env=self.variables())
        if out.returncode:
            raise Absent(f"{' '.join(words)[:80]}: {out.stderr.strip()[-400:]}")
        return out.stdout.strip()

    def variables(self) -> dict[str, str]:
        """For a process of this environment that imports from this folder."""
        return {**os.environ, "PYTHONPATH": str(BENCH)}

    def version(self, package: str) -> str:
        return self.run("-c", f"import importlib.metadata as m; print(m.version({package!r}))")

    def installed_mb(self) -> float:
        return sum(path.stat().st_size for path in self._installed()) / 1e6

    def _installed(self) -> Iterator[Path]:
        for path in self.folder.rglob("*"):
            if path == self._stamp or path.is_symlink() or not path.is_file():
                continue
            match path.relative_to(self.folder).parts:
                case ("bin", name) | ("lib", _, "site-packages", name, *_) if _INSTALLER.fullmatch(name):
                    continue
            yield path

    def _run(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        with self.log.open("a") as output:
            print("$", *command, file=output, flush=True)
            try:
                subprocess.run(
                    command,
                    check=True,
                    env={**os.environ, **(environment or {})},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=INSTALL_LIMIT_S,
                )
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as fault:
                shutil.rmtree(self.folder, ignore_errors=True)
                raise Absent(f"{command[0]} … {command[-1]} failed: {last_lines(self.log)}") from fault
