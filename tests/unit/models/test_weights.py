"""Stored tensors -> canonical weights, from files that transformers and the gguf package wrote."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

import tiny_models
from sterna.errors import ModelError
from sterna.files.gguf import GGUFFile, GGUFTensor
from sterna.files.safetensors import SafetensorsFolder
from sterna.models.spec import ModelSpec, weight_shapes
from sterna.models.stored import Rows, Unpermute
from sterna.models.weights import WeightEntry, WeightIndex, WeightStore, index_for_gguf, index_for_hf
from tiny_gguf import has_gguf, write_gguf
from tiny_reading import open_gguf, open_hf, reopened
from unit.models.canonical import canonical_weights

pytest.importorskip("transformers")

IN_GGUF = [name for name in tiny_models.VARIANTS if has_gguf(name)]


def assert_holds(store: WeightStore, spec: ModelSpec, expected: dict[str, tiny_models.FloatArray]) -> None:
    assert list(store.names()) == list(weight_shapes(spec))
    assert set(store.names()) == set(expected)
    for name in store.names():
        values = store.float32(name)
        assert values.shape == store.shape(name)
        assert values.dtype == np.float32
        assert values.flags.c_contiguous
        assert values.flags.writeable
        np.testing.assert_array_equal(values, expected[name], err_msg=name)
        if values.ndim == 2:
            dtype, rows, shape = store.raw(name)
            assert (dtype, shape) == ("F32", values.shape)
            np.testing.assert_array_equal(rows.view(np.float32), values, err_msg=name)


@pytest.mark.parametrize("name", tiny_models.VARIANTS)
def test_a_hugging_face_folder_yields_the_weights_that_were_put_in(name: str, tmp_path: Path) -> None:
    spec, family, source = open_hf(tiny_models.write_hf(tmp_path / "hf", name, sharded=name == "llama"))
    assert len({tensor.file for tensor in source.tensors.values()}) == (6 if name == "llama" else 1)
    assert_holds(reopened(index_for_hf(spec, family, source), tmp_path / "resolved"), spec, canonical_weights(name))


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_gguf_file_yields_the_weights_that_were_put_in(name: str, tmp_path: Path) -> None:
    spec, family, source = open_gguf(write_gguf(tmp_path / "tiny.gguf", name))
    assert_holds(reopened(index_for_gguf(spec, family, source), tmp_path / "resolved"), spec, canonical_weights(name))


@pytest.mark.parametrize("name", IN_GGUF)
def test_both_formats_of_one_model_give_one_spec(name: str, tmp_path: Path) -> None:
    from sterna.models.rope import inverse_frequencies

    ours, _, _ = open_hf(tiny_models.write_hf(tmp_path / "hf", name))
    theirs, _, _ = open_gguf(write_gguf(tmp_path / "tiny.gguf", name))
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert (a.mixer.rope is None) == (b.mixer.rope is None)
        if a.mixer.rope is None or b.mixer.rope is None:
            continue
        assert a.mixer.rope.dim == b.mixer.rope.dim
        frequencies, scale = inverse_frequencies(a.mixer.rope)
        stored, stored_scale = inverse_frequencies(b.mixer.rope)
        np.testing.assert_allclose(stored, frequencies, rtol=1e-6)  # GGUF stores numbers as float32
        assert stored_scale == pytest.approx(scale, rel=1e-6)
    assert_alike(_without_ropes(ours), _without_ropes(theirs))


def _without_ropes(spec: ModelSpec) -> ModelSpec:
    replace = msgspec.structs.replace
    return replace(spec, layers=tuple(replace(layer, mixer=replace(layer.mixer, rope=None)) for layer in spec.layers))


def assert_alike(a: object, b: object) -> None:
    """The same structure, its numbers the same as far as float32 tells."""
    if isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-6)
    elif isinstance(a, msgspec.Struct):
        assert type(a) is type(b)
        for name in a.__struct_fields__:
            assert_alike(getattr(a, name), getattr(b, name))
    elif isinstance(a, tuple) and isinstance(b, tuple):
        for left, right in zip(a, b, strict=True):
            assert_alike(left, right)
    else:
        assert a == b


RAW = {
    "llama": ["embed", "layers.0.attn.q", "layers.1.attn.k", "layers.1.attn.v", "layers.2.mlp.down"],
    "qwen3-moe": ["layers.0.attn.q", "layers.0.mlp.experts.0.gate", "layers.1.mlp.experts.3.up", "layers.2.mlp.experts.2.down"],
    "phi3": ["layers.0.attn.q", "layers.1.attn.k", "layers.2.attn.v", "layers.0.mlp.gate", "layers.1.mlp.up", "layers.1.mlp.down"],
}


@pytest.mark.parametrize("variant", RAW)
@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_raw_rows_are_the_bytes_of_canonical_rows_and_views_where_no_row_moves(variant: str, quant: str, tmp_path: Path) -> None:
    import gguf

    spec, family, source = open_gguf(write_gguf(tmp_path / "tiny.gguf", variant, quant=quant))
    store = reopened(index_for_gguf(spec, family, source), tmp_path / "resolved")
    kind = gguf.GGMLQuantizationType[quant]
    expected = canonical_weights(variant)
    for name in RAW[variant]:
        dtype, rows, shape = store.raw(name)
        assert (dtype, shape) == (quant, store.shape(name))
        # Rows are quantised one by one, so that moving them and quantising commute.
        np.testing.assert_array_equal(rows, gguf.quants.quantize(expected[name], kind).view(np.uint8), err_msg=name)
        np.testing.assert_array_equal(store.float32(name), gguf.quants.dequantize(rows, kind), err_msg=name)
        assert rows.flags.owndata == (variant == "llama" and name.endswith((".q", ".k")))


def test_raw_rows_of_safetensors_are_the_numbers_as_stored(tmp_path: Path) -> None:
    spec, family, source = open_hf(tiny_models.write_hf(tmp_path / "hf", "llama", dtype="bfloat16"))
    store = reopened(index_for_hf(spec, family, source), tmp_path / "resolved")
    dtype, rows, shape = store.raw("layers.0.mlp.up")
    assert (dtype, rows.shape, shape) == ("BF16", (128, 2 * 64), (128, 64))
    np.testing.assert_array_equal((rows.view("<u2").astype(np.uint32) << 16).view(np.float32), store.float32("layers.0.mlp.up"))


def test_a_vector_has_no_raw_rows(tmp_path: Path) -> None:
    spec, family, source = open_gguf(write_gguf(tmp_path / "tiny.gguf", "llama"))
    store = reopened(index_for_gguf(spec, family, source), tmp_path / "resolved")
    with pytest.raises(ValueError, match=r"final_norm of shape \(64,\)"):
        store.raw("final_norm")


@pytest.mark.parametrize("quant", ["F32", "Q4_1"])
def test_rows_of_a_fused_tensor_are_read_alone_and_may_then_be_permuted(quant: str, tmp_path: Path) -> None:
    import gguf

    _, _, source = open_gguf(write_gguf(tmp_path / "tiny.gguf", "llama", quant=quant))
    stored = source.tensors["token_embd.weight"]
    entry = WeightEntry(str(source.path), stored.name, quant, (32, 64), stored.shape, (Rows(64), Unpermute(2)))
    store = WeightStore(WeightIndex("gguf", str(source.path), {"part": entry}), source)
    order = [*range(64, 80, 2), *range(65, 80, 2), *range(80, 96, 2), *range(81, 96, 2)]
    np.testing.assert_array_equal(store.float32("part"), source.float32(stored.name)[order])
    kind = gguf.GGMLQuantizationType[quant]
    np.testing.assert_array_equal(gguf.quants.dequantize(store.raw("part").rows, kind), store.float32("part"))


PAIRED = ("llama", "mistral", "mixtral", "granite", "smollm3")


@pytest.mark.parametrize("name", [*PAIRED, "qwen2", "qwen3", "qwen3-moe", "gemma2", "gemma3", "phi3", "olmo2"])
def test_queries_and_keys_alone_are_permuted_in_gguf_and_not_for_every_architecture(name: str, tmp_path: Path) -> None:
    spec, family, source = open_gguf(write_gguf(tmp_path / "tiny.gguf", name))
    entries = index_for_gguf(spec, family, source).entries
    permuted = {name: t for name, entry in entries.items() for t in entry.transforms if isinstance(t, Unpermute)}
    layers = range(len(spec.layers)) if name in PAIRED else ()
    assert permuted == {f"layers.{i}.attn.{part}": Unpermute(heads) for i in layers for part, heads in (("q", 4), ("k", 2))}


def with_tensors(source: GGUFFile, **changes: GGUFTensor | None) -> GGUFFile:
    tensors = {**source.tensors, **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
    return GGUFFile(source.path, source.metadata, {k: v for k, v in tensors.items() if v is not None}, source._data)


def test_a_tensor_that_is_missing_misshapen_or_surplus_is_named(tmp_path: Path) -> None:
    spec, family, source = open_gguf(write_gguf(tmp_path / "tiny.gguf", "llama"))
    up = source.tensors["blk.1.ffn_up.weight"]
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight is missing.*\(128, 64\)"):
        index_for_gguf(spec, family, with_tensors(source, blk__1__ffn_up__weight=None))
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight has shape \(64, 128\), expected \(128, 64\)"):
        index_for_gguf(spec, family, with_tensors(source, blk__1__ffn_up__weight=replace(up, shape=(64, 128))))
    for name in ("blk.1.ffn_up.bias", "blk.3.attn_q.weight", "blk.0.attn_q_norm.weight", "blk.0.attn_q.scale"):
        with pytest.raises(ModelError, match=f"{name} of shape"):
            index_for_gguf(spec, family, with_tensors(source, **{name: replace(up, name=name)}))


def test_stored_rope_tables_are_no_surplus(tmp_path: Path) -> None:
    spec, family, source = open_gguf(write_gguf(tmp_path / "tiny.gguf", "llama"))
    table = replace(source.tensors["blk.0.attn_norm.weight"], shape=(8,))
    ours = with_tensors(source, **{"rope_freqs.weight": table, "blk.0.attn_rot_embd.weight": table})
    assert index_for_gguf(spec, family, ours).entries == index_for_gguf(spec, family, source).entries
    hf_spec, hf_family, folder = open_hf(tiny_models.write_hf(tmp_path / "hf", "llama"))
    norm = folder.tensors["model.norm.weight"]
    more = {**folder.tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": norm}
    assert index_for_hf(hf_spec, hf_family, SafetensorsFolder(folder.folder, more, {})).entries
    with pytest.raises(ModelError, match=r"q_proj\.bias"):
        index_for_hf(hf_spec, hf_family, SafetensorsFolder(folder.folder, {**more, "model.layers.0.self_attn.q_proj.bias": norm}, {}))


def test_a_file_that_changed_after_it_was_indexed_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama")
    spec, family, source = open_gguf(path)
    store = reopened(index_for_gguf(spec, family, source), tmp_path)
    assert "head" not in store
    write_gguf(path, "llama", quant="Q8_0")
    with pytest.raises(ModelError, match="not what it was"):
        WeightStore.open(tmp_path)


def test_a_folder_without_an_index_or_with_a_damaged_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a resolved model folder"):
        WeightStore.open(tmp_path)
    (tmp_path / "weights.json").write_text("{}")
    with pytest.raises(ModelError, match="not a resolved model folder"):
        WeightStore.open(tmp_path)
