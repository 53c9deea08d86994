"""A spec says all there is to say: run by a hundred lines of NumPy, it gives the tokens that transformers and llama.cpp give.

The engines have their own tests; this one shows that families, rope and weights are right whichever engine runs them.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny_models
from sterna.models.rope import inverse_frequencies
from sterna.models.spec import AttentionSpec, GatedMLPSpec, LayerSpec, ModelSpec, RopeSpec
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
    x = weights["embed"][ids] * spec.embed_scale
    for i, layer in enumerate(spec.layers):
        run = Run(weights, layer, f"layers.{i}")
        x = x + layer.residual_scale * run.normed(run.attention(run.normed(x, "attn_norm")), "attn_post_norm")
        x = x + layer.residual_scale * run.normed(run.mlp(run.normed(x, "mlp_norm")), "mlp_post_norm")
    x = norm(x, weights["final_norm"], spec.final_norm_eps)
    return capped(x @ weights["embed" if spec.tied_head else "head"].T * spec.logit_scale, spec.logit_softcap)


def norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def capped(x: Array, cap: float | None) -> Array:
    return x if cap is None else cap * np.tanh(x / cap)


def softmax(x: Array) -> Array:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


@dataclass(frozen=True)
class Run:
    """One layer. Whether a norm is there shows in the weights."""

    weights: dict[str, Array]
    layer: LayerSpec
    at: str

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.weights[f"{self.at}.{name}"].T + self.weights.get(f"{self.at}.{name}.bias", np.zeros(()))

    def normed(self, x: Array, name: str) -> Array:
        weight = self.weights.get(f"{self.at}.{name}")
        assert (weight is not None) == (self.layer.post_norm if "post" in name else self.layer.pre_norm)
        return x if weight is None else norm(x, weight, self.layer.norm_eps)

    def attention(self, x: Array) -> Array:
        mixer = self.layer.mixer
        parts = {part: self.linear(x, f"attn.{part}") for part in "qkv"}
        if mixer.qk_norm == "projection":
            parts |= {part: norm(parts[part], self.weights[f"{self.at}.attn.{part}_norm"], self.layer.norm_eps) for part in "qk"}
        heads = {part: values.reshape(len(x), -1, mixer.head_dim) for part, values in parts.items()}
        if mixer.qk_norm == "head":
            heads |= {part: norm(heads[part], self.weights[f"{self.at}.attn.{part}_norm"], self.layer.norm_eps) for part in "qk"}
        return self.linear(attend(mixer, heads["q"], heads["k"], heads["v"]), "attn.o")

    def mlp(self, x: Array) -> Array:
        spec = self.layer.mlp
        if isinstance(spec, GatedMLPSpec):
            return self.gated(x, "mlp")
        probabilities = softmax(self.linear(x, "mlp.router"))
        chosen = np.argsort(-probabilities, -1, kind="stable")[:, : spec.top_k]
        shares = np.take_along_axis(probabilities, chosen, -1)
        if spec.normalize:
            shares = shares / shares.sum(-1, keepdims=True)
        rows = [
            sum(share * self.gated(row, f"mlp.experts.{e}") for e, share in zip(experts, weights, strict=True))
            for row, experts, weights in zip(x, chosen, shares, strict=True)
        ]
        return np.stack(rows)

    def gated(self, x: Array, at: str) -> Array:
        gate = self.linear(x, f"{at}.gate")
        if self.layer.mlp.activation == "silu":
            gate = gate / (1 + np.exp(-gate))
        else:
            assert self.layer.mlp.activation == "gelu_tanh"
            gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        return self.linear(gate * self.linear(x, f"{at}.up"), f"{at}.down")


def attend(mixer: AttentionSpec, q: Array, k: Array, v: Array) -> Array:
    positions = np.arange(len(q))
    if mixer.rope is not None:
        q, k = turned(mixer.rope, q), turned(mixer.rope, k)
    group = mixer.num_heads // mixer.num_kv_heads
    q, k, v = (x.swapaxes(0, 1) for x in (q, np.repeat(k, group, 1), np.repeat(v, group, 1)))
    scores = capped(q @ k.swapaxes(1, 2) * mixer.scale, mixer.softcap)
    distance = positions[:, None] - positions
    scores[:, (distance < 0) | (distance >= (mixer.window or len(positions)))] = -np.inf
    return (softmax(scores) @ v).swapaxes(0, 1).reshape(len(positions), -1)


def turned(rope: RopeSpec, x: Array) -> Array:
    frequencies, scale = inverse_frequencies(rope)
    angles = np.tile(np.arange(len(x))[:, None] * frequencies, 2)[:, None]
    x, rest = x[..., : rope.dim], x[..., rope.dim :]
    half = rope.dim // 2
    x = scale * (x * np.cos(angles) + np.concatenate([-x[..., half:], x[..., :half]], -1) * np.sin(angles))
    return np.concatenate([x, rest], -1)


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
