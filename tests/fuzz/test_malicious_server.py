"""Any response of a malicious server ends as a right one, an error that names it, or a cut one.

Whatever it sends, no client gets data that are wrong or cut short and looks whole, none waits
without end, and nothing is left of it in the gateway.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from gateway.protocol.dialects import DIALECTS
from tests.fuzz.malicious_responses import ServerResponse, any_response, in_order
from tests.fuzz.malicious_server import KINDS, Case, check_cases
from tests.support.scale import fuzz_seconds

pytestmark = [
    # On one loop only: these tests take their time.
    pytest.mark.asyncio(loop_factories=["uvloop"]),
    pytest.mark.usefixtures("clean"),
]


@pytest.mark.parametrize(
    ("kind", "ending"), [("JSON", "close"), ("binary", "close"), ("V1", "close"), ("JSON", "reset")]
)
@pytest.mark.parametrize("sizes", [(), (100, 7)], ids=["sized", "chunked"])
async def test_a_close_at_any_byte_of_a_response_is_detected(
    kind: str, ending: str, sizes: tuple[int, ...]
) -> None:
    data = in_order("two outputs", sizes)
    cases = (Case(kind, ServerResponse(data[:size], (), ending)) for size in range(1, len(data)))
    assert await check_cases("triton", cases) == len(data) - 1


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_any_response_is_right_or_an_error_or_cut(dialect: str) -> None:
    end = time.monotonic() + fuzz_seconds(4)
    chance = random.Random(dialect)

    def cases() -> Iterator[Case]:
        yield Case("JSON", any_response(chance))  # one, however slow the machine is
        while time.monotonic() < end:
            yield Case(chance.choice(KINDS), any_response(chance))

    assert await check_cases(dialect, cases()) > 0
