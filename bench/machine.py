"""What the figures were taken on."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

TELLING_FLAGS = ("amx", "avx", "fma", "f16c", "asimd", "sve", "i8mm", "bf16", "dotprod")


def describe(cores: int) -> dict[str, Any]:
    """The processor's name, what it can do with vectors and matrices, the `cores` that we may use, memory in GB, system and Python."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", info, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.M)
    return {
        "cpu": name[1] if name else platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "flags": sorted(flag for flag in (flags[1].split() if flags else ()) if flag.startswith(TELLING_FLAGS)),
        "cores": cores,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def summary(machine: dict[str, Any]) -> str:
    """One line for a reader."""
    flags = set(machine["flags"])
    kinds = {"AMX": {"amx_int8"}, "AVX-512": {"avx512f"}, "VNNI": {"avx512_vnni"}, "BF16": {"avx512_bf16"}, "AVX2": {"avx2"}}
    have = [kind for kind, needed in kinds.items() if needed <= flags]
    lack = [] if "AMX" in have else ["no AMX"]
    return f"{machine['cores']} cores of {machine['cpu']} ({', '.join(have + lack)}), {machine['memory_gb']} GB of memory"
