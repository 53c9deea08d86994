"""Put on PYTHONPATH of a server under test: records every call of the round trip's functions, in whichever process it happens.

Each call appends one line of JSON to $HOP_TRACE:
hop, pid, the process's own module, and the types that went in and came out.
"""

import functools
import inspect
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from wrap_on_import import Points, wrap_on_import

# (module, attribute path) by hop, as docs/architecture.md has them.
HOPS = {
    ("sterna.server.openai.chat.protocol", "decode"): "1",
    ("sterna.server.openai.chat.convert", "to_generate"): "2",
    ("sterna.tokenizer_manager.tokenize", "to_tokenized"): "3",
    ("sterna.scheduler.intake", "to_req"): "4",
    ("sterna.executor.scripted", "ScriptedExecutor.submit"): "5",
    ("sterna.scheduler.output", "to_token_id_output"): "6",
    ("sterna.detokenizer.manager", "DetokenizerManager.to_str_output"): "7",
    ("sterna.tokenizer_manager.receive", "fold"): "8",
    ("sterna.server.openai.chat.response", "to_response"): "9",
}


def types_in(value: Any) -> list[str]:
    """The type names of `value` and of what it holds one level down."""
    if isinstance(value, tuple | list):
        return [name for item in value for name in types_in(item)]
    return [type(value).__name__]


def record(hop: str, args: Sequence[Any], result: Any) -> None:
    line = {"hop": hop, "pid": os.getpid(), "takes": types_in(list(args)), "gives": types_in(result)}
    with open(os.environ["HOP_TRACE"], "a") as trace:
        trace.write(json.dumps(line) + "\n")


def traced(hop: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            results = list(function(*args, **kwargs))
            record(hop, args, results)
            return iter(results)
    elif inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = await function(*args, **kwargs)
            record(hop, args, result)
            return result
    else:

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            record(hop, args, result)
            return result

    return wrapper


if "HOP_TRACE" in os.environ:
    points: Points = {module: [(path, functools.partial(traced, hop))] for (module, path), hop in HOPS.items()}
    wrap_on_import(points)
