"""What the benchmarks make or say of models."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from numpy.typing import NDArray

import ceilings
import shapes
from peers import checkpoint
from sterna.config.memory import available_memory_bytes
from sterna.executor.base import ROLE_GENERATED, WANT_SAMPLE, ExecutorInfo, ForwardBatch, StepOutput
from sterna.models.resolve import resolve_model
from tiny_models import write_hf


def test_a_peers_checkpoint_is_the_model_rounded_to_bfloat16(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = write_hf(tmp_path / "theirs", "llama-untied")
    resolved = resolve_model(str(theirs), cache_dir=tmp_path / "cache", context_length=None, progress=False)
    checkpoint.write(resolved, tmp_path / "made")
    original = safetensors.torch.load_file(theirs / "model.safetensors")
    written = safetensors.torch.load_file(tmp_path / "made" / "model.safetensors")
    assert set(written) == set(original)
    for name, values in original.items():
        assert torch.equal(written[name], values.to(torch.bfloat16)), name
    ids = torch.arange(3, 40)[None]
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval() for folder in (theirs, tmp_path / "made")]
    with torch.inference_mode():
        assert torch.equal(models[0](ids).logits, models[1](ids).logits)
    assert (tmp_path / "made" / "tokenizer.json").read_bytes() == (resolved / "tokenizer.json").read_bytes()


def test_only_plain_llama_models_are_handed_to_a_peer(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "theirs", "llama-llama3")
    resolved = resolve_model(str(folder), cache_dir=tmp_path / "cache", context_length=None, progress=False)
    with pytest.raises(ValueError, match="plain llama"):
        checkpoint.write(resolved, tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("name", "billions"), [("Qwen3-0.6B", 0.596), ("Llama-3.2-1B", 1.236), ("Llama-3.1-8B", 8.03)])
def test_a_shape_has_its_models_number_of_weights(name: str, billions: float) -> None:
    assert shapes.work_of(shapes.SHAPES[name]).weights / 1e9 == pytest.approx(billions, rel=0.002)


def test_least_work_counts_what_a_step_can_not_do_without() -> None:
    work = shapes.Work(weights=1000, matrix=600, head=400, kv_per_token=10, heads_width=8)
    assert work.step_bytes(rows=2, context=5, bits=(8, 16)) == 600 + 400 * 2 + 2 * 5 * 10 * 2
    assert work.operations(tokens=3, samples=1, attended=6) == 2 * 3 * 600 + 2 * 400 + 4 * 6 * 8


def test_a_shape_that_memory_can_not_hold_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "available_memory_bytes", lambda: 10**9)
    with pytest.raises(shapes.Unavailable, match=r"needs about .* GB"):
        shapes.make_executor("Llama-3.1-8B", "none", 16, 1)
    assert available_memory_bytes() > 0


@pytest.mark.parametrize("quantization", shapes.BITS)
def test_random_weights_take_as_many_bits_as_is_said_and_give_numbers(quantization: str) -> None:
    rope = shapes.RopeSpec(1e4, 32)
    tiny = shapes._llama((2, 64, 512, 2, 1, 32, 320), rope, 1e-5, tied=False)
    weights = shapes.RandomWeights(tiny, quantization, 1)  # type: ignore[arg-type]
    for name, record in weights.header.matrices.items():
        bits = shapes.BITS[quantization][name in ("embed", "head")]
        assert record.nbytes * 8 == record.rows * record.cols * bits, name
    args = shapes.ServerArgs(threads=1, max_total_tokens=64, context_length=64)
    executor = shapes.make(args, shapes._facts(tiny), tiny, weights)
    driver = shapes.Driver(executor, tiny.vocab_size)
    driver.start(2, 20)
    driver.prompt(18, sample=False)
    first = driver.decode(np.ones(2, dtype=np.int32))
    assert len(driver.decode(first)) == 2
    executor.shutdown()


class _Recorder:
    """An executor that answers token 5 to whoever asks, and keeps the batches."""

    info = ExecutorInfo("recorder", "", "cpu", (4096,), (None,), 16, 64, 4096, True, "none", 1)

    def __init__(self) -> None:
        self.batches: list[ForwardBatch] = []

    def bind(self, *_: object) -> None: ...

    def release(self, _: int) -> None: ...

    def submit(self, batch: ForwardBatch) -> "_Recorder":
        self.batches.append(batch)
        return self

    def result(self) -> StepOutput:
        batch = self.batches[-1]
        ids: NDArray[np.int32] = np.full(int((batch.wants == WANT_SAMPLE).sum()), 5, dtype=np.int32)
        return StepOutput(batch.step, ids, np.zeros(batch.num_rows + 1, dtype=np.int32), np.zeros(batch.num_rows, dtype=np.uint8))


def test_the_driver_runs_prompts_in_chunks_and_then_all_rows_together_each_in_slots_of_its_own() -> None:
    recorder = _Recorder()
    driver = shapes.Driver(recorder, 100)  # type: ignore[arg-type]
    driver.start(3, 700)
    driver.prompt(600, sample=False)
    assert [len(batch.input_ids) for batch in recorder.batches] == [512, 88] * 3
    ids = driver.decode(driver.decode(np.ones(3, dtype=np.int32)))
    assert ids.tolist() == [5, 5, 5]
    written = np.concatenate([batch.groups[0].out_cache_loc for batch in recorder.batches])
    assert len(written) == len(set(written.tolist())) == 3 * 602
    last = recorder.batches[-1]
    assert last.roles.tolist() == [ROLE_GENERATED] * 3
    assert (last.prefix_lens.tolist(), last.seq_lens.tolist()) == ([601] * 3, [602] * 3)
    assert last.row_splits.tolist() == [0, 1, 2, 3]
    assert all(after.step == before.step + 1 for before, after in pairwise(recorder.batches))


def test_memory_is_taken_by_a_token_in_the_highest_page() -> None:
    recorder = _Recorder()
    driver = shapes.Driver(recorder, 100)  # type: ignore[arg-type]
    driver.take_memory()
    assert [batch.groups[0].out_cache_loc.tolist() for batch in recorder.batches] == [[4096 - 16]]


@pytest.mark.parametrize("compiler", [None, "/bin/false"], ids=["the system's", "none that works"])
def test_ceilings_are_measured_with_and_without_a_compiler(compiler: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler is not None:
        monkeypatch.setenv("CXX", compiler)
    found = ceilings.measure(threads=1, seconds=0.003)
    assert found["by"] == "NumPy" or compiler is None
    assert set(found["read_gb_s"]) == {"64 MB", "512 MB"}
    assert all(speed > 0 for speed in found["read_gb_s"].values())
    assert all(rate > 0 for kind in ("int8_tops", "bf16_tflops", "fp32_tflops") for rate in found[kind].values())
    assert found["fp32_tflops"]


def test_a_forced_instruction_set_has_its_own_ceiling() -> None:
    rates = {"int8_tops": {"portable": 1.0, "avx2": 2.0, "avx512": 5.0}, "bf16_tflops": {"avx512": 3.0}, "fp32_tflops": {}}
    assert ceilings.best(rates, "int8_tops", "avx2") == 2.0
    assert ceilings.best(rates, "int8_tops", "avx512vnni") == 5.0
    assert ceilings.best(rates, "int8_tops", None) == 5.0
    assert ceilings.best(rates, "bf16_tflops", "avx2") is None
    assert ceilings.best(rates, "bf16_tflops", "avx512vnni") is None
    assert ceilings.best(rates, "fp32_tflops", None) is None


def test_integers_in_tiles_have_the_tiles_ceiling_and_all_else_has_avx512_s() -> None:
    rates = {"int8_tops": {"avx512": 5.0, "amx": 9.0}, "bf16_tflops": {"avx512": 3.0, "amx": 8.0}, "fp32_tflops": {"avx512": 1.0}}
    found = [ceilings.best(rates, kind, "amx-int8") for kind in ("int8_tops", "bf16_tflops", "fp32_tflops")]
    assert found == [9.0, 3.0, 1.0]


def test_without_bfloat16_instructions_bf16_weights_are_held_against_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STERNA_ISA", "avx2")
    limits = {"read_gb_s": {"64 MB": 10.0}, "int8_tops": {"avx2": 2.0}, "bf16_tflops": {"avx512": 8.0}, "fp32_tflops": {"avx2": 1.0}}
    line = {"batch": 1, "gb_s": 5.0, "tera_ops_s": 0.5}
    assert shapes.against(line, limits, "none") == {**line, "gb_s_share": 0.5, "tera_ops_s_share": 0.5}
    assert shapes.against(line, limits, "int4")["tera_ops_s_share"] == 0.25
