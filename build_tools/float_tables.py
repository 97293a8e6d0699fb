"""Writes powers_of_ten.h, the tables by which the C module reads and writes numbers."""

from __future__ import annotations

_LEAST, _MOST = -342, 308
"""Exponents of the powers of ten: times 64 bits of digits, lesser ones give 0, others infinity."""

_LEAST_UNIT, _MOST_UNIT = -1074, 971
"""Exponents of the powers of two that doubles are multiples of."""


def powers_of_ten() -> str:
    """Give a C header with the powers of ten that read and write floats, and tables of text."""
    powers = [_first_bits(exponent) for exponent in range(_LEAST, _MOST + 1)]
    short = "\n".join(map(_short_number, range(1000)))
    units = [_scaled_unit(exponent) for exponent in range(_LEAST_UNIT, _MOST_UNIT + 1)]
    return f"""\
enum {{ LEAST_POWER = {_LEAST}, MOST_POWER = {_MOST} }};
static const uint64_t POWERS_OF_TEN[][2] = {{
{_rows(powers)}
}};
/* Powers of two, divided by the least power of ten above each. */
enum {{ LEAST_UNIT = {_LEAST_UNIT} }};
static const uint64_t UNITS[][2] = {{
{_rows(units)}
}};
{_layouts()}
/* Numbers below 1000: up to three digits and how many they are, and the same with all three. */
static const uint32_t SHORT_NUMBERS[][2] = {{
{short}
}};
"""


def _rows(numbers: list[int]) -> str:
    """Give C initializers for numbers of 128 bits, as two words each."""
    return "\n".join(f"    {{{n >> 64:#x}, {n % 2**64:#x}}}," for n in numbers)


def _layouts() -> str:
    """Give C tables that tell where the digits of a float stand in its text; see encode_numbers.c.

    There are 8 digits of FP32 and 16 of FP64, the last of them in the lowest byte, and one more.
    Rows go by the digits before the point, then by the zeros that the digits begin with. The text
    has ``longest`` characters, less one per zero that the digits end with, but ``least``.
    """
    tables = []
    for name, digits, least, most, zeros in (("4", 8, -5, 13, 3), ("8", 16, -4, 16, 2)):
        rows = [
            _layout(digits, before, skipped)
            for before in range(least, most + 1)
            for skipped in range(zeros)
        ]
        tables.append(f"static const struct layout LAYOUTS_{name}[] = {{\n{''.join(rows)}}};\n")
    return f"""\
struct layout {{ unsigned char places[32], characters[32], last, longest, least, unused[13]; }};
{"".join(tables)}"""


def _layout(digits: int, before: int, skipped: int) -> str:
    """Give the row of a table; a place is the number of a digit, -1 for a 0, None for the point."""
    lead = list(range(skipped, skipped + before)) or [-1] * (1 - before)
    places = [*lead[:1], None, *lead[1:]] if before <= 0 else [*lead, None]
    places += range(skipped + max(before, 0), 32)
    digits_at = places[:32]
    shuffled = [
        digits - 1 - place if place is not None and 0 <= place < digits else 0x80
        for place in digits_at
    ]
    characters = [ord("." if place is None else "0") for place in digits_at]
    last = digits_at.index(digits)
    others = 2 - before if before <= 0 else 1
    fields = [last, digits + 1 - skipped + others, before + 2 if before > 0 else 0]
    return f"    {{{_braced(shuffled)}, {_braced(characters)}, {str(fields)[1:-1]}, {{0}}}},\n"


def _braced(numbers: list[int]) -> str:
    return f"{{{', '.join(map(str, numbers))}}}"


def _short_number(number: int) -> str:
    digits = b"%d" % number
    words = digits.ljust(3) + bytes((len(digits),)), digits.zfill(3)
    first, second = (int.from_bytes(word, "little") for word in words)
    return f"    {{{first:#x}, {second:#x}}},"


def _scaled_unit(exponent: int) -> int:
    """Give the first 128 bits behind the point of 2**exponent / 10**power, cut off.

    The power of ten is the least one above 2**exponent: this is at least 0.1 and below 1.
    """
    power = (exponent * 78913 >> 18) + 1  # floor(log10(2**exponent)) + 1, as C computes it
    scaled = (2**128 << max(exponent, 0)) * 10 ** max(-power, 0)
    return (scaled >> max(-exponent, 0)) // 10 ** max(power, 0)


def _first_bits(exponent: int) -> int:
    """Give the first 128 bits of 10**exponent: cut off, or, below 1, one more than that.

    They are those of 5**exponent, as the rest are powers of two.
    """
    five = 5 ** abs(exponent)
    size = five.bit_length()
    if exponent < 0:
        return (1 << (127 + size)) // five + 1
    return five << (128 - size) if size <= 128 else five >> (size - 128)
