from sterna.launch.restarts import MAX_IN_A_ROW, STABLE_S, RestartBudget


def delays(budget: RestartBudget, count: int, *, served: bool = False, lived_s: float = 1.0) -> list[float | None]:
    return [budget.next_delay(served=served, lived_s=lived_s) for _ in range(count)]


def test_a_child_that_dies_for_nothing_again_and_again_is_given_up() -> None:
    *waits, last = delays(RestartBudget(), MAX_IN_A_ROW + 1)
    assert last is None
    assert waits[0] == 0
    assert waits == sorted(waits)
    assert None not in waits


def test_work_done_in_between_starts_the_count_anew() -> None:
    budget = RestartBudget()
    for _ in range(10):
        assert None not in delays(budget, MAX_IN_A_ROW - 1)
        assert delays(budget, 1, served=True) == [0]


def test_a_child_that_lived_long_had_come_up() -> None:
    assert delays(RestartBudget(), 50, lived_s=STABLE_S + 1) == [0] * 50
