"""Experts: who is chosen, who runs, and what is summed."""

from __future__ import annotations

import pytest
import torch

from sterna.executor.torch.linear import Linear
from sterna.executor.torch.mlp import GatedMLP, MoE
from sterna.models.spec import MoESpec

HIDDEN, EXPERTS = 8, 4


class Scaling(GatedMLP):
    """Multiplies by its number plus 1, and keeps what it saw."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: list[torch.Tensor] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(x.clone())
        return x * (self.number + 1)


def moe(router: torch.Tensor, *, top_k: int = 2, normalize: bool = True) -> tuple[MoE, list[Scaling]]:
    experts = [Scaling(number) for number in range(EXPERTS)]
    return MoE(MoESpec(EXPERTS, top_k, 16, "silu", normalize), Linear(router, None), list(experts)), experts


def test_an_expert_runs_once_and_for_its_tokens_only() -> None:
    # Token t is the unit vector t, so that column t of the router is its logits.
    router = torch.zeros(EXPERTS, HIDDEN)
    choices = [(0, 3), (3, 1), (3, 0), (1, 0), (0, 1)]
    for token, (first, second) in enumerate(choices):
        router[first, token], router[second, token] = 5.0, 3.0
    layer, experts = moe(router)
    x = torch.eye(HIDDEN)[: len(choices)]
    out = layer(x)
    assert [len(expert.calls) for expert in experts] == [1, 1, 0, 1]
    for expert in experts:
        own = [token for token, chosen in enumerate(choices) if expert.number in chosen]
        assert [call.argmax(-1).tolist() for call in expert.calls] == ([own] if own else [])
    likelier = torch.tensor([5.0, 3.0]).softmax(-1)
    expected = [likelier[0] * (first + 1) + likelier[1] * (second + 1) for first, second in choices]
    torch.testing.assert_close(out, x * torch.stack(expected)[:, None])


@pytest.mark.parametrize("normalize", [True, False])
def test_a_tie_goes_to_the_lower_expert_and_weights_are_shares_of_all_or_of_the_chosen(normalize: bool) -> None:
    layer, experts = moe(torch.zeros(EXPERTS, HIDDEN), normalize=normalize)
    x = torch.ones(3, HIDDEN)
    torch.testing.assert_close(layer(x), x * (1 + 2) * (0.5 if normalize else 0.25))
    assert [len(expert.calls) for expert in experts] == [1, 1, 0, 0]


def test_what_is_added_is_the_output() -> None:
    layer, _ = moe(torch.zeros(EXPERTS, HIDDEN), top_k=1)
    x = torch.full((2, HIDDEN), 3.0)
    torch.testing.assert_close(layer.add_to(torch.ones(2, HIDDEN), x), 1 + layer(x))
