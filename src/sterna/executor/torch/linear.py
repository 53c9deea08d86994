"""Matrix products with weights laid out once for the processor.

PyTorch's plain product reorders bfloat16 weights at every call, and in float32 it is slow for a handful of rows. oneDNN's prepacked
product, which PyTorch's own compiler uses, does neither; it is taken wherever it exists.
"""

from __future__ import annotations

import platform

import torch
from torch.nn import functional

_PACKED_MACHINES = ("x86_64", "AMD64")
"""Where the prepacked product has been compared with the plain one."""


class Linear:
    """y = x @ weight.T + bias, for x (T, in) in the weight's dtype; y (T, out)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._bias = bias
        self._packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return functional.linear(x, self._weight, self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + y, as a new tensor."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
        return residual + functional.linear(x, self._weight, self._bias)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or platform.machine() not in _PACKED_MACHINES or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
