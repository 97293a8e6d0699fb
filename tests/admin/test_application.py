"""The paths of the admin address, its errors and headers, and which requests it refuses."""

import logging
import re
from collections.abc import AsyncIterator
from importlib.resources import files

import pytest

from gateway.admin import security
from tests.admin.site import ChosenSource, RunningSite, running_site
from tests.support.gateway import no_leaks
from tests.support.http_messages import Head, request
from tests.support.raw_client import RawClient

DOCUMENTS = (
    "/api/overview",
    "/api/history",
    "/api/topology",
    "/api/curves?route=r",
    "/api/curves?upstream=u&endpoint=http://h",
    "/api/models",
    "/api/model?name=m",
    "/api/calls",
    "/api/journal",
)
FOLDER = files("gateway.admin") / "page"
NAMES = sorted(each.name for each in FOLDER.iterdir())
PAGES = ("/", "/live", "/ready", "/status", "/metrics", *DOCUMENTS, "/page/main.js")


@pytest.fixture
async def site() -> AsyncIterator[RunningSite]:
    async with no_leaks(), running_site() as running:
        yield running


@pytest.fixture
async def client(site: RunningSite) -> AsyncIterator[RawClient]:
    async with site.client() as client:
        yield client


def _check_headers(head: Head) -> None:
    for name, value in security.HEADERS.items():
        assert head.get(name) == value
    assert head.get("Cache-Control") in ("no-store", "no-cache")


@pytest.mark.parametrize("path", PAGES)
async def test_each_page_is_served_with_the_headers_of_protection_and_head_without_a_body(
    client: RawClient, path: str
) -> None:
    got = await client.call("GET", path)
    assert got.status == 200
    assert got.body
    _check_headers(got.head)
    await client.send(request("HEAD", path), request("GET", "/live"))
    head = await client.head()
    assert head.status == 200
    assert head.get("Content-Type") == got.head.get("Content-Type")
    assert int(head.get("Content-Length") or 0) > 0
    _check_headers(head)
    assert (await client.read_response()).body == b'{"live":true}\n'


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
async def test_other_methods_are_refused(client: RawClient, method: str) -> None:
    for path in PAGES:
        response = await client.call(method, path, b"")
        assert response.status == 405
        name = path.partition("?")[0]
        assert response.error == f"{method} {name}: pages are read with GET"
        _check_headers(response.head)


@pytest.mark.parametrize(
    "path", ["/x", "/live/", "//live", "/page/", "/page/../pages.py", "/api/", "/api/x"]
)
async def test_unknown_path_is_not_found(client: RawClient, path: str) -> None:
    response = await client.call("GET", path)
    assert response.status == 404
    assert response.error.endswith("there are: /live, /ready, /status, /metrics")
    _check_headers(response.head)


@pytest.mark.parametrize("name", ["x", "%2e%2e%2fapi.py", ".", "%00"])
async def test_unknown_file_is_not_found(client: RawClient, name: str) -> None:
    response = await client.call("GET", f"/page/{name}")
    assert response.status == 404
    assert response.error.startswith("no file ") or name == "."
    _check_headers(response.head)


@pytest.mark.parametrize("path", [b"/\xff", b"/page/\xff", b"/%ff", b"/x%00y", b"/%ed%a0%80"])
async def test_path_of_any_bytes_gets_an_error(client: RawClient, path: bytes) -> None:
    response = await client.ask(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert response.status in (400, 404, 405)


@pytest.mark.parametrize("name", [b"%ff", b"%00", b"%ed%a0%80", b"%22%3cscript%3e"])
async def test_model_of_any_name_is_described(client: RawClient, name: bytes) -> None:
    head = b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    response = await client.ask(b"GET /api/model?name=" + name + head)
    assert response.status == 200
    assert response.json["ready"] == []


async def test_error_of_our_own_is_logged_once(
    site: RunningSite, client: RawClient, caplog: pytest.LogCaptureFixture
) -> None:
    site.source.error = RuntimeError("a secret")
    for path in ("/status", "/api/overview"):
        response = await client.call("GET", path)
        assert response.status == 500
        assert "secret" not in response.error
        _check_headers(response.head)
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in errors] == [
        "GET /status failed",
        "GET /api/overview failed",
    ]
    site.source.error = None
    assert (await client.call("GET", "/status")).status == 200


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"Host": "evil.example"}, "the host name 'evil.example' is not known here"),
        ({"Origin": "http://evil.example"}, "a request from the origin"),
    ],
)
async def test_documents_are_refused_to_pages_of_others(
    client: RawClient, headers: dict[str, str], reason: str
) -> None:
    for path in (*DOCUMENTS, "/api/events", "/%61pi/overview", "/status", "/metrics", "/%73tatus"):
        response = await client.call("GET", path, headers=headers)
        assert response.status == 403
        assert response.error.startswith(reason)
        _check_headers(response.head)
    assert (await client.call("GET", "/live", headers=headers)).status == 200


async def test_names_of_the_settings_are_own_ones() -> None:
    async with (
        running_site(
            ChosenSource(admin={"listen": "127.0.0.1:9080", "hosts": "gateway.example"})
        ) as site,
        site.client() as client,
    ):
        host = {"Host": "gateway.example:9000"}
        for path in ("/api/overview", "/status", "/metrics"):
            assert (await client.call("GET", path, headers=host)).status == 200


async def test_absolute_target_does_not_replace_the_host(client: RawClient) -> None:
    target = "http://localhost/api/overview"
    response = await client.call("GET", target, headers={"Host": "evil.example"})
    assert response.status == 403


@pytest.mark.parametrize(
    ("path", "parameter"),
    [
        ("/api/model?name=", "name"),
        ("/api/models?offset=x", "offset"),
        ("/api/topology?limit=1.5", "limit"),
        ("/api/calls?min_ms=nan", "min_ms"),
        ("/api/calls?status=%ff", "status"),
        ("/api/journal?seconds=x", "seconds"),
        ("/api/curves?upstream=u", "route"),
        ("/api/events?topics=overview,", "topics"),
        ("/api/events?topics=calls&calls.min_ms=x", "min_ms"),
        ("/api/events?topics=topology&topology.limit=x", "limit"),
    ],
)
async def test_query_that_cannot_be_read_is_named(
    client: RawClient, path: str, parameter: str
) -> None:
    response = await client.call("GET", path)
    assert response.status == 400
    assert response.error.startswith(f"{parameter}: ")
    _check_headers(response.head)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"x" * 70_000 + b"\r\n\r\n",
    ],
    ids=range(4),
)
async def test_malformed_request_gets_an_error_and_no_line_in_the_log(
    client: RawClient, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Any client can send it."""
    await client.send(data)
    assert (await client.head()).status == 400
    await client.rest()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_readiness_has_its_reason(site: RunningSite, client: RawClient) -> None:
    site.source.reason = 'upstream "u" \udcff'
    response = await client.call("GET", "/ready")
    assert (response.status, response.error) == (503, 'not ready: upstream "u" ?')


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("text/html,application/xhtml+xml,*/*;q=0.8", "text/html; charset=utf-8"),
        ("*/*", "text/plain; charset=utf-8"),
    ],
)
async def test_root_is_the_page_for_browsers(
    client: RawClient, accept: str, content_type: str
) -> None:
    response = await client.call("GET", "/", headers={"Accept": accept})
    assert response.head.get("Content-Type") == content_type
    assert response.head.get("Vary") == "Accept"


async def test_files_are_served_as_they_are(client: RawClient) -> None:
    types = {"js": "text/javascript", "css": "text/css", "html": "text/html"}
    for name in NAMES:
        response = await client.call("GET", f"/page/{name}")
        assert response.body == (FOLDER / name).read_bytes()
        suffix = name.rpartition(".")[2]
        assert response.head.get("Content-Type") == f"{types[suffix]}; charset=utf-8"
        assert response.head.get("Cache-Control") == "no-cache"


@pytest.mark.parametrize("path", ["/", "/page/main.js"])
async def test_file_that_has_not_changed_is_not_sent_again(client: RawClient, path: str) -> None:
    page = {"Accept": "text/html"}
    etag = (await client.call("GET", path, headers=page)).head.get("ETag")
    assert etag is not None
    for known in (etag, f'"other", {etag}', f"W/{etag}"):
        response = await client.call("GET", path, headers={**page, "If-None-Match": known})
        assert (response.status, response.body) == (304, b"")
        assert response.head.get("ETag") == etag
        assert response.head.get("X-Content-Type-Options") == "nosniff"
    for other in ('"other"', '""', "nonsense", etag.upper() + "x"):
        response = await client.call("GET", path, headers={**page, "If-None-Match": other})
        assert response.status == 200
        assert response.body


async def test_index_refers_to_files_that_there_are(client: RawClient) -> None:
    index = (await client.call("GET", "/page/index.html")).body.decode()
    named = re.findall(r'(?:src|href)="(?:/?page/)?([^"#:]+\.(?:js|css|svg))"', index)
    assert named
    assert set(named) <= set(NAMES)


def test_page_has_no_inline_script_or_style_and_asks_no_other_host() -> None:
    """The Content-Security-Policy would stop it."""
    for name in NAMES:
        text = (FOLDER / name).read_text()
        assert not re.search(r"""(src|href|from|import)\s*[=(]?\s*["']https?:""", text), name
        if name.endswith(".html"):
            assert "<style" not in text
            assert not re.search(r"<script(?![^>]*\bsrc=)", text)
            assert not re.search(r"""\son\w+=|\sstyle=""", text)


# Requests that a browser may be made to send


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
