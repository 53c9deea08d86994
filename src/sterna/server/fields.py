"""Types and rules that more than one family of endpoints shares."""

from __future__ import annotations

import re
import uuid
from typing import Annotated, Any

from msgspec import Meta

from sterna.errors import InvalidRequest, ModelNotFound
from sterna.tokenizer_manager.manager import TokenizerManager

User = Annotated[str, Meta(max_length=512)]
CacheSalt = Annotated[str, Meta(max_length=256)]

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
    "session_params": (),
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
