"""Wraps functions of modules as they are imported. For the `sitecustomize.py` of a server under test, on whose PYTHONPATH this folder is
too: the product has no hook."""

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Points = dict[str, list[tuple[str, Wrap]]]
"""By module: (attribute path, what makes the wrapper)."""


def wrap_on_import(points: Points) -> None:
    sys.meta_path.insert(0, _Finder(points))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Wraps the functions of a module when it has been executed, before its importer sees it."""

    def __init__(self, points: Points) -> None:
        self._points = points
        self._loaders: dict[str, importlib.abc.Loader] = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in self._points:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, importlib.abc.Loader):
            self._loaders[fullname] = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self._loaders[module.__name__].exec_module(module)
        for path, wrap in self._points[module.__name__]:
            *owners, attribute = path.split(".")
            owner = functools.reduce(getattr, owners, module)
            setattr(owner, attribute, wrap(getattr(owner, attribute)))
