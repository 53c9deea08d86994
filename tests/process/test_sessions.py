"""Sessions in real processes: whatever is cut off or branches meanwhile, each turn goes on from exactly what its parent said.

The executor echoes its prompt, so every answer shows the whole context; and it verifies that cached KV is that context's.
"""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx

from running_server import RunningServer, until

CLIENTS = 8
TURNS = 12


def echo(context: bytes, count: int) -> bytes:
    return bytes(context[index % len(context)] for index in range(count))


def converse(server: RunningServer, number: int) -> Counter[str]:
    """Turns at random places of one session, some of them left in mid-stream."""
    rng = random.Random(number)
    seen: Counter[str] = Counter()
    contexts: dict[str | None, bytes] = {None: b""}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        session = http.post("/open_session", json={}).json()
        for index in range(TURNS):
            place = {"id": session, "rid": rng.choice(list(contexts))}
            new = "".join(rng.choices("abcdefgh ", k=rng.randint(1, 40)))
            body = {"text": new, "rid": f"{number}-{index}", "session_params": place}
            if index and rng.random() < 0.3:
                long = {**body, "stream": True, "sampling_params": {"max_new_tokens": 1000}}
                with http.stream("POST", "/generate", json=long) as stream:
                    next(stream.iter_lines())
                seen["cut"] += 1
            answer = http.post("/generate", json={**body, "rid": f"{number}-{index}+", "sampling_params": {"max_new_tokens": 20}})
            assert answer.status_code == 200, answer.text
            context = contexts[place["rid"]] + new.encode()
            said = bytes(answer.json()["output_ids"])
            assert (answer.json()["meta_info"]["prompt_tokens"], said) == (len(context), echo(context, 20))
            contexts[f"{number}-{index}+"] = context + said
            seen["cached"] += answer.json()["meta_info"]["cached_tokens"] > 0
        assert http.post("/close_session", json={"session_id": session}).status_code == 200
    return seen


def test_many_clients_branch_and_leave_and_every_turn_has_its_exact_context(slow_server: RunningServer) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        seen = sum(pool.map(lambda number: converse(slow_server, number), range(CLIENTS)), Counter())
    assert seen["cut"] >= CLIENTS
    assert seen["cached"] >= CLIENTS
    held = ("sterna_sessions", "sterna_session_tokens", "sterna_requests_running", "sterna_kv_used_tokens")
    until(lambda: all(slow_server.metrics()[name] == 0 for name in held))
