"""Put on PYTHONPATH by `make sanitize`: the engine is the one in the folder $STERNA_SANITIZED, whichever is installed."""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

ENGINE = "sterna.executor.native._native"


class SanitizedEngine(MetaPathFinder):
    def __init__(self, folder: Path) -> None:
        [self._path] = folder.glob("_native*.so")

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return spec_from_file_location(ENGINE, self._path) if fullname == ENGINE else None


if "STERNA_SANITIZED" in os.environ:
    sys.meta_path.insert(0, SanitizedEngine(Path(os.environ["STERNA_SANITIZED"])))
