"""The keys: every route is closed unless it is named here, and what concerns everybody's requests may have a key of its own."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from sterna.errors import AuthenticationFailed

ALWAYS_OPEN = frozenset({"/health", "/ready"})

Headers = Iterable[tuple[bytes, bytes]]


class Auth:
    """Compares `Authorization: Bearer KEY` in constant time. The keys themselves go nowhere else: no log, no message."""

    def __init__(self, api_key: str | None, admin_api_key: str | None, open_paths: frozenset[str]) -> None:
        """`admin_api_key` opens everything; None: `api_key`, if there is one, does."""
        self._admin_keys = [key.encode() for key in (admin_api_key,) if key is not None]
        self._keys = [] if api_key is None else [api_key.encode(), *self._admin_keys]
        self._open = open_paths

    def check(self, path: str, headers: Headers) -> None:
        """Raises AuthenticationFailed. Paths that lead nowhere are closed too: who has no key learns nothing of the routes."""
        if path not in self._open:
            _check(headers, self._keys)

    def check_admin(self, headers: Headers) -> None:
        """For what concerns everybody's requests, after `check`. Raises AuthenticationFailed."""
        _check(headers, self._admin_keys)


def _check(headers: Headers, keys: list[bytes]) -> None:
    """Whether one of `keys` was sent, if there are any."""
    if not keys:
        return
    given = [value for name, value in headers if name == b"authorization"]
    if len(given) != 1:
        raise AuthenticationFailed("this needs a key: send it as `Authorization: Bearer KEY`")
    scheme, _, sent = bytes(given[0]).partition(b" ")
    right = [hmac.compare_digest(sent.strip(), key) for key in keys]
    if scheme.lower() != b"bearer" or not any(right):
        raise AuthenticationFailed("the key is not the right one")
