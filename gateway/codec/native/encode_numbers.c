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

#include "powers_of_ten.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "eight digits are stored as a little-endian word"
#endif

typedef unsigned __int128 uint128_t;

/* Everything for an element is inlined, once per datatype. */
#define INLINE __attribute__((always_inline)) static inline
#define UNLIKELY(condition) __builtin_expect(condition, 0)

static const uint64_t EIGHT_ZEROS = 0x3030303030303030; /* "00000000" */

INLINE void
store_word(char *to, uint64_t word)
{
    memcpy(to, &word, sizeof word);
}

/* ---- Digits as bytes: the first in the lowest byte of a word ---- */

/* Split a number below 10^8 into its eight digits: into fours, then pairs, then digits. */
INLINE uint64_t
eight_digits(uint64_t value)
{
    uint64_t fours = value / 10000;
    fours += (value - fours * 10000) << 32;
    /* Quotients by 100 below 10^4, and by 10 below 100, are exact with these multipliers. */
    uint64_t hundreds = (fours * 5243 >> 19) & 0x0000007F0000007F;
    uint64_t pairs = (fours << 16) - hundreds * ((100 << 16) - 1);
    uint64_t tens = (pairs * 103 >> 10) & 0x000F000F000F000F;
    return (pairs << 8) - tens * ((10 << 8) - 1);
}

/* Count the digits without the zeros at their end. */
INLINE int
without_zeros(uint64_t digits)
{
    /* The upper half of each byte is 0, so that no bit is lost. */
    return (70 - __builtin_clzll(digits << 1 | 1)) / 8;
}

/* ---- Integers ---- */

/* Write a number below 10^8 without zeros before it. */
INLINE char *
write_short(uint64_t value, char *to)
{
    uint64_t digits = eight_digits(value);
    int zeros = __builtin_ctzll(digits | 1ULL << 56) / 8;
    store_word(to, (digits | EIGHT_ZEROS) >> 8 * zeros);
    return to + 8 - zeros;
}

INLINE char *
write_eight(uint64_t value, char *to)
{
    store_word(to, eight_digits(value) | EIGHT_ZEROS);
    return to + 8;
}

/* Write an integer of ``size`` bytes. */
INLINE char *
write_unsigned(uint64_t value, int size, char *to)
{
    const uint64_t e8 = 100000000;
    if (size < 4 || value < e8)
        return write_short(value, to);
    uint64_t upper = value / e8;
    if (size == 4 || upper < e8)
        to = write_short(upper, to);
    else
        to = write_eight(upper % e8, write_short(upper / e8, to));
    return write_eight(value % e8, to);
}

INLINE char *
write_integer(uint64_t bits, int size, bool is_signed, char *to)
{
    if (!is_signed)
        return write_unsigned(bits, size, to);
    int64_t value = (int64_t)(bits << (64 - 8 * size)) >> (64 - 8 * size);
    *to = '-';
    return write_unsigned(value < 0 ? -(uint64_t)value : (uint64_t)value, size, to + (value < 0));
}

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

/* A number that is digits * 10^power. */
struct decimal {
    uint64_t digits;
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

/*
 * Choose the digits of c * 2^q = whole.something * 10^k where the product is not exact enough to
 * tell on which side of a border it is.
 */
__attribute__((noinline, cold)) static uint64_t
choose_exactly(uint64_t c, int q, uint64_t whole, int k)
{
    uint64_t tens = whole / 10 * 10;
    bool is_even = !(c & 1);
    /* Twice the interval is 2c-1 to 2c+1, with its ends if c is even. */
    if (compare_exactly(2 * c - 1, q - 1, tens, k) < is_even)
        return tens;
    if (compare_exactly(2 * c + 1, q - 1, tens + 10, k) > -is_even)
        return tens + 10;
    int beyond_half = compare_exactly(4 * c, q - 1, 2 * whole + 1, k);
    return whole + (beyond_half > 0 || (beyond_half == 0 && whole & 1));
}

/* Compute the digits of c * 2^q, where c is no power of two, or q the least. */
INLINE struct decimal
shortest(uint64_t c, int q, int size)
{
    const uint64_t half = 1ULL << 63;
    const uint64_t *unit = UNITS[q - LEAST_UNIT];
    int k = power_below(q);
    /* The integer is the upper word of the product, the fraction the lower one. */
    uint128_t product = (uint128_t)(c << 4) * unit[0];
    if (size == 8)
        product += (uint64_t)((uint128_t)(c << 4) * unit[1] >> 64);
    uint64_t whole = (uint64_t)(product >> 64), fraction = (uint64_t)product;
    uint64_t without_last = whole / 10;
    /* The last digit and the fraction, with 4 bits for the digit, as half a unit has. */
    uint64_t rest = (whole - without_last * 10) << 60 | fraction >> 4, half_unit = unit[0] >> 1;
    const uint64_t ten = 10ULL << 60;
    uint64_t up;
    if (size == 4) {
        /*
         * No end of an interval comes nearer to a multiple of ten than 2^-32, unless it is one.
         * The ends belong to the interval if c is even.
         */
        const uint64_t margin = 1ULL << 27;
        half_unit += c & 1 ? -margin : margin;
        up = fraction > half - (whole & 1);
    } else {
        const uint64_t margin = 16;
        if (UNLIKELY(
                rest + half_unit - ten + margin <= 2 * margin ||
                rest - half_unit + margin <= 2 * margin || fraction - half + margin <= 2 * margin))
            return (struct decimal){choose_exactly(c, q, whole, k), k};
        up = fraction >> 63;
    }
    bool is_above = rest + half_unit > ten, is_below = rest < half_unit;
    uint64_t tens = (without_last + is_above) * 10;
    return (struct decimal){is_above | is_below ? tens : whole + up, k};
}

/*
 * Compute the digits of 2^(q + stored). The floats below a power of two are nearer to it than those
 * above. There are few, so that the tests try all.
 */
static struct decimal
shortest_of_power(int q, int stored)
{
    const uint64_t *unit = UNITS[q - LEAST_UNIT];
    uint128_t scaled = (uint128_t)unit[0] << 64 | unit[1];
    int k = power_below(q), bits = 124;
    if (unit[0] < (1ULL << 62) / 3) {
        /* The interval, 3/4 of a unit, is below 1. */
        scaled = (scaled >> 4) * 10;
        bits -= 4;
        k--;
    }
    bits -= stored;
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
    return (struct decimal){whole, k};
}

/* ---- The text of a float ---- */

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

/* The digits of a float: one, and eight or sixteen as bytes. */
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
        digits.next = eight_digits(value - digits.first * e8);
        digits.last = 0;
        digits.count = 1 + without_zeros(digits.next);
        return digits;
    }
    digits.first = value / e16;
    value -= digits.first * e16;
    uint64_t upper = value / e8;
    digits.next = eight_digits(upper);
    digits.last = eight_digits(value - upper * e8);
    int upper_count = without_zeros(digits.next), lower_count = without_zeros(digits.last);
    digits.count = 1 + (lower_count ? 8 + lower_count : upper_count);
    return digits;
}

INLINE void
store_digits(char *to, uint64_t next, uint64_t last, int size)
{
    store_word(to, next | EIGHT_ZEROS);
    if (size == 8)
        store_word(to + 8, last | EIGHT_ZEROS);
}

/* Write digits with the point behind the first, and an exponent. */
static char *
write_scientific(const struct digits *digits, int exponent, int size, char *to)
{
    to[0] = (char)('0' + digits->first);
    to[1] = '.';
    store_digits(to + 2, digits->next, digits->last, size);
    to += digits->count > 1 ? digits->count + 1 : 1;
    *to++ = 'e';
    *to++ = exponent < 0 ? '-' : '+';
    return write_short((uint64_t)(exponent < 0 ? -exponent : exponent), to);
}

/* Write digits with more than eight of them before the point. */
static char *
write_large(const struct digits *digits, int before, int size, char *to)
{
    *to = (char)('0' + digits->first);
    store_digits(to + 1, digits->next, digits->last, size);
    if (size == 4)
        store_word(to + 9, EIGHT_ZEROS);
    int behind = digits->count > before ? digits->count - before : 1;
    memmove(to + before + 1, to + before, 9);
    to[before] = '.';
    return to + before + 1 + behind;
}

/* Write digits as orjson does; ``before`` of them stand before the point. */
INLINE char *
write_decimal(const struct digits *digits, int before, int size, char *to)
{
    if (UNLIKELY(before < least_before_point(size) || before > 8)) {
        if (before < least_before_point(size) || before > most_before_point(size))
            return write_scientific(digits, before - 1, size, to);
        return write_large(digits, before, size, to);
    }
    /* Below 1, zeros come first. Above, the digits behind the point are stored a second time. */
    bool is_below_one = before <= 0;
    store_word(to, 0x3030303030302E30); /* "0.000000" */
    char *first = is_below_one ? to + 2 - before : to;
    *first = (char)('0' + digits->first);
    store_digits(first + 1, digits->next, digits->last, size);
    int shift = is_below_one ? 0 : 8 * (before - 1);
    char *second = is_below_one ? first + 1 : to + before + 1;
    uint64_t next = digits->next >> shift;
    if (size == 8)
        next |= digits->last << 1 << (63 - shift);
    store_digits(second, next, digits->last >> shift, size);
    to[is_below_one ? 1 : before] = '.';
    int behind = digits->count - before;
    return second + (is_below_one ? digits->count - 1 : behind > 1 ? behind : 1);
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

/* Write a float with ``size`` bytes, given its bits; NULL if it is refused. */
INLINE char *
write_float(uint64_t bits, int size, enum nonfinite nonfinite, char *to)
{
    const int stored = mantissa_bits(size), bias = size == 4 ? 150 : 1075;
    const int largest = size == 4 ? 255 : 2047;
    bool negative = bits >> (8 * size - 1);
    int exponent = (int)(bits >> stored & (uint64_t)largest);
    uint64_t c = bits & ((1ULL << stored) - 1);
    *to = '-';
    struct decimal decimal;
    if (UNLIKELY(exponent == largest))
        return write_nonfinite(negative, c != 0, nonfinite, to);
    to += negative;
    if (UNLIKELY(c == 0 || exponent == 0)) {
        if ((c | (uint64_t)exponent) == 0) {
            memcpy(to, "0.0", 3);
            return to + 3;
        }
        decimal = c == 0 && exponent > 1 ? shortest_of_power(exponent - bias, stored)
                                         : shortest(exponent ? 1ULL << stored : c, 1 - bias, size);
    } else {
        decimal = shortest(c | 1ULL << stored, exponent - bias, size);
    }
    /* As many digits as any float has. */
    uint64_t full = size == 4 ? 100000000 : 10000000000000000;
    int missing = decimal.digits < full;
    decimal.digits = missing ? decimal.digits * 10 : decimal.digits;
    while (UNLIKELY(decimal.digits < full)) {
        decimal.digits *= 10;
        missing++;
    }
    struct digits digits = split(decimal.digits, size);
    return write_decimal(&digits, decimal.power - missing + most_digits(size), size, to);
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

INLINE uint64_t
load(const char *data, size_t index, int size)
{
    uint64_t bits = 0;
    memcpy(&bits, data + index * (size_t)size, (size_t)size);
    return bits;
}

/* Write elements, each with a comma behind it. */
INLINE char *
write_all(
    const char *data, size_t count, enum datatype datatype, int size, enum nonfinite nonfinite,
    char *to)
{
    bool is_signed = datatype >= INT8 && datatype <= INT64;
    for (size_t i = 0; i < count && to != NULL; i++) {
        uint64_t bits = load(data, i, size);
        if (datatype == FP64)
            to = write_float(bits, 8, nonfinite, to);
        else if (datatype == FP32)
            to = write_float(bits, 4, nonfinite, to);
        else if (datatype == BF16)
            to = write_float(bits << 16, 4, nonfinite, to);
        else if (datatype == FP16)
            to = write_float(widen_fp16(bits), 4, nonfinite, to);
        else
            to = write_integer(bits, size, is_signed, to);
        if (to != NULL)
            *to++ = ',';
    }
    return to;
}

static char *
write_booleans(const char *data, size_t count, char *to)
{
    const uint64_t words[] = {0x2C65736C6166, 0x2C65757274}; /* "false,", "true," */
    unsigned char all = 0;
    for (size_t i = 0; i < count; i++) {
        unsigned char value = (unsigned char)data[i];
        all |= value;
        value &= 1;
        store_word(to, words[value]);
        to += 6 - value;
    }
    return all <= 1 ? to : NULL;
}

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
    char *end = to;
    switch (datatype) {
#define CASE(datatype, size) \
    case datatype: \
        end = write_all(data, count, datatype, size, nonfinite, to); \
        break
    CASE(UINT8, 1);
    CASE(UINT16, 2);
    CASE(UINT32, 4);
    CASE(UINT64, 8);
    CASE(INT8, 1);
    CASE(INT16, 2);
    CASE(INT32, 4);
    CASE(INT64, 8);
    CASE(FP16, 2);
    CASE(FP32, 4);
    CASE(FP64, 8);
    CASE(BF16, 2);
#undef CASE
    case BOOL:
        end = write_booleans(data, count, to);
        break;
    default:
        return -1;
    }
    if (end == NULL)
        return -1;
    return end - to - (count != 0);
}
