"""The table of routes: what answers where, and the types that `/openapi.json` shows. An endpoint is one folder and one row."""

from __future__ import annotations

from sterna.server.docs import docs_asset, docs_page
from sterna.server.health import Health, health, metrics, ready
from sterna.server.native.control.protocol import AbortRequest, AbortResponse, FlushCacheResponse, ServerInfo
from sterna.server.native.control.serving import abort_request, flush_cache, server_info
from sterna.server.native.generate.protocol import GenerateBody, GenerateOutput
from sterna.server.native.generate.serving import generate
from sterna.server.native.requests.protocol import RequestList, RequestTraces
from sterna.server.native.requests.serving import get_request, list_requests
from sterna.server.native.session.protocol import CloseSessionRequest, CloseSessionResponse, OpenSessionRequest
from sterna.server.native.session.serving import close_session, open_session
from sterna.server.native.tokenize.protocol import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from sterna.server.native.tokenize.serving import detokenize, tokenize
from sterna.server.openai.chat.protocol import ChatCompletionBody, ChatCompletionResponse
from sterna.server.openai.chat.serving import chat_completions
from sterna.server.openai.completion.protocol import CompletionRequest, CompletionResponse
from sterna.server.openai.completion.serving import completions
from sterna.server.openai.models.protocol import ModelCard, ModelList
from sterna.server.openai.models.serving import get_model, list_models
from sterna.server.openapi import openapi_json
from sterna.server.route import Route

ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/chat/completions", chat_completions, "Chat", ChatCompletionBody, ChatCompletionResponse, streams=True),
    Route("POST", "/v1/completions", completions, "Complete texts or token ids", CompletionRequest, CompletionResponse, streams=True),
    Route("POST", "/generate", generate, "SGLang's own generation API", GenerateBody, GenerateOutput | list[GenerateOutput], streams=True),
    Route("GET", "/v1/models", list_models, "The served model", None, ModelList),
    Route("GET", "/v1/models/{model:path}", get_model, "One model", None, ModelCard),
    Route("GET", "/v1/requests", list_requests, "Live and recent requests, newest first", None, RequestList, admin=True),
    Route("GET", "/v1/requests/{rid:path}", get_request, "A request's stages and their times", None, RequestTraces),
    Route("POST", "/tokenize", tokenize, "Text to token ids", TokenizeRequest, TokenizeResponse),
    Route("POST", "/detokenize", detokenize, "Token ids to text", DetokenizeRequest, DetokenizeResponse),
    Route(
        "POST", "/abort_request", abort_request, "End a running request; `aborted` is 0 where there is none", AbortRequest, AbortResponse
    ),
    Route("POST", "/open_session", open_session, "Keep the tokens of a conversation", OpenSessionRequest, str),
    Route("POST", "/close_session", close_session, "Forget them", CloseSessionRequest, CloseSessionResponse),
    Route("POST", "/flush_cache", flush_cache, "Drop cached prefixes that nobody uses", None, FlushCacheResponse, admin=True),
    Route("GET", "/server_info", server_info, "Settings, model, engine, gauges", None, ServerInfo),
    Route("GET", "/health", health, "Liveness", None, Health),
    Route("GET", "/ready", ready, "Readiness", None, Health),
    Route("GET", "/metrics", metrics, "Prometheus metrics"),
    Route("GET", "/openapi.json", openapi_json, "This description"),
    Route("GET", "/docs", docs_page, "This description, to read and try"),
    Route("GET", "/docs/{asset}", docs_asset, "Parts of that page"),
)
