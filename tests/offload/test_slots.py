import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.elements.offloaded_work import do
from gateway.codec.offload import Work
from gateway.offload.slots import (
    COUNT,
    LARGEST_RESULT,
    LARGEST_WORK,
    TICKET,
    Slots,
    TicketReader,
    mark_of,
    memory_file,
    work_of,
)
from gateway.protocol.datatypes import DATATYPES
from tests.codec import strategies

MARKS = st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**32 - 1))


@pytest.fixture
def both() -> tuple[Slots, Slots]:
    """Give the slots as the gateway and as its helper has them."""
    with os.fdopen(memory_file()) as file:
        return Slots(file.fileno()), Slots(file.fileno())


@pytest.mark.parametrize("to_json", [True, False])
@pytest.mark.parametrize("datatype", DATATYPES.values(), ids=DATATYPES)
def test_marks_stand_for_work(datatype: object, to_json: bool) -> None:
    work = Work(to_json, datatype)  # type: ignore[arg-type]
    assert work_of(mark_of(work)) == work
    assert 0 <= mark_of(work) < 256


@given(st.lists(MARKS), strategies.SEEDS)
def test_tickets_arrive_however_they_are_split(
    tickets: list[tuple[int, int, int]], seed: int
) -> None:
    data = b"".join(TICKET.pack(*ticket) for ticket in tickets)
    for pieces in ([data], strategies.cut(data, seed), strategies.bytewise(data)):
        reader = TicketReader()
        assert [ticket for piece in pieces for ticket in reader.feed(piece)] == tickets


def test_work_put_on_one_side_is_there_on_the_other(both: tuple[Slots, Slots]) -> None:
    ours, its = both
    sizes = [ours.put_work(slot, (b"[", memoryview(b"%d" % slot), b"]")) for slot in range(COUNT)]
    assert [its.work(slot, sizes[slot]) for slot in range(COUNT)] == [
        b"[%d]" % slot for slot in range(COUNT)
    ]


def test_work_may_be_withdrawn(both: tuple[Slots, Slots]) -> None:
    ours, its = both
    for slot in range(COUNT):
        ours.put_work(slot, (b"1",))
    ours.withdraw(1)
    assert [its.is_wanted(slot) for slot in range(COUNT)] == [slot != 1 for slot in range(COUNT)]
    ours.put_work(1, (b"1",))
    assert its.is_wanted(1)


def test_full_slots_do_not_touch_each_other(both: tuple[Slots, Slots]) -> None:
    ours, its = both
    for slot in range(COUNT):
        assert ours.put_work(slot, (bytes([slot]) * LARGEST_WORK,)) == LARGEST_WORK
        its.put_result(slot, bytes([100 + slot]) * LARGEST_RESULT)
    for slot in range(COUNT):
        assert its.work(slot, LARGEST_WORK) == bytes([slot]) * LARGEST_WORK
        assert ours.result(slot, LARGEST_RESULT) == bytes([100 + slot]) * LARGEST_RESULT


@pytest.mark.parametrize(
    ("name", "element"),
    [
        ("INT8", b"\x80"),
        ("UINT8", b"\xff"),
        ("INT16", b"\x00\x80"),
        ("FP16", b"\xff\xfb"),
        ("BF16", b"\x80\x80"),
        ("FP32", b"\xff\xff\x7f\xff"),
        ("FP64", b"\xff\xff\xff\xff\xff\xff\xef\xff"),
        ("INT64", b"\x00\x00\x00\x00\x00\x00\x00\x80"),
    ],
)
def test_the_longest_text_of_a_chunk_fits(name: str, element: bytes) -> None:
    data = element * (64 * 1024 // len(element))
    text = do(Work(True, DATATYPES[name]), data)
    assert text is not None
    assert len(text) <= LARGEST_RESULT
