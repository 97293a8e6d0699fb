"""Which requests a browser may be made to send, and the admin address refuses."""

import pytest

from gateway.admin import security

KNOWN = ("gateway.example", "10.example")


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("", None),
        ("LOCALHOST:9000", None),
        ("localhost.:9000", None),
        ("page.localhost:80", None),
        ("10.1.2.3:80", None),
        ("[fe80::1%25eth0]:9000", None),
        ("Gateway.Example:9000", None),
        ("LOCALHOST:9000", "http://localhost:9000"),
        ("[::1]:9000", "http://[::1]:9000"),
        ("127.0.0.1:9000", "https://gateway.example"),
    ],
)
def test_own_names_and_origins_are_served(host: str, origin: str | None) -> None:
    for path in ("/api/overview", "/status", "/metrics"):
        assert security.refusal(path, host, origin, KNOWN) == ""


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:9000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil-localhost",
        "xgateway.example",
        "gateway.example.evil",
        "[::1",
        "evil.example:port",
        "\ud800",
        "evil.example/localhost",
        "x" * 10_000,
    ],
)
def test_names_of_others_are_refused(host: str) -> None:
    for path in ("/api/overview", "/status", "/metrics"):
        reason = security.refusal(path, host, None, KNOWN)
        assert reason.startswith("the host name '")
        assert reason.endswith(
            "' is not known here: use localhost or the IP address, or add it to admin.hosts,"
            " also for Prometheus"
        )
        assert len(reason) < 300


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "http://localhost",
        "http://localhost:9000.evil.example",
        "http://evil@localhost:9000",
        "file://localhost:9000",
        "http://[::1",
        "\ud800",
        "x" * 10_000,
    ],
)
def test_other_origins_are_refused(origin: str) -> None:
    reason = security.refusal("/api/overview", "localhost:9000", origin, KNOWN)
    assert reason.startswith("a request from the origin ")
    assert len(reason) < 300


@pytest.mark.parametrize("path", ["/", "/live", "/ready", "/page/main.js"])
def test_probes_and_files_of_the_page_may_use_any_name(path: str) -> None:
    assert security.refusal(path, "anything.svc", "http://evil.example", ()) == ""
