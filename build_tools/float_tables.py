"""Writes powers_of_ten.h, the tables by which the C module reads and writes numbers."""

from __future__ import annotations

_LEAST, _MOST = -342, 308
"""Exponents of the powers of ten: times 64 bits of digits, lesser ones give 0, others infinity."""

_LEAST_UNIT, _MOST_UNIT = -1075, 972
"""Exponents of the powers of two that doubles are multiples of, and one more at each end."""

_LEAST_POWER_FP32, _LEAST_POWER_FP64 = -45, -324
"""The least powers of ten at or below a power of two that FP32 and FP64 are multiples of."""


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

    Each place is that of a byte with a digit. There are 9 digits of FP32: the last one is byte 7,
    the first one byte 15. Of the 17 digits of FP64, the first 16 characters see all but the last
    one, the others all but the first one, from byte 15 down.

    A text ends behind its last digit other than 0, or behind that of the bit ``least``. ``end``
    follows, an exponent and a comma, with its size as the last byte.

    The first row is "0.0". Those of FP32 go by the power of ten of the digits but the last, then by
    the zeros that the digits begin with; those of FP64 by the digits before the point.
    """
    fp32 = [
        _layout(9, power + 9 - zeros, zeros, range(-5, 14))
        for power in range(_LEAST_POWER_FP32, 32)
        for zeros in range(3)
    ]
    powers = range(_LEAST_POWER_FP64, 294)
    fp64 = [_layout(17, power + 16, 0, range(-4, 17)) for power in powers]
    zero = _layout_row([0x80] * 32, b"0.0".ljust(32), 4, ",")
    return f"""\
enum {{ LEAST_POWER_FP32 = {_LEAST_POWER_FP32}, LEAST_POWER_FP64 = {_LEAST_POWER_FP64} }};
struct layout {{
    unsigned char places[32], characters[32], end[8];
    uint32_t least;
}} __attribute__((aligned(32)));
static const struct layout LAYOUTS_FP32[] = {{
{zero}{"".join(fp32)}}};
static const struct layout LAYOUTS_FP64[] = {{
{zero}{"".join(fp64)}}};"""


def _layout(digits: int, before: int, zeros: int, plain: range) -> str:
    """Give a row of a table; a place is the number of a digit, -1 for a 0, None for the point."""
    end, least = ",", 1 << max(before + 1, 0)
    if before not in plain:
        end, least, before = f"e{before - 1:+},", 1, 1
    lead = list(range(zeros, zeros + before)) or [-1] * (1 - before)
    places = [*lead[:1], None, *lead[1:]] if before <= 0 else [*lead, None]
    places = [*places, *range(zeros + max(before, 0), 32)][:32]
    shuffled = [
        0x80 if place is None or not 0 <= place < digits else 15 + at // 16 - place
        for at, place in enumerate(places)
    ]
    return _layout_row(shuffled, bytes(46 if each is None else 48 for each in places), least, end)


def _layout_row(places: list[int], characters: bytes, least: int, end: str) -> str:
    fields = places, [*characters], [*end.ljust(7).encode(), len(end)]
    return "    {" + "".join(f"{{{str(each)[1:-1]}}}, " for each in fields) + f"{least}}},\n"


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
