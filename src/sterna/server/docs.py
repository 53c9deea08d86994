"""GET /docs: Swagger UI over `/openapi.json`. Its assets come from the package `openapi-ui-bundles`: nothing is fetched from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from sterna.errors import RequestNotFound
from sterna.server.context import AppContext
from sterna.server.exchange import Exchange

ASSETS = {"swagger-ui.css": b"text/css; charset=utf-8", "swagger-ui-bundle.js": b"text/javascript; charset=utf-8"}

_PAGE = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Sterna API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#ui", deepLinking: true, validatorUrl: null})</script>
</body>
</html>
"""


async def docs_page(exchange: Exchange, context: AppContext) -> None:
    await exchange.respond(200, _PAGE, content_type=b"text/html; charset=utf-8")


async def docs_asset(exchange: Exchange, context: AppContext) -> None:
    """Raises RequestNotFound for anything but the two assets."""
    name = exchange.path_params["asset"]
    if name not in ASSETS:
        raise RequestNotFound(f"no such page: /docs/{name[:64]}")
    data = await context.manager.run_blocking(_read, name)
    await exchange.respond(200, data, content_type=ASSETS[name], headers=[(b"cache-control", b"max-age=86400")])


def _read(name: str) -> bytes:
    return (files("openapi_ui_bundles") / "swagger_ui" / "vendor" / name).read_bytes()
