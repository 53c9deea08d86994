"""The default model behind real processes that can be struck, and one disturbed run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from faults.checks import Census, nobody_lives, take_census
from faults.faults import POINTS, Fault, Strike
from faults.load import Answer, Ask, Load
from running_server import PROMPTLY_S, RunningServer

MODEL = "smollm2"
INSIDE = Path(__file__).with_name("inside")
ON_IMPORT = Path(__file__).parents[1] / "on_import"


class Struck:
    """A server with `inside/` in its processes. Its run directories are in a temporary directory of its own."""

    def __init__(self, log: Path, *flags: str, model: str | Path = MODEL, run_folder: Path | None = None) -> None:
        """`run_folder` is its temporary directory (default: one that is its own)."""
        self.folder = Path(tempfile.mkdtemp(prefix="f-"))  # a short name: Unix sockets are in it
        self.run_folder = run_folder or self.folder / "t"
        self.run_folder.mkdir(exist_ok=True)
        env = {
            "PYTHONPATH": os.pathsep.join(map(str, (INSIDE, ON_IMPORT))),
            "FAULTS_DIR": str(self.folder),
            "FAULTS_POINTS": json.dumps(POINTS),
            "TMPDIR": str(self.run_folder),
        }
        self.server = RunningServer(model, *flags, log=log, env=env)

    def wait_ready(self) -> Struck:
        self.server.wait_ready()
        return self

    def pid_of(self, process: str) -> int:
        return self.server.process.pid if process == "server" else self.server.children()[process]

    def play(self, asks: Sequence[Ask], faults: Sequence[Fault] = ()) -> tuple[list[Answer], list[Strike]]:
        """`asks` all at once, disturbed by `faults`. Returns when every client is done and every stopped process goes on."""
        return asyncio.run(self.perform(asks, faults))

    async def perform(self, asks: Sequence[Ask], faults: Sequence[Fault]) -> tuple[list[Answer], list[Strike]]:
        strikes = [Strike(fault, self.folder, self.pid_of) for fault in faults]

        def watch(load: Load) -> None:
            for strike in strikes:
                strike.watch(load)

        answers = await Load(self.server.url, asks, watch).run()
        for strike in strikes:
            await strike.settle()
        return answers, strikes

    @contextmanager
    def poisoned(self, point: str, rid: str) -> Iterator[None]:
        """Inside, whichever process takes the request `rid` to `point`, before it, dies of it."""
        order = self.folder / f"{point}.poison"
        order.write_text(rid)
        try:
            yield
        finally:
            order.unlink()

    def census(self) -> Census:
        return take_census(self.server, self.folder)

    def end(self) -> int:
        """SIGTERM where it still lives. The exit code; nobody and nothing is left."""
        code = self.server.stop() if self.server.process.poll() is None else self.server.process.returncode
        nobody_lives(self.folder, PROMPTLY_S)
        left = sorted(path.name for path in self.run_folder.iterdir())
        shutil.rmtree(self.folder)
        assert not left, f"left behind: {left}"
        return code
