"""A burst of connections is what the system allows, not what a shell's default does."""

import resource

import pytest

from sterna.server.http_server import MAX_CONNECTIONS, raise_file_limit

NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 10**6), (MAX_CONNECTIONS, 10**6)),
        ((1024, NO_LIMIT), (MAX_CONNECTIONS, NO_LIMIT)),
        ((10**6, 10**6), None),
        ((NO_LIMIT, NO_LIMIT), None),
        ((4096, 4096), None),
    ],
)
def test_the_limit_on_open_files_is_raised_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], after: tuple[int, int] | None
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: before)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    raise_file_limit()
    assert asked == ([] if after is None else [after])


def test_a_system_that_refuses_is_lived_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, NO_LIMIT))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_file_limit()
