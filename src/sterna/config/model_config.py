"""What every process may know of a model without opening its weights: `facts.json` of a resolved model folder.

A resolved folder (made once by `models/resolve.py`, opened by every process) holds

    facts.json            this file's `ModelConfig`
    tokenizer.json        for `text/tokenizer.py`
    chat_template.jinja   absent where the model has none
    spec.json             `models/spec.py: ModelSpec`
    weights.json          canonical name -> where its bytes lie (`models/weights.py`)
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from sterna.errors import ModelError

FACTS_VERSION = 1


class GenerationDefaults(msgspec.Struct, frozen=True):
    """generation_config.json's sampling parameters; None where the model says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    version: int = FACTS_VERSION
    name: str
    """What was asked for: alias, file or folder name, hub id. The default of `--served-model-name`."""
    source: str
    """The file or folder that it was resolved from."""
    family: str
    """Row of the family table: `llama`, `qwen3`, …"""
    weights_dtype: str
    """The matrices' type as stored: `Q4_1`, `BF16`, …"""
    num_parameters: int
    vocab_size: int
    """Rows of the embedding: every valid token id is below it."""
    context_len: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Every id that ends a turn: config, generation config, GGUF's eos and eot, merged."""
    generation: GenerationDefaults = GenerationDefaults()
    bos_token: str | None = None
    eos_token: str | None = None
    """As chat templates want them."""
    template_tokens: dict[str, str] = {}
    """Other special tokens that templates may name (`unk_token`, `pad_token`, …)."""

    @staticmethod
    def load(folder: Path) -> ModelConfig:
        """Read `facts.json`. Raises ModelError where it is absent, damaged or of another version."""
        try:
            config = msgspec.json.decode((folder / "facts.json").read_bytes(), type=ModelConfig)
        except (OSError, msgspec.MsgspecError) as fault:
            raise ModelError(f"{folder}: not a resolved model folder: {fault}") from fault
        if config.version != FACTS_VERSION:
            raise ModelError(f"{folder}: made by another version of Sterna (facts {config.version})")
        return config
