"""GET /metrics: Prometheus' text format.

Histograms are fed once per request, at its end; gauges and inter-token latency are read from their owners at the scrape.
`sterna_requests_started_total` = the sum of `sterna_requests_total` over its outcomes + `sterna_requests_running`, at every scrape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sterna.server.cause_metrics import Causes
from sterna.server.exchange import Exchange
from sterna.tokenizer_manager.manager import TokenizerManager
from sterna.tokenizer_manager.receive import ITL_BOUNDS_S
from sterna.tokenizer_manager.req_state import Outcome, ReqState, RequestTimes

# Version 0.0.4 of the text format, which `generate_latest` writes.
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

# Each stage ends where the next one begins; one that a request never reached isn't counted.
STAGES: tuple[tuple[str, str, str], ...] = (
    ("template", "received", "templated"),
    ("tokenize", "templated", "tokenized"),
    ("dispatch", "tokenized", "dispatched"),
    ("queue", "dispatched", "first_scheduled"),
    ("prefill", "first_scheduled", "first_token"),
    ("first_delivery", "first_token", "first_byte"),
    ("decode", "first_token", "last_token"),
    ("detokenize", "last_token", "detokenized"),
    ("last_delivery", "detokenized", "finished"),
)


class Metrics:
    """One registry per app, so that several apps may live in one process."""

    def __init__(self, manager: TokenizerManager) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._outcomes = Counter("sterna_requests", "Generating requests that have ended.", ["outcome"], registry=registry)
        self._responses = Counter("sterna_http_responses", "HTTP responses.", ["route", "status"], registry=registry)
        self._prompt_tokens = Counter("sterna_prompt_tokens", "Prompt tokens of requests that have ended.", registry=registry)
        self._cached_tokens = Counter("sterna_cached_tokens", "Prompt tokens that came from the prefix cache.", registry=registry)
        self._completion_tokens = Counter("sterna_completion_tokens", "Output tokens of requests that have ended.", registry=registry)
        self._ttft = _histogram(registry, "sterna_time_to_first_token_seconds", "From a request's arrival to its first token.")
        self._e2e = _histogram(registry, "sterna_e2e_request_latency_seconds", "From a request's arrival to its end.")
        self._queue = _histogram(registry, "sterna_queue_time_seconds", "From dispatch to the first step that a request is part of.")
        self._stage = Histogram("sterna_stage_seconds", "Time per stage of a request.", ["stage"], buckets=SECONDS, registry=registry)
        for outcome in get_args(Outcome):
            self._outcomes.labels(outcome)
        registry.register(_Live(manager))
        registry.register(Causes(manager.recorder))

    def finished(self, state: ReqState, outcome: Outcome) -> None:
        """An observer of the manager (`on_finish`)."""
        self._outcomes.labels(outcome).inc()
        self._prompt_tokens.inc(state.prompt_tokens)
        self._cached_tokens.inc(state.cached_tokens)
        self._completion_tokens.inc(len(state.output_ids))
        times = state.times
        _observe(self._ttft, times.received, times.first_token)
        _observe(self._e2e, times.received, times.finished)
        _observe(self._queue, times.dispatched, times.first_scheduled)
        for stage, begin, end in STAGES:
            _observe(self._stage.labels(stage), _begin(times, begin), getattr(times, end))

    def answered(self, exchange: Exchange) -> None:
        """A response's status line is out. Paths outside the route table share one label."""
        self._responses.labels(exchange.route or "other", str(exchange.status)).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


def _begin(times: RequestTimes, stage: str) -> float | None:
    if stage == "templated" and times.templated is None:
        return times.received  # no template on this route
    value: float | None = getattr(times, stage)
    return value


def _histogram(registry: CollectorRegistry, name: str, text: str) -> Histogram:
    return Histogram(name, text, buckets=SECONDS, registry=registry)


def _observe(histogram: Histogram, begin: float | None, end: float | None) -> None:
    if begin is not None and end is not None:
        histogram.observe(max(0.0, end - begin))


class _Live(Collector):
    """What the manager and, through it, the scheduler know at this moment."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        manager = self._manager
        started = CounterMetricFamily("sterna_requests_started", "Generating requests accepted.")
        started.add_metric([], manager.started_total)
        yield started
        yield _gauge("sterna_requests_running", "Generating requests that have begun and not ended, wherever they are.", manager.num_live)
        yield _gauge("sterna_ready", "1 when requests are admitted.", int(manager.ready))
        yield _gauge("sterna_sessions", "Open sessions.", manager.sessions.num_open)
        yield _gauge("sterna_session_tokens", "Tokens that open sessions hold.", manager.sessions.num_tokens)
        yield self._inter_token_latency()
        stats = manager.stats
        if stats is None:
            return
        yield _gauge("sterna_scheduler_running", "Requests in the batch.", stats.num_running_reqs)
        yield _gauge("sterna_scheduler_waiting", "Requests in the waiting queue.", stats.num_waiting_reqs)
        yield _gauge("sterna_kv_total_tokens", "KV slots.", stats.kv_total_tokens)
        yield _gauge("sterna_kv_used_tokens", "KV slots held by running requests or locked prefixes.", stats.kv_used_tokens)
        yield _gauge("sterna_kv_evictable_tokens", "KV slots of cached prefixes that nobody holds.", stats.kv_evictable_tokens)
        yield _gauge("sterna_kv_usage", "Share of the KV slots in use.", stats.kv_used_tokens / max(1, stats.kv_total_tokens))
        hit_rate = stats.cached_tokens_total / max(1, stats.prompt_tokens_total)
        yield _gauge("sterna_cache_hit_rate", "Cached share of all prompt tokens.", hit_rate)
        yield _gauge("sterna_max_batch_size", "Most rows in one step since the start.", stats.max_batch_size)
        for name, text, value in (
            ("sterna_output_tokens", "Tokens generated by the engine.", stats.output_tokens_total),
            ("sterna_retractions", "Requests taken out of the batch for want of memory.", stats.retractions_total),
            ("sterna_steps", "Steps of the engine.", stats.steps_total),
        ):
            counter = CounterMetricFamily(name, text)
            counter.add_metric([], value)
            yield counter

    def _inter_token_latency(self) -> Metric:
        itl = self._manager.itl
        buckets: list[tuple[str, float]] = []
        below = 0
        for bound, count in zip([*map(str, ITL_BOUNDS_S), "+Inf"], itl.buckets, strict=True):
            below += count
            buckets.append((bound, below))
        family = HistogramMetricFamily("sterna_inter_token_latency_seconds", "Time per output token after the first.")
        family.add_metric([], buckets, itl.total_s)
        return family


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family
