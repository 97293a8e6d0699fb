import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.loans import Work
from gateway.helper.frames import HEAD, FrameReader, mark_of, work_of
from gateway.protocol.datatypes import DATATYPES
from tests.codec import bodies


@pytest.mark.parametrize("to_json", [True, False])
@pytest.mark.parametrize("datatype", DATATYPES.values(), ids=DATATYPES)
def test_marks_stand_for_work(datatype: object, to_json: bool) -> None:
    work = Work(to_json, datatype)  # type: ignore[arg-type]
    assert work_of(mark_of(work)) == work
    assert 0 <= mark_of(work) < 256


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=50))), bodies.SEEDS)
def test_frames_arrive_however_they_are_split(frames: list[tuple[int, bytes]], seed: int) -> None:
    data = b"".join(HEAD.pack(mark, len(payload)) + payload for mark, payload in frames)
    for pieces in ([data], bodies.cut(data, seed), bodies.bytewise(data)):
        reader = FrameReader()
        assert [frame for piece in pieces for frame in reader.feed(piece)] == frames
