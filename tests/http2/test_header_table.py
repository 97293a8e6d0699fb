from __future__ import annotations

import pytest
from hpack.table import HeaderTable
from hypothesis import given
from hypothesis import strategies as st

from gateway.http2.header_table import (
    STATIC_FIELDS,
    STATIC_NAMES,
    STATIC_SIZE,
    STATIC_TABLE,
    DynamicTable,
    Header,
    field_size,
)
from tests.http1.splits import LAW


def _content(table: DynamicTable) -> list[Header]:
    found = [table.get(STATIC_SIZE + 1 + place) for place in range(len(table))]
    assert table.get(STATIC_SIZE + 1 + len(table)) is None
    return [field for field in found if field is not None]


def test_static_table_is_that_of_the_rfc() -> None:
    assert STATIC_TABLE[1:] == tuple(HeaderTable.STATIC_TABLE)
    assert STATIC_SIZE == 61
    assert STATIC_FIELDS[b":method", b"POST"] == 3
    assert STATIC_NAMES[b":method"] == 2
    assert STATIC_NAMES[b"www-authenticate"] == 61
    assert b"" not in STATIC_NAMES


@LAW
@given(
    st.lists(
        st.one_of(
            st.integers(0, 300),
            st.tuples(st.binary(max_size=20), st.binary(max_size=100)),
        ),
        max_size=40,
    )
)
def test_table_evicts_as_that_of_hpack(steps: list[int | Header]) -> None:
    table = DynamicTable(200)
    oracle = HeaderTable()
    oracle.maxsize = 200
    for step in steps:
        before = _content(table)
        if isinstance(step, int):
            evicted = table.resize(step)
            oracle.maxsize = step
        else:
            evicted = table.add(step)
            oracle.add(*step)
        content = _content(table)
        assert [tuple(each) for each in oracle.dynamic_entries] == content
        assert before == before[: len(before) - len(evicted)] + evicted[::-1]
        assert table.size == sum(field_size(field) for field in content) <= table.max_size


@pytest.mark.parametrize("size", [33, 34, 1000])
def test_field_larger_than_the_table_empties_it(size: int) -> None:
    table = DynamicTable(33)
    assert table.add((b"a", b"")) == []
    assert table.add((b"b", b"x" * (size - 33))) == [(b"a", b"")]
    assert len(table) == (size == 33)
