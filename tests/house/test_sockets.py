"""No process of Sterna unpickles anything, and none but the HTTP server opens a socket that isn't a Unix socket."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "sterna"
SOURCES = sorted(ROOT.rglob("*.py"))
UNPICKLERS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing"}
PICKLING_CALLS = {"send_pyobj", "recv_pyobj"}


def imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_unpickles(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not imported(tree) & UNPICKLERS
    assert not {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & PICKLING_CALLS


def test_sockets_are_opened_where_they_are_known_to_be() -> None:
    """The listener of HTTP is bound by whoever launches; between the processes it is ZeroMQ, over addresses that one file makes."""
    users = {str(path.relative_to(ROOT)) for path in SOURCES if "socket" in imported(ast.parse(path.read_text()))}
    zmq_users = {path for path in SOURCES if "zmq" in imported(ast.parse(path.read_text()))}
    assert {user.split("/")[0] for user in users} <= {"launch", "server"}
    assert zmq_users
    assert not [path for path in SOURCES if "tcp://" in path.read_text()]
