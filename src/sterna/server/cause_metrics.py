"""What went otherwise than it should, by cause, in `/metrics`: read from the flight recorder at the scrape.

Every label's values are a fixed set (`CAUSES`, `PROCESSES`, `EndCause`) or the error codes of the source, 64 at most; those of a fixed set
are there from the start, at 0, so that a first event is an increase.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sterna.tokenizer_manager.flight_recorder import CAUSES, Event, FlightRecorder

_EVENTS: dict[Event, tuple[str, str]] = {
    "aborted": ("sterna_aborts", "Requests told to end before their time."),
    "timeout": ("sterna_timeouts", "Requests that a deadline ended."),
    "replayed": ("sterna_replays", "Requests dispatched again from their accepted tokens."),
}


class Causes(Collector):
    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder

    def collect(self) -> Iterator[Metric]:
        recorder = self._recorder
        for event, (name, text) in _EVENTS.items():
            yield _counter(name, text, ("cause",), (((cause,), recorder.counts[event, cause]) for cause in CAUSES[event]))
        yield _counter(
            "sterna_process_restarts",
            "Processes of the group started again, by how they ended.",
            ("process", "cause"),
            recorder.restarts.items(),
        )
        errors = (((code,), count) for code, count in recorder.errors.items())
        yield _counter("sterna_request_errors", "Registered requests that ended with an error.", ("code",), errors)
        refusals = (((code,), count) for code, count in recorder.refusals.items())
        yield _counter("sterna_refusals", "HTTP requests for output that were refused unregistered.", ("code",), refusals)


def _counter(name: str, text: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], int]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in samples:
        family.add_metric(values, count)
    return family
