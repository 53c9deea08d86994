"""GET /openapi.json: OpenAPI 3.1, generated from the route table and its types."""

from __future__ import annotations

from typing import Any

import msgspec

import sterna
from sterna.server.context import AppContext
from sterna.server.errors import ErrorResponse
from sterna.server.exchange import Exchange
from sterna.server.route import PATH_PARAM, Route


async def openapi_json(exchange: Exchange, context: AppContext) -> None:
    await exchange.respond(200, context.openapi)


def describe(routes: tuple[Route, ...], *, keyed: bool, open_paths: frozenset[str]) -> dict[str, Any]:
    """The document. `keyed`: whether a key is needed, on all but `open_paths`."""
    types = [kind for route in routes for kind in (route.request, route.response) if kind is not None]
    schemas, components = msgspec.json.schema_components([*types, ErrorResponse], ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(str, types), schemas, strict=False))
    error = {"description": "The fault, in OpenAI's shape", "content": {"application/json": {"schema": schemas[-1]}}}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, schema_of, error)
        if keyed and route.path not in open_paths:
            operation["security"] = [{"key": []}]
        paths.setdefault(PATH_PARAM.sub(r"{\1}", route.path), {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sterna", "version": sterna.__version__, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Route, schema_of: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.response is not None:
        content["application/json"] = {"schema": schema_of[str(route.response)]}
    if route.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "responses": {"200": {"description": "Success"} | ({"content": content} if content else {}), "default": error},
    }
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema_of[str(route.request)]}}}
    names = [param[1] for param in PATH_PARAM.finditer(route.path)]
    if names:
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    return operation
