"""The answers of GET /v1/models and GET /v1/models/{id}."""

from __future__ import annotations

import msgspec


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    """When the server started, in seconds since 1970."""
    owned_by: str = "sterna"
    root: str
    """What the model was resolved from."""
    max_model_len: int
    """Tokens of prompt and output together."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]
