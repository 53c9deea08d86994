"""A spec says all there is to say: run by thirty lines of NumPy, it gives the tokens that transformers and llama.cpp give.

The engines have their own tests; this one shows that families, rope and weights are right whichever engine runs them.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny_models
from sterna.models.rope import inverse_frequencies
from sterna.models.spec import AttentionSpec, ModelSpec
from sterna.models.weights import WeightStore, index_for_gguf, index_for_hf
from tiny_gguf import has_gguf, write_gguf
from tiny_reading import open_gguf, open_hf, reopened

Array = NDArray[np.float64]

REFERENCE: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "models_tiny_gguf.json").read_text())
CASES: list[dict[str, Any]] = REFERENCE["cases"]
NEAR_TIE = 1e-4

pytest.importorskip("transformers")


def logits(spec: ModelSpec, store: WeightStore, ids: list[int]) -> Array:
    """(tokens, vocab), computed in float64."""
    weights = {name: store.float32(name).astype(np.float64) for name in store.names()}

    def linear(x: Array, name: str) -> Array:
        return x @ weights[name].T + weights.get(f"{name}.bias", np.zeros(()))

    def norm(x: Array, name: str, eps: float) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weights[name]

    x = weights["embed"][ids]
    for i, layer in enumerate(spec.layers):
        at, eps = f"layers.{i}", layer.norm_eps
        h = norm(x, f"{at}.attn_norm", eps)
        q, k, v = (linear(h, f"{at}.attn.{part}").reshape(len(ids), -1, layer.mixer.head_dim) for part in "qkv")
        if layer.mixer.qk_norm:
            q, k = norm(q, f"{at}.attn.q_norm", eps), norm(k, f"{at}.attn.k_norm", eps)
        x = x + linear(attend(layer.mixer, q, k, v), f"{at}.attn.o")
        h = norm(x, f"{at}.mlp_norm", eps)
        gate = linear(h, f"{at}.mlp.gate")
        if layer.mlp.activation == "silu":
            gate = gate / (1 + np.exp(-gate))
        else:
            assert layer.mlp.activation == "gelu_tanh"
            gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        x = x + linear(gate * linear(h, f"{at}.mlp.up"), f"{at}.mlp.down")
    return linear(norm(x, "final_norm", spec.final_norm_eps), "embed" if spec.tied_head else "head")


def attend(mixer: AttentionSpec, q: Array, k: Array, v: Array) -> Array:
    assert mixer.rope is not None
    positions = np.arange(len(q))
    frequencies, scale = inverse_frequencies(mixer.rope)
    angles = np.tile(positions[:, None] * frequencies, 2)[:, None]
    half = mixer.rope.dim // 2

    def turn(x: Array) -> Array:
        return scale * (x * np.cos(angles) + np.concatenate([-x[..., half:], x[..., :half]], -1) * np.sin(angles))

    group = mixer.num_heads // mixer.num_kv_heads
    q, k, v = (x.swapaxes(0, 1) for x in (turn(q), np.repeat(turn(k), group, 1), np.repeat(v, group, 1)))
    scores = q @ k.swapaxes(1, 2) * mixer.scale
    distance = positions[:, None] - positions
    scores[:, (distance < 0) | (distance >= (mixer.window or len(positions)))] = -np.inf
    probabilities = np.exp(scores - scores.max(-1, keepdims=True))
    return (probabilities / probabilities.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(len(positions), -1)


def assert_greedy(spec: ModelSpec, store: WeightStore, prompt: list[int], ids: list[int], gaps: list[float]) -> None:
    """Each token is the best one after those before it, or one of two that were nearly equal."""
    ours = logits(spec, store, prompt + ids[:-1])[len(prompt) - 1 :].argmax(-1)
    differing = [step for step, (mine, theirs) in enumerate(zip(ours, ids, strict=True)) if mine != theirs and gaps[step] >= NEAR_TIE]
    assert differing == [], [gaps[step] for step in differing]


def test_the_reference_reads_every_tiny_gguf() -> None:
    read = Counter(case["variant"] for case in CASES if case["quant"] == "F32")
    assert set(read) == {name for name in tiny_models.VARIANTS if has_gguf(name)}
    assert {case["quant"] for case in CASES} == {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"}
    assert {case["reader"] for case in CASES} == {"transformers", "llama.cpp"}
    # Output that repeats one token would hide faults.
    assert all(len({token for output in case["outputs"] for token in output["ids"]}) > 20 for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['variant']}-{case['quant']}-{case['reader']}")
def test_a_gguf_means_what_independent_readers_take_it_for(case: dict[str, Any], tmp_path: Path) -> None:
    assert case["weights_sha256"] == tiny_models.weights_sha256(case["variant"])
    spec, family, source = open_gguf(write_gguf(tmp_path / "tiny.gguf", case["variant"], quant=case["quant"]))
    store = reopened(index_for_gguf(spec, family, source), tmp_path)
    for prompt, output in zip(REFERENCE["prompts"], case["outputs"], strict=True):
        assert_greedy(spec, store, prompt, output["ids"], output["gaps"])


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Models this small run slower on several."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", tiny_models.VARIANTS)
def test_a_hugging_face_folder_means_what_transformers_takes_it_for(name: str, tmp_path: Path) -> None:
    import torch

    spec, family, source = open_hf(tiny_models.write_hf(tmp_path / "hf", name))
    store = reopened(index_for_hf(spec, family, source), tmp_path)
    prompt = REFERENCE["prompts"][2]
    with torch.inference_mode():
        expected = tiny_models.torch_model(name)(torch.tensor([prompt])).logits[0].numpy()
    np.testing.assert_allclose(logits(spec, store, prompt), expected, atol=2e-3)
