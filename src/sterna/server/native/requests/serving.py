"""GET /v1/requests, GET /v1/requests/{rid}: the flight recorder, read."""

from __future__ import annotations

from sterna.errors import RequestNotFound
from sterna.server.context import AppContext
from sterna.server.exchange import Exchange
from sterna.server.native.requests.protocol import ListQuery, RequestList, RequestTraces, decode_query
from sterna.server.native.requests.response import to_summary, to_trace
from sterna.tokenizer_manager.flight_recorder import Record

MAX_MEMBERS = 64
"""Of a fan-out, in one answer; the list shows all of them: `/v1/requests?rid=…`."""


async def list_requests(exchange: Exchange, context: AppContext) -> None:
    """Raises InvalidRequest."""
    query = decode_query(exchange.scope["query_string"])
    # One more than asked for tells whether there is another page.
    records = context.manager.recorder.newest(lambda record: _matches(record, query), limit=query.limit + 1, before=query.before)
    page = records[: query.limit]
    more = page[-1].serial if len(records) > query.limit else None
    await exchange.respond_json(RequestList(data=[to_summary(record) for record in page], next_before=more))


async def get_request(exchange: Exchange, context: AppContext) -> None:
    """Live ones are looked up in the scheduler, which answers between two steps. Raises RequestNotFound."""
    rid = exchange.path_params["rid"]
    recorder = context.manager.recorder
    records = recorder.find(rid)
    if not records:
        raise RequestNotFound(f"no request {rid[:160]!r} is running, or among the last {context.args.flight_recorder} that ended")
    shown = records[:MAX_MEMBERS]
    live = await context.manager.look_up([record.rid for record in shown if record.phase != "finished"])
    traces = [to_trace(record.refresh(), live.get(record.rid)) for record in shown]
    await exchange.respond_json(RequestTraces(rid=rid, total=len(records), requests=traces))


def _matches(record: Record, query: ListQuery) -> bool:
    origin = record.origin
    return (
        (query.state is None or record.phase == query.state or (query.state == "live" and record.phase != "finished"))
        and (query.outcome is None or record.outcome == query.outcome)
        and (query.rid is None or record.rid == query.rid or (origin is not None and origin.rid == query.rid))
        and (query.request_id is None or (origin is not None and origin.request_id == query.request_id))
    )
