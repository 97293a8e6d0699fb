"""Documents in shared memory are whole or as before, whatever happens to their writers."""

import os
import signal
import time

import pytest

from gateway.workers.shared_documents import SharedDocuments

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
