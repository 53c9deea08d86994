"""Which files a model folder in Hugging Face layout is made of. Needs no NumPy: a start that fetches and reads nothing asks here too."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sterna.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SETTINGS_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""All that is read besides the weights."""


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def weight_files(folder: Path) -> dict[Path, frozenset[str] | None]:
    """The files that hold a folder's weights, each with the tensors that the index expects there (None: no index, whatever is there).

    Raises ModelError where there are none, where one is missing, or where the index is damaged or names a file outside the folder.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        return _indexed_files(folder, index)
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: None}
    hint = "; pickled weights are never opened: convert them to safetensors" if any(folder.glob("pytorch_model*.bin")) else ""
    raise ModelError(f"{folder}: there is neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")


def _indexed_files(folder: Path, index: Path) -> dict[Path, frozenset[str] | None]:
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise ModelError(f"{index}: can't be read: {fault}") from fault
    if not weight_map:
        raise ModelError(f"{index}: it names no tensors")
    by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, set()).add(name)
    for file in by_file:
        if Path(file).name != file or "\0" in file:
            raise ModelError(f"{index}: shard {file!r} isn't a file of this folder")
        if not (folder / file).is_file():
            raise ModelError(f"{folder / file}: the shard is missing ({INDEX_FILE} names it)")
    return {folder / file: frozenset(by_file[file]) for file in sorted(by_file)}
