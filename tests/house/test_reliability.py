"""docs/reliability.md states each promise beside the tests that hold it; those exist."""

import re

from running_server import ROOT

TEXT = (ROOT / "docs" / "reliability.md").read_text()


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+(?:\.py|/))", TEXT)
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_promise_names_a_test() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) > 10
    for row in rows:
        promise, held_by = row.strip("| ").split(" | ")
        assert re.search(r"tests/|machine|fault|make soak", held_by), promise
