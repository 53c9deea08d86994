"""The table that opens docs/architecture.md, followed by one real request through real processes."""

import json
import os
import re
from pathlib import Path

from byte_model import make_byte_model
from running_server import ROOT, running_server

HOP_TRACE = Path(__file__).with_name("hop_trace")
ON_IMPORT = Path(__file__).parents[1] / "on_import"
PROCESS_OF_HOP = {
    "1": "server",
    "2": "server",
    "3": "server",
    "4": "scheduler",
    "5": "scheduler",
    "6": "scheduler",
    "7": "detokenizer",
    "8": "server",
    "9": "server",
}
TAKES = {
    "1": "bytes",
    "2": "ChatCompletionRequest",
    "3": "GenerateReqInput",
    "4": "TokenizedGenerateReqInput",
    "5": "ForwardBatch",
    "6": "Req",
    "7": "BatchTokenIDOutput",
    "8": "StrRow",
    "9": "Full",
}
GIVES = {
    "1": "ChatCompletionRequest",
    "2": "GenerateReqInput",
    "3": "TokenizedGenerateReqInput",
    "4": "Req",
    "5": "ScriptedStep",
    "6": "BatchTokenIDOutput",
    "7": "BatchStrOutput",
    "9": "ChatCompletionResponse",
}
ONCE = ("1", "2", "3", "4", "9")


def test_a_request_passes_every_hop_in_its_process_on_its_types(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    model = make_byte_model(tmp_path / "model")
    env = {"PYTHONPATH": os.pathsep.join(map(str, (HOP_TRACE, ON_IMPORT))), "HOP_TRACE": str(trace)}
    with running_server(model, "--executor", "scripted", log=tmp_path / "log", env=env) as server:
        pids = {"server": server.process.pid, **server.children()}
        assert len(set(pids.values())) == 3
        trace.unlink()  # of the scheduler's first forward, before anybody asked for one
        body = {"model": "bytes", "messages": [{"role": "user", "content": "to and fro"}], "max_tokens": 6, "rid": "one"}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "user\n"  # the echo of the prompt, its first token skipped
    calls = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {call["hop"] for call in calls} == set(PROCESS_OF_HOP)
    for call in calls:
        hop = call["hop"]
        assert call["pid"] == pids[PROCESS_OF_HOP[hop]], call
        assert TAKES[hop] in call["takes"], call
        assert GIVES.get(hop, "bool") in call["gives"], call
    for hop in ONCE:
        assert sum(call["hop"] == hop for call in calls) == 1
    first = [next(i for i, call in enumerate(calls) if call["hop"] == hop) for hop in PROCESS_OF_HOP]
    assert first == sorted(first), "the hops happened out of order"


def test_the_table_in_the_docs_names_files_and_functions_that_exist() -> None:
    table = [line for line in (ROOT / "docs/architecture.md").read_text().splitlines() if re.match(r"\| \d ", line)]
    assert [line.split("|")[1].strip() for line in table] == [str(hop) for hop in range(1, 10)]
    for line in table:
        named = re.findall(r"`([\w/]+\.py)(?:: (\w+))?`", line)
        assert named
        for file, function in named:
            path = ROOT / "src/sterna" / file
            if not path.exists():  # a sibling of the file named before it
                path = ROOT / "src/sterna" / Path(named[0][0]).parent / file
            assert path.exists(), file
            if function:
                assert re.search(rf"def {function}\b", path.read_text()), f"{file}: {function}"
