import pytest

from unit.scheduler.harness import Harness


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step read before the next one is submitted, and after."""
    monkeypatch.setattr(Harness, "overlap", request.param)
