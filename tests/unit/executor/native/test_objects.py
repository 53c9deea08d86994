"""Object files of one instruction set give nothing away but their table: the linker could else bring their instructions to all callers."""

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def objects(program: Path) -> list[Path]:
    found = sorted(program.parent.rglob("isa_*.o"))
    assert "isa_portable.cpp.o" in {path.name for path in found}
    return found


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """(type, demangled name) of each symbol."""
    out = subprocess.run(["nm", "-C", *options, str(path)], check=True, capture_output=True, text=True).stdout
    return [(kind, name) for line in out.splitlines() for kind, name in [line[17:].split(" ", 1)]]


def test_objects_of_an_instruction_set_export_their_table_and_nothing_else(objects: list[Path]) -> None:
    for path in objects:
        isa = path.name.removeprefix("isa_").split(".", 1)[0]
        exported = [name for _, name in symbols(path, "--defined-only", "--extern-only")]
        assert exported == [f"sterna::make_kernels_{isa}(sterna::Kernels&)"], path


def test_objects_of_an_instruction_set_need_nothing_but_c(objects: list[Path]) -> None:
    """No C++ library: what it has inline would be emitted here. Names of the compiler's own runtime begin with underscores."""
    for path in objects:
        needed = {name for _, name in symbols(path, "--undefined-only") if not name.startswith("_")}
        assert needed <= {"memset", "memcpy", "fmaf", "sqrtf"}, path
