"""The second half of a layer: one gated MLP for all tokens, or experts of which each token takes some."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import assert_never

import torch
from torch.nn import functional

from sterna.executor.torch.linear import Linear
from sterna.models.spec import GatedMLPSpec, MoESpec

Activation = Callable[[torch.Tensor], torch.Tensor]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class GatedMLP:
    """down(act(gate(x)) * up(x)), for x (T, hidden)."""

    def __init__(self, gate_up: Linear, down: Linear, intermediate: int, activation: Activation) -> None:
        self._gate_up = gate_up
        self._down = down
        self._intermediate = intermediate
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._inner(x))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + self(x), as a new tensor."""
        return self._down.add_to(residual, self._inner(x))

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self._gate_up(x)
        return self._activation(gate_up[:, : self._intermediate]).mul_(gate_up[:, self._intermediate :])


class MoE:
    """`MoESpec`, for x (T, hidden): each expert runs once, for the tokens that chose it."""

    def __init__(self, spec: MoESpec, router: Linear, experts: list[GatedMLP]) -> None:
        self._spec = spec
        self._router = router
        self._experts = experts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = self._router(x).float().softmax(dim=-1)
        # Not `topk`, which leaves open who wins a tie.
        weights, chosen = probabilities.sort(dim=-1, descending=True, stable=True)
        weights, chosen = weights[:, : self._spec.top_k], chosen[:, : self._spec.top_k]
        if self._spec.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        # Pairs of token and expert, those of one expert beside each other.
        pairs = chosen.flatten().argsort(stable=True)
        inputs = x[pairs // self._spec.top_k]
        counts = chosen.flatten().bincount(minlength=len(self._experts)).tolist()
        outputs = x.new_empty(len(pairs), x.shape[1])
        for expert, own, rows in zip(self._experts, pairs.split(counts), inputs.split(counts), strict=True):
            if len(rows):
                outputs[own] = expert(rows)
        return self._summed(outputs.view(len(x), self._spec.top_k, -1), weights)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + self(x), as a new tensor."""
        return residual + self(x)

    def _summed(self, outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(T, top_k, hidden), (T, top_k) -> (T, hidden): added one by one, likeliest first, whatever the batch is."""
        total = outputs[:, 0].float() * weights[:, :1]
        for rank in range(1, self._spec.top_k):
            total += outputs[:, rank].float() * weights[:, rank, None]
        return total.to(outputs.dtype)


MLP = GatedMLP | MoE


def load_mlp(load: Callable[[str], torch.Tensor], at: str, spec: GatedMLPSpec | MoESpec) -> MLP:
    """The MLP whose weights' canonical names begin with `at` (`layers.3.mlp`)."""
    match spec:
        case GatedMLPSpec():
            return _gated(load, at, spec.intermediate, spec.activation, spec.bias)
        case MoESpec():
            experts = [_gated(load, f"{at}.experts.{e}", spec.intermediate, spec.activation, False) for e in range(spec.num_experts)]
            return MoE(spec, Linear(load(f"{at}.router"), None), experts)
        case _:
            assert_never(spec)


def _gated(load: Callable[[str], torch.Tensor], at: str, intermediate: int, activation: str, bias: bool) -> GatedMLP:
    def gate_up(suffix: str) -> torch.Tensor:
        return torch.cat([load(f"{at}.gate{suffix}"), load(f"{at}.up{suffix}")])

    return GatedMLP(
        Linear(gate_up(""), gate_up(".bias") if bias else None),
        Linear(load(f"{at}.down"), load(f"{at}.down.bias") if bias else None),
        intermediate,
        _ACTIVATIONS[activation],
    )
