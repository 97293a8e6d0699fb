import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.elements.offloaded_work import run_job
from gateway.codec.offload import ConversionJob
from gateway.offload.slots import (
    MAX_RESULT_SIZE,
    MAX_WORK_SIZE,
    MESSAGE,
    SLOT_COUNT,
    MessageReader,
    SharedSlots,
    create_memory,
    work_code,
    work_from_code,
)
from gateway.protocol.datatypes import DATATYPES
from tests.codec import strategies

MARKS = st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**32 - 1))


@pytest.fixture
def both() -> tuple[SharedSlots, SharedSlots]:
    """Give the slots as the gateway and as its helper has them."""
    with os.fdopen(create_memory()) as file:
        return SharedSlots(file.fileno()), SharedSlots(file.fileno())


@pytest.mark.parametrize("to_json", [True, False])
@pytest.mark.parametrize("datatype", DATATYPES.values(), ids=DATATYPES)
def test_marks_stand_for_work(datatype: object, to_json: bool) -> None:
    work = ConversionJob(to_json, datatype)  # type: ignore[arg-type]
    assert work_from_code(work_code(work)) == work
    assert 0 <= work_code(work) < 256


@given(st.lists(MARKS), strategies.SEEDS)
def test_tickets_arrive_however_they_are_split(
    tickets: list[tuple[int, int, int]], seed: int
) -> None:
    data = b"".join(MESSAGE.pack(*ticket) for ticket in tickets)
    for pieces in ([data], strategies.cut(data, seed), strategies.bytewise(data)):
        reader = MessageReader()
        assert [ticket for piece in pieces for ticket in reader.feed(piece)] == tickets


def test_work_put_on_one_side_is_there_on_the_other(both: tuple[SharedSlots, SharedSlots]) -> None:
    ours, its = both
    sizes = [
        ours.put_work(slot, (b"[", memoryview(b"%d" % slot), b"]")) for slot in range(SLOT_COUNT)
    ]
    assert [its.work(slot, sizes[slot]) for slot in range(SLOT_COUNT)] == [
        b"[%d]" % slot for slot in range(SLOT_COUNT)
    ]


def test_work_may_be_withdrawn(both: tuple[SharedSlots, SharedSlots]) -> None:
    ours, its = both
    for slot in range(SLOT_COUNT):
        ours.put_work(slot, (b"1",))
    ours.cancel(1)
    assert [its.is_pending(slot) for slot in range(SLOT_COUNT)] == [
        slot != 1 for slot in range(SLOT_COUNT)
    ]
    ours.put_work(1, (b"1",))
    assert its.is_pending(1)


def test_full_slots_do_not_touch_each_other(both: tuple[SharedSlots, SharedSlots]) -> None:
    ours, its = both
    for slot in range(SLOT_COUNT):
        assert ours.put_work(slot, (bytes([slot]) * MAX_WORK_SIZE,)) == MAX_WORK_SIZE
        its.put_result(slot, bytes([100 + slot]) * MAX_RESULT_SIZE)
    for slot in range(SLOT_COUNT):
        assert its.work(slot, MAX_WORK_SIZE) == bytes([slot]) * MAX_WORK_SIZE
        assert ours.result(slot, MAX_RESULT_SIZE) == bytes([100 + slot]) * MAX_RESULT_SIZE


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
    text = run_job(ConversionJob(True, DATATYPES[name]), data)
    assert text is not None
    assert len(text) <= MAX_RESULT_SIZE
