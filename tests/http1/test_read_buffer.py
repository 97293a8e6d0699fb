import numpy as np

from gateway.http1.read_buffer import ReadBuffer

LARGE = 100 * 1024


def fill(intake: ReadBuffer, data: bytes) -> bytes | memoryview:
    space = intake.space()
    space[: len(data)] = data
    return intake.filled(len(data))


def test_what_was_read_stays_as_it_is() -> None:
    intake = ReadBuffer()
    rng = np.random.default_rng(0)
    pieces = [rng.bytes(int(size)) for size in rng.integers(1, LARGE, 50)]
    taken = [fill(intake, piece) for piece in pieces]
    assert [bytes(data) for data in taken] == pieces


def test_there_is_always_space() -> None:
    intake = ReadBuffer()
    for _ in range(50):
        assert len(intake.space()) >= LARGE
        fill(intake, bytes(LARGE))


def test_little_is_copied() -> None:
    intake = ReadBuffer()
    space = intake.space()
    assert isinstance(fill(intake, b"little"), bytes)
    assert intake.space() is space


def test_much_is_not() -> None:
    intake = ReadBuffer()
    data = fill(intake, bytes(LARGE))
    assert isinstance(data, memoryview)
    assert len(data) == LARGE


def test_little_that_waits_keeps_little_however_much_passes_between() -> None:
    intake = ReadBuffer()
    waiting = []
    for _ in range(500):
        fill(intake, bytes(6 * LARGE))  # which nobody keeps
        waiting.append(fill(intake, b"x" * 20_000))
    copies = [piece for piece in waiting if isinstance(piece, bytes)]
    shared = [piece for piece in waiting if isinstance(piece, memoryview)]
    assert 0 < len({id(view.obj) for view in shared}) <= 32
    assert len(copies) > 400
    assert all(bytes(piece) == b"x" * 20_000 for piece in waiting)


def test_nothing_large_is_copied_once_nobody_keeps_much() -> None:
    intake = ReadBuffer()
    waiting = [(fill(intake, bytes(6 * LARGE)), fill(intake, bytes(LARGE))) for _ in range(50)]
    assert isinstance(fill(intake, bytes(LARGE)), bytes)
    assert isinstance(fill(intake, bytes(6 * LARGE)), memoryview)
    waiting.clear()
    assert isinstance(fill(intake, bytes(LARGE)), memoryview)
