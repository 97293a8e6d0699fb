"""The Huffman code of header strings: RFC 7541, section 5.2 and appendix B.

A string is decoded byte by byte. Each *state* is a node of the code's tree: what the bits since the
last symbol were. A row has, for each next byte, the symbols that it completes and the next state.
"""

from __future__ import annotations

from typing import Final

from gateway.http2.errors import compression_error
from gateway.sizes import CACHED_LINES
from gateway.system.bounded_cache import cached

BYTES: Final = [bytes([value]) for value in range(256)]
"""Each byte, alone."""

_MAX_CACHED: Final = 64
"""Maximum bytes of a cached string, encoded. With ``CACHED_LINES`` of them: 0.7 MB at most."""

# The code is canonical: codes of equal length are in the order of their symbols, so the lengths
# say it all. The last one is EOS.
_LENGTHS: Final = bytes.fromhex(
    "0d171c1c1c1c1c1c1c181e1c1c1e1c1c1c1c1c1c1c1c1e1c1c1c1c1c1c1c1c1c060a0a0c0d06080b0a0a080b"
    "080606060505050606060606060607080f060c0a0d0607070707070707070707070707070707070707070707"
    "0807080d130d0e060f05060506050606060507070606060506070605050607070707070f0b0e0d1c14161414"
    "1616161716171717171718171818161718171717171516171617171816151416161717151716161815161717"
    "151516151716171714161616171616171a1a1413161716191a1a1a1b1b1a181913151a1b1b1a1b1815151a1a"
    "1c1b1b1b14181415161515171616191918181a171a1b1a1a1b1b1b1b1b1c1b1b1b1b1b1a1e"
)
_EOS: Final = 256


def _canonical_codes() -> list[str]:
    """Return the code of each symbol as a text of bits."""
    codes = [""] * len(_LENGTHS)
    code = before = 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(_LENGTHS)):
        code <<= length - before
        codes[symbol] = f"{code:0{length}b}"
        code += 1
        before = length
    return codes


_CODES: Final = _canonical_codes()


def huffman_encode(text: bytes) -> bytes:
    """Encode a string."""
    bits = "".join([_CODES[byte] for byte in text])
    # Padding: the first bits of EOS, which are ones (section 5.2).
    bits += "1" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big") if bits else b""


_ROOT: Final = 0
_INVALID: Final = 256
"""The state after EOS. It is never left."""


def _make_tree() -> list[list[int]]:
    """Return the two successors of each inner node: another one, or -1 - symbol."""
    tree = [[0, 0]]
    for symbol, code in enumerate(_CODES):
        node = _ROOT
        for bit in code[:-1]:
            if not tree[node][bit == "1"]:
                tree[node][bit == "1"] = len(tree)
                tree.append([0, 0])
            node = tree[node][bit == "1"]
        tree[node][code[-1] == "1"] = -1 - symbol
    return tree


def _padding_states() -> frozenset[int]:
    """Return the states in which a string may end."""
    states = [_ROOT]
    # Less than 8 bits, and the first ones of EOS (section 5.2).
    for _ in range(7):
        states.append(_TREE[states[-1]][1])
    return frozenset(states)


_TREE: Final = _make_tree()
_FINAL_STATES: Final = _padding_states()
_rows: Final[dict[int, tuple[list[bytes], list[int]]]] = {}
"""What each next byte does in a state: the symbols that it completes, and the next state.

The rows made so far: each takes 4 KiB, and there are 257 states."""


def _row(state: int) -> tuple[list[bytes], list[int]]:
    """Return the row of a state; it is made at its first use."""
    row = _rows.get(state)
    if row is None:
        steps = [_step(state, byte) for byte in range(256)]
        row = _rows[state] = ([step[0] for step in steps], [step[1] for step in steps])
    return row


def _step(state: int, byte: int) -> tuple[bytes, int]:
    """Return the symbols that a byte completes, and the next state."""
    symbols = b""
    for shift in range(7, -1, -1):
        if state == _INVALID:
            break
        state = _TREE[state][byte >> shift & 1]
        if state == -1 - _EOS:
            state = _INVALID  # a string must not contain EOS (section 5.2)
        elif state < 0:
            symbol = BYTES[-1 - state]
            # Most steps complete one symbol: those share their bytes.
            symbols = symbols + symbol if symbols else symbol
            state = _ROOT
    return symbols, state


def huffman_decode(encoded: bytes) -> bytes:
    """Decode a string; it has at most 8/5 of the encoded bytes.

    Raises Http2Error.
    """
    return _cached_decode(encoded) if len(encoded) <= _MAX_CACHED else _decode(encoded)


def _decode(encoded: bytes) -> bytes:
    symbols: list[bytes] = []
    state = _ROOT
    for byte in encoded:
        completed, following = _rows.get(state) or _row(state)
        symbols.append(completed[byte])
        state = following[byte]
    if state not in _FINAL_STATES:
        raise compression_error(
            "a Huffman-coded string with EOS in it"
            if state == _INVALID
            else "a Huffman-coded string with invalid padding"
        )
    return b"".join(symbols)


_cached_decode = cached(CACHED_LINES)(_decode)
