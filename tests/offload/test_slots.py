import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.elements.run_job import run_job
from gateway.codec.offload_interface import ConversionJob
from gateway.offload.slots import (
    MAX_JOB_SIZE,
    MAX_RESULT_SIZE,
    MESSAGE,
    SLOT_COUNT,
    MessageReader,
    SharedSlots,
    create_memory,
    decode_job,
    encode_job,
)
from gateway.protocol.datatypes import DATATYPES
from tests.codec import strategies

MESSAGES = st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**32 - 1))


@pytest.fixture
def both() -> tuple[SharedSlots, SharedSlots]:
    """The slots as the worker and as its offload process has them."""
    with os.fdopen(create_memory()) as file:
        return SharedSlots(file.fileno()), SharedSlots(file.fileno())


@pytest.mark.parametrize("to_json", [True, False])
@pytest.mark.parametrize("datatype", DATATYPES.values(), ids=DATATYPES)
def test_jobs_have_codes_of_one_byte(datatype: object, to_json: bool) -> None:
    job = ConversionJob(to_json, datatype)  # type: ignore[arg-type]
    assert decode_job(encode_job(job)) == job
    assert 0 <= encode_job(job) < 256


@given(st.lists(MESSAGES), strategies.SEEDS)
def test_messages_arrive_however_they_are_split(
    messages: list[tuple[int, int, int]], seed: int
) -> None:
    data = b"".join(MESSAGE.pack(*message) for message in messages)
    for pieces in ([data], strategies.cut(data, seed), strategies.bytewise(data)):
        reader = MessageReader()
        assert [message for piece in pieces for message in reader.feed(piece)] == messages


def test_job_data_is_shared(both: tuple[SharedSlots, SharedSlots]) -> None:
    ours, theirs = both
    sizes = [
        ours.write_job(slot, (b"[", memoryview(b"%d" % slot), b"]")) for slot in range(SLOT_COUNT)
    ]
    assert [theirs.job_data(slot, sizes[slot]) for slot in range(SLOT_COUNT)] == [
        b"[%d]" % slot for slot in range(SLOT_COUNT)
    ]


def test_job_may_be_cancelled(both: tuple[SharedSlots, SharedSlots]) -> None:
    ours, theirs = both
    for slot in range(SLOT_COUNT):
        ours.write_job(slot, (b"1",))
    ours.cancel(1)
    assert [theirs.is_pending(slot) for slot in range(SLOT_COUNT)] == [
        slot != 1 for slot in range(SLOT_COUNT)
    ]
    ours.write_job(1, (b"1",))
    assert theirs.is_pending(1)


def test_full_slots_do_not_overlap(both: tuple[SharedSlots, SharedSlots]) -> None:
    ours, theirs = both
    for slot in range(SLOT_COUNT):
        assert ours.write_job(slot, (bytes([slot]) * MAX_JOB_SIZE,)) == MAX_JOB_SIZE
        theirs.write_result(slot, bytes([100 + slot]) * MAX_RESULT_SIZE)
    for slot in range(SLOT_COUNT):
        assert theirs.job_data(slot, MAX_JOB_SIZE) == bytes([slot]) * MAX_JOB_SIZE
        assert ours.copy_result(slot, MAX_RESULT_SIZE) == bytes([100 + slot]) * MAX_RESULT_SIZE


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
def test_longest_text_of_a_chunk_fits(name: str, element: bytes) -> None:
    data = element * (64 * 1024 // len(element))
    text = run_job(ConversionJob(True, DATATYPES[name]), data)
    assert text is not None
    assert len(text) <= MAX_RESULT_SIZE
