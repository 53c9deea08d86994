"""Cores and memory as containers limit them, from made-up /proc and /sys trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sterna.config.cores import usable_cores
from sterna.config.memory import available_memory_bytes, parse_bytes
from sterna.errors import ConfigError

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def test_without_a_quota_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(root=tmp_path) == 8
    assert usable_cores(root=tree(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"})) == 8


@pytest.mark.parametrize(("quota", "cores"), [("300000 100000", 3), ("250000 100000", 2), ("50000 100000", 1), ("3200000 100000", 8)])
def test_a_version_2_quota_is_rounded_down_to_at_least_one_core(tmp_path: Path, quota: str, cores: int) -> None:
    tree(tmp_path, {"proc/self/cgroup": "0::/app\n", "sys/fs/cgroup/app/cpu.max": quota + "\n"})
    assert usable_cores(root=tmp_path) == cores


def test_a_parents_smaller_quota_counts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "200000 100000", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}
    assert usable_cores(root=tree(tmp_path, files)) == 2


def test_a_group_that_is_mounted_as_the_root_is_found(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/docker/1234\n", "sys/fs/cgroup/cpu.max": "200000 100000"}
    assert usable_cores(root=tree(tmp_path, files)) == 2


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_a_version_1_quota_counts(tmp_path: Path, mount: str) -> None:
    at = f"sys/fs/cgroup/{mount}/app"
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/app\n3:memory:/\n",
        f"{at}/cpu.cfs_quota_us": "400000",
        f"{at}/cpu.cfs_period_us": "100000",
    }
    assert usable_cores(root=tree(tmp_path, files)) == 4
    (tmp_path / at / "cpu.cfs_quota_us").write_text("-1")
    assert usable_cores(root=tmp_path) == 8


MEMINFO = f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n"


def test_memory_is_what_the_machine_has_free(tmp_path: Path) -> None:
    assert available_memory_bytes(root=tree(tmp_path, {"proc/meminfo": MEMINFO})) == 8 * GIB


def test_a_version_2_limit_counts_file_cache_as_free(tmp_path: Path) -> None:
    group = {"memory.max": str(4 * GIB), "memory.current": str(3 * GIB), "memory.stat": f"anon 7\ninactive_file {GIB}\n"}
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/app\n"} | {f"sys/fs/cgroup/app/{name}": text for name, text in group.items()}
    assert available_memory_bytes(root=tree(tmp_path, files)) == 2 * GIB


def test_a_version_1_limit_counts(tmp_path: Path) -> None:
    at = "sys/fs/cgroup/memory"
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "3:memory:/\n", f"{at}/memory.limit_in_bytes": str(2 * GIB)}
    assert available_memory_bytes(root=tree(tmp_path, files | {f"{at}/memory.usage_in_bytes": str(GIB)})) == GIB


def test_an_unlimited_group_counts_for_nothing(tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}
    assert available_memory_bytes(root=tree(tmp_path, files)) == 8 * GIB


@pytest.mark.parametrize(
    ("text", "amount"),
    [("2GB", 2 * 10**9), ("512MiB", 512 << 20), ("512M", 512 << 20), ("1.5 GiB", 3 << 29), ("4096", 4096), ("10b", 10), ("1tb", 10**12)],
)
def test_amounts_of_memory_are_read_as_people_write_them(text: str, amount: int) -> None:
    assert parse_bytes(text, "--kv-memory") == amount


@pytest.mark.parametrize("text", ["", "GB", "2 gigs", "-1GB", "1e9", "2GB2", "nan"])
def test_anything_else_is_refused_naming_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-memory must be an amount of memory"):
        parse_bytes(text, "--kv-memory")
