"""Documents and rings in shared memory are whole, whatever happens to writer and reader."""

import copy
import os
import signal
import time
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.workers.shared_records import SharedDocuments, SharedRing
from tests.observe.dying import die_before_store, run_in_a_child


def _record(number: int, length: int = 20) -> bytes:
    return b"%04d" % number + bytes([number % 251]) * (length - 4)


def _space(record: bytes) -> int:
    """Return the bytes that a record takes: a header of 8, and multiples of 8."""
    return 8 + len(record) + -len(record) % 8


class _Model:
    """What a ring has to hold, in plain Python."""

    def __init__(self, size: int) -> None:
        self.size = size - size % 8
        self.records: list[bytes] = []
        self.dropped = 0

    def append(self, record: bytes) -> bool:
        if _space(record) > self.size // 4:
            return False
        self.records.append(record)
        while sum(map(_space, self.records)) > self.size:
            del self.records[0]
            self.dropped += 1
        return True


@given(
    st.integers(64, 400),
    st.lists(st.binary(max_size=24) | st.integers(0, 130).map(bytes) | st.none(), max_size=60),
)
def test_ring_holds_the_newest_records_of_any_length(
    size: int, operations: list[bytes | None]
) -> None:
    """None is a read of what came since the last one."""
    ring, model = SharedRing(size), _Model(size)
    position = seen = 0
    for record in operations:
        if record is not None:
            assert ring.append(record) == model.append(record)
            assert ring.read().records == model.records
            continue
        batch = ring.read(position)
        assert batch.records == model.records[max(0, seen - model.dropped) :]
        position, seen = batch.position, model.dropped + len(model.records)
    assert ring.read(position).records == model.records[max(0, seen - model.dropped) :]


def _reader(ring: SharedRing, before_copy: Callable[[int], None]) -> SharedRing:
    """Return a reader that calls a function, with a number from 0, before each of its copies."""
    reader, numbers = copy.copy(ring), count()

    def read(position: int, length: int) -> bytes:
        before_copy(next(numbers))
        return ring._copy(position, length)

    reader._copy = read  # type: ignore[method-assign]
    return reader


@pytest.mark.parametrize("written", [1, 2, 3, 5, 7, 8, 9, 50])
def test_reader_that_is_overtaken_between_any_two_steps_gets_whole_records(written: int) -> None:
    for step in range(16):
        ring = SharedRing(256)  # 8 records
        numbers = count()
        for _ in range(13):
            ring.append(_record(next(numbers)))

        def overtake(number: int, step: int = step, ring: SharedRing = ring) -> None:
            if number == step:
                for _ in range(written):
                    ring.append(_record(next(numbers)))  # noqa: B023  # it is called at once

        batch = _reader(ring, overtake).read()
        known = [_record(number) for number in range(13 + written)]
        assert batch.records == [each for each in known if each in batch.records]
        assert batch.records[:1] in ([], [_record(5)], *([each] for each in known[5:]))
        # What it has missed, and what came later, is in the next batch, unless it was overwritten.
        rest = ring.read(batch.position).records
        together = batch.records + rest
        assert together == sorted(set(together))
        assert set(ring.read().records) <= set(together)


def test_reader_goes_on_behind_a_record_that_is_being_overwritten() -> None:
    """The writer moves the start, and then writes: between, and in the midst of it."""
    for step in range(16):
        ring = SharedRing(256)
        for number in range(8):
            ring.append(_record(number))

        def overwrite(number: int, step: int = step, ring: SharedRing = ring) -> None:
            if number == step:
                ring._start_and_end[0] = 32
                ring._ring[:20] = b"\xff" * 20

        records = _reader(ring, overwrite).read().records
        assert records[-7:] == [_record(number) for number in range(1, 8)]
        assert records[:-7] in ([], [_record(0)])


def test_record_that_has_not_arrived_is_read_once_it_has() -> None:
    """Another processor may see the end move before it sees the record."""
    ring = SharedRing(256)
    for number in range(3):
        ring.append(_record(number))
    whole = bytes(ring._ring)
    start = _space(_record(0))
    for at in range(start, start + 28, 4):
        for hidden in (slice(at, at + 4), slice(at, start + 28), slice(start, start + 32)):
            ring._ring[hidden] = bytes(hidden.stop - hidden.start)
            if bytes(ring._ring) == whole:
                continue
            batch = ring.read()
            assert batch.records == [_record(0)]
            ring._ring[:] = whole
            assert ring.read(batch.position).records == [_record(1), _record(2)]


def test_zeros_are_no_record() -> None:
    ring = SharedRing(256)
    ring._start_and_end[1] = 32
    assert ring.read().records == []


@pytest.mark.parametrize("before", [0, 3, 6, 7, 11])
def test_writer_killed_between_any_two_stores_leaves_whole_records(before: int) -> None:
    """Its successor goes on, with shorter and longer records. A reader notices neither."""
    for stores in count():
        ring, model = SharedRing(256), _Model(256)
        for number in range(before):
            ring.append(_record(number, 30))
            model.append(_record(number, 30))
        position = ring.read().position
        kept = list(model.records)

        def run(ring: SharedRing = ring, stores: int = stores) -> None:
            die_before_store(stores)
            ring.append(b"new" * 18)

        status = run_in_a_child(run)
        records = ring.read().records
        if records[-1:] == [b"new" * 18]:
            model.append(records[-1])
            assert records == model.records
        else:
            assert records == kept[len(kept) - len(records) :]
            # The start may have moved, by no more than the new record takes.
            assert len(records) >= len(kept) - 2
            model.records = list(records)
        for record in (b"", b"x" * 9, b"y" * 55):
            assert ring.append(record)
            model.append(record)
            assert ring.read().records == model.records
        assert ring.read(position).records[-3:] == [b"", b"x" * 9, b"y" * 55]
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert stores >= 4  # the start, the record in two parts, and the end


KIB = 1024


def test_last_document_of_each_slot_is_read() -> None:
    documents = SharedDocuments(3)
    for text in (b"one", b"a longer one", b"two"):
        assert documents.publish(0, text)
    assert documents.publish(2, b"other")
    assert documents.read_all() == [b"two", b"", b"other"]


@pytest.mark.parametrize("size", [0, 1, 64])
def test_document_that_is_too_long_leaves_the_one_before(size: int) -> None:
    documents = SharedDocuments(1, max_document=64)
    assert documents.publish(0, bytes(size))
    assert not documents.publish(0, bytes(65))
    assert documents.read_all() == [bytes(size)]


def test_document_of_a_process_that_is_killed_at_any_moment_is_whole() -> None:
    documents = SharedDocuments(1, max_document=64 * KIB)
    for attempt in range(10):
        documents.publish(0, b"")
        pid = os.fork()
        if not pid:
            while True:
                for number in range(256):
                    documents.publish(0, bytes([number]) * (KIB + 200 * number))
        try:
            while documents.read_all() == [b""]:
                time.sleep(0.0001)
            for _ in range(200 + 7 * attempt):
                _check_whole(documents.read_all()[0])
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert documents.read_all()[0]
        _check_whole(documents.read_all()[0])
        documents.publish(0, b"successor")
        assert documents.read_all() == [b"successor"]


def _check_whole(document: bytes) -> None:
    # A reader gives up if the writer never pauses.
    if document:
        assert document == document[:1] * (KIB + 200 * document[0])
