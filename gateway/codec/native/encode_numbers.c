/*
 * Encodes binary elements as the text of JSON numbers.
 *
 * Floats get the fewest digits that give the same float back, and of these the ones nearest to it.
 * After Raffaello Giulietti, "The Schubfach way to render doubles" (2020). A float is c * 2^q, and
 * all numbers within half a 2^q of it read as that float. With 10^k the power of ten at or below
 * 2^q, at least one multiple of 10^k is among them, and at most one of 10^(k+1). The float is
 * multiplied once, by 2^q / 10^k (powers_of_ten.h, made by the build), and the ends of the interval
 * are compared with the product.
 *
 * What differs from one float to the next is computed rather than branched on, as branches on it
 * are unpredictable: each wrong guess would cost as much as half a float.
 */
#include "encode_numbers.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "digits.h"
#include "encode_integers.h"

typedef unsigned __int128 uint128_t;

/* ---- The digits of a float ---- */

/* The formats of IEEE 754 for floats of 4 and 8 bytes. */
INLINE int
mantissa_bits(int size)
{
    return size == 4 ? 23 : 52;
}

/* The most digits that a float needs. */
INLINE int
most_digits(int size)
{
    return size == 4 ? 9 : 17;
}

/* A number that is (10 * tens + last) * 10^power. */
struct decimal {
    uint64_t tens, last;
    int power;
};

/* floor(log10(2^exponent)) of all exponents of floats */
INLINE int
power_below(int exponent)
{
    return exponent * 78913 >> 18;
}

enum { WORDS = 32 /* 1024 bits: c * 2^q of all doubles, scaled to integers */ };

static void
big_multiply(uint32_t *number, uint32_t by)
{
    uint64_t carry = 0;
    for (int i = 0; i < WORDS; i++) {
        carry += (uint64_t)number[i] * by;
        number[i] = (uint32_t)carry;
        carry >>= 32;
    }
}

/* Set a number to factor * 2^twos * 5^fives. */
static void
big_set(uint32_t *number, uint64_t factor, int twos, int fives)
{
    memset(number, 0, WORDS * sizeof *number);
    uint128_t shifted = (uint128_t)factor << twos % 32;
    for (int i = twos / 32; shifted && i < WORDS; i++, shifted >>= 32)
        number[i] = (uint32_t)shifted;
    for (; fives > 0; fives--)
        big_multiply(number, 5);
}

/* Compare a * 2^exponent with b * 10^power exactly: -1, 0 or 1, as strcmp does. */
static int
compare_exactly(uint64_t a, int exponent, uint64_t b, int power)
{
    uint32_t left[WORDS], right[WORDS];
    int twos = exponent - power;
    big_set(left, a, twos > 0 ? twos : 0, power < 0 ? -power : 0);
    big_set(right, b, twos < 0 ? -twos : 0, power > 0 ? power : 0);
    for (int i = WORDS - 1; i >= 0; i--)
        if (left[i] != right[i])
            return left[i] < right[i] ? -1 : 1;
    return 0;
}

/* Choose the digits of c * 2^q, where the lower half of the unit is 0: the product is exact. */
static struct decimal
choose_from_product(uint64_t c, int q, uint64_t unit)
{
    const uint128_t one = (uint128_t)1 << 64;
    uint128_t product = (uint128_t)c * unit, rest = product % one;
    uint64_t tens = (uint64_t)(product / one), last = (uint64_t)(rest * 10 / one);
    uint64_t fraction = (uint64_t)(rest * 10 % one);
    bool is_even = !(c & 1);
    int k = power_below(q);
    if (2 * rest < (uint128_t)unit + is_even)
        return (struct decimal){tens, 0, k};
    if (2 * rest + unit + is_even > 2 * one)
        return (struct decimal){tens + 1, 0, k};
    last += fraction > (1ULL << 63) - (last & 1);
    return (struct decimal){tens + last / 10, last % 10, k};
}

/*
 * Choose the digits of c * 2^q, about ``whole`` * 10^k, where the product is too near to a border
 * to tell on which side it is. Of all doubles, this is some dozens, and those exactly on a border.
 */
__attribute__((noinline, cold)) static struct decimal
choose_exactly(uint64_t c, int q, uint64_t whole, int k)
{
    const uint64_t *unit = UNITS[q - LEAST_UNIT];
    if (unit[1] == 0)
        return choose_from_product(c, q, unit[0]);
    uint64_t tens = whole / 10, last = whole % 10;
    bool is_even = !(c & 1);
    /* Twice the interval is 2c-1 to 2c+1, with its ends if c is even. */
    if (compare_exactly(2 * c - 1, q - 1, tens * 10, k) < is_even)
        return (struct decimal){tens, 0, k};
    if (compare_exactly(2 * c + 1, q - 1, tens * 10 + 10, k) > -is_even)
        return (struct decimal){tens + 1, 0, k};
    int beyond_half = compare_exactly(4 * c, q - 1, 2 * whole + 1, k);
    last += beyond_half > 0 || (beyond_half == 0 && last & 1);
    return (struct decimal){tens + last / 10, last % 10, k};
}

/* Compute the digits of c * 2^q, where c is no power of two, or q the least. */
INLINE struct decimal
shortest(uint64_t c, int q, int size)
{
    const uint64_t half = 1ULL << 63;
    const uint64_t *unit = UNITS[q - LEAST_UNIT];
    int k = power_below(q);
    /* The upper word is the integer, the lower one the fraction; both lack the last digit. */
    uint128_t product = (uint128_t)c * unit[0];
    if (size == 8)
        product += (uint64_t)((uint128_t)c * unit[1] >> 64);
    uint64_t tens = (uint64_t)(product >> 64), rest = (uint64_t)product, half_unit = unit[0] >> 1;
    product = (uint128_t)rest * 10;
    uint64_t last = (uint64_t)(product >> 64), fraction = (uint64_t)product;
    if (size == 4) {
        /*
         * No end of an interval comes nearer to a multiple of ten than this, unless it is one. The
         * ends belong to the interval if c is even.
         */
        const uint64_t margin = 1ULL << 27;
        half_unit += margin - (c & 1) * 2 * margin;
        last += fraction > half - (last & 1);
    } else {
        /* The product, and half a unit, are each cut off by less than 1. */
        const uint64_t margin = 4;
        if (UNLIKELY(
                rest + half_unit + margin <= 2 * margin ||
                rest - half_unit + margin <= 2 * margin ||
                fraction - half + 10 * margin <= 20 * margin))
            return choose_exactly(c, q, tens * 10 + last, k);
        last += fraction >> 63;
    }
    bool is_above = rest + half_unit < rest, is_below = rest < half_unit;
    return (struct decimal){tens + is_above, last & ((uint64_t)(is_above | is_below) - 1), k};
}

/*
 * Compute the digits of 2^(q + stored). The floats below a power of two are nearer to it than those
 * above. There are few, so that the tests try all.
 */
static struct decimal
shortest_of_power(int q, int stored)
{
    const uint64_t *unit = UNITS[q - LEAST_UNIT];
    uint128_t scaled = ((uint128_t)unit[0] << 64 | unit[1]) >> 4;
    int k = power_below(q), bits = 124 - stored;
    scaled *= 10;
    if (unit[0] < UINT64_MAX / 15 * 2) {
        /* The interval, 3/4 of a unit, is below 1. */
        scaled *= 10;
        k--;
    }
    uint128_t one = (uint128_t)1 << bits, fraction = scaled & (one - 1);
    uint128_t above = scaled >> (stored + 1), below = above >> 1;
    uint64_t whole = (uint64_t)(scaled >> bits);
    uint128_t rest = whole % 10 * one + fraction;
    if (rest <= below)
        whole -= whole % 10;
    else if (rest + above >= 10 * one)
        whole += 10 - whole % 10;
    else if (fraction > below || fraction > one / 2 || (fraction == one / 2 && whole & 1))
        whole++;
    return (struct decimal){whole / 10, whole % 10, k};
}

/* ---- The text of a float ---- */

/* Count the zeros at the end of eight digits. */
INLINE int
zeros_at_end(uint64_t digits)
{
    /* A digit has its bits in the lower half of its byte: the bit set below is behind the first. */
    return (__builtin_ctzll(digits | 1ULL << 63) + 4) / 8;
}

/* How many digits stand before the point, at least and at most, without an exponent. */
INLINE int
least_before_point(int size)
{
    return size == 4 ? -5 : -4;
}

INLINE int
most_before_point(int size)
{
    return size == 4 ? 13 : 16;
}

/* The digits of a float: one, and eight or sixteen as text. */
struct digits {
    uint64_t first, next, last;
    int count; /* without zeros at the end */
};

INLINE struct digits
split(uint64_t value, int size)
{
    struct digits digits;
    const uint64_t e8 = 100000000, e16 = e8 * e8;
    if (size == 4) {
        digits.first = value / e8;
        uint64_t next = eight_digits(value - digits.first * e8);
        digits.next = as_text(next);
        digits.last = EIGHT_ZEROS;
        digits.count = 9 - zeros_at_end(next);
        return digits;
    }
    digits.first = value / e16;
    value -= digits.first * e16;
    uint64_t upper = value / e8;
    uint64_t next = eight_digits(upper), last = eight_digits(value - upper * e8);
    digits.next = as_text(next);
    digits.last = as_text(last);
    int zeros = zeros_at_end(last);
    digits.count = 17 - zeros - (zeros_at_end(next) & -(zeros >> 3));
    return digits;
}

INLINE void
store_digits(char *to, struct digits digits, int size)
{
    *to = (char)('0' + digits.first);
    store_word(to + 1, digits.next);
    if (size == 8)
        store_word(to + 9, digits.last);
}

INLINE char *
write_exponent(int exponent, char *to)
{
    *to++ = 'e';
    *to++ = exponent < 0 ? '-' : '+';
    return write_three((uint64_t)(exponent < 0 ? -exponent : exponent), to);
}

/* Write digits with the point behind the first, and an exponent. */
static char *
write_scientific(struct digits digits, int exponent, int size, char *to)
{
    store_digits(to + 1, digits, size);
    to[0] = to[1];
    to[1] = '.';
    return write_exponent(exponent, to + (digits.count > 1 ? digits.count + 1 : 1));
}

/* Write digits, more than eight of them before the point. */
static char *
write_large(struct digits digits, int before, int size, char *to)
{
    store_digits(to, digits, size);
    if (size == 4)
        store_word(to + 9, EIGHT_ZEROS);
    to += before;
    memmove(to + 1, to, 9);
    *to = '.';
    return to + 1 + (digits.count > before ? digits.count - before : 1);
}

/*
 * Where the parts of a float stand. Below 1, zeros come before the digits. Above, the digits behind
 * the point are stored a second time, without those before it.
 */
struct position {
    unsigned char first;  /* digit */
    unsigned char second; /* digit, or the first behind the point */
    unsigned char shift;  /* bits of the digits that stand before the point, but for one */
    unsigned char point;
    unsigned char others; /* characters that are not digits */
    unsigned char least;  /* characters */
};

/* By the digits before the point, from -5 on: a table, as branches would be unpredictable. */
static const struct position POSITIONS[] = {
    {7, 8, 0, 1, 7, 0},  {6, 7, 0, 1, 6, 0},  {5, 6, 0, 1, 5, 0},  {4, 5, 0, 1, 4, 0},
    {3, 4, 0, 1, 3, 0},  {2, 3, 0, 1, 2, 0},  {0, 2, 0, 1, 1, 3},  {0, 3, 8, 2, 1, 4},
    {0, 4, 16, 3, 1, 5}, {0, 5, 24, 4, 1, 6}, {0, 6, 32, 5, 1, 7}, {0, 7, 40, 6, 1, 8},
    {0, 8, 48, 7, 1, 9}, {0, 9, 56, 8, 1, 10},
};

/* Write digits, at most eight of them before the point. */
INLINE char *
write_plain(struct digits digits, int before, int size, char *to)
{
    const struct position *position = &POSITIONS[before + 5];
    store_word(to, 0x3030303030302E30); /* "0.000000" */
    store_digits(to + position->first, digits, size);
    /* Shifted as digits: what follows the last one is zeros, and becomes text with them. */
    uint64_t next = digits.next ^ EIGHT_ZEROS, last = digits.last ^ EIGHT_ZEROS;
    next >>= position->shift;
    if (size == 8) {
        next |= last << 1 << (63 - position->shift);
        store_word(to + position->second + 8, last >> position->shift | EIGHT_ZEROS);
    }
    store_word(to + position->second, next | EIGHT_ZEROS);
    to[position->point] = '.';
    int end = digits.count + position->others;
    return to + (end > position->least ? end : position->least);
}

/* Write a number as orjson does. */
INLINE char *
write_decimal(struct decimal decimal, int size, char *to)
{
    const uint64_t full = size == 4 ? 100000000 : 10000000000000000;
    uint64_t value = decimal.tens * 10 + decimal.last;
    /* As many digits as any float has: mostly, they are all or one less. */
    int missing = value < full;
    value += value * 9 & -(uint64_t)missing;
    for (; UNLIKELY(value < full); value *= 10)
        missing++;
    struct digits digits = split(value, size);
    int before = decimal.power + most_digits(size) - missing;
    if (UNLIKELY(before < least_before_point(size) || before > most_before_point(size)))
        return write_scientific(digits, before - 1, size, to);
    return before <= 8 ? write_plain(digits, before, size, to)
                       : write_large(digits, before, size, to);
}

/* Write a NaN or an infinity; NULL if it is refused. */
static char *
write_nonfinite(bool negative, bool is_nan, enum nonfinite nonfinite, char *to)
{
    if (nonfinite == NONFINITE_ERROR)
        return NULL;
    const char *word = is_nan ? "NaN" : negative ? "-Infinity" : "Infinity";
    if (nonfinite == NONFINITE_NULL)
        word = "null";
    size_t size = strlen(word);
    bool is_quoted = nonfinite == NONFINITE_STRING;
    *to = '"';
    memcpy(to + is_quoted, word, size);
    to[is_quoted + size] = '"';
    return to + size + 2 * is_quoted;
}

/* A float with ``size`` bytes, taken apart. */
struct parts {
    bool negative;
    int exponent;
    uint64_t mantissa;
};

INLINE struct parts
take_apart(uint64_t bits, int size)
{
    const int stored = mantissa_bits(size), largest = size == 4 ? 255 : 2047;
    return (struct parts){
        bits >> (8 * size - 1),
        (int)(bits >> stored & (uint64_t)largest),
        bits & ((1ULL << stored) - 1),
    };
}

/* Tell whether a float is 0, a power of two, subnormal, infinite or NaN. */
INLINE bool
is_special(struct parts parts, int size)
{
    const unsigned largest = size == 4 ? 255 : 2047;
    return UNLIKELY(parts.mantissa == 0) || UNLIKELY((unsigned)parts.exponent - 1 >= largest - 1);
}

INLINE struct decimal
shortest_of_normal(struct parts parts, int size)
{
    const int stored = mantissa_bits(size), bias = size == 4 ? 150 : 1075;
    return shortest(parts.mantissa | 1ULL << stored, parts.exponent - bias, size);
}

/* Write a special float; NULL if it is refused. */
INLINE char *
write_special(struct parts parts, int size, enum nonfinite nonfinite, char *to)
{
    const int stored = mantissa_bits(size), bias = size == 4 ? 150 : 1075;
    *to = '-';
    if (parts.exponent == (size == 4 ? 255 : 2047))
        return write_nonfinite(parts.negative, parts.mantissa != 0, nonfinite, to);
    to += parts.negative;
    if (parts.mantissa == 0 && parts.exponent == 0) {
        memcpy(to, "0.0", 3);
        return to + 3;
    }
    if (parts.mantissa == 0 && parts.exponent > 1)
        return write_decimal(shortest_of_power(parts.exponent - bias, stored), size, to);
    uint64_t c = parts.exponent ? 1ULL << stored : parts.mantissa;
    return write_decimal(shortest(c, 1 - bias, size), size, to);
}

static char *
write_special_fp32(struct parts parts, enum nonfinite nonfinite, char *to)
{
    return write_special(parts, 4, nonfinite, to);
}

static char *
write_special_fp64(struct parts parts, enum nonfinite nonfinite, char *to)
{
    return write_special(parts, 8, nonfinite, to);
}

/* Write a float, given its bits; NULL if it is refused. */
INLINE char *
write_float(uint64_t bits, int size, enum nonfinite nonfinite, char *to)
{
    struct parts parts = take_apart(bits, size);
    if (is_special(parts, size))
        return size == 4 ? write_special_fp32(parts, nonfinite, to)
                         : write_special_fp64(parts, nonfinite, to);
    *to = '-';
    return write_decimal(shortest_of_normal(parts, size), size, to + parts.negative);
}

/* ---- Elements of one datatype ---- */

/* Convert the bits of an FP16 to those of the same FP32. */
INLINE uint64_t
widen_fp16(uint64_t bits)
{
    uint64_t sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 0x3FF;
    if (exponent == 0 && mantissa != 0) {
        /* A subnormal: its leading bit becomes implicit. */
        int zeros = __builtin_clzll(mantissa) - 53;
        return sign | (uint64_t)(113 - zeros) << 23 | (mantissa << (13 + zeros) & 0x7FFFFF);
    }
    uint64_t biased = exponent == 31 ? 255 : exponent ? exponent + 112 : 0;
    return sign | biased << 23 | mantissa << 13;
}

INLINE char *
write_floats(
    const char *data, size_t count, enum datatype datatype, enum nonfinite nonfinite, char *to)
{
    for (size_t i = 0; i < count; i++) {
        if (datatype == FP64)
            to = write_float(load(data, i, 8), 8, nonfinite, to);
        else if (datatype == FP32)
            to = write_float(load(data, i, 4), 4, nonfinite, to);
        else if (datatype == BF16)
            to = write_float(load(data, i, 2) << 16, 4, nonfinite, to);
        else
            to = write_float(widen_fp16(load(data, i, 2)), 4, nonfinite, to);
        if (UNLIKELY(to == NULL))
            return NULL;
        *to++ = ',';
    }
    return to;
}

static char *
write_floats_plainly(
    const char *data, size_t count, enum datatype datatype, enum nonfinite nonfinite, char *to)
{
    if (datatype == FP64)
        return write_floats(data, count, FP64, nonfinite, to);
    if (datatype == FP32)
        return write_floats(data, count, FP32, nonfinite, to);
    if (datatype == BF16)
        return write_floats(data, count, BF16, nonfinite, to);
    return write_floats(data, count, FP16, nonfinite, to);
}

/*
 * ---- Four floats at once, with vectors ----
 *
 * All digits of a float get their places at once, by a table of the build: in a third of the time.
 * Special floats are written as above.
 */

#ifdef WIDE

/* Load four floats as FP32 or FP64: FP16 get the right bits only if they are normal or 0. */
WIDE INLINE quad
load_four(const char *data, enum datatype datatype)
{
    quad bits = load_quad(data, datatype == FP64 ? 8 : datatype == FP32 ? 4 : 2);
    if (datatype != FP16)
        return datatype == BF16 ? bits << 16 : bits;
    quad absolute = bits & 0x7FFF, is_zero = (quad)(absolute == 0);
    return (bits & 0x8000) << 16 | ((absolute << 13) + (~is_zero & 112 << 23));
}

/* Where the digits of four floats are, and the rows of the layouts. */
struct four {
    quad even, odd;         /* 16 bytes for each float: digits, the first one last */
    quad even_end, odd_end; /* the same, for what follows the first 16 characters */
    uint64_t rows[4];       /* addresses */
    unsigned special;       /* a bit for each float that has none of this */
};

/* Load the UNITS of four exponents: both words of each. */
WIDE INLINE void
load_units(quad exponents, const uint64_t (*units)[2], quad *first, quad *second)
{
    /* By AVX2's gather instruction, encoding would take a third longer. */
    uint64_t rows[4];
    memcpy(rows, &exponents, sizeof rows);
    quad even = join_halves(load_block(units[rows[0]]), load_block(units[rows[2]]));
    quad odd = join_halves(load_block(units[rows[1]]), load_block(units[rows[3]]));
    *first = interleave(even, odd, false);
    *second = interleave(even, odd, true);
}

/* Return power_below(exponent - bias) + above, which must not be less than 0. */
WIDE INLINE quad
powers_below(quad exponents, uint64_t bias, uint64_t above)
{
    return (multiply_lower(exponents, fill(78913)) + ((above << 18) - bias * 78913)) >> 18;
}

/*
 * As shortest_of_normal() for four FP32. Of the products, 40 bits are the fraction: they are cut
 * off by less than 2, half a unit by 1, and no end of an interval comes nearer than 8 to a multiple
 * of ten, unless it is one. The tests try all floats.
 */
WIDE INLINE struct four
shortest_of_four_fp32(quad bits, bool is_fp16)
{
    const uint64_t one = 1ULL << 40, margin = 4, row_size = sizeof(struct layout);
    struct four four;
    quad exponents = bits >> 23 & 255, mantissas = bits & 0x7FFFFF, unit, unused;
    load_units(exponents, &UNITS[-150 - LEAST_UNIT], &unit, &unused);
    quad c = (mantissas | 1 << 23) << 8;
    quad product = multiply_lower(c, unit >> 32) + (multiply_lower(c, unit) >> 32);
    quad tens = product >> 40, rest = product & (one - 1);
    quad half_unit = (unit >> 25) + margin - (bits & 1) * (2 * margin);
    quad is_above = more(rest + half_unit, fill(one - 1));
    quad is_last_0 = is_above | more(half_unit, rest);
    tens -= is_above;
    quad last = rest * 5; /* with a fraction of 39 bits; a half is rounded to even */
    last = (last + (one / 4 - 1) + (last >> 39 & 1)) >> 39 & ~is_last_0;

    quad shorter = more(tens, fill(999999)) + more(tens, fill(9999999)); /* 6 - digits of tens */
    quad is_zero = (quad)(bits << 33 == 0);
    quad rows = powers_below(exponents, 150, 1 - LEAST_POWER_FP32);
    rows = (multiply_lower(rows, fill(3 * row_size)) + shorter * row_size) & ~is_zero;
    rows += (uintptr_t)LAYOUTS_FP32;
    memcpy(four.rows, &rows, sizeof rows);
    /* From 2^-46 to 2^24, powers of two have the same digits as if the interval were even. */
    quad is_power = (quad)(mantissas == 0) & more((exponents - 81) & 255, fill(70));
    quad is_special = (quad)(((exponents + 1) & 254) == 0) | is_power;
    /* Powers of two of FP16 are in that range. Its infinities and NaN have got the exponent 143. */
    if (is_fp16)
        is_special = more((exponents - 113) & 255, fill(29));
    four.special = bits_of_quad(is_special & ~is_zero);

    quad digits = digits_of(tens);
    four.even = four.even_end = interleave(last << 56, digits, false);
    four.odd = four.odd_end = interleave(last << 56, digits, true);
    return four;
}

/*
 * Multiply four numbers of 53 bits by units, whose words are ``first`` and ``second``. Set 64 bits
 * of the fraction, cut off by less than 4, and return the integers.
 */
WIDE INLINE quad
multiply_by_units(quad c, quad first, quad second, quad *fraction)
{
    const uint64_t low = UINT32_MAX;
    quad upper = c >> 32;
    quad p1 = multiply_lower(upper, first), p2 = multiply_lower(c, first >> 32);
    quad p3 = multiply_lower(c, first), p4 = multiply_lower(upper, second >> 32);
    quad middle = (p1 & low) + (p2 & low) + (p3 >> 32) + (p4 >> 32);
    quad lower = (p3 & low) + (p4 & low);
    lower += multiply_lower(upper, second) >> 32;
    lower += multiply_lower(c, second >> 32) >> 32;
    *fraction = (middle << 32) + lower;
    middle += lower >> 32;
    return multiply_lower(upper, first >> 32) + (p1 >> 32) + (p2 >> 32) + (middle >> 32);
}

/* As shortest_of_normal() for four FP64; those that choose_exactly() has to see are special. */
WIDE INLINE struct four
shortest_of_four_fp64(quad bits)
{
    /* Of 63 bits of the fraction, and of 60 behind the last digit. */
    const uint64_t margin = 4, last_margin = 16, sign = 1ULL << 63, one = 1ULL << 60;
    struct four four;
    quad exponents = bits >> 52 & 2047, mantissas = bits & ((1ULL << 52) - 1);
    quad first, second, rest;
    load_units(exponents, &UNITS[-1075 - LEAST_UNIT], &first, &second);
    quad tens = multiply_by_units(mantissas | 1ULL << 52, first, second, &rest);
    /* Signed, both are less than 0 beyond the border. */
    quad above = (rest >> 1) + (first >> 2), below = (rest >> 1) - (first >> 2);
    quad is_above = more(fill(0), above), is_last_0 = is_above | more(fill(0), below);
    quad near = fill(2 * margin + 1 - sign);
    quad is_special = more(near, above + margin) | more(near, below + margin + sign);
    quad last = (rest >> 4) * 10 + one / 2;
    is_special |= more(fill(2 * last_margin), (last + last_margin) & (one - 1));
    last = last >> 60 & ~is_last_0;
    tens -= is_above;

    /* Where the digits are but 16, the last one goes to the others. */
    quad is_long = more(tens, fill(999999999999999));
    struct sixteens digits = sixteen_digits((is_long & tens) | (~is_long & (tens * 10 + last)));
    last &= is_long;
    four.even = digits.even;
    four.odd = digits.odd;
    four.even_end = push_bytes(four.even, interleave(last, fill(0), false));
    four.odd_end = push_bytes(four.odd, interleave(last, fill(0), true));

    quad is_zero = (quad)(bits << 1 == 0);
    quad rows = powers_below(exponents, 1075, 1 - LEAST_POWER_FP64) - is_long;
    rows = multiply_lower(rows, fill(sizeof(struct layout))) & ~is_zero;
    rows += (uintptr_t)LAYOUTS_FP64;
    memcpy(four.rows, &rows, sizeof rows);
    /* From 2^-23 to 2^63, powers of two have the same digits as if the interval were even. */
    is_special |= (quad)(mantissas == 0) & more((exponents - 1000) & 2047, fill(86));
    is_special |= (quad)(((exponents + 1) & 2046) == 0);
    four.special = bits_of_quad(is_special & ~is_zero);
    return four;
}

/* Write the text of one of four floats without its sign, but with a comma. */
WIDE INLINE char *
write_of_four(const struct four *four, int i, char *to)
{
    const struct layout *layout = (const void *)four->rows[i];
    quad first = i & 1 ? four->odd : four->even, second = i & 1 ? four->odd_end : four->even_end;
    quad text = join_halves(half_of(first, i / 2), half_of(second, i / 2));
    text = bytes_at(text, load_quad(layout->places, 8));
    uint32_t kept = bits_of_digits(text) | layout->least;
    text |= load_quad(layout->characters, 8);
    memcpy(to, &text, sizeof text);
    to = to + 32 - (unsigned)__builtin_clz(kept);
    memcpy(to, layout->end, sizeof layout->end);
    return to + layout->end[7];
}

/* Write the first ``count`` of four floats, each with a comma. */
WIDE INLINE char *
write_four(const char *data, int count, enum datatype datatype, enum nonfinite nonfinite, char *to)
{
    const int size = datatype == FP64 ? 8 : datatype == FP32 ? 4 : 2;
    quad bits = load_four(data, datatype);
    if (UNLIKELY(bits_of_quad((quad)(bits == 0)) == 15)) {
        memcpy(to, "0.0,0.0,0.0,0.0,", 16);
        return to + 4 * count;
    }
    struct four four = datatype == FP64 ? shortest_of_four_fp64(bits)
                                        : shortest_of_four_fp32(bits, datatype == FP16);
#pragma GCC unroll 4
    for (int i = 0; i < 4 && i < count; i++) {
        if (UNLIKELY(four.special & 1 << i)) {
            to = write_floats_plainly(data + i * size, 1, datatype, nonfinite, to);
            if (to == NULL)
                return NULL;
            continue;
        }
        *to = '-';
        to += load(data, (size_t)i, size) >> (8 * size - 1);
        to = write_of_four(&four, i, to);
    }
    return to;
}

WIDE INLINE char *
write_fours(
    const char *data, size_t count, enum datatype datatype, enum nonfinite nonfinite, char *to)
{
    const size_t size = datatype == FP64 ? 8 : datatype == FP32 ? 4 : 2;
    for (; to != NULL && count >= 4; count -= 4, data += 4 * size)
        to = write_four(data, 4, datatype, nonfinite, to);
    if (to == NULL || count == 0)
        return to;
    char rest[32] = {0};
    memcpy(rest, data, count * size);
    return write_four(rest, (int)count, datatype, nonfinite, to);
}

WIDE static char *
write_floats_wide(
    const char *data, size_t count, enum datatype datatype, enum nonfinite nonfinite, char *to)
{
    if (datatype == FP64)
        return write_fours(data, count, FP64, nonfinite, to);
    if (datatype == FP32)
        return write_fours(data, count, FP32, nonfinite, to);
    if (datatype == BF16)
        return write_fours(data, count, BF16, nonfinite, to);
    return write_fours(data, count, FP16, nonfinite, to);
}

#endif

size_t
most_text(enum datatype datatype)
{
    /* Of floats, -0.0000123... is the longest. The words of NONFINITE_STRING are shorter. */
    static const unsigned char most[DATATYPE_COUNT] = {
        [BOOL] = 6,  [UINT8] = 4,  [UINT16] = 6, [UINT32] = 11, [UINT64] = 21,
        [INT8] = 5,  [INT16] = 7,  [INT32] = 12, [INT64] = 21,  [FP16] = 18,
        [FP32] = 18, [FP64] = 26,  [BF16] = 18,
    };
    return most[datatype];
}

ptrdiff_t
encode_numbers(
    const char *data, size_t count, enum datatype datatype, enum nonfinite nonfinite, char *to)
{
    char *(*write)(const char *, size_t, enum datatype, enum nonfinite, char *);
    write = write_floats_plainly;
#ifdef WIDE
    if (has_wide())
        write = write_floats_wide;
#endif
    bool is_float = datatype >= FP16;
    char *end = is_float ? write(data, count, datatype, nonfinite, to)
                         : encode_integers(data, count, datatype, to);
    return end == NULL ? -1 : end - to - (count != 0);
}

size_t
nested_text(size_t count, const size_t *sizes, int levels)
{
    size_t brackets = 0;
    for (int level = 0; level < levels; level++)
        brackets += 2 * (count / sizes[level]);
    return brackets;
}

/* Count the levels of which an array begins or ends behind so many elements. */
static size_t
borders_at(size_t done, const size_t *sizes, int levels)
{
    int level = 0;
    while (level < levels && done % sizes[level] == 0)
        level++;
    return (size_t)level;
}

ptrdiff_t
encode_nested(
    const char *data, size_t count, enum datatype datatype, enum nonfinite nonfinite,
    const size_t *sizes, int levels, char *to)
{
    if (levels == 0)
        return encode_numbers(data, count, datatype, nonfinite, to);
    char *start = to;
    for (size_t done = 0; done < count;) {
        size_t borders = borders_at(done, sizes, levels);
        if (done)
            *to++ = ',';
        memset(to, '[', borders);
        to += borders;
        ptrdiff_t size = encode_numbers(
            data + done * ELEMENT_SIZES[datatype], sizes[0], datatype, nonfinite, to);
        if (size < 0)
            return -1;
        done += sizes[0];
        borders = borders_at(done, sizes, levels);
        memset(to + size, ']', borders);
        to += size + (ptrdiff_t)borders;
    }
    return to - start;
}
