"""What transformers says: greedy tokens, and how near its second choice was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEAR_TIE = 1e-4
"""Where the two best logits of the reference are this near, rounding decides, and the tokens may part."""


@dataclass(frozen=True)
class Reference:
    ids: list[int]
    gaps: list[float]
    """The difference of the two best logits before each id."""


class Oracle:
    """A model folder as transformers runs it, float32. Each prompt is computed once."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._known: dict[tuple[float, ...], Reference] = {}

    def greedy(self, prompt: Sequence[int], tokens: int, *, repetition_penalty: float = 1.0) -> Reference:
        """`tokens` ids, going on past end tokens."""
        key = (repetition_penalty, *prompt)
        known = self._known.get(key)
        if known is None or len(known.ids) < tokens:
            known = self._known[key] = self._generate(prompt, tokens, repetition_penalty)
        return Reference(known.ids[:tokens], known.gaps[:tokens])

    def _generate(self, prompt: Sequence[int], tokens: int, repetition_penalty: float) -> Reference:
        with torch.inference_mode():
            made = self._model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=tokens,
                do_sample=False,
                repetition_penalty=repetition_penalty,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        best = torch.cat(made.scores).topk(2).values
        return Reference(made.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())


def assert_agrees(ids: Sequence[int], reference: Reference, what: str = "") -> int:
    """The same tokens, or first other ones where the reference has a near tie. Returns how many tokens are the same."""
    assert len(ids) == len(reference.ids), f"{what}: {len(ids)} tokens instead of {len(reference.ids)}"
    for at, (got, expected, gap) in enumerate(zip(ids, reference.ids, reference.gaps, strict=True)):
        if got != expected:
            assert gap < NEAR_TIE, f"{what}: token {at} is {got}, not {expected}, and the two best logits are {gap} apart"
            return at
    return len(ids)
