from http import HTTPStatus

import pytest

from gateway.errors import Audience, ErrorKind, GatewayError, ServerName, bad_request, bad_response

_CLIENT_ERRORS = range(400, 500)
_SERVER_ERRORS = (*range(500, 505), 508)
_GRPC_CODES = range(1, 17)


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_every_kind_has_an_http_status_and_a_grpc_code(kind: ErrorKind) -> None:
    assert HTTPStatus(kind.value.status) in (*_CLIENT_ERRORS, *_SERVER_ERRORS)
    assert kind.value.grpc_code in _GRPC_CODES


def test_only_errors_before_a_complete_request_are_retryable() -> None:
    kinds = [ErrorKind.EXHAUSTED, ErrorKind.REFUSED, ErrorKind.UNREACHABLE]
    assert [kind for kind in ErrorKind if kind.value.retryable] == kinds


@pytest.mark.parametrize(
    ("make", "kind", "status"),
    [(bad_request, ErrorKind.BAD_REQUEST, 400), (bad_response, ErrorKind.BAD_RESPONSE, 502)],
)
def test_error_makers_set_kind_and_status(
    make: type[GatewayError], kind: ErrorKind, status: int
) -> None:
    error = make("why")  # type: ignore[call-arg, arg-type]
    assert isinstance(error, GatewayError)
    assert (error.kind, error.message, str(error)) == (kind, "why", "why")
    assert error.kind.value.status == status


SERVER = ServerName("http://10.0.0.1:8000", "upstream 'triton'")


def test_clients_are_told_the_public_name_of_the_server() -> None:
    error = bad_response(f"{SERVER.url} closed; {SERVER.url} is gone", SERVER)
    assert str(error) == error.message_for(Audience.OPERATORS)
    assert str(error) == "http://10.0.0.1:8000 closed; http://10.0.0.1:8000 is gone"
    assert (
        error.message_for(Audience.CLIENTS) == "upstream 'triton' closed; upstream 'triton' is gone"
    )
