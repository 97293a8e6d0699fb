"""The pytest fixture that starts the real Triton server."""

from collections.abc import Iterator

import pytest

from tests.integration.triton.installation import TritonMissingError
from tests.integration.triton.server import TritonServer


@pytest.fixture(scope="session")
def triton() -> Iterator[TritonServer]:
    """A Triton server with all models, started once per run.

    A missing server is a failure, not a skip: a test that cannot run must be seen.
    """
    server = TritonServer()
    try:
        server.start()
    except TritonMissingError as error:
        pytest.fail(str(error), pytrace=False)
    try:
        yield server
    finally:
        server.stop()
