"""How the next token is chosen and when a request ends by itself."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Normalised and validated (hop 2): every later process trusts these values. Field names are SGLang's.

    Nothing here is random or left to a later default, except `max_new_tokens`, which hop 3 resolves against the prompt's length.
    """

    max_new_tokens: int | None = None
    """Output tokens at most; None only before hop 3, where it becomes the rest of the context."""
    min_new_tokens: int = 0
    """No stop of any kind ends the request before this many output tokens; end tokens are masked until then."""
    temperature: float = 1.0
    """>= 0; 0 is greedy."""
    top_p: float = 1.0
    """In (0, 1]."""
    top_k: int = -1
    """-1 (off) or >= 1."""
    min_p: float = 0.0
    """In [0, 1]; relative to the likeliest token's probability."""
    repetition_penalty: float = 1.0
    """> 0; over prompt and output tokens (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """In [-2, 2]; over output tokens."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; over output tokens."""
    logit_bias: dict[int, float] = {}
    """Token id -> added to its logit, in [-100, 100]."""
    seed: int = 0
    """Unsigned 64 bit. Drawn at hop 2 where the request has none, so that a replay repeats it."""
    stop: tuple[str, ...] = ()
    """Non-empty stop strings."""
    stop_token_ids: tuple[int, ...] = ()
    """Ends by id, the model's own end tokens not included (those come from `ModelConfig.eos_token_ids`)."""
    ignore_eos: bool = False
    """The model's own end tokens don't end the request."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    """The matched stop string or token stays in the text."""
    return_logprob: bool = False
    """Each output token comes with its `TokenLogprobs`."""
    top_logprobs_num: int = 0
    """>= 0; how many of the likeliest tokens those tell of. 0 unless `return_logprob`."""
    token_ids_logprob: tuple[int, ...] = ()
    """Tokens of the vocabulary that those tell of at every place. Empty unless `return_logprob`."""


def describe(params: SamplingParams, prompt_tokens: int, output_tokens: int) -> str:
    """A request for the log: sizes and parameters. Stop strings and bias are counted, since they are text of the client's too."""
    given = {name: getattr(params, name) for name in params.__struct_fields__}
    given |= {name: len(given[name]) for name in ("stop", "stop_token_ids", "logit_bias", "token_ids_logprob")}
    return f"prompt_tokens={prompt_tokens} output_tokens={output_tokens} " + " ".join(f"{name}={value}" for name, value in given.items())
