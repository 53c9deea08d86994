"""The sampling parameters that a model's files recommend.

As SGLang and vLLM read them: each value that is given becomes the default of requests, whatever `do_sample` says; what isn't given
stays at the API's own default. (So a model with `do_sample: false` and no temperature isn't greedy by default.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sterna.config.model_config import GenerationDefaults
from sterna.errors import ModelError


def from_hf(settings: Mapping[str, Any]) -> GenerationDefaults:
    """Of generation_config.json. Raises ModelError naming a value that no request could have."""
    return _defaults(settings, "generation_config.json: ", {})


def from_gguf(metadata: Mapping[str, Any]) -> GenerationDefaults:
    """Of `general.sampling.*`; not the repetition penalty, which llama.cpp applies to a window of tokens only."""
    return _defaults(metadata, "GGUF metadata: general.sampling.", {"temperature": "temp", "repetition_penalty": None})


def _defaults(values: Mapping[str, Any], where: str, renamed: Mapping[str, str | None]) -> GenerationDefaults:
    prefix = where.rpartition(": ")[2]

    def number(field: str, low: float, high: float, *, above: bool = False) -> float | None:
        name = renamed.get(field, field)
        value = None if name is None else values.get(prefix + name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{where}{name} is {value!r}, not a number")
        if not low <= value <= high or (above and value == low):
            raise ModelError(f"{where}{name} is {value!r}, outside {low:g} to {high:g}")
        return value

    top_k = number("top_k", -1, 2**31 - 1)
    top_p = number("top_p", 0, 1)
    return GenerationDefaults(
        temperature=number("temperature", 0, 100),
        # 0 switches each of the two off in these files; here -1 and 1 do.
        top_p=1.0 if top_p == 0 else top_p,
        top_k=None if top_k is None else int(top_k) or -1,
        min_p=number("min_p", 0, 1),
        repetition_penalty=number("repetition_penalty", 0, 100, above=True),
    )
