"""What the commands print: nothing that a terminal obeys, and no key."""

import pytest

from sterna.cli.client import printable
from sterna.cli.serve import announce
from sterna.config.server_args import ServerArgs


class Manager:
    """As much of a manager as an announcement reads."""

    served_model_name = "m"
    chat_template = None
    process_info = {"scheduler": {"executor": "scripted", "kv_total_tokens": 16}}  # noqa: RUF012


def test_a_model_can_not_command_the_terminal() -> None:
    assert printable("a\x1b[31mred\x1b]0;title\x07\x9b2J\r\n\tb 世界 é") == "a[31mred]0;title2J\n\tb 世界 é"


@pytest.mark.parametrize(
    ("environment", "shown"), [("secret", "Bearer $STERNA_API_KEY"), ("other", "Bearer YOUR_KEY"), ("", "Bearer YOUR_KEY")]
)
def test_the_line_to_paste_never_holds_the_key(
    environment: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STERNA_API_KEY", environment)
    announce(ServerArgs(api_key="secret"), Manager(), 1.0)  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert shown in printed
    assert "secret" not in printed
    assert "http://127.0.0.1:8000/v1/completions" in printed
