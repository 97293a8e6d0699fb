from __future__ import annotations

import pytest

from gateway.protocol.tensors import element_count


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((0,), 0),
        ((2, 3, 4), 24),
        ((2**62, 2**62, 0), 0),
        ((2**40, 2**40), 2**63),
        ((1,) * 100_000, 1),
        ((9,) * 100_000, 2**63),
    ],
)
def test_elements_of_a_shape_are_counted(shape: tuple[int, ...], count: int) -> None:
    assert element_count(shape) == count
    assert element_count(list(shape)) == count
