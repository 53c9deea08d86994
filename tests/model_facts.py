"""The `ModelConfig` of a model that exists in a test only."""

from typing import Any

from sterna.config.model_config import ModelConfig


def model_facts(*, vocab_size: int, context_len: int, **facts: Any) -> ModelConfig:
    """What a test says nothing of is as plain as it can be: no begin or end of text, nothing stored."""
    plain = {
        "name": "bytes",
        "source": "",
        "family": "llama",
        "weights_dtype": "none",
        "num_parameters": 0,
        "bos_token_id": None,
        "eos_token_ids": (),
    }
    return ModelConfig(**{**plain, "vocab_size": vocab_size, "context_len": context_len, **facts})
