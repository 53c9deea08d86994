"""Limits that no test enforces do not hold: a file is under 500 lines, a function under 60."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(p for d in ("src", "tests", "bench") for p in (ROOT / d).rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_is_under_500_lines_and_a_function_under_60(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") < 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length < 60, f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines"


CPP_SOURCES = sorted(p for d in ("csrc", "bench") for suffix in ("cpp", "h", "inl") for p in (ROOT / d).rglob(f"*.{suffix}"))


@pytest.mark.parametrize("path", CPP_SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_so_is_a_file_of_cpp_and_its_functions(path: Path) -> None:
    """Functions outside classes, as they are formatted: from a line without indentation that ends in a brace to the next lone one."""
    lines = path.read_text().splitlines()
    assert len(lines) < 500
    start = None
    for number, line in enumerate(lines, start=1):
        if line.endswith("{") and line[0].isalpha() and not line.startswith(("namespace", "class", "struct", "enum")):
            start = number
        elif line == "}" and start is not None:
            assert number - start + 1 < 60, f"{path.relative_to(ROOT)}:{start} has {number - start + 1} lines"
            start = None
