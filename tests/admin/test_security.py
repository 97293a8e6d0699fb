"""Which requests a browser may be made to send, and the admin address refuses."""

import pytest

from gateway.admin import security

KNOWN = ("gateway.example", "10.example")


@pytest.mark.parametrize(
    "host",
    [
        "",
        "localhost",
        "LOCALHOST:9000",
        "localhost.:9000",
        "page.localhost:80",
        "127.0.0.1",
        "127.0.0.1:9000",
        "10.1.2.3:80",
        "[::1]",
        "[::1]:9000",
        "[fe80::1%25eth0]:9000",
        "gateway.example",
        "Gateway.Example:9000",
        "gateway.example.",
        "10.example",
    ],
)
def test_own_names_are_served(host: str) -> None:
    assert security.refusal("/api/overview", host, None, KNOWN) == ""


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:9000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil-localhost",
        "127.1.evil",
        "gateway.example.evil",
        "xgateway.example",
        "[::1",
        "[evil]",
        "::1]",
        "evil.example:port",
        "a b",
        "\ud800",
        "evil.example/localhost",
        "localhost@evil.example",
        "evil.example#localhost",
        "x" * 10_000,
    ],
)
def test_names_of_others_are_refused(host: str) -> None:
    reason = security.refusal("/api/overview", host, None, KNOWN)
    assert "is not known here: use localhost or the IP address, or add it to admin.hosts" in reason
    assert len(reason) < 300


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:9000", None),
        ("localhost:9000", "http://localhost:9000"),
        ("LOCALHOST:9000", "http://localhost:9000"),
        ("127.0.0.1:9000", "http://127.0.0.1:9000"),
        ("[::1]:9000", "http://[::1]:9000"),
        ("127.0.0.1:9000", "https://gateway.example"),
        ("gateway.example", "https://gateway.example:8443"),
    ],
)
def test_own_origins_are_served(host: str, origin: str | None) -> None:
    assert security.refusal("/api/overview", host, origin, KNOWN) == ""


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "http://evil.example",
        "http://localhost",
        "http://localhost:9001",
        "http://localhost:9000.evil.example",
        "http://evil@localhost:9000",
        "file://localhost:9000",
        "chrome-extension://localhost:9000",
        "localhost:9000",
        "http://[::1",
        "\ud800",
        "x" * 10_000,
    ],
)
def test_other_origins_are_refused(origin: str) -> None:
    reason = security.refusal("/api/overview", "localhost:9000", origin, KNOWN)
    assert reason.startswith("a request from the origin ")
    assert len(reason) < 300


@pytest.mark.parametrize("path", ["/status", "/metrics", "/api/overview"])
def test_what_tells_of_the_gateway_needs_a_name_that_is_known(path: str) -> None:
    for name in ("127.0.0.1", "localhost", *KNOWN):
        assert security.refusal(path, f"{name}:9080", None, KNOWN) == ""
    reason = security.refusal(path, "tensorgate.models.svc:9080", None, KNOWN)
    assert reason == (
        "the host name 'tensorgate.models.svc' is not known here: use localhost or the IP address,"
        " or add it to admin.hosts, also for Prometheus"
    )


@pytest.mark.parametrize("path", ["/", "/live", "/ready", "/page/main.js"])
def test_probes_and_files_of_the_page_may_use_any_name(path: str) -> None:
    assert security.refusal(path, "anything.svc", "http://evil.example", ()) == ""
