"""The API key: every route is closed unless it is named here."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from sterna.errors import AuthenticationFailed

ALWAYS_OPEN = frozenset({"/health", "/ready"})


class Auth:
    """Compares `Authorization: Bearer KEY` in constant time. The key itself goes nowhere else: no log, no message."""

    def __init__(self, api_key: str | None, open_paths: frozenset[str]) -> None:
        self._key = None if api_key is None else api_key.encode()
        self._open = open_paths

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises AuthenticationFailed. Paths that lead nowhere are closed too: who has no key learns nothing of the routes."""
        if self._key is None or path in self._open:
            return
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1:
            raise AuthenticationFailed("this server needs a key: send it as `Authorization: Bearer KEY`")
        scheme, _, key = bytes(given[0]).partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
            raise AuthenticationFailed("the key is not the right one")
