"""Which endpoints lead back to the gateway."""

from __future__ import annotations

import socket

import pytest

from gateway.app.preflight.settings_checks import find_self_references
from gateway.settings.schema import Settings


def _own(listen: object, *endpoints: object) -> list[str]:
    settings = Settings.model_validate(
        {"listen": listen, "upstreams": {"u": {"endpoints": endpoints}}}
    )
    return [why.split()[0] for _, why in find_self_references(settings)]


@pytest.mark.parametrize(
    ("listen", "endpoint"),
    [
        ("127.0.0.1:80", "http://127.0.0.1:80"),
        ("127.0.0.1:80", "http://localhost:80"),
        ("127.0.0.1:80", "http://0.0.0.0:80"),
        ("localhost:80", "http://LocalHost.:80"),
        ("0.0.0.0:80", "http://127.1.2.3:80"),
        ("0.0.0.0:80", f"http://{socket.gethostname()}:80"),
        ("[::]:80", "http://[::1]:80"),
        (["127.0.0.1:79", "127.0.0.1:80"], "http://127.0.0.1:80"),
        ("unix:/run/a", "unix:/run/a"),
    ],
)
def test_endpoint_at_a_listening_address_is_found(listen: object, endpoint: str) -> None:
    assert _own(listen, "http://other:80", endpoint) == [endpoint]


@pytest.mark.parametrize(
    ("listen", "endpoint"),
    [
        ("127.0.0.1:80", "http://127.0.0.1:81"),
        ("0.0.0.0:80", "http://triton:80"),
        ("0.0.0.0:80", "http://192.0.2.1:80"),
        ("0.0.0.0:80", "http://[::1]:80"),
        ("[::]:80", "http://127.0.0.1:80"),
        ("192.0.2.1:80", "http://127.0.0.1:80"),
        ("unix:/run/a", "http://127.0.0.1:80"),
    ],
)
def test_endpoint_at_another_address_is_not_found(listen: object, endpoint: str) -> None:
    assert _own(listen, endpoint) == []


@pytest.mark.parametrize(
    ("listen", "own"), [(80, "http://localhost:80"), (81, "grpc://localhost:81")]
)
def test_both_addresses_of_an_endpoint_are_looked_at(listen: int, own: str) -> None:
    both = {"http": "http://localhost:80", "grpc": "grpc://localhost:81"}
    assert _own(f"127.0.0.1:{listen}", both) == [own]
