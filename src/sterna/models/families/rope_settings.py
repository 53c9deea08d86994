"""Rope settings of config.json (transformers 4's `rope_scaling` beside `rope_theta`, transformers 5's `rope_parameters`) and of GGUF."""

from __future__ import annotations

from collections.abc import Sequence

from sterna.models.family import ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT, ROPE_FREQS, RopeTensors, Shapes
from sterna.models.fields import Fields
from sterna.models.spec import RopeDynamic, RopeFactors, RopeLinear, RopeLlama3, RopeScaling, RopeSpec, RopeYarn

DEFAULT_THETA = 10_000.0
MAX_CONTEXT = 1 << 28
_MAX_THETA = 1e15
_MAX_FACTOR = 1e6

_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "factor", "partial_rotary_factor"})
_HF_KEYS = {
    "default": frozenset({"factor"}),
    "linear": frozenset[str](),
    "dynamic": frozenset({"original_max_position_embeddings"}),
    "llama3": frozenset({"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
    | {"truncate", "finetuned"},
}
"""What each kind of rope understands; any other key that has a value is refused."""

GGUF_NEUTRAL: dict[str, tuple[object, ...]] = {
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0, -1.0),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


def rope_from_hf(config: Fields, *, head_dim: int, context_len: int, default_theta: float = DEFAULT_THETA) -> RopeSpec:
    """The rope of a config.json. Precedence of the places is transformers': `rope_scaling`, `rope_parameters`, the top level."""
    config.refuse({"partial_rotary_factor": (1.0,), "rope_interleaved": (False,)})
    settings = config.mapping("rope_scaling") or config.mapping("rope_parameters")
    theta = theta_from_hf(config, settings, default_theta)
    if settings is None:
        return RopeSpec(theta, head_dim)
    return RopeSpec(theta, head_dim, scaling_from_hf(config, settings, head_dim=head_dim, context_len=context_len))


def theta_from_hf(config: Fields, settings: Fields | None, default: float = DEFAULT_THETA, *, name: str = "rope_theta") -> float:
    """The base: that of the nested `settings`, or else `name` at the top level."""
    theta = config.number(name, default, low=1.0, high=_MAX_THETA)
    if settings is None:
        return _checked_theta(config, theta, name)
    return _checked_theta(settings, settings.number("rope_theta", theta, low=1.0, high=_MAX_THETA))


def rope_from_gguf(metadata: Fields, shapes: Shapes, *, head_dim: int, tensors: RopeTensors) -> RopeSpec:
    """The rope of a GGUF (`metadata` prefixed with the architecture), as llama.cpp reads it; factors may lie in a tensor."""
    for name in (ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT):
        if name in shapes:
            raise metadata.fault("rope.scaling.type", f"the file scales rope by {name}, which is not supported for this architecture")
    if ROPE_FREQS in shapes and ROPE_FREQS not in tensors:
        raise metadata.fault("rope.scaling.type", f"the file scales rope by {ROPE_FREQS}, whose contents were not given")
    metadata.refuse({"rope.dimension_count": (head_dim, 0), **GGUF_NEUTRAL})
    scaling = _scaling_from_gguf(metadata)
    if ROPE_FREQS in tensors:
        scaling = _with_factors(metadata, scaling, tensors[ROPE_FREQS], head_dim)
    return RopeSpec(theta_from_gguf(metadata), head_dim, scaling)


def theta_from_gguf(metadata: Fields, name: str = "rope.freq_base", default: float = DEFAULT_THETA) -> float:
    return _checked_theta(metadata, metadata.number(name, default, low=1.0, high=_MAX_THETA), name)


def context_len_from_hf(config: Fields) -> int:
    """`max_position_embeddings`, or what yarn stretches the original window to, where that is more.

    Linear and dynamic factors add nothing: configs differ in whether the first already counts it, and under the second the
    trained window is where results equal transformers'.
    """
    length = config.integer("max_position_embeddings", high=MAX_CONTEXT)
    settings = config.mapping("rope_scaling") or config.mapping("rope_parameters")
    if settings is not None and rope_kind(settings) == "yarn":
        original = _original_window(config, settings)
        length = max(length, int(original * settings.number("factor", 1.0, low=1.0, high=_MAX_FACTOR)))
    return min(length, MAX_CONTEXT)


def context_len_from_gguf(metadata: Fields) -> int:
    """`context_length`, or what yarn stretches the original window to, where that is more."""
    length = metadata.integer("context_length", high=MAX_CONTEXT)
    scaling = _scaling_from_gguf(metadata)
    if isinstance(scaling, RopeYarn):
        length = max(length, int(scaling.original_max_position * scaling.factor))
    return min(length, MAX_CONTEXT)


def _checked_theta(where: Fields, theta: float, name: str = "rope_theta") -> float:
    # At 1 all pairs turn alike and yarn divides by log(theta).
    if theta == 1.0:
        raise where.fault(name, "must be above 1")
    return theta


def rope_kind(settings: Fields) -> str:
    """transformers' name of it; older configs say `type`."""
    return settings.text("rope_type", settings.text("type", "default"))


def _original_window(config: Fields, settings: Fields) -> int:
    holder = config if config.get("original_max_position_embeddings") is not None else settings
    default = config.integer("max_position_embeddings", high=MAX_CONTEXT)
    return holder.integer("original_max_position_embeddings", default, high=MAX_CONTEXT)


def _factor(settings: Fields, default: float | None = None) -> float:
    return settings.number("factor", default, low=1.0, high=_MAX_FACTOR)


def scaling_from_hf(config: Fields, settings: Fields, *, head_dim: int, context_len: int) -> RopeScaling | None:
    """What `settings`, the nested ones, stretch rope by; None where they don't."""
    kind = rope_kind(settings)
    if kind not in _HF_KEYS:
        raise settings.fault("rope_type", f"{kind!r} is not supported (supported: {', '.join(_HF_KEYS)})")
    for name in settings.names():
        if name not in _COMMON_KEYS | _HF_KEYS[kind]:
            raise settings.fault(name, f"not a setting of {kind} rope that is supported")
    settings.refuse({"partial_rotary_factor": (1.0,)})
    match kind:
        case "linear":
            return RopeLinear(_factor(settings))
        case "dynamic":
            if head_dim < 4:
                raise config.fault("head_dim", "dynamic rope needs at least 4")
            # The trained window is max_position_embeddings here: transformers 5 reads no other.
            window = config.integer("max_position_embeddings", high=MAX_CONTEXT)
            settings.refuse({"original_max_position_embeddings": (window,)})
            return RopeDynamic(_factor(settings), window, context_len)
        case "llama3":
            low = settings.number("low_freq_factor", low=1e-3, high=1e6)
            high = settings.number("high_freq_factor", low=1e-3, high=1e6)
            if high <= low:
                raise settings.fault("high_freq_factor", f"must be above low_freq_factor ({low:g}), is {high:g}")
            return RopeLlama3(_factor(settings), low, high, _original_window(config, settings))
        case "yarn":
            return _yarn_from_hf(config, settings)
        case _:
            return None


def _yarn_from_hf(config: Fields, settings: Fields) -> RopeYarn:
    def optional(name: str) -> float | None:
        return None if settings.get(name) is None else settings.number(name, low=0.0, high=1e4)

    original = _original_window(config, settings)
    # Where a config names no factor, transformers takes the ratio of the two windows.
    ratio = max(config.integer("max_position_embeddings", high=MAX_CONTEXT) / original, 1.0)
    return RopeYarn(
        factor=_factor(settings, ratio),
        original_max_position=original,
        # 0 stands for the default, as in transformers.
        beta_fast=settings.number("beta_fast", 32.0, low=0.0, high=1e6) or 32.0,
        beta_slow=settings.number("beta_slow", 1.0, low=0.0, high=1e6) or 1.0,
        attention_factor=None if settings.get("attention_factor") is None else settings.number("attention_factor", low=1e-3, high=1e3),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=settings.flag("truncate", True),
    )


def _scaling_from_gguf(metadata: Fields) -> RopeScaling | None:
    # llama.cpp's defaults: linear where only a factor is given, and no scaling where the factor is 0 or absent.
    legacy = metadata.number("rope.scale_linear", 0.0, low=0.0, high=_MAX_FACTOR)
    factor = metadata.number("rope.scaling.factor", legacy, low=0.0, high=_MAX_FACTOR)
    if 0.0 < factor < 1.0:
        raise metadata.fault("rope.scaling.factor", f"must be at least 1, is {factor:g}")
    kind = metadata.text("rope.scaling.type", "linear")
    match kind:
        case "none":
            return None
        case "linear":
            return RopeLinear(factor) if factor > 1.0 else None
        case "yarn":
            window = metadata.integer("context_length", high=MAX_CONTEXT)
            return RopeYarn(
                factor=factor or 1.0,
                original_max_position=metadata.integer("rope.scaling.original_context_length", window, high=MAX_CONTEXT),
                beta_fast=metadata.number("rope.scaling.yarn_beta_fast", 32.0, low=1e-3, high=1e6),
                beta_slow=metadata.number("rope.scaling.yarn_beta_slow", 1.0, low=1e-3, high=1e6),
            )
        case _:
            raise metadata.fault("rope.scaling.type", f"{kind!r} is not supported (supported: none, linear, yarn)")


def _with_factors(metadata: Fields, scaling: RopeScaling | None, factors: Sequence[float], head_dim: int) -> RopeFactors:
    if len(factors) * 2 != head_dim:
        raise metadata.fault("rope.dimension_count", f"{ROPE_FREQS} has {len(factors)} factors for {head_dim // 2} pairs")
    if not all(1e-6 < value < 1e6 for value in factors):
        raise metadata.fault("rope.scaling.factor", f"{ROPE_FREQS} holds factors that are not positive numbers")
    match scaling:
        case None:
            return RopeFactors(tuple(float(value) for value in factors))
        case RopeLinear(factor=stretch):
            return RopeFactors(tuple(float(value) * stretch for value in factors))
        case _:
            raise metadata.fault("rope.scaling.type", f"yarn together with {ROPE_FREQS} is not supported")
