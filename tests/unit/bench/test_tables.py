"""What the comparison's figures become: rows, a table, a section of the document, bars."""

import copy
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import plot
import tables
from cases import CASES

SVG = "{http://www.w3.org/2000/svg}"
MACHINE = {"cpu": "Some CPU", "flags": ["avx2", "avx512f", "avx512_vnni"], "cores": 2, "memory_gb": 16.0}
CEILINGS = {"threads": 2, "read_gb_s": {"64 MB": 40.0}, "int8_tops": {"avx2": 0.25}, "bf16_tflops": {}, "fp32_tflops": {"avx2": 0.125}}


def _system(speed: float, seconds: float, **more: Any) -> dict[str, Any]:
    runs = {}
    for case in CASES:
        value = speed if case.more_is_better else seconds
        runs[case.name] = [{case.figure: value * factor, "disturbed": False} for factor in (0.5, 1, 3)]
    return {"version": "1.2", "settings": "as it likes <best>", "installed_mb": 150, "ready_s": [0.5, 0.9, 0.7], "runs": runs, **more}


@pytest.fixture
def found() -> dict[str, Any]:
    systems = {"Sterna": _system(200, 4, memory_mb=250), "llama.cpp": _system(100, 8, memory_mb=500), "vLLM": _system(160, 16)}
    systems["vLLM"]["runs"]["prompt"] = []
    absent = {"vLLM": "it ended & left"}
    return {"date": "2026-01-02 03:04 UTC", "machine": MACHINE, "ceilings": CEILINGS, "repeat": 3, "systems": systems, "absent": absent}


def test_a_row_holds_medians_and_counts_better_the_right_way_round(found: dict[str, Any]) -> None:
    rows = tables.rows(found)
    assert list(rows) == list(tables.TITLES)
    assert rows["1 stream"].values == {"Sterna": 200, "llama.cpp": 100, "vLLM": 160}
    assert rows["1 stream"].times_better("llama.cpp") == 2
    assert rows["shared prefix"].times_better("llama.cpp") == 2
    assert rows["1 stream"].best_peer() == "vLLM"
    assert rows["shared prefix"].best_peer() == "llama.cpp"
    assert "vLLM" not in rows["prompt"].values


def test_what_was_asked_is_met_or_missed(found: dict[str, Any]) -> None:
    rows = tables.rows(found)
    assert tables.GOALS["1 stream"].verdict(rows["1 stream"]) == "1.6 × llama.cpp: 2.00 ×, met"
    assert tables.GOALS["64 streams"].verdict(rows["64 streams"]) == "2.5 × vLLM: 1.25 ×, missed"
    assert tables.GOALS["prompt"].verdict(rows["prompt"]) == "2.5 × vLLM: vLLM is absent"
    assert tables.GOALS["ready"].verdict(rows["ready"]) == "≤ 1 s: met"
    del found["systems"]["Sterna"]
    assert tables.GOALS["ready"].verdict(tables.rows(found)["ready"]) == ""


def test_sterna_with_an_instruction_set_forced_is_no_peer(found: dict[str, Any]) -> None:
    found["systems"]["Sterna avx2"] = _system(1000, 1)
    assert tables.rows(found)["1 stream"].best_peer() == "vLLM"


def test_the_table_has_a_line_per_quantity_and_a_dash_for_what_is_missing(found: dict[str, Any]) -> None:
    header, _, *lines = tables.table(found).splitlines()
    assert [cell.strip() for cell in header.split("|")[2:5]] == ["Sterna", "llama.cpp", "vLLM"]
    assert len(lines) == len(tables.TITLES)
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines}
    assert cells["1 stream, tok/s"][:4] == ["200 (100 to 600)", "100 (50.0 to 300)", "160 (80.0 to 480)", "1.25 × (vLLM)"]
    assert cells["installed size, MB"][:3] == ["150"] * 3
    assert cells["prompt of 1,900 tokens, alone, tok/s"][2] == "–"
    assert len({line.count("|") for line in lines}) == 1


def test_the_section_tells_who_is_absent_and_how_many_runs_were_disturbed(found: dict[str, Any]) -> None:
    found["systems"]["Sterna"]["runs"]["1 stream"][0]["disturbed"] = True
    section = tables.section(found)
    assert "**vLLM** is absent (from here on): it ended & left" in section
    runs = sum(len(runs) for system in found["systems"].values() for runs in system["runs"].values())
    assert f"Of {runs} runs, 1 were disturbed" in section
    assert "40 GB/s from 64 MB; int8, TOPS: avx2 0.25; fp32, TFLOPS: avx2 0.12" in section


def test_only_the_section_of_the_document_is_rewritten(found: dict[str, Any], tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text(f"before\n{tables.BEGIN}\nold figures\n{tables.END}\nafter\n")
    for _ in range(2):
        tables.rewrite(document, found)
        assert document.read_text() == f"before\n{tables.section(found)}\nafter\n"
    document.write_text("no markers")
    with pytest.raises(ValueError, match="markers"):
        tables.rewrite(document, found)


def test_the_plot_is_well_formed_and_holds_every_figure(found: dict[str, Any]) -> None:
    rows = tables.rows(found)
    root = ElementTree.fromstring(plot.bars(rows, list(found["systems"]), "taken <somewhere> & then"))
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    for row in rows.values():
        assert row.title in texts
        for name, value in row.values.items():
            assert plot.figure(value) in texts[texts.index(row.title) :], (row.title, name)
    assert "taken <somewhere> & then" in texts
    missing = sum(len(found["systems"]) - len(row.values) for row in rows.values())
    assert missing == 2
    assert texts.count("–") == missing


def test_a_bar_is_as_long_as_its_value_among_the_others(found: dict[str, Any]) -> None:
    rows = {"1 stream": tables.rows(found)["1 stream"]}
    root = ElementTree.fromstring(plot.bars(rows, list(found["systems"]), ""))
    ours, llama, vllm = [float(bar.get("width", "")) for bar in root.iter(f"{SVG}rect")][1:]
    assert llama == pytest.approx(ours / 2, abs=0.1)
    assert vllm == pytest.approx(ours * 0.8, abs=0.1)


def test_the_document_has_a_place_for_the_section() -> None:
    text = tables.DOCUMENT.read_text()
    assert text.count(tables.BEGIN) == text.count(tables.END) == 1
    assert text.index(tables.BEGIN) < text.index(tables.END)


@pytest.mark.skipif(not tables.RESULTS.exists(), reason="no comparison is kept in this checkout")
def test_the_document_and_the_plot_say_what_the_kept_comparison_found() -> None:
    kept = json.loads(tables.RESULTS.read_text())
    assert tables.section(kept) in tables.DOCUMENT.read_text()
    assert plot.figure(tables.rows(kept)["1 stream"].values["Sterna"]) in tables.PLOT.read_text()


def test_publishing_leaves_the_figures_as_they_were(found: dict[str, Any]) -> None:
    before = copy.deepcopy(found)
    tables.section(found)
    plot.bars(tables.rows(found), list(found["systems"]), "")
    assert found == before
