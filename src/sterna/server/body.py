"""Bytes of a JSON body → a typed request. Every fault is a 400 that names the field.

What happens to a field:

    built            decoded by its type; null is absent
    unbuilt          an API defines it and Sterna doesn't do it yet: refused by name, unless it is null or says what happens anyway
    unknown          no API defines it: ignored with one logged warning per name, or refused (`--strict-fields`)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec

from sterna.errors import InvalidRequest, UnsupportedField
from sterna.server.json_bounds import MAX_FIELDS, check_bounds

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

# Names of unknown fields that are remembered (each is warned of once), and how much of one is logged.
MAX_WARNED_NAMES = 256
MAX_LOGGED_NAME = 64

Unbuilt = Mapping[str, tuple[Any, ...]]
"""Field -> values that change nothing, and so are accepted. Null always is."""

_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])

# "Expected `int`, got `str` - at `$.messages[0].content`", "… - at `key` in `$.logit_bias`"
_PLACE = re.compile(r"^(?P<what>.*?) - at (?:`(?:key|value)` in )?`\$(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `([^`]*)`")


class UnknownFields:
    """What happens to fields that no API defines. One per app: it remembers the names that it has warned of."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._warned: set[str] = set()

    def found(self, param: str) -> None:
        """Raises InvalidRequest under `--strict-fields`; warns once per name otherwise, up to a number of names."""
        if self._strict:
            raise InvalidRequest(f"unknown field {param!r}", param=param, code="unknown_parameter")
        if param not in self._warned and len(self._warned) < MAX_WARNED_NAMES:
            self._warned.add(param)
            log.warning("ignoring the unknown field %r in request bodies", param)


class BodyDecoder(Generic[T]):
    """Decodes one endpoint's bodies. Immutable; made once."""

    def __init__(self, type_: type[T], *, unbuilt: Unbuilt) -> None:
        self._decoder = msgspec.json.Decoder(type_)
        self._built = frozenset(field.encode_name for field in msgspec.structs.fields(type_))
        self._unbuilt = unbuilt

    def decode(self, body: bytes | msgspec.Raw, unknown: UnknownFields, *, prefix: str = "") -> tuple[T, dict[str, msgspec.Raw]]:
        """The request, and each of its fields as sent; `prefix` is the path to `body` inside a larger one.

        Raises InvalidRequest, UnsupportedField.
        """
        if isinstance(body, bytes):
            check_bounds(body)
        fields: dict[str, msgspec.Raw] = parse(_raw_fields, body, prefix=prefix)
        if len(fields) > MAX_FIELDS:
            raise InvalidRequest(f"{prefix or 'the body'}: at most {MAX_FIELDS} fields", param=prefix or None, code="body_too_complex")
        path = f"{prefix}." if prefix else ""
        # Before the types: a field that isn't built is named as such, whatever its value.
        for name, raw in fields.items():
            if name not in self._built:
                self._check(path, name, raw, unknown)
        request: T = parse(self._decoder, body, prefix=prefix)
        return request, fields

    def _check(self, path: str, name: str, raw: msgspec.Raw, unknown: UnknownFields) -> None:
        accepted = self._unbuilt.get(name)
        param = path + name[:MAX_LOGGED_NAME]
        if accepted is not None:
            if not _changes_nothing(raw, accepted):
                raise UnsupportedField(_unbuilt_message(param, accepted), param=param)
        else:
            unknown.found(param)


def parse(decoder: msgspec.json.Decoder[Any], body: bytes | msgspec.Raw, *, prefix: str = "") -> Any:
    """Decode `body`. Raises InvalidRequest that names the field (below `prefix`)."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as fault:
        raise _invalid_field(str(fault), prefix) from None
    except msgspec.DecodeError as fault:
        raise InvalidRequest(_malformed(str(fault), bytes(body)), code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8", code="invalid_json") from None


def _invalid_field(fault: str, prefix: str) -> InvalidRequest:
    place = _PLACE.match(fault)
    what, path = (place["what"], place["path"].removesuffix("[...]").lstrip(".")) if place else (fault, "")
    missing = _MISSING.search(what)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        what = "this field is required"
    elif not path and not prefix:
        return InvalidRequest(f"the body: {what}")
    else:
        what = what[:1].lower() + what[1:]
    param = f"{prefix}.{path}" if prefix and path else prefix or path
    return InvalidRequest(f"{param}: {what}", param=param, code="missing_required_parameter" if missing else None)


def _malformed(fault: str, body: bytes) -> str:
    if "UTF-8" in fault:
        return "the body is not valid UTF-8"
    # The decoder says the same of an escape that is half of a surrogate pair.
    cause = "it ends too early, or an escape is half of a surrogate pair" if "truncated" in fault else fault
    return f"the body is not valid JSON: {cause}" if body else "the body is empty; JSON is expected"


def _changes_nothing(raw: msgspec.Raw, accepted: tuple[Any, ...]) -> bool:
    try:
        value = msgspec.json.decode(raw)
    except (RecursionError, msgspec.DecodeError):  # too deep, or a number that no float holds: neither is a value that is accepted
        return False
    return value is None or any(isinstance(value, bool) == isinstance(other, bool) and value == other for other in accepted)


def _unbuilt_message(name: str, accepted: tuple[Any, ...]) -> str:
    if not accepted:
        return f"{name} is not supported"
    return f"{name} is not supported yet; leave it out, or send {' or '.join(str(msgspec.json.encode(v), 'utf-8') for v in accepted)}"
