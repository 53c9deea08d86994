"""What clients and operators may meet is in the docs: every error code beside its status, every metric, every flag of the server."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sterna import errors
from sterna.config.resolve import flag_of
from sterna.config.server_args import ServerArgs

ROOT = Path(__file__).parents[2]
SOURCES = [path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))]
ERRORS = (ROOT / "docs/errors.md").read_text()
OBSERVABILITY = (ROOT / "docs/observability.md").read_text()
README = (ROOT / "README.md").read_text()
ABSTRACT = (errors.RequestError, errors.TimedOut)
"""Only their subclasses are raised."""


def tree(root: type[errors.SternaError]) -> Iterator[type[errors.SternaError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


SERVED = [
    kind
    for root in (errors.RequestError, errors.OverloadedError, errors.TimedOut, errors.EngineError)
    for kind in tree(root)
    if kind not in ABSTRACT
]
GIVEN = sorted({code for source in SOURCES for code in re.findall(r'\bcode="(\w+)"', source)})
METRICS = sorted({name for source in SOURCES for name in re.findall(r'"(sterna_[a-z_0-9]+)"', source)})


@pytest.mark.parametrize("kind", SERVED, ids=lambda kind: kind.__name__)
def test_every_error_s_code_is_documented_with_its_status(kind: type[errors.RequestError]) -> None:
    sections = [section for section in re.split(r"^(?=## |\| )", ERRORS, flags=re.MULTILINE) if f"`{kind.code}`" in section]
    assert any(re.match(rf"(\| |## ){kind.status}\b", section) for section in sections)


@pytest.mark.parametrize("code", GIVEN)
def test_so_is_a_code_that_one_case_has_for_itself(code: str) -> None:
    assert f"`{code}`" in ERRORS


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_documented(name: str) -> None:
    assert re.search(rf"`{name}(_total)?`", OBSERVABILITY)


def test_the_readme_names_no_flag_that_the_server_lacks() -> None:
    settings = README[README.index("## Settings") : README.index("Environment: ")]
    named = set(re.findall(r"`(--[a-z-]+)`", settings))
    assert "--port" in named
    assert named <= {flag.replace("--", negation) for flag in map(flag_of, ServerArgs.__struct_fields__) for negation in ("--", "--no-")}
