from itertools import islice

import pytest

from gateway.routing.intervals import jittered_intervals


@pytest.mark.parametrize(("random", "first"), [(0.0, 0.0), (0.25, 2.5), (0.999, 9.99)])
def test_first_interval_is_a_random_part_of_the_others(random: float, first: float) -> None:
    assert list(islice(jittered_intervals(10, random), 4)) == [pytest.approx(first), 10, 10, 10]
