"""The ASGI application: key → route → handler; every error leaves through `errors.to_http`."""

from __future__ import annotations

import logging
import re
import time
from typing import NamedTuple

import msgspec

from sterna.config.server_args import ServerArgs
from sterna.errors import MethodNotAllowed, RequestNotFound
from sterna.server.auth import ALWAYS_OPEN, Auth
from sterna.server.body import UnknownFields
from sterna.server.context import AppContext
from sterna.server.errors import to_http
from sterna.server.exchange import BodyBudget, ClientGone, Exchange, Receive, Scope, Send
from sterna.server.freed_memory import FreedMemory
from sterna.server.generation import Generations
from sterna.server.metrics import Metrics
from sterna.server.openapi import describe
from sterna.server.request_log import RequestLog
from sterna.server.route import Route, compile_path
from sterna.server.routes import ROUTES
from sterna.server.sampling import SamplingResolver
from sterna.server.threads import Threads
from sterna.text.token_names import TokenNames
from sterna.tokenizer_manager.manager import TokenizerManager

log = logging.getLogger(__name__)

# Bodies of this many times the limit of one may be held at once, before they are decoded.
BODIES_AT_ONCE = 16


def create_app(manager: TokenizerManager, args: ServerArgs) -> App:
    """Wire the surfaces to `manager` and observe its requests' ends."""
    metrics = Metrics(manager)
    request_log = RequestLog()
    manager.on_finish += [metrics.finished, request_log.finished]
    open_paths = ALWAYS_OPEN | {"/metrics"} if args.open_metrics else ALWAYS_OPEN
    context = AppContext(
        manager=manager,
        args=args,
        sampling=SamplingResolver(manager.model.vocab_size, manager.model.generation, args.sampling_defaults),
        token_names=TokenNames(manager.tokenizer),
        generations=Generations(manager),
        metrics=metrics,
        threads=Threads.create(args),
        unknown_fields=UnknownFields(strict=args.strict_fields),
        auth=Auth(args.api_key, args.admin_api_key, open_paths),
        openapi=msgspec.json.encode(describe(ROUTES, keyed=args.api_key is not None, open_paths=open_paths)),
        started=int(time.time()),
    )
    return App(context, request_log)


class _Compiled(NamedTuple):
    pattern: re.Pattern[str]
    by_method: dict[str, Route]


class App:
    """See the module; `shutdown` ends it. Speaks HTTP only: it needs no lifespan, and refuses WebSockets by saying nothing of them."""

    def __init__(self, context: AppContext, request_log: RequestLog) -> None:
        self.context = context
        self._request_log = request_log
        self._budget = BodyBudget(BODIES_AT_ONCE * context.args.max_body_bytes)
        self._freed = FreedMemory()
        self._fixed: dict[str, dict[str, Route]] = {}
        self._patterns: list[_Compiled] = []
        for route in ROUTES:
            if "{" in route.path:
                self._patterns.append(_Compiled(compile_path(route.path), {route.method: route}))
            else:
                self._fixed.setdefault(route.path, {})[route.method] = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(f"no {scope['type']} here")
        exchange = Exchange(scope, receive, send, max_body_bytes=self.context.args.max_body_bytes, budget=self._budget)
        route: Route | None = None
        try:
            self.context.auth.check(scope["path"], scope["headers"])
            route = self._route(exchange)
            if route.admin:
                self.context.auth.check_admin(scope["headers"])
            await route.handler(exchange, self.context)
        except ClientGone:
            return
        except Exception as fault:
            error = to_http(fault)
            if route is not None and route.streams and not exchange.registered:
                self._request_log.refused(exchange, error)
                self.context.manager.recorder.refused(error.code)
            if exchange.status is not None:
                raise  # too late for an answer: the server closes the connection
            await exchange.respond_error(error)
        finally:
            exchange.release_body()
            self._freed.released(exchange.body_bytes)
            if exchange.status is not None:
                self.context.metrics.answered(exchange)

    def shutdown(self) -> None:
        """Let the threads go; call when no request is being answered any more."""
        self.context.threads.shutdown()
        self._freed.close()

    def _route(self, exchange: Exchange) -> Route:
        """Raises RequestNotFound, MethodNotAllowed."""
        path: str = exchange.scope["path"]
        by_method = self._fixed.get(path)
        if by_method is None:
            for compiled in self._patterns:
                match = compiled.pattern.fullmatch(path)
                if match:
                    by_method = compiled.by_method
                    exchange.path_params = match.groupdict()
                    break
            else:
                raise RequestNotFound(f"no such route: {path[:128]}")
        method: str = exchange.scope["method"]
        route = by_method.get("GET" if method == "HEAD" else method)
        if route is None:
            refusal = MethodNotAllowed(f"{method} is not allowed here")
            refusal.allowed = tuple(sorted(by_method))
            raise refusal
        exchange.route = route.path
        return route
