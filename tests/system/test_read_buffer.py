import numpy as np

from gateway.system.read_buffer import ReadBuffer

LARGE = 100 * 1024


def fill(buffer: ReadBuffer, data: bytes) -> bytes | memoryview:
    space = buffer.prepare()
    space[: len(data)] = data
    return buffer.commit(len(data))


def test_read_data_is_not_overwritten() -> None:
    buffer = ReadBuffer()
    rng = np.random.default_rng(0)
    pieces = [rng.bytes(int(size)) for size in rng.integers(1, LARGE, 50)]
    taken = [fill(buffer, piece) for piece in pieces]
    assert [bytes(data) for data in taken] == pieces


def test_small_read_is_copied() -> None:
    buffer = ReadBuffer()
    space = buffer.prepare()
    assert isinstance(fill(buffer, b"little"), bytes)
    assert buffer.prepare() is space


def test_large_read_is_not_copied() -> None:
    buffer = ReadBuffer()
    data = fill(buffer, bytes(LARGE))
    assert isinstance(data, memoryview)
    assert len(data) == LARGE


def test_waiting_reads_pin_few_slabs() -> None:
    buffer = ReadBuffer()
    waiting = []
    for _ in range(500):
        fill(buffer, bytes(6 * LARGE))  # which nobody keeps
        waiting.append(fill(buffer, b"x" * 20_000))
    copies = [piece for piece in waiting if isinstance(piece, bytes)]
    shared = [piece for piece in waiting if isinstance(piece, memoryview)]
    assert 0 < len({id(view.obj) for view in shared}) <= 32
    assert len(copies) > 400
    assert all(bytes(piece) == b"x" * 20_000 for piece in waiting)


def test_large_reads_are_copied_while_many_slabs_are_pinned() -> None:
    buffer = ReadBuffer()
    waiting = [(fill(buffer, bytes(6 * LARGE)), fill(buffer, bytes(LARGE))) for _ in range(50)]
    assert isinstance(fill(buffer, bytes(LARGE)), bytes)
    assert isinstance(fill(buffer, bytes(6 * LARGE)), memoryview)
    waiting.clear()
    assert isinstance(fill(buffer, bytes(LARGE)), memoryview)
