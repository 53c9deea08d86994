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
    pools, cache = ledger.pools, ledger.cache
    free, evictable, protected, owned = pools.available, cache.evictable_size, cache.protected_size, ledger.owned
    if free + evictable + protected + owned != pools.total or min(free, evictable, protected, owned) < 0:
        raise InvariantViolation(f"free {free} + evictable {evictable} + protected {protected} + owned {owned} is not {pools.total}")


def check_ownership(ledger: KVLedger, reqs: Iterable[Req]) -> None:
    """Slot by slot, O(pool): in tests. Raises InvariantViolation.

    Also that the rows of `reqs` begin with what the cache owns.
    """
    check_counts(ledger)
    reqs = [req for req in reqs if req.node is not None]
    for g, (pool, table) in enumerate(zip(ledger.pools.groups, ledger.tables.tables, strict=True)):
        owners = np.zeros(pool.total, dtype=np.int64)
        cached = ledger.cache.owned_slots()[g]
        np.add.at(owners, pool.free_slots(), 1)
        np.add.at(owners, cached, 1)
        for req in reqs:
            np.add.at(owners, table[req.req_pool_idx, req.tree_len : req.allocated_len], 1)
        if (owners != 1).any():
            slot = int(np.flatnonzero(owners != 1)[0])
            raise InvariantViolation(f"slot {slot} of group {g} has {owners[slot]} owners")
        in_cache = np.zeros(pool.total, dtype=np.bool_)
        in_cache[cached] = True
        for req in reqs:
            if not in_cache[table[req.req_pool_idx, : req.tree_len]].all():
                raise InvariantViolation(f"{req.rid} reads a prefix that the cache doesn't own")
    if len({req.req_pool_idx for req in reqs}) != len(reqs) or len(reqs) + ledger.tables.available != ledger.tables.num_rows:
        raise InvariantViolation("rows of req_to_token are lost or lent twice")
