"""Object files of one instruction set give nothing away but their table: the linker could else bring their instructions to all callers."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


def objects() -> list[Path]:
    """Those of the newest build under build/, or under the folder that STERNA_BUILD_DIR names."""
    tree = Path(os.environ.get("STERNA_BUILD_DIR", ROOT / "build"))
    builds: dict[Path, list[Path]] = {}
    for each in tree.glob("**/sterna_isa_*.dir/csrc/kernels/isa_*.o"):
        builds.setdefault(each.parents[4], []).append(each)
    return max(builds.values(), key=lambda found: max(each.stat().st_mtime for each in found), default=[])


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """(type, demangled name) of each symbol."""
    out = subprocess.run(["nm", "-C", *options, str(path)], check=True, capture_output=True, text=True).stdout
    return [(kind, name) for line in out.splitlines() for kind, name in [line[17:].split(" ", 1)]]


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_objects_of_an_instruction_set_export_their_table_and_nothing_else() -> None:
    found = objects()
    if not found:
        pytest.skip("no build tree under build/ or STERNA_BUILD_DIR")
    for path in found:
        isa = path.name.removeprefix("isa_").split(".", 1)[0]
        exported = [name for _, name in symbols(path, "--defined-only", "--extern-only")]
        assert exported == [f"sterna::make_kernels_{isa}(sterna::Kernels&)"], path


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_objects_of_an_instruction_set_need_nothing_but_c() -> None:
    """No C++ library: what it has inline would be emitted here. Names of the compiler's own runtime begin with underscores."""
    found = objects()
    if not found:
        pytest.skip("no build tree under build/ or STERNA_BUILD_DIR")
    for path in found:
        needed = {name for _, name in symbols(path, "--undefined-only") if not name.startswith("_")}
        assert needed <= {"memset", "memcpy", "fmaf", "sqrtf"}, path
