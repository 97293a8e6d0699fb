"""Bytes of terminals as keys."""

import pytest

from gateway.top.keys import KeyDecoder


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q/2", ["q", "/", "2"]),
        (b"\x1b[A\x1b[B\x1bOC\x1bOD", ["up", "down", "right", "left"]),
        (b"\x1b[1;5A", ["up"]),
        (b"\x1b[5~\x1b[6~", ["page up", "page down"]),
        (b"\x1b[H\x1b[F\x1b[1~\x1b[4~\x1bOH", ["home", "end", "home", "end", "home"]),
        (b"\t\x1b[Z", ["tab", "back tab"]),
        (b"\r\n", ["enter", "enter"]),
        (b"\x7f\x08\x15", ["backspace", "backspace", "clear"]),
        (b"\x03", ["leave"]),
        (b"\x04", ["leave"]),
        ("模é".encode(), ["模", "é"]),
        (b"\x1b[200~x\x1b[15~y\x1b[99999;1Rz", ["x", "y", "z"]),
        (b"\x00\x01\x1c", []),
        (b"\x1bx", ["escape", "x"]),
        (b"\xff", ["\ufffd"]),
    ],
)
def test_keys_of_terminals(data: bytes, keys: list[str]) -> None:
    assert KeyDecoder().feed(data) == keys
    decoder = KeyDecoder()
    assert [key for byte in data for key in decoder.feed(bytes([byte]))] == keys
    assert not decoder.waits


def test_an_escape_character_alone_is_the_key() -> None:
    decoder = KeyDecoder()
    assert decoder.feed(b"\x1b") == []
    assert decoder.waits
    assert decoder.flush() == ["escape"]
    assert not decoder.waits


def test_an_unfinished_sequence_is_no_key() -> None:
    decoder = KeyDecoder()
    assert decoder.feed(b"\x1b[1") == []
    assert decoder.flush() == []
    assert decoder.feed(b"q") == ["q"]


def test_a_sequence_without_end_does_not_grow_for_ever() -> None:
    decoder = KeyDecoder()
    keys = decoder.feed(b"\x1b[" + b"1" * 1000)
    assert keys[0] == "escape"
    assert not decoder.waits
