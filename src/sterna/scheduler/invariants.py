"""Invariant 6: free + evictable + protected + owned by requests == total, and every slot has exactly one owner."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sterna.scheduler.kv import KVLedger
from sterna.scheduler.req import Req


class InvariantViolation(Exception):
    """The books of KV memory don't add up."""


def check_counts(ledger: KVLedger) -> None:
    """By counters, O(1): after every step. Raises InvariantViolation."""
    cache = ledger.cache
    for group, (pool, owned) in enumerate(zip(ledger.pools.groups, ledger.owned, strict=True)):
        free, evictable, protected = pool.available, cache.evictable(group), cache.protected(group)
        if free + evictable + protected + owned != pool.total or min(free, evictable, protected, owned) < 0:
            books = f"free {free} + evictable {evictable} + protected {protected} + owned {owned} is not {pool.total}"
            raise InvariantViolation(f"group {group}: {books}")


def check_ownership(ledger: KVLedger, reqs: Iterable[Req]) -> None:
    """Slot by slot, O(pool): in tests. Raises InvariantViolation.

    Also that what `reqs` hold of the cache's, it owns.
    """
    check_counts(ledger)
    reqs = [req for req in reqs if req.node is not None]
    starts = {req: _held_from(ledger, req) for req in reqs}
    for g, (pool, table) in enumerate(zip(ledger.pools.groups, ledger.tables.tables, strict=True)):
        owners = np.zeros(pool.total, dtype=np.int64)
        cached = ledger.cache.owned_slots()[g]
        np.add.at(owners, pool.free_slots(), 1)
        np.add.at(owners, cached, 1)
        for req in reqs:
            np.add.at(owners, table[req.req_pool_idx, max(starts[req][g], req.tree_len) : req.allocated_len], 1)
        if (owners != 1).any():
            slot = int(np.flatnonzero(owners != 1)[0])
            raise InvariantViolation(f"slot {slot} of group {g} has {owners[slot]} owners")
        in_cache = np.zeros(pool.total, dtype=np.bool_)
        in_cache[cached] = True
        for req in reqs:
            if not in_cache[table[req.req_pool_idx, starts[req][g] : req.tree_len]].all():
                raise InvariantViolation(f"{req.rid} reads a prefix that the cache doesn't own")
    if len({req.req_pool_idx for req in reqs}) != len(reqs) or len(reqs) + ledger.tables.available != ledger.tables.num_rows:
        raise InvariantViolation("rows of req_to_token are lost or lent twice")


def _held_from(ledger: KVLedger, req: Req) -> list[int]:
    """Per group, the first position that `req` holds."""
    starts = [0] * len(ledger.pools.groups)
    for (group, _), start in zip(ledger.pools.windows, req.window_starts, strict=True):
        starts[group] = start
    return starts
