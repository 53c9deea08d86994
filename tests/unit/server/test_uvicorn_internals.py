"""`http_server.py` extends parts of uvicorn that it promises nobody: an upgrade that takes them away has to fail here, by name."""

import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (httptools_impl, ["STATUS_LINE"]),
        (
            httptools_impl.HttpToolsProtocol,
            ["send_400_response", "on_message_begin", "on_headers_complete", "on_message_complete", "on_response_complete"],
        ),
        (httptools_impl.HttpToolsProtocol, ["pause_writing", "resume_writing", "data_received", "connection_lost"]),
        (uvicorn.Server, ["main_loop", "on_tick", "capture_signals"]),
    ],
)
def test_what_is_overridden_is_there(owner: object, names: list[str]) -> None:
    assert [name for name in names if not hasattr(owner, name)] == []
