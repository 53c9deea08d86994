"""What every handler is given: made once per app."""

from __future__ import annotations

from dataclasses import dataclass

from sterna.config.server_args import ServerArgs
from sterna.server.auth import Auth
from sterna.server.body import UnknownFields
from sterna.server.generation import Generations
from sterna.server.metrics import Metrics
from sterna.server.sampling import SamplingResolver
from sterna.server.threads import Threads
from sterna.text.token_names import TokenNames
from sterna.tokenizer_manager.manager import TokenizerManager


@dataclass(slots=True, frozen=True)
class AppContext:
    manager: TokenizerManager
    args: ServerArgs
    sampling: SamplingResolver
    token_names: TokenNames
    generations: Generations
    metrics: Metrics
    threads: Threads
    unknown_fields: UnknownFields
    auth: Auth
    openapi: bytes
    """The document of /openapi.json."""
    started: int
    """When the app was made, in seconds since 1970: `created` of the served model."""
