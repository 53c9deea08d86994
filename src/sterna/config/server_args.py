"""Every setting of a server: one frozen field is one flag is one docstring. Parsed in `cli/`, resolved once by `resolve.py`."""

from __future__ import annotations

from typing import Literal

import msgspec


class ServerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """`--max-running-requests` sets `max_running_requests`, and so on; the docstring beneath a field is its help text."""

    model: str = "smollm2"
    """Alias, .gguf file, folder in Hugging Face layout, or hub id org/name[:file]."""
    served_model_name: str | None = None
    """Name in /v1/models and in responses (default: the model as named)."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_key: str | None = None
    """Key that every route but /health and /ready then requires (also STERNA_API_KEY)."""
    admin_api_key: str | None = None
    """Key for what concerns everybody, such as /flush_cache (also STERNA_ADMIN_API_KEY; default: the other key)."""
    open_metrics: bool = False
    """Leave /metrics open when a key is set."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Verbosity of the log on standard error; prompts appear at no level but debug."""
    cache_dir: str | None = None
    """Where models are kept (also STERNA_CACHE_DIR; default ~/.cache/sterna)."""

    executor: str = "native"
    """Engine: native, torch (needs the extra), or scripted (no model runs: for tests and host benchmarks)."""
    executor_options: str = ""
    """key=value,… passed to the executor."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the torch executor; auto is bfloat16 where the processor has instructions for it, else float32."""
    device: str = "auto"
    """auto, cpu or cuda."""
    quantization: Literal["none", "int8", "int4"] = "none"
    """What the native executor turns the weights of a checkpoint in bf16, fp16 or fp32 into; none keeps bfloat16."""
    kv_dtype: Literal["bfloat16"] = "bfloat16"
    """Keys and values in the native executor's KV pool."""
    arithmetic: Literal["auto", "portable"] = "auto"
    """The native executor's arithmetic; portable gives the same text on every machine, auto may be faster on this one."""
    isa: str = "auto"
    """Instruction set of the native executor (also STERNA_ISA): amx, amx-int8, avx512, avx512vnni, avx2, portable; auto: the best."""
    threads: int | None = None
    """Compute threads (default: the cores that affinity and cgroup quota allow)."""
    context_length: int | None = None
    """Longest prompt plus output, in tokens (default: the model's)."""
    kv_memory: str | None = None
    """Memory for the KV pool, such as 2GB (default: a share of what is available)."""
    max_total_tokens: int | None = None
    """KV pool in tokens, of the layers without a sliding window; overrides --kv-memory."""
    page_size: int = 16
    """KV slots per page; prefixes are shared in whole pages."""

    max_running_requests: int = 256
    """Requests in a batch at most."""
    max_queued_requests: int = 4096
    """Requests waiting at most; one more gets 429 queue_full."""
    max_queued_tokens: int | None = None
    """Prompt tokens of all waiting requests at most; more get 429 too_many_queued_tokens (default: no limit)."""
    max_concurrent_per_key: int | None = None
    """Requests of one API key at once at most; one more gets 429 too_many_concurrent (default: no limit)."""
    waiting_timeout: float | None = None
    """Seconds after which a request that hasn't begun ends with 503 waiting_timeout (default: none)."""
    running_timeout: float | None = None
    """Seconds from its beginning after which a request ends with 504 running_timeout (default: none)."""
    chunked_prefill_size: int = 512
    """Prompt tokens computed per step at most; a longer prompt is split; 0 never splits."""
    schedule_policy: Literal["fcfs", "lpm", "priority"] = "fcfs"
    """Order of the waiting queue: first come first served, longest cached prefix first, or by the requests' priority."""
    priority_ageing: float = 10.0
    """Seconds of waiting that are worth one level of priority."""
    max_sessions: int = 1024
    """Open sessions at most; one more gets 429 too_many_sessions."""
    max_session_tokens: int = 8 * 1024 * 1024
    """Tokens of all sessions together from which on no further turn begins (429 too_many_session_tokens); 4 bytes each."""
    session_timeout: float = 600.0
    """Idle seconds after which a session is forgotten, where /open_session says nothing else."""
    radix_cache: bool = True
    """Share the KV of common prefixes between requests."""

    sampling_defaults: Literal["model", "openai"] = "model"
    """Where unset sampling parameters come from: the model's generation_config.json, or OpenAI's defaults."""
    incremental_streaming_output: bool = False
    """/generate streams deltas instead of cumulative text."""
    strict_fields: bool = False
    """Refuse body fields that no API defines (default: ignore, with one warning)."""
    max_body_bytes: int = 16 * 1024 * 1024
    """Request body limit; a larger one gets 413."""
    max_detokenizer_states: int = 65536
    """Requests whose text is being decoded at most; one more is refused at its start."""
    sse_keep_alive: float = 15.0
    """Seconds of silence after which a stream gets a comment line."""
    sse_commit_after: float = 5.0
    """Seconds after which a stream's status line goes out even if nothing is ready yet."""
    recovery: bool = True
    """Start a process that has died again and go on with every request; off: all requests end and the server exits with code 1."""
    drain_timeout: float = 30.0
    """Seconds that SIGTERM leaves to running requests."""
    flight_recorder: int = 1024
    """Ended requests whose stages are kept for /v1/requests and `sterna trace`; 0 keeps none."""
    stream_interval: int = 1
    """Tokens between two outputs of a stream."""
