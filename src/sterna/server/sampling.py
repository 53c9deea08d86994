"""Sampling parameters as clients send them, for every surface that generates: types, bounds, defaults."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from sterna.config.model_config import GenerationDefaults
from sterna.errors import InvalidRequest
from sterna.protocol.logprobs import LogprobWish
from sterna.protocol.sampling import SamplingParams

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 4096
MAX_COUNT = 2**31 - 1

Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_COUNT, description="-1 or 0: off")]
MinP = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(ge=0.001, le=10)]  # far below, logits divided by it leave float32
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(description="64 bits: -2^63 to 2^64-1; a negative seed is the unsigned one with the same bits")]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class SamplingFields(msgspec.Struct, kw_only=True):
    """What every surface calls by the same name. None is absent."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    """A stop string, or up to 16."""
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None


class Lengths(NamedTuple):
    """What surfaces name differently."""

    max_new_tokens: int | None
    """None: the surface's default."""
    min_new_tokens: int
    seed: int | None
    seed_name: str = "seed"


class SamplingResolver:
    """Turns `SamplingFields` into `SamplingParams`. Immutable; one per app."""

    def __init__(self, vocab_size: int, generation: GenerationDefaults, defaults: Literal["model", "openai"]) -> None:
        self.vocab_size = vocab_size
        known = generation if defaults == "model" else GenerationDefaults()
        self._defaults: dict[str, Any] = {
            name: value
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            if (value := getattr(known, name)) is not None
        }
        if self._defaults.get("top_k") == 0:
            self._defaults["top_k"] = -1

    def resolve(self, fields: SamplingFields, lengths: Lengths, *, logprobs: LogprobWish | None = None, prefix: str = "") -> SamplingParams:
        """Validated and normalised; a seed is drawn where there is none. Raises InvalidRequest, its `param` below `prefix`.

        `logprobs` has been validated by its surface.
        """
        given: dict[str, Any] = dict(self._defaults)
        for name in _SAME_NAME:
            value = getattr(fields, name)
            if value is not None:
                given[name] = value
        if given.get("top_k") == 0:
            given["top_k"] = -1
        if fields.logit_bias:
            given["logit_bias"] = self._logit_bias(fields.logit_bias, prefix)
        if fields.stop_token_ids:
            given["stop_token_ids"] = self._stop_token_ids(fields.stop_token_ids, prefix)
        if logprobs is not None:
            given |= {"return_logprob": True, "top_logprobs_num": logprobs.top, "token_ids_logprob": logprobs.token_ids}
        return SamplingParams(
            max_new_tokens=lengths.max_new_tokens,
            min_new_tokens=lengths.min_new_tokens,
            stop=merge_stops(fields.stop, prefix),
            seed=to_seed(lengths.seed, prefix + lengths.seed_name),
            **given,
        )

    def _logit_bias(self, bias: dict[str, float], prefix: str) -> dict[int, float]:
        param = prefix + "logit_bias"
        if len(bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"{param}: at most {MAX_LOGIT_BIAS} entries", param=param)
        result: dict[int, float] = {}
        for key, value in bias.items():
            if not (key.isascii() and key.isdigit() and len(key) < 20 and int(key) < self.vocab_size):
                raise InvalidRequest(f"{param}: {key[:32]!r} is not a token id below {self.vocab_size}", param=param)
            result[int(key)] = value
        return result

    def _stop_token_ids(self, ids: list[int], prefix: str) -> tuple[int, ...]:
        param = prefix + "stop_token_ids"
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(f"{param}: at most {MAX_STOP_TOKEN_IDS} ids", param=param)
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise InvalidRequest(f"{param}: ids must be in [0, {self.vocab_size})", param=param)
        return tuple(dict.fromkeys(ids))


_SAME_NAME = tuple(name for name in SamplingFields.__struct_fields__ if name not in ("logit_bias", "stop", "stop_token_ids"))


def merge_stops(stop: str | list[str] | None, prefix: str = "") -> tuple[str, ...]:
    """One string or a list as a tuple without repeats. Raises InvalidRequest."""
    param = prefix + "stop"
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"{param}: at most {MAX_STOPS} stop strings", param=param)
    if any(not entry for entry in stops):
        raise InvalidRequest(f"{param}: a stop string can't be empty", param=param)
    if any(len(entry) > MAX_STOP_CHARS for entry in stops):
        raise InvalidRequest(f"{param}: a stop string has at most {MAX_STOP_CHARS} characters", param=param)
    return tuple(dict.fromkeys(stops))


def to_seed(seed: int | None, param: str) -> int:
    """Unsigned 64 bit. Negative seeds (OpenAI's are signed) keep their bits; None is drawn. Raises InvalidRequest beyond 64 bits."""
    if seed is None:
        return secrets.randbits(64)
    if not -(2**63) <= seed < 2**64:
        raise InvalidRequest(f"{param}: a seed has 64 bits", param=param)
    return seed % 2**64
