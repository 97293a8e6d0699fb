"""Other proxies, before a gateway or a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from urllib.parse import urlsplit

import pytest

from benchmarks.harness.client import NotInstalledError
from benchmarks.harness.processes import Server

Proxy = Callable[[int], AbstractContextManager[Server]]


@contextmanager
def before(proxy: Proxy, url: str) -> Iterator[str]:
    """Run a proxy before what listens at a URL; give the proxy's own."""
    port = urlsplit(url).port
    assert port is not None
    try:
        # Without cores of their own: to set them takes a fork, which breaks grpcio in this process.
        with proxy(port) as running:
            yield f"http://127.0.0.1:{running.ports[0]}"
    except NotInstalledError as error:
        pytest.skip(str(error))
