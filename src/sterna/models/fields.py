"""Reads settings out of a config.json or a GGUF's metadata: typed, bounded, and naming the field in every complaint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeGuard

from sterna.errors import ModelError


class Fields:
    """A view of one mapping of settings. A value of None counts as absent; every method raises ModelError naming the field.

    `source` begins each message ("config.json", "GGUF metadata"), `nested_in` ("rope_scaling.") says where in it the mapping lies, and
    `prefix` ("llama.") is what its keys begin with.
    """

    def __init__(self, values: Mapping[str, object], source: str, *, nested_in: str = "", prefix: str = "") -> None:
        self._values = values
        self._source = source
        self._nested_in = nested_in
        self._prefix = prefix

    def fault(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self._source}: {self._nested_in}{self._prefix}{name}: {problem}")

    def get(self, name: str) -> object:
        return self._values.get(self._prefix + name)

    def names(self) -> Iterable[str]:
        """Every name under the prefix whose value isn't None."""
        cut = len(self._prefix)
        return (key[cut:] for key, value in self._values.items() if key.startswith(self._prefix) and value is not None)

    def mentions(self, name: str) -> bool:
        """Whether the name is there at all, be it with a value of None."""
        return self._prefix + name in self._values

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int) -> int:
        """A whole number in low..high; absent without a default is a fault."""
        value = self.get(name)
        if value is None:
            if default is None:
                raise self.fault(name, "missing")
            return default
        if not _is_number(value) or value != math.floor(value) or not low <= value <= high:
            raise self.fault(name, f"must be a whole number from {low} to {high}, is {_shown(value)}")
        return int(value)

    def number(self, name: str, default: float | None = None, *, low: float, high: float) -> float:
        """A finite number in low..high; absent without a default is a fault."""
        value = self.get(name)
        if value is None:
            if default is None:
                raise self.fault(name, "missing")
            return default
        if not _is_number(value) or not low <= value <= high:
            raise self.fault(name, f"must be a number from {low:g} to {high:g}, is {_shown(value)}")
        return float(value)

    def numbers(self, name: str, *, count: int, low: float, high: float) -> tuple[float, ...]:
        """A list of `count` finite numbers in low..high."""
        values = self.get(name)
        if not isinstance(values, list) or len(values) != count or not all(_is_number(value) and low <= value <= high for value in values):
            raise self.fault(name, f"must be a list of {count} numbers from {low:g} to {high:g}, is {_shown(values)}")
        return tuple(float(value) for value in values)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fault(name, f"must be true or false, is {_shown(value)}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.get(name)
        if value is None:
            if default is None:
                raise self.fault(name, "missing")
            return default
        if not isinstance(value, str):
            raise self.fault(name, f"must be a string, is {_shown(value)}")
        return value

    def mapping(self, name: str) -> Fields | None:
        """The settings nested under a name; None where there are none."""
        value = self.get(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise self.fault(name, f"must be an object, is {_shown(value)}")
        return Fields(value, self._source, nested_in=f"{self._nested_in}{self._prefix}{name}.")

    def refuse(self, neutral: Mapping[str, tuple[object, ...]]) -> None:
        """Fault the first name whose value is neither absent nor one of those that change nothing."""
        for name, harmless in neutral.items():
            value = self.get(name)
            if value is not None and value not in harmless:
                raise self.fault(name, f"{_shown(value)} is not supported")


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
