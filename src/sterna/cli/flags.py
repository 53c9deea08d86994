"""`ServerArgs` as command-line flags: one field, one flag, its docstring the help."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import types
import typing
from collections.abc import Sequence

import msgspec

from sterna.config.resolve import flag_of
from sterna.config.server_args import ServerArgs

# Settings that the environment may give; a flag wins.
ENVIRONMENT = {
    "api_key": "STERNA_API_KEY",
    "admin_api_key": "STERNA_ADMIN_API_KEY",
    "cache_dir": "STERNA_CACHE_DIR",
    "isa": "STERNA_ISA",
}


def server_parser() -> argparse.ArgumentParser:
    """For `sterna serve [MODEL] --port …`."""
    parser = argparse.ArgumentParser(prog="sterna serve", description="Serve a model over HTTP.")
    docs = field_docs(ServerArgs)
    hints = typing.get_type_hints(ServerArgs)
    for field in msgspec.structs.fields(ServerArgs):
        text = docs[field.name].replace("%", "%%")
        if field.name == "model":
            parser.add_argument("model", nargs="?", default=field.default, metavar="MODEL", help=text)
            continue
        _add(parser, field.name, hints[field.name], field.default, text)
    return parser


def parse_server_args(argv: Sequence[str]) -> ServerArgs:
    """Exits with code 2 and the flag's name where a flag isn't right."""
    given = {name: value for name, value in vars(server_parser().parse_args(argv)).items() if value is not None}
    for name, variable in ENVIRONMENT.items():
        if name not in given and os.environ.get(variable):
            given[name] = os.environ[variable]
    return ServerArgs(**given)


def _add(parser: argparse.ArgumentParser, name: str, hint: typing.Any, default: object, text: str) -> None:
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    shown = "" if default is None or default == "" else f" [{default}]"
    if hint is bool:
        parser.add_argument(flag_of(name), action=argparse.BooleanOptionalAction, default=None, help=text + shown)
    elif typing.get_origin(hint) is typing.Literal:
        parser.add_argument(flag_of(name), choices=typing.get_args(hint), default=None, help=text + shown)
    else:
        parser.add_argument(flag_of(name), type=hint, default=None, metavar=hint.__name__.upper(), help=text + shown)


def field_docs(struct: type) -> dict[str, str]:
    """The docstring beneath each field, read from the source (Python keeps none)."""
    body = ast.parse(inspect.getsource(struct)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, doc in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
            assert isinstance(doc.value, ast.Constant)
            docs[field.target.id] = " ".join(str(doc.value.value).split())
    return docs
