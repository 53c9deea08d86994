"""One model out of a repository on the Hugging Face hub: which of its files are needed, fetched once, found again offline."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import msgspec

from sterna.errors import ModelError
from sterna.files import cache
from sterna.files.layout import INDEX_FILE, SETTINGS_FILES, SINGLE_FILE, weight_files


class Unreachable(Exception):
    """The hub can't be asked now."""


class HubClient(Protocol):
    """What is asked of the hub."""

    def list_files(self, repo: str) -> tuple[str, list[str]]:
        """(commit, paths) of the default branch. Raises Unreachable, or ModelError where there is no such repository for us."""
        ...

    def download(self, repo: str, commit: str, files: Sequence[str]) -> Path:
        """The folder that then holds the files under their paths. Raises Unreachable or ModelError."""
        ...

    def cached(self, repo: str) -> Path | None:
        """A folder that an earlier download, by whomever, has left; perhaps not with all files."""
        ...


class _Record(msgspec.Struct, frozen=True):
    """What an earlier fetch has found: good as long as the files are there at their sizes."""

    model: str
    sizes: dict[str, int]
    """By absolute path."""


def fetch(repo: str, file: str | None, records: Path, client: HubClient) -> Path:
    """The model's folder, or its .gguf file, downloaded where it isn't there. A second call asks the hub nothing.

    `records` is Sterna's folder of what was fetched; the files themselves stay in the hub's own cache, which other programs share.
    Raises ModelError where the repository holds no model that can be read, or can't be had.
    """
    record_file = records / (quote(repo if file is None else f"{repo}:{file}", safe="") + ".json")
    known = _recorded(record_file)
    if known is not None:
        return known
    with cache.faults_named(records):
        records.mkdir(parents=True, exist_ok=True)
        with cache.exclusive(record_file.with_suffix(".lock"), f"waiting: another start of Sterna is fetching {repo}"):
            return _recorded(record_file) or _fetch(repo, file, record_file, client)


def _fetch(repo: str, file: str | None, record_file: Path, client: HubClient) -> Path:
    try:
        commit, available = client.list_files(repo)
        wanted = choose_files(repo, available, file)
        folder = client.download(repo, commit, wanted)
    except Unreachable as fault:
        return _without_the_hub(repo, file, client, fault)
    model = _model_of(folder, wanted)
    sizes = {str(folder / name): (folder / name).stat().st_size for name in wanted}
    cache.write_whole(record_file, msgspec.json.encode(_Record(str(model), sizes)))
    return model


def _without_the_hub(repo: str, file: str | None, client: HubClient, fault: Unreachable) -> Path:
    """What another program has left in the hub's cache. Never recorded: it may lack files that only the hub knows of."""
    left = client.cached(repo)
    try:
        if left is not None:
            available = [path.relative_to(left).as_posix() for path in left.rglob("*") if path.is_file()]
            return _model_of(left, choose_files(repo, available, file))
    except ModelError:
        pass  # the download was of other files, or broke off: what to say is the same as where there was none
    raise ModelError(
        f"{repo}: the Hugging Face hub can't be reached, and the model isn't whole on this machine: {fault}. Check the network, proxy "
        "and HF_ENDPOINT; or fetch the model elsewhere and name its folder or .gguf file"
    ) from fault


def _model_of(folder: Path, wanted: Sequence[str]) -> Path:
    if wanted[0].endswith(".gguf"):
        return folder / wanted[0]
    weight_files(folder)  # raises where the index names a shard that isn't there
    return folder


def _recorded(record_file: Path) -> Path | None:
    record = _read_record(record_file)
    return Path(record.model) if record is not None else None


def recorded_bytes(record_file: Path) -> int:
    """The size of a recorded download's files, which are in the hub's own cache; 0 where they aren't there as recorded."""
    record = _read_record(record_file)
    return sum(record.sizes.values()) if record is not None else 0


def _read_record(record_file: Path) -> _Record | None:
    try:
        record = msgspec.json.decode(record_file.read_bytes(), type=_Record)
        whole = all(Path(path).stat().st_size == size for path, size in record.sizes.items())
    except (OSError, msgspec.MsgspecError):
        return None
    return record if whole else None


def choose_files(repo: str, available: Sequence[str], file: str | None) -> list[str]:
    """Which paths of a repository make one model: the named file, else configuration and safetensors, else the only .gguf file.

    Raises ModelError where that is nothing, or several.
    """
    ggufs = sorted(name for name in available if name.endswith(".gguf"))
    listed = f"its .gguf files are: {', '.join(ggufs)}" if ggufs else "it has no .gguf files"
    if file is not None:
        if not file.endswith(".gguf"):
            raise ModelError(f"{repo}:{file}: after the colon comes the name of a .gguf file; {listed}")
        if file not in available:
            raise ModelError(f"{repo}: there is no file {file!r}; {listed}")
        return [file]
    weights = _weight_files(available)
    if "config.json" in available and weights:
        return [name for name in SETTINGS_FILES if name in available] + weights
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise ModelError(f"{repo}: choose one of its files, as in {repo}:{ggufs[0]}; {listed}")
    raise ModelError(f"{repo}: there are neither config.json with {SINGLE_FILE} (or its shards) nor a .gguf file in it")


def _weight_files(available: Sequence[str]) -> list[str]:
    if INDEX_FILE in available:
        # A repository may hold a second copy of the weights in its maker's own layout (`consolidated…`), which the index doesn't name.
        shards = [name for name in available if "/" not in name and name.endswith(".safetensors") and not name.startswith("consolidated")]
        return [INDEX_FILE, *sorted(name for name in shards if name != SINGLE_FILE)]
    return [SINGLE_FILE] if SINGLE_FILE in available else []


class HuggingFace:
    """The hub itself, with huggingface_hub's configuration: HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE."""

    def __init__(self, progress: bool) -> None:
        self._progress = progress

    def list_files(self, repo: str) -> tuple[str, list[str]]:
        import huggingface_hub  # 0.3 s that no local model needs

        try:
            info = huggingface_hub.HfApi().model_info(repo)
        except Exception as fault:  # each version of the library has its own kinds, down to its HTTP client's
            raise _explained(repo, fault) from fault
        return info.sha, [sibling.rfilename for sibling in info.siblings or ()]

    def download(self, repo: str, commit: str, files: Sequence[str]) -> Path:
        import huggingface_hub
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

        silenced = not self._progress and not are_progress_bars_disabled()
        if silenced:
            disable_progress_bars()
        try:
            patterns = [glob.escape(name) for name in files]
            return Path(huggingface_hub.snapshot_download(repo, revision=commit, allow_patterns=patterns))
        except Exception as fault:
            raise _explained(repo, fault) from fault
        finally:
            if silenced:
                enable_progress_bars()

    def cached(self, repo: str) -> Path | None:
        import huggingface_hub

        try:
            return Path(huggingface_hub.snapshot_download(repo, local_files_only=True))
        except Exception:  # whatever the reason, there is nothing to use
            return None


def _explained(repo: str, fault: Exception) -> Exception:
    """What a fault of huggingface_hub means to us: a ModelError where asking again won't help, the system's own fault, or Unreachable."""
    from huggingface_hub import errors

    reason = str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__
    if isinstance(fault, errors.GatedRepoError):
        return ModelError(f"{repo}: its makers ask for consent: accept their terms on the model's page, then set HF_TOKEN")
    if isinstance(fault, errors.RepositoryNotFoundError):
        return ModelError(f"{repo}: the hub has no such model, or it is private: check the name, or set HF_TOKEN")
    if isinstance(fault, OSError) and fault.errno is not None and fault.filename is not None:
        return ModelError(f"{repo}: {fault.filename}: {os.strerror(fault.errno)}")
    return Unreachable(reason)
