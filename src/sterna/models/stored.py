"""How a canonical weight is made of a stored tensor: data, so that every reader of `weights.json` can do it, be it on blocks of bytes."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """As many rows as the canonical weight has, from `start` on: a part of a fused matrix, or one expert's matrix out of a stack.

    Rows are those of the tensor seen as a matrix, all its axes but the last taken as one. They are whole: quantised blocks, which run
    along rows, stay as they are.
    """

    start: int


class Unpermute(msgspec.Struct, frozen=True, tag="unpermute"):
    """Stored rows are paired for interleaved rope, (2i, 2i + 1) within each head; canonical ones in halves, (i, i + head_dim / 2).

    Whole rows move, so that quantised blocks stay as they are.
    """

    heads: int

    def canonical_rows(self, rows: int) -> NDArray[np.intp]:
        """(rows,): which stored row each canonical row is."""
        return np.arange(rows).reshape(self.heads, rows // self.heads // 2, 2).swapaxes(1, 2).reshape(rows)


class AddOne(msgspec.Struct, frozen=True, tag="add_one"):
    """1 is added to every number, in float32: Gemma's norms multiply by 1 + weight. Of vectors only."""


Transform = Rows | Unpermute | AddOne


class Source(msgspec.Struct, frozen=True):
    """The stored tensor that a canonical weight is made of, and how."""

    tensor: str
    transforms: tuple[Transform, ...] = ()
    """Applied one after the other. At most one is `Rows`, and then the first."""
    shape: tuple[int, ...] | None = None
    """The shape that the stored tensor must have; None: that of the canonical weight."""
