"""The files of the operator's page, and how a browser caches them."""

import re
from collections.abc import AsyncIterator
from importlib.resources import files

import pytest

from tests.admin.site import running_site
from tests.support.raw_client import RawClient

FOLDER = files("gateway.admin") / "page"
NAMES = sorted(each.name for each in FOLDER.iterdir())


@pytest.fixture
async def client() -> AsyncIterator[RawClient]:
    async with running_site() as site, site.client() as client:
        yield client


@pytest.mark.parametrize("name", NAMES)
async def test_file_is_served_as_it_is(client: RawClient, name: str) -> None:
    response = await client.call("GET", f"/page/{name}")
    assert response.body == (FOLDER / name).read_bytes()
    types = {"js": "text/javascript", "css": "text/css", "html": "text/html"}
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
