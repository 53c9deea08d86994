"""The one mapping: every error of the tree has a status, a type and a code; and what crossed a process comes back as itself."""

import json

import pytest

from sterna import errors
from sterna.protocol.finish import FinishAbort, to_finish
from sterna.server.errors import error_of, rename_param, to_http


def tree(root: type[errors.SternaError]) -> list[type[errors.SternaError]]:
    return [root, *(found for child in root.__subclasses__() for found in tree(child))]


SERVED = [kind for root in (errors.RequestError, errors.OverloadedError, errors.TimedOut, errors.EngineError) for kind in tree(root)]


@pytest.mark.parametrize("kind", SERVED, ids=lambda kind: kind.__name__)
def test_every_served_error_has_a_status_and_openai_s_shape(kind: type[errors.RequestError]) -> None:
    http = to_http(kind("what happened"))
    detail = json.loads(http.body)["error"]
    assert http.status == kind.status
    assert detail == {"message": "what happened", "type": kind.error_type, "param": None, "code": kind.code}
    assert (b"retry-after" in dict(http.headers)) == issubclass(kind, errors.OverloadedError)


@pytest.mark.parametrize("kind", SERVED, ids=lambda kind: kind.__name__)
def test_an_error_that_crossed_a_process_comes_back_as_its_kind(kind: type[errors.RequestError]) -> None:
    given = kind("what happened")
    if isinstance(given, errors.RequestError):
        given.param = "field"
    found = error_of(to_finish(given))
    assert type(found) is kind
    assert found.message == "what happened"
    if isinstance(found, errors.RequestError):
        assert found.param == "field"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.InvalidRequest),
        (422, errors.InvalidRequest),
        (429, errors.OverloadedError),
        (503, errors.OverloadedError),
        (504, errors.TimedOut),
        (500, errors.EngineFailure),
        (599, errors.EngineFailure),
    ],
)
def test_an_unknown_code_is_told_apart_by_its_status(status: int, kind: type[errors.SternaError]) -> None:
    assert type(error_of(FinishAbort("m", status, "brand_new"))) is kind


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_with_a_code_of_its_own_keeps_its_status(status: int) -> None:
    http = to_http(error_of(FinishAbort("m", status, "too_many_session_tokens", retry_after_s=3)))
    assert (http.status, http.code) == (status, "too_many_session_tokens")
    assert dict(http.headers)[b"retry-after"] == b"3"


def test_a_refusal_says_when_to_come_back() -> None:
    found = error_of(FinishAbort("full", 429, "queue_full", retry_after_s=17))
    assert dict(to_http(found).headers)[b"retry-after"] == b"17"
    assert dict(to_http(error_of(FinishAbort("full", 429, "queue_full"))).headers)[b"retry-after"] == b"1"


def test_a_foreign_exception_tells_nothing() -> None:
    http = to_http(ValueError("inside"))
    assert http.status == 500
    assert b"inside" not in http.body


def test_params_are_told_in_the_surface_s_words() -> None:
    names = {"prompt": "messages"}
    assert rename_param(errors.InvalidRequest("m", param="prompt"), names).param == "messages"
    assert rename_param(errors.InvalidRequest("m", param="seed"), names).param == "seed"
    assert rename_param(errors.InvalidRequest("m"), names).param is None
