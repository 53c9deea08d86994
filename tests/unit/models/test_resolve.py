"""A model's name becomes one folder, whole, made once, whoever else is starting."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from sterna.config.model_config import GenerationDefaults, ModelConfig
from sterna.errors import ConfigError, ModelError
from sterna.models.resolve import KEEP_DAYS, resolve_model
from sterna.models.spec import ModelSpec, RopeDynamic
from sterna.models.weights import WeightStore
from sterna.text.tokenizer import Tokenizer
from tiny_gguf import write_gguf
from tiny_models import CHAT_TEMPLATE, VARIANTS, tokenizer, weights

LOCK = "tiny.lock"
CONTENT = {"facts.json", "tokenizer.json", "chat_template.jinja", "spec.json", "weights.json"}


def write_folder(folder: Path, variant: str = "llama", **config: object) -> Path:
    """As `tiny_models.write_hf`, without torch."""
    folder.mkdir(parents=True)
    settings = {**VARIANTS[variant].config, "model_type": VARIANTS[variant].model_type, **config}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(tokenizer().to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    safetensors_numpy.save_file(weights(variant), folder / "model.safetensors")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "tiny")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def resolve(model: Path, cache: Path, context_length: int | None = None) -> Path:
    return resolve_model(str(model), cache_dir=cache, context_length=context_length, progress=False)


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_a_resolved_folder_has_all_that_the_processes_open(tmp_path: Path, cache: Path, form: str) -> None:
    model = write_folder(tmp_path / "tiny") if form == "folder" else write_gguf(tmp_path / "tiny.gguf", "llama")
    folder = resolve(model, cache)
    assert names(folder) == CONTENT
    facts = ModelConfig.load(folder)
    assert (facts.name, facts.source, facts.family, facts.weights_dtype) == (model.name, str(model), "llama", "F32")
    assert (facts.vocab_size, facts.context_len, facts.bos_token_id, facts.eos_token_ids) == (336, 512, 1, (2,))
    assert (facts.bos_token, facts.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert facts.num_parameters == sum(values.size for values in weights("llama").values())
    assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert Tokenizer.load(folder).encode("the tern", add_special_tokens=False) == tokenizer().encode("the tern").ids
    assert len(msgspec.json.decode((folder / "spec.json").read_bytes(), type=ModelSpec).layers) == 3
    np.testing.assert_array_equal(
        WeightStore.open(folder).float32("layers.1.attn.q"), weights("llama")["model.layers.1.self_attn.q_proj.weight"]
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tiny_variant_resolves(tmp_path: Path, cache: Path, variant: str) -> None:
    facts = ModelConfig.load(resolve(write_folder(tmp_path / variant, variant), cache))
    assert facts.family == VARIANTS[variant].family


def test_the_dominating_type_of_matrices_is_told(tmp_path: Path, cache: Path) -> None:
    facts = ModelConfig.load(resolve(write_gguf(tmp_path / "tiny.gguf", "llama", quant="Q4_1"), cache))
    assert facts.weights_dtype == "Q4_1"


def test_a_second_start_makes_nothing_anew(model: Path, cache: Path) -> None:
    folder = resolve(model, cache)
    made = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert resolve(model, cache) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == made


def test_a_second_start_loads_neither_numpy_nor_tokenizers(model: Path, cache: Path) -> None:
    folder = resolve(model, cache)
    script = (
        "import sys; from pathlib import Path; from sterna.models.resolve import resolve_model\n"
        "print(resolve_model(sys.argv[1], cache_dir=Path(sys.argv[2]), context_length=None))\n"
        "print(sorted({'numpy', 'tokenizers', 'gguf', 'huggingface_hub', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(model), str(cache)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(folder), "[]"]


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json", "model.safetensors"])
def test_a_changed_file_of_the_model_is_noticed(model: Path, cache: Path, file: str) -> None:
    before = resolve(model, cache)
    path = model / file
    # A file replaced by one of the same size and times is another file still.
    content, times = (path.read_bytes(), path.stat()) if path.exists() else (b"{}", model.stat())
    path.with_suffix(".new").write_bytes(content)
    os.utime(path.with_suffix(".new"), ns=(times.st_atime_ns, times.st_mtime_ns))
    path.with_suffix(".new").replace(path)
    assert resolve(model, cache) != before


def test_context_lengths_have_folders_of_their_own(model: Path, cache: Path) -> None:
    folders = {length: resolve(model, cache, length) for length in (None, 100, 200)}
    assert len(set(folders.values())) == 3
    assert [ModelConfig.load(folder).context_len for folder in folders.values()] == [512, 100, 200]


@pytest.mark.parametrize("damage", ["facts", "half", "missing", "other version"])
def test_a_damaged_folder_is_made_anew(model: Path, cache: Path, damage: str) -> None:
    folder = resolve(model, cache)
    match damage:
        case "facts":
            (folder / "facts.json").write_text("{")
        case "half":
            (folder / "facts.json").unlink()
        case "missing":
            (folder / "tokenizer.json").unlink()
        case "other version":
            change(folder / "facts.json", version=-1)
    assert resolve(model, cache) == folder
    assert names(folder) == CONTENT
    assert ModelConfig.load(folder).vocab_size == 336
    assert names(cache / "resolved") == {folder.name, LOCK}


def test_what_a_killed_start_has_left_is_removed_and_never_used(model: Path, cache: Path) -> None:
    folder = resolve(model, cache)
    folder.rename(folder.with_name(folder.name + ".part-killed"))
    assert resolve(model, cache) == folder
    assert names(cache / "resolved") == {folder.name, LOCK}


def aged(folder: Path, days: float) -> Path:
    then = time.time() - days * 86_400
    os.utime(folder, (then, then))
    return folder


def test_making_a_folder_deletes_those_of_its_name_that_no_start_has_used_for_a_month(model: Path, cache: Path) -> None:
    root = cache / "resolved"
    unused, recent, revived = (resolve(model, cache, context) for context in (100, 101, 102))
    namesake = root / ("tiny-big-" + unused.name.removeprefix("tiny-"))
    shutil.copytree(unused, namesake)
    part = root / (unused.name + ".part-killed")
    part.mkdir()
    for folder in (unused, revived, namesake, part):
        aged(folder, KEEP_DAYS + 1)
    aged(recent, KEEP_DAYS - 1)
    assert resolve(model, cache, 102) == revived
    assert unused.exists(), "a start that makes nothing deletes nothing"
    made = resolve(model, cache, 103)
    assert names(root) == {LOCK} | {folder.name for folder in (recent, revived, namesake, made)}


def test_starts_at_once_agree_on_one_folder(model: Path, cache: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from sterna.models.resolve import resolve_model\n"
        "sys.stdin.read()\n"
        "folder = resolve_model(sys.argv[1], cache_dir=Path(sys.argv[2]), context_length=None)\n"
        "print(folder, (folder / 'facts.json').stat().st_ino)"
    )
    command = [sys.executable, "-c", script, str(model), str(cache)]
    starts = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    results = [process.communicate() for process in starts]
    assert [process.returncode for process in starts] == [0] * 4, results
    assert len({out for out, _ in results}) == 1


def test_a_failed_start_leaves_nothing(model: Path, cache: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelError):
        resolve(model, cache)
    assert [name for name in names(cache / "resolved") if not name.endswith(".lock")] == []


def test_more_context_than_the_model_has_is_refused_with_numbers(model: Path, cache: Path) -> None:
    assert ModelConfig.load(resolve(model, cache, 512)).context_len == 512
    with pytest.raises(ConfigError, match=r"--context-length 513 is more than the model's 512"):
        resolve(model, cache, 513)


@pytest.mark.parametrize(("variant", "factor"), [("llama-dynamic", 2), ("llama-linear", 4)])
def test_rope_scaling_stretches_the_context_by_its_factor(tmp_path: Path, cache: Path, variant: str, factor: int) -> None:
    model = write_folder(tmp_path / "tiny", variant)
    folder = resolve(model, cache, 512 * factor)
    assert ModelConfig.load(folder).context_len == 512 * factor
    with pytest.raises(ConfigError, match=rf"{512 * factor + 1} is more than the model's {512 * factor} tokens \(512, stretched"):
        resolve(model, cache, 512 * factor + 1)


def test_dynamic_rope_is_fixed_by_the_configured_context(tmp_path: Path, cache: Path) -> None:
    model = write_folder(tmp_path / "tiny", "llama-dynamic")
    lengths = []
    for wished in (300, None, 1000):
        spec = msgspec.json.decode((resolve(model, cache, wished) / "spec.json").read_bytes(), type=ModelSpec)
        rope = spec.layers[0].mixer.rope
        assert rope is not None
        assert isinstance(rope.scaling, RopeDynamic)
        lengths.append(rope.scaling.context_len)
    assert lengths == [300, 512, 1000]


def added(count: int, *, special: bool = False) -> Callable[[dict[str, Any]], None]:
    """A change to a tokenizer.json: so many added tokens that it has `count` in all."""

    def change(document: dict[str, Any]) -> None:
        known = len(document["model"]["vocab"])
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
        document["added_tokens"] += [{"id": i, "content": f"<|more{i}|>", **flags} for i in range(known, count)]

    return change


def far_token(document: dict[str, Any]) -> None:
    document["model"]["vocab"]["far"] = 5000


def far_beginning(document: dict[str, Any]) -> None:
    """Put before every text, and not in the vocabulary."""
    sequence = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<s>": {"id": "<s>", "ids": [400], "tokens": ["<s>"]}}
    document["post_processor"] = {"type": "TemplateProcessing", "single": sequence, "pair": sequence, "special_tokens": special}


@pytest.mark.parametrize(("larger", "tokens"), [(added(337), 337), (far_token, 5001), (far_beginning, 401)])
def test_a_tokenizer_with_ids_beyond_the_embedding_is_refused_with_both_sizes(
    model: Path, cache: Path, larger: Callable[[dict[str, Any]], None], tokens: int
) -> None:
    document = json.loads(tokenizer().to_str())
    larger(document)
    (model / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match=rf"tiny: the tokenizer has {tokens} tokens .*, but the embedding has 336 rows"):
        resolve(model, cache)


def test_a_special_token_of_a_larger_sibling_is_left_out_and_said(model: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    document = json.loads(tokenizer().to_str())
    added(340, special=True)(document)
    (model / "tokenizer.json").write_text(json.dumps(document))
    kept = Tokenizer.load(resolve(model, cache))
    assert kept.vocab_size <= 336
    assert "left out: the embedding has 336 rows" in caplog.text
    text = document["added_tokens"][-1]["content"]
    ids = kept.encode(text, add_special_tokens=False)
    assert len(ids) > 1
    assert kept.decode(ids) == text


@pytest.mark.parametrize("more", [["word"], ["[PAD336]"], ["the", "the"], ["", ""], ["[PAD336]", "word"]])
def test_a_gguf_that_lists_more_tokens_than_the_embedding_has_rows_is_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """Whether or not those too many can ever come out of a text."""
    for change_list, filler in ((gguf.GGUFWriter.add_token_list, more), (gguf.GGUFWriter.add_token_types, [1] * len(more))):
        longer = lambda self, values, write=change_list, filler=filler: write(self, [*values, *filler])  # noqa: E731
        monkeypatch.setattr(gguf.GGUFWriter, change_list.__name__, longer)
    model = write_gguf(tmp_path / "tiny.gguf", "llama")
    tokens = 336 + len(more)
    with pytest.raises(ModelError, match=rf"tiny\.gguf: the tokenizer has {tokens} tokens .*, but the embedding has 336 rows"):
        resolve(model, cache)


def test_an_embedding_with_more_rows_than_there_are_tokens_is_padded_and_fine(model: Path, cache: Path) -> None:
    assert Tokenizer.from_json(tokenizer().to_str()).vocab_size < 336
    assert ModelConfig.load(resolve(model, cache)).vocab_size == 336


def test_a_folder_without_a_tokenizer_is_refused_with_advice(model: Path, cache: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tiny: there is no tokenizer\.json; make one"):
        resolve(model, cache)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_a_damaged_settings_file_is_named(model: Path, cache: Path, file: str, content: bytes) -> None:
    (model / file).write_bytes(content)
    with pytest.raises(ModelError, match=r"tiny.*" + ("" if file == "tokenizer.json" else file)):
        resolve(model, cache)


def test_an_architecture_that_isnt_supported_is_refused_by_name_with_those_that_are(model: Path, cache: Path) -> None:
    change(model / "config.json", model_type="mamba", architectures=["MambaForCausalLM"])
    with pytest.raises(ModelError, match=r"tiny: .*MambaForCausalLM.*LlamaForCausalLM"):
        resolve(model, cache)


@pytest.mark.parametrize(
    ("tensor", "values", "problem"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        ("model.norm.weight", np.ones(63, np.float32), r"model\.norm\.weight has shape \(63,\), expected \(64,\)"),
    ],
)
def test_a_missing_or_misshapen_tensor_is_named(model: Path, cache: Path, tensor: str, values: np.ndarray | None, problem: str) -> None:
    tensors = {name: value for name, value in weights("llama").items() if name != tensor}
    safetensors_numpy.save_file(tensors | ({} if values is None else {tensor: values}), model / "model.safetensors")
    with pytest.raises(ModelError, match="tiny.*" + problem):
        resolve(model, cache)


def test_a_part_of_a_split_gguf_is_refused_with_advice(tmp_path: Path, cache: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"part\.gguf: one of 3 parts.*--merge"):
        resolve(tmp_path / "part.gguf", cache)


def test_generation_config_gives_defaults_whatever_do_sample_says(model: Path, cache: Path) -> None:
    settings = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.1}
    change(model / "generation_config.json", do_sample=False, eos_token_id=[2, 0], **settings)
    facts = ModelConfig.load(resolve(model, cache))
    assert facts.generation == GenerationDefaults(**settings)
    assert facts.eos_token_ids == (2, 0)


@pytest.mark.parametrize(("setting", "value"), [("temperature", "hot"), ("temperature", -1), ("top_p", 1.5), ("top_k", True), ("min_p", 2)])
def test_a_default_that_no_request_could_have_is_refused(model: Path, cache: Path, setting: str, value: object) -> None:
    change(model / "generation_config.json", **{setting: value})
    with pytest.raises(ModelError, match=rf"tiny: generation_config\.json: {setting} is {value!r}"):
        resolve(model, cache)


def test_end_tokens_beyond_the_embedding_are_left_out(model: Path, cache: Path) -> None:
    change(model / "generation_config.json", eos_token_id=[2, 5000])
    assert ModelConfig.load(resolve(model, cache)).eos_token_ids == (2,)


def test_a_cache_that_cant_be_written_to_is_said(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match=r"can't keep files in the cache.*STERNA_CACHE_DIR"):
        resolve(model, tmp_path / "file")


def test_the_weights_may_be_shards(tmp_path: Path, cache: Path) -> None:
    model = write_folder(tmp_path / "tiny")
    (model / "model.safetensors").unlink()
    by_shard: dict[str, dict[str, np.ndarray]] = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for i, (name, values) in enumerate(weights("llama").items()):
        by_shard[f"model-{i % 2 + 1}.safetensors"][name] = values
    for shard, tensors in by_shard.items():
        safetensors_numpy.save_file(tensors, model / shard)
    weight_map = {name: shard for shard, tensors in by_shard.items() for name in tensors}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    folder = resolve(model, cache)
    np.testing.assert_array_equal(WeightStore.open(folder).float32("embed"), weights("llama")["model.embed_tokens.weight"])
    shutil.rmtree(folder)
    (model / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2\.safetensors: the shard is missing"):
        resolve(model, cache)
