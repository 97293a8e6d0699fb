"""A program that feeds generated strings to the C module, and checks what it makes of them.

harness.py tells its arguments.
"""

from __future__ import annotations

import base64
import json
import re
import struct
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.native.harness import LastInput, WrongError, call, load, run

_DEEPEST = 64
_PARTS = (
    *('"', "\\", "[", "]", ",", "{", "}", ":", " ", "\n", "a", "abcdefg", "é", "漢", "😀", "\x7f"),
    *('""', '"a"', '","', '"],["', "\\n", '\\"', "\\\\", "\\u0041", "\\ud83d\\ude00", "\\ud83d"),
    *('{"b64":"QQ=="}', '{ "b64" : "QUJD" }', "QQ==", "=", "\0", "\x1f"),
)
_BROKEN = (b"\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\xff", b'"')
_BASE64 = re.compile(rb"[A-Za-z0-9+/]*={0,2}")


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise WrongError(f"{what} gave {found!r}, not {expected!r}")


def _pack(elements: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(each)) + each for each in elements)


# ------------------------------------------------------------------------------------ inputs


def _string(rng: Random) -> str:
    alphabet = rng.choice(("abcdefghij", 'ab"\\/\n\x1f', "aé漢😀\x7f", "é漢"))
    return "".join(rng.choices(alphabet, k=rng.choice((0, 1, 3, 7, 8, 9, 16, 40))))


def _array(rng: Random, depth: int = 0) -> list[Any]:
    size = rng.choice((0, 1, 2, 5, 30))
    return [
        _array(rng, depth + 1) if depth < 3 and rng.random() < 0.2 else _string(rng)
        for _ in range(size)
    ]


def _text(rng: Random) -> bytes:
    """Return an array as clients write it."""
    comma = rng.choice((",", ", ", " ,\n"))
    ascii_only = rng.random() < 0.5
    return json.dumps(_array(rng), ensure_ascii=ascii_only, separators=(comma, ":")).encode()


def _soup(rng: Random) -> bytes:
    return "".join(rng.choices(_PARTS, k=rng.randrange(30))).encode()


def _broken(rng: Random, data: bytes) -> bytes:
    """Replace some bytes, or cut the end off."""
    at = rng.randrange(len(data) + 1)
    piece = rng.choice((*_BROKEN, b"", rng.randbytes(2), rng.choice(_PARTS).encode()))
    return data[:at] + (piece + data[at + rng.randrange(3) :] if rng.random() < 0.8 else b"")


# ------------------------------------------------------------------------------------ checks


def _strings_of(text: bytes) -> list[bytes] | None:
    """Return the strings of an array, encoded; None if it is none, or too deep."""
    try:
        array = json.loads(text.decode())
        waiting, strings = [(array, 0)], list[bytes]()
        while waiting:
            value, depth = waiting.pop()
            if isinstance(value, list) and depth < _DEEPEST:
                waiting += [(item, depth + 1) for item in reversed(value)]
            elif isinstance(value, str) and depth:
                strings.append(value.encode())
            else:
                return None
    except (ValueError, RecursionError):
        return None
    return strings


def _check_decoding(native: Any, rng: Random) -> bool:
    text = rng.choice((_text, _soup))(rng)
    text = text if rng.random() < 0.5 else _broken(rng, text)
    _last.write(text)
    strings = _strings_of(text)
    expected = None if strings is None else (len(strings), _pack(strings))
    _expect("decode_strings", call(native.decode_strings, text), expected)
    elements = call(native.decode_elements, text)
    if expected is not None:
        _expect("decode_elements", elements and elements[:2], expected)
        _expect("collect_marks", call(native.collect_marks, text), elements[2])
        _expect("scan_strings", call(native.scan_strings, text, 0)[5], True)
    parts = _strings_of(b'["%b"]' % text)
    inner = parts[0] if parts is not None and len(parts) == 1 else None
    if b'"' not in text.replace(b"\\\\", b"").replace(b'\\"', b""):
        _expect("decode_text", call(native.decode_text, text), inner)
    # Whatever they find, they stay within the text.
    for scan in (native.collect_marks, native.scan_array_values, native.find_string_end):
        call(scan, text)
    call(native.scan_strings, text, rng.randrange(3))
    call(native.decode_elements, text, 1, 1)
    return expected is not None


def _check_encoding(native: Any, rng: Random) -> bool:
    elements = [_string(rng).encode() for _ in range(rng.choice((0, 1, 3, 40)))]
    if rng.random() < 0.3:
        elements = [_broken(rng, each) for each in elements]
    rest = rng.choice((b"", b"\0", b"\5\0\0\0abc", b"\xff\xff\xff\xffabcdefghi"))
    data, first = _pack(elements), rng.choice((0, 1, 7))
    _last.write(data + rest)
    written: list[str] | None
    try:
        written = [json.dumps(each.decode(), ensure_ascii=False) for each in elements]
    except UnicodeDecodeError:
        written = None
    texts = [base64.b64encode(each).decode() for each in elements]
    for each, encoded in zip(elements, texts, strict=True):
        _expect("encode_base64", call(native.encode_base64, each), encoded.encode())
    forms = written, [f'"{each}"' for each in texts], [f'{{"b64":"{each}"}}' for each in texts]
    row = rng.choice((1, 2, 3))
    for form, strings in enumerate(forms):
        for sizes in (b"", struct.pack("<2Q", row, 2**63)):
            found = call(native.encode_strings, data + rest, form, first, sizes)
            leads = [_lead(index, row if sizes else 0) for index in range(first, first + 40)]
            pairs = zip(leads, strings or [], strict=False)
            text = "".join(lead + string for lead, string in pairs).encode()
            count = len(elements), len(data)
            _expect("encode_strings", found, None if strings is None else (*count, text))
    joined = b"".join(elements)
    found = call(native.encode_text, joined)
    if written is not None:
        text = json.dumps(joined.decode(), ensure_ascii=False)[1:-1].encode()
        _expect("encode_text", found, (len(joined), text))
    return written is not None


def _lead(index: int, row: int) -> str:
    """Return the text before an element of a matrix, or of a flat array."""
    if not row or index % row:
        return "," if index else ""
    return "],[" if index else "[["


def _check_base64(native: Any, rng: Random) -> bool:
    texts = [base64.b64encode(_string(rng).encode()) for _ in range(rng.choice((0, 1, 3, 9)))]
    if rng.random() < 0.5:
        texts = [_broken(rng, each) for each in texts]
    data = _pack(texts)
    _last.write(data)
    decoded = [_decode(each) for each in texts]
    for text, expected in zip(texts, decoded, strict=True):
        _expect("decode_base64", call(native.decode_base64, text, True), expected)
        lenient = call(native.decode_base64, text, False)
        if expected is not None:
            _expect("decode_base64", lenient, expected)
            _expect(
                "without padding", call(native.decode_base64, text.rstrip(b"="), False), expected
            )
    rest = rng.choice((b"", b"\4", b"\4\0\0\0QQ=", b"\xff\xff\xff\xffQQ=="))
    complete = [each for each in decoded if each is not None]
    found = call(native.decode_base64_elements, data + rest)
    is_valid = len(complete) == len(decoded)
    _expect(
        "decode_base64_elements",
        found,
        (len(texts), len(data), _pack(complete)) if is_valid else None,
    )
    return is_valid


def _decode(text: bytes) -> bytes | None:
    """Decode canonical base64."""
    if not _BASE64.fullmatch(text) or len(text) % 4:
        return None
    data = base64.b64decode(text)
    return data if base64.b64encode(data) == text else None


_last: LastInput


def main(module: str, seconds: float, seed: str, last: Path) -> None:
    """Feed inputs for so many seconds."""
    global _last
    _last = LastInput(last)
    native, rng = load(module), Random(seed)
    counts = Counter[str](converted=0, left=0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        check = rng.choice((_check_decoding, _check_encoding, _check_base64))
        counts["converted" if check(native, rng) else "left"] += 1
    print(json.dumps(counts))


if __name__ == "__main__":
    run(main)
