"""Asks /health and /ready in turn, 20 times a second, as an orchestrator's probe does but more often, and prints how long the answers took.

    python bench/probe.py URL SECONDS

Standard library only and in a process of its own, so that what it measures is the server and not a busy client.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections import Counter
from urllib.parse import urlsplit

INTERVAL_S = 0.05


def main(url: str, seconds: float) -> None:
    target = urlsplit(url)
    assert target.hostname is not None
    connection = http.client.HTTPConnection(target.hostname, target.port, timeout=60)
    statuses: Counter[int] = Counter()
    took: list[float] = []
    began = time.perf_counter()
    for index in range(int(seconds / INTERVAL_S)):
        due = began + index * INTERVAL_S
        time.sleep(max(due - time.perf_counter(), 0))
        asked = time.perf_counter()
        connection.request("GET", ("/health", "/ready")[index % 2])
        answer = connection.getresponse()
        answer.read()
        took.append(time.perf_counter() - asked)
        statuses[answer.status] += 1
    took.sort()
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    figures = {name: round(1000 * took[min(len(took) - 1, int(share * len(took)))], 1) for name, share in shares.items()}
    print(json.dumps({"statuses": dict(statuses), "ms": figures}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
