"""One field, one flag, one docstring; checked once."""

import msgspec
import pytest

from model_facts import model_facts
from sterna.cli.flags import ENVIRONMENT, field_docs, parse_server_args
from sterna.config.resolve import check, complete
from sterna.config.server_args import ServerArgs
from sterna.errors import ConfigError


def test_every_field_has_its_docstring_and_there_are_few_enough() -> None:
    names = {field.name for field in msgspec.structs.fields(ServerArgs)}
    assert field_docs(ServerArgs).keys() == names
    assert len(names) <= 60
    assert len(ENVIRONMENT) <= 10


def test_flags_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ENVIRONMENT.values():
        monkeypatch.delenv(variable, raising=False)
    args = parse_server_args(["some/model", "--port", "9", "--no-radix-cache", "--schedule-policy", "lpm", "--sse-keep-alive", "0.5"])
    assert (args.model, args.port, args.radix_cache, args.schedule_policy, args.sse_keep_alive) == ("some/model", 9, False, "lpm", 0.5)
    assert parse_server_args([]) == ServerArgs()


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STERNA_API_KEY", "from-environment")
    assert parse_server_args([]).api_key == "from-environment"
    assert parse_server_args(["--api-key", "from-flag"]).api_key == "from-flag"


def test_the_environment_can_name_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STERNA_ISA", "portable")
    assert parse_server_args([]).isa == "portable"
    assert parse_server_args(["--isa", "avx2"]).isa == "avx2"


@pytest.mark.parametrize(
    ("owner", "field", "value"), [("native", "quantization", "int4"), ("native", "arithmetic", "portable"), ("torch", "dtype", "float32")]
)
def test_another_executor_does_not_ignore_what_changes_the_output(owner: str, field: str, value: str) -> None:
    for executor in {"native", "torch", "scripted"} - {owner}:
        with pytest.raises(ConfigError, match=f"--{field} is for the {owner} executor, not for {executor}"):
            check(ServerArgs(executor=executor, **{field: value}))
    assert check(ServerArgs(executor=owner, **{field: value}))


def test_only_torch_runs_elsewhere_than_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match=r"--device cuda: the native executor runs on the CPU"):
        check(ServerArgs(device="cuda"))
    assert check(ServerArgs(device="cpu"))
    assert check(ServerArgs(executor="torch", device="cuda"))


@pytest.mark.parametrize("argv", [["--port", "many"], ["--schedule-policy", "luck"], ["--no-such-flag"], ["a", "b"]])
def test_a_wrong_flag_is_named_and_ends_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_server_args(argv)
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err or "b" in argv


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 65536),
        ("port", -1),
        ("page_size", 0),
        ("max_running_requests", 0),
        ("threads", 0),
        ("stream_interval", 0),
        ("host", ""),
        ("api_key", ""),
    ],
)
def test_a_value_out_of_range_names_its_flag(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match="--" + field.replace("_", "-")):
        check(msgspec.structs.replace(ServerArgs(), **{field: value}))


def test_a_context_length_that_the_named_folder_was_not_resolved_for_is_refused() -> None:
    model = model_facts(vocab_size=1, context_len=64)
    assert complete(ServerArgs(), model).context_length == complete(ServerArgs(context_length=64), model).context_length == 64
    with pytest.raises(ConfigError, match="--context-length 32"):
        complete(ServerArgs(context_length=32), model)
