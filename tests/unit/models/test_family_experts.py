"""Families with experts."""

from __future__ import annotations

from typing import Any

import pytest

from sterna.errors import ModelError
from sterna.models.spec import GatedMLPSpec, MoESpec
from unit.models.settings import config, gguf_spec, metadata, spec, windows


def test_experts_go_by_either_name_and_within_bounds() -> None:
    def experts(family: str, **changes: object) -> Any:
        return spec(family, config(family, **changes)).layers[0].mlp

    mixtral = experts("mixtral", num_local_experts=8, num_experts_per_tok=3)
    assert mixtral == MoESpec(8, 3, 128, "silu", normalize=True)
    qwen = {"moe_intermediate_size": 48, "num_experts": 16, "num_experts_per_tok": 4}
    assert experts("qwen3_moe", **qwen) == MoESpec(16, 4, 48, "silu", normalize=False)
    assert experts("qwen3_moe", **qwen, num_local_experts=16, norm_topk_prob=True) == MoESpec(16, 4, 48, "silu", normalize=True)
    for name, value in (
        ("num_experts", 17),  # beside num_local_experts = 16
        ("num_local_experts", 1025),
        ("num_local_experts", 0),
        ("num_experts_per_tok", 17),
        ("num_experts_per_tok", 0),
        ("moe_intermediate_size", 0),
        ("norm_topk_prob", 1),
    ):
        with pytest.raises(ModelError, match=name):
            experts("qwen3_moe", **{**qwen, "num_local_experts": 16, name: value})
    with pytest.raises(ModelError, match="num_local_experts: 1024 in each of 1000 layers"):
        experts("mixtral", num_local_experts=1024, num_hidden_layers=1000)


def test_layers_without_experts_are_where_qwen3s_settings_say() -> None:
    def has_experts(**changes: object) -> list[bool]:
        made = spec("qwen3_moe", config("qwen3_moe", num_hidden_layers=5, **changes))
        plain = {layer.mlp for layer in made.layers if isinstance(layer.mlp, GatedMLPSpec)}
        assert plain <= {GatedMLPSpec(128, "silu")}
        return [isinstance(layer.mlp, MoESpec) for layer in made.layers]

    assert has_experts() == [True] * 5
    assert has_experts(mlp_only_layers=[0, 3]) == [False, True, True, False, True]
    assert has_experts(decoder_sparse_step=2) == [False, True, False, True, False]
    assert has_experts(decoder_sparse_step=2, mlp_only_layers=[1]) == [False, False, False, True, False]
    for name, value in (("mlp_only_layers", "0"), ("mlp_only_layers", [0.5]), ("decoder_sparse_step", 0)):
        with pytest.raises(ModelError, match=name):
            has_experts(**{name: value})


def test_windows_of_models_with_experts_are_on_every_layer() -> None:
    assert windows("mixtral", sliding_window=128) == [128] * 3
    assert windows("mixtral") == [None] * 3
    assert windows("qwen3_moe", sliding_window=128) == [None] * 3
    assert windows("qwen3_moe", sliding_window=128, use_sliding_window=True) == [128] * 3
    with pytest.raises(ModelError, match="max_window_layers"):
        windows("qwen3_moe", sliding_window=128, use_sliding_window=True, max_window_layers=2)


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_experts_are_read_as_llama_cpp_reads_them(arch: str) -> None:
    def experts(**changes: object) -> Any:
        return gguf_spec(arch, metadata(arch, **{"expert_count": 8, "expert_used_count": 2, **changes})).layers[2].mlp

    assert experts() == MoESpec(8, 2, 128, "silu", normalize=True)
    assert experts(expert_feed_forward_length=48) == MoESpec(8, 2, 48, "silu", normalize=True)
    assert experts(expert_gating_func=1, expert_weights_norm=True, expert_weights_scale=1.0) == experts()
    for name, value in (
        ("expert_used_count", None),
        ("expert_used_count", 9),
        ("expert_count", 5000),
        ("expert_gating_func", 2),
        ("expert_weights_norm", False),
        ("expert_weights_scale", 2.5),
        ("expert_shared_count", 1),
        ("expert_group_count", 2),
    ):
        with pytest.raises(ModelError, match=name):
            experts(**{name: value})
