from http import HTTPStatus

import pytest

from gateway.errors import ErrorKind, GatewayError, bad_request, bad_response

_CLIENT_ERRORS = range(400, 500)
_SERVER_ERRORS = (*range(500, 505), 508)
_GRPC_CODES = range(1, 17)


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_every_kind_has_an_answer_in_both_protocols(kind: ErrorKind) -> None:
    assert HTTPStatus(kind.value.status) in (*_CLIENT_ERRORS, *_SERVER_ERRORS)
    assert kind.value.grpc_code in _GRPC_CODES


def test_only_a_fault_of_our_own_is_a_500() -> None:
    assert [kind for kind in ErrorKind if kind.value.status == 500] == [ErrorKind.INTERNAL]


def test_only_what_no_server_can_have_seen_is_retried() -> None:
    kinds = [ErrorKind.EXHAUSTED, ErrorKind.UNREACHABLE]
    assert [kind for kind in ErrorKind if kind.value.retryable] == kinds


def test_kinds_are_told_apart() -> None:
    # Two members of equal value would be one.
    assert len(ErrorKind) == len(ErrorKind.__members__)


@pytest.mark.parametrize(
    ("make", "kind", "status"),
    [(bad_request, ErrorKind.BAD_REQUEST, 400), (bad_response, ErrorKind.BAD_RESPONSE, 502)],
)
def test_makers(make: type[GatewayError], kind: ErrorKind, status: int) -> None:
    error = make("why")  # type: ignore[call-arg, arg-type]
    assert isinstance(error, GatewayError)
    assert (error.kind, error.message, str(error)) == (kind, "why", "why")
    assert error.kind.value.status == status
