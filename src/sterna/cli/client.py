"""As much of HTTP as the commands need, from the standard library: starting takes no time."""

from __future__ import annotations

import http.client
import json
import unicodedata
from typing import Any
from urllib.parse import urlsplit

from sterna.errors import StartupError

DEFAULT_URL = "http://127.0.0.1:8000"


class ServerClient:
    """Asks a running server. Every fault is a StartupError whose message is fit to be printed."""

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StartupError(f"not an http address: {url}")
        self._url = url
        self._parts = parts
        # A connection per request: what has been read to its end, or is closed, leaves none behind.
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def request(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """The response, its body unread; `body` goes as JSON. Raises StartupError for any status but 200."""
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        connection = kind(self._parts.hostname, self._parts.port)
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
        except OSError as fault:
            raise StartupError(f"no server at {self._url} ({fault.strerror or fault}); start one with: sterna serve") from fault
        if response.status != 200:
            raise StartupError(printable(_error_message(response)))
        return response

    def get(self, path: str) -> Any:
        """The JSON that `path` answers."""
        with self.request("GET", path) as response:
            try:
                return json.load(response)
            except ValueError:
                raise StartupError(f"{self._url}{path} is no Sterna server: its answer is not JSON") from None


def _error_message(response: http.client.HTTPResponse) -> str:
    text = response.read().decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status}: {text[:200]}"


def printable(text: str) -> str:
    """`text` without what a terminal would obey: every control character but newline and tab.

    Without its escape character a control sequence is plain text, so nothing has to be remembered from one piece to the next.
    """
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")
