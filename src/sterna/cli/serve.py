"""`sterna serve [MODEL] …`"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence

import uvloop

from sterna.cli.flags import parse_server_args
from sterna.config.memory import show_bytes
from sterna.config.server_args import ServerArgs
from sterna.launch.serve import serve
from sterna.tokenizer_manager.manager import TokenizerManager


def run(argv: Sequence[str]) -> int:
    """Serve until told to stop; the exit code."""
    args = parse_server_args(argv)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(args, announce))


def announce(args: ServerArgs, manager: TokenizerManager, seconds: float) -> None:
    """What a user reads when the server is ready: where it is, and a line to paste."""
    url = f"http://{_host_to_call(args.host)}:{args.port}"
    info = manager.process_info["scheduler"]
    key = f'\n  -H "Authorization: Bearer {_key_to_paste(args.api_key)}" \\' if args.api_key else ""
    body = f'{{"model": "{manager.served_model_name}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'
    route = "/v1/chat/completions"
    if manager.chat_template is None:
        body = f'{{"model": "{manager.served_model_name}", "prompt": "The sky is blue because"}}'
        route = "/v1/completions"
    print(
        f"\n{manager.served_model_name} is ready after {seconds:.1f} s ({_engine(info)})\n"
        f"  {url}       docs: {url}/docs\n\n"
        f"curl {url}{route} \\{key}\n  -H 'Content-Type: application/json' \\\n  -d '{body}'\n",
        flush=True,
    )


def _engine(info: Mapping[str, object]) -> str:
    """What runs the model, and how much it can hold: `/server_info` has the rest."""
    named = [f"{name} {info[name]}" for name in ("executor", "dtype", "device", "isa", "threads") if name in info]
    room = f"room for {info['kv_total_tokens']} tokens"
    if "kv_bytes" in info:
        room += f" in {show_bytes(int(str(info['kv_bytes'])))}"
    return ", ".join([*named, room])


def _key_to_paste(api_key: str) -> str:
    """What stands for the key, which itself is never printed: a shell that has it in its environment fills it in."""
    return "$STERNA_API_KEY" if os.environ.get("STERNA_API_KEY") == api_key else "YOUR_KEY"


def _host_to_call(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
