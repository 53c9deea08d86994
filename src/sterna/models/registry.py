"""Which model families there are. Adding one is a file in `families/` and a row here (docs/adding/model.md)."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple, cast

from sterna.errors import ModelError
from sterna.models.family import Family, Settings


class FamilyRow(NamedTuple):
    """Where a family's class is, and the names by which files ask for it."""

    module: str
    class_name: str
    hf_model_type: str
    hf_architecture: str
    gguf_architecture: str | None


FAMILIES: dict[str, FamilyRow] = {
    "llama": FamilyRow("sterna.models.families.llama", "Llama", "llama", "LlamaForCausalLM", "llama"),
    # In GGUF, Mistral's architecture is `llama`.
    "mistral": FamilyRow("sterna.models.families.mistral", "Mistral", "mistral", "MistralForCausalLM", None),
    "qwen2": FamilyRow("sterna.models.families.qwen2", "Qwen2", "qwen2", "Qwen2ForCausalLM", "qwen2"),
    "qwen3": FamilyRow("sterna.models.families.qwen3", "Qwen3", "qwen3", "Qwen3ForCausalLM", "qwen3"),
    "qwen3_moe": FamilyRow("sterna.models.families.qwen3_moe", "Qwen3MoE", "qwen3_moe", "Qwen3MoeForCausalLM", "qwen3moe"),
    # In GGUF, Mixtral's architecture is `llama` too.
    "mixtral": FamilyRow("sterna.models.families.mixtral", "Mixtral", "mixtral", "MixtralForCausalLM", None),
    "gemma2": FamilyRow("sterna.models.families.gemma2", "Gemma2", "gemma2", "Gemma2ForCausalLM", "gemma2"),
    "gemma3": FamilyRow("sterna.models.families.gemma3", "Gemma3", "gemma3_text", "Gemma3ForCausalLM", "gemma3"),
    "phi3": FamilyRow("sterna.models.families.phi3", "Phi3", "phi3", "Phi3ForCausalLM", "phi3"),
    "olmo2": FamilyRow("sterna.models.families.olmo2", "Olmo2", "olmo2", "Olmo2ForCausalLM", "olmo2"),
    "granite": FamilyRow("sterna.models.families.granite", "Granite", "granite", "GraniteForCausalLM", "granite"),
    "smollm3": FamilyRow("sterna.models.families.smollm3", "SmolLM3", "smollm3", "SmolLM3ForCausalLM", "smollm3"),
}


def load_family(name: str) -> Family:
    """The family of a row, imported when first asked for. Raises ModelError where there is no such row."""
    row = FAMILIES.get(name)
    if row is None:
        raise ModelError(f"model family {name!r} is not supported (supported: {', '.join(FAMILIES)})")
    return cast(Family, getattr(import_module(row.module), row.class_name)())


def family_of_hf(config: Settings) -> Family:
    """The family that a config.json asks for.

    Both `model_type` and, where it is given, `architectures` must be a family's: the same body under another head is another model.
    Raises ModelError naming what isn't supported and listing what is.
    """
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if not architectures:
        architectures = [None]
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ModelError(f"config.json: architectures: must be a list of one name, is {architectures!r}")
    for name, row in FAMILIES.items():
        if row.hf_model_type == model_type and architectures[0] in (row.hf_architecture, None):
            return load_family(name)
    asked = architectures[0] or f"model_type {model_type!r}"
    supported = ", ".join(row.hf_architecture for row in FAMILIES.values())
    raise ModelError(f"config.json: architecture {asked} is not supported (supported: {supported})")


def family_of_gguf(metadata: Settings) -> Family:
    """The family of a GGUF's `general.architecture`. Raises ModelError naming what isn't supported and listing what is."""
    architecture = metadata.get("general.architecture")
    for name, row in FAMILIES.items():
        if row.gguf_architecture is not None and row.gguf_architecture == architecture:
            return load_family(name)
    supported = ", ".join(row.gguf_architecture for row in FAMILIES.values() if row.gguf_architecture)
    raise ModelError(f"GGUF metadata: general.architecture {architecture!r} is not supported (supported: {supported})")
