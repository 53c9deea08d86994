"""Types and rules that more than one family of endpoints shares."""

from __future__ import annotations

import re
import uuid
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sterna.errors import InvalidRequest, ModelNotFound
from sterna.protocol.generate import SessionTurn
from sterna.server.sampling import MAX_COUNT
from sterna.tokenizer_manager.manager import TokenizerManager

User = Annotated[str, Meta(max_length=512)]
CacheSalt = Annotated[str, Meta(max_length=256)]
SessionId = Annotated[str, Meta(min_length=1, max_length=128)]

# No white space, which `member_rid` uses, and nothing that a log line or a header couldn't hold.
_RID = re.compile(r"[\x21-\x7e]{1,128}")

# SGLang's fields that aren't built: name -> values that change nothing (see `server/body.py`).
SGLANG_UNBUILT: dict[str, tuple[Any, ...]] = {
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "structural_tag": (),
    "stop_regex": ([],),
    "lora_path": (),
    "lora_id": (),
    "session_id": (),
    "extra_key": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_cached_tokens_details": (False,),
    "return_prompt_token_ids": (False,),
    "return_meta_info": (False,),
    "custom_logit_processor": (),
    "custom_params": (),
    "custom_labels": ({},),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "data_parallel_rank": (),
    "routed_dp_rank": (),
    "disagg_prefill_dp_rank": (),
    "log_metrics": (True,),
    "sampling_seed": (),
}


class SessionParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where in a session a request stands (docs/sessions.md). A misspelt key would change the context unnoticed: it is refused."""

    id: SessionId
    rid: Annotated[str, Meta(min_length=1, max_length=160)] | None = None
    """The turn to go on from; absent: from the beginning."""
    offset: Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)] | None = None
    """Keep that many tokens of its context; negative: cut as many off its end; 0 or absent: keep all."""
    replace: bool | None = None
    """End and forget whatever goes on from there already."""
    drop_previous_output: bool | None = None
    """Go on from that turn's prompt, without its answer."""


def to_session(params: SessionParams | None, *, chat: bool = False) -> SessionTurn | None:
    """Hop 2's part of it: a chat that goes on from a turn brings what closes that turn's answer."""
    if params is None:
        return None
    return SessionTurn(
        id=params.id,
        rid=params.rid,
        offset=params.offset or 0,
        replace=bool(params.replace),
        drop_previous_output=bool(params.drop_previous_output),
        closes_answer=chat and params.rid is not None,
    )


def check_model(asked: str | None, manager: TokenizerManager) -> None:
    """Raises ModelNotFound unless `asked` is absent or one of the served model's names."""
    if asked is not None and asked not in (manager.served_model_name, manager.model.name, manager.args.model):
        raise ModelNotFound(f"the model {asked[:128]!r} isn't served here; {manager.served_model_name!r} is", param="model")


def to_rid(given: str | None, prefix: str) -> str:
    """The client's own rid, or a new one with `prefix`. Raises InvalidRequest."""
    if given is None:
        return prefix + uuid.uuid4().hex
    if not _RID.fullmatch(given):
        raise InvalidRequest("rid: 1 to 128 printable ASCII characters without spaces", param="rid")
    return given


def member_rid(rid: str, index: int) -> str:
    """The name of one prompt of a list. No client's rid looks like it."""
    return f"{rid} {index}"
