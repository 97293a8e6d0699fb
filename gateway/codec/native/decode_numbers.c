/*
 * Decodes the text of a JSON array of numbers in one pass.
 *
 * simdjson parses any JSON, and numpy rounds its doubles. This module handles the one case that
 * large requests consist of, without the steps between. Text that it does not decode with
 * certainty, invalid text included, is left to them.
 *
 * After Daniel Lemire, "Number Parsing at a Gigabyte per Second" (2021). The digits are multiplied
 * by the first 128 bits of the power of ten (powers_of_ten.h, made by the build). The product gives
 * the nearest float of either size. FP32 is not rounded from a double, as that would round twice.
 */
#include "decode_numbers.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "powers_of_ten.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "eight digits are loaded, and floats are stored, as a little-endian word"
#endif

typedef unsigned __int128 uint128_t;

enum {
    MAX_DEPTH = 64,  /* nested arrays */
    MAX_DIGITS = 19, /* any number of so many digits fits into 64 bits */
};

/* A position in the text; NULL if the text is left to the caller. */
typedef const char *cursor;

/* Everything for a number is inlined, once per size of float: calls would cost a fifth. */
#define INLINE __attribute__((always_inline)) static inline

INLINE bool
is_digit(char c)
{
    return (unsigned char)(c - '0') < 10;
}

/* ---- Eight digits at a time ---- */

static const uint64_t EIGHT_ZEROS = 0x3030303030303030; /* "00000000" */
static const uint64_t TENS[] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000};

/* Count the digits among eight characters, up to the first other one. */
INLINE int
leading_digits(uint64_t word)
{
    /* The upper half of a digit is 3, even with 6 added. A carry affects later bytes only. */
    const uint64_t upper = 0xF0F0F0F0F0F0F0F0;
    uint64_t others = ((word ^ EIGHT_ZEROS) | ((word + 0x0606060606060606) ^ EIGHT_ZEROS)) & upper;
    return others ? __builtin_ctzll(others) / 8 : 8;
}

/* Return the value of eight digits: join them to pairs, then to fours, then to eight. */
INLINE uint64_t
value_of_eight(uint64_t digits)
{
    digits = digits * 10 + (digits >> 8);
    uint64_t first = (digits & 0x000000FF000000FF) * (100 + (1000000ULL << 32));
    uint64_t second = (digits >> 16 & 0x000000FF000000FF) * (1 + (10000ULL << 32));
    return (first + second) >> 32;
}

/* Append digits to a value; bits beyond 64 are lost. */
INLINE cursor
read_digits(cursor at, cursor end, uint64_t *value)
{
    while (end - at >= 8) {
        uint64_t word;
        memcpy(&word, at, sizeof word);
        int count = leading_digits(word);
        if (count == 0)
            return at;
        /* Shift them to the last of the eight characters, with zeros before them. */
        word = (word ^ EIGHT_ZEROS) << (64 - 8 * count);
        *value = *value * TENS[count] + value_of_eight(word);
        at += count;
        if (count < 8)
            return at;
    }
    for (; at < end && is_digit(*at); at++)
        *value = *value * 10 + (uint64_t)(*at - '0');
    return at;
}

/* ---- One number ---- */

/* The formats of IEEE 754 for floats of 4 and 8 bytes. */
INLINE int
mantissa_bits(int size)
{
    return size == 4 ? 23 : 52;
}

INLINE uint64_t
infinity(int size)
{
    return size == 4 ? 0x7F800000 : 0x7FF0000000000000;
}

/* Tell whether digits of 64 bits, times this power of ten, can be halfway between two floats. */
INLINE bool
may_be_half(int64_t exponent, int size)
{
    return size == 4 ? exponent >= -17 && exponent <= 10 : exponent >= -4 && exponent <= 23;
}

/* Compute the bits of the float nearest to digits * 10^exponent; false if they are in doubt. */
INLINE bool
nearest(uint64_t digits, int64_t exponent, int size, uint64_t *bits)
{
    const int stored = mantissa_bits(size), bias = size == 4 ? 127 : 1023;
    if (digits == 0) {
        *bits = 0;
        return true;
    }
    /* Within these bounds, all results are normal doubles. */
    if (exponent < LEAST_POWER || exponent > MOST_POWER)
        return false;
    const uint64_t *power = POWERS_OF_TEN[exponent - LEAST_POWER];
    int zeros = __builtin_clzll(digits);
    digits <<= zeros;
    uint128_t product = (uint128_t)digits * power[0];
    uint64_t high = (uint64_t)(product >> 64), low = (uint64_t)product;
    const uint64_t beyond = UINT64_MAX >> (stored + 3);
    if ((high & beyond) == beyond) {
        /* The power's lower half may carry into the significant bits. */
        uint64_t more = (uint64_t)((uint128_t)digits * power[1] >> 64);
        low += more;
        high += low < more;
        if (low == UINT64_MAX && (exponent < -27 || exponent > 55))
            return false;
    }
    int top = (int)(high >> 63), shift = top + 61 - stored;
    uint64_t mantissa = high >> shift; /* with one bit more, for rounding */
    /* To nearest, ties to even. The direction is unpredictable: a branch would cost a fifth. */
    uint64_t up = mantissa & 1;
    if (low <= 1 && may_be_half(exponent, size) && mantissa << shift == high)
        up &= mantissa >> 1;
    /* floor(log2(10^exponent)) and the bias, less 1: the leading bit, or a carry, adds that. */
    int binary = ((217706 * (int)exponent) >> 16) + 63 + top - zeros + bias - 1;
    if (size == 4 && binary < 0) {
        /* A subnormal float: no number with such a power is halfway between two of them. */
        mantissa = binary > -stored - 2 ? mantissa >> -binary : 0;
        up = mantissa & 1;
        binary = 0;
    }
    *bits = ((uint64_t)binary << stored) + ((mantissa + up) >> 1);
    return size == 8 || *bits < infinity(size);
}

INLINE cursor
read_exponent(cursor at, cursor end, int64_t *exponent)
{
    bool negative = at < end && *at == '-';
    at += negative || (at < end && *at == '+');
    int64_t value = 0;
    cursor start = at;
    for (; at < end && is_digit(*at) && value < 1000; at++)
        value = value * 10 + (*at - '0');
    *exponent += negative ? -value : value;
    return at == start || (at < end && is_digit(*at)) ? NULL : at;
}

INLINE bool
starts_with(cursor at, cursor end, const char *word, size_t size)
{
    return (size_t)(end - at) >= size && memcmp(at, word, size) == 0;
}

/* Read NaN and infinities, which are not JSON, as clients write them. */
static cursor
read_nonfinite(cursor at, cursor end, bool negative, int size, char *to)
{
    uint64_t bits = (uint64_t)negative << (8 * size - 1) | infinity(size);
    bool is_nan = !negative && starts_with(at, end, "NaN", 3);
    if (is_nan)
        bits |= 1ULL << (mantissa_bits(size) - 1);
    else if (!starts_with(at, end, "Infinity", 8))
        return NULL;
    memcpy(to, &bits, (size_t)size);
    return at + (is_nan ? 3 : 8);
}

/*
 * Read a number of RFC 8259, section 6, or a bare NaN, Infinity or -Infinity; write the float of
 * ``size`` bytes if it fits.
 */
INLINE cursor
read_float(cursor at, cursor end, int size, char *to)
{
    bool negative = at < end && *at == '-', is_integer = true;
    at += negative;
    cursor start = at;
    if (at == end || !is_digit(*at))
        return read_nonfinite(at, end, negative, size, to);
    uint64_t digits = (uint64_t)(*at++ - '0'); /* mostly all digits before the point */
    int64_t exponent = 0;
    if (at < end && is_digit(*at)) {
        if (digits == 0)
            return NULL;
        at = read_digits(at, end, &digits);
    }
    ptrdiff_t count = at - start;
    if (at < end && *at == '.') {
        cursor fraction = at + 1;
        at = read_digits(fraction, end, &digits);
        if (at == fraction)
            return NULL;
        exponent = fraction - at;
        count += at - fraction;
        is_integer = false;
    }
    if (count > MAX_DIGITS) {
        for (; start < at && (*start == '0' || *start == '.'); start++)
            count -= *start == '0';
        if (count > MAX_DIGITS)
            return NULL;
    }
    if (at < end && (*at | 0x20) == 'e') {
        at = read_exponent(at + 1, end, &exponent);
        is_integer = false;
    }
    uint64_t bits;
    if (at == NULL || !nearest(digits, exponent, size, &bits))
        return NULL;
    /* As an integer, -0 has no sign. */
    bits |= (uint64_t)(negative && (digits || !is_integer)) << (8 * size - 1);
    memcpy(to, &bits, (size_t)size);
    return at;
}

/* ---- The array ---- */

INLINE cursor
behind_space(cursor at, cursor end)
{
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r'))
        at++;
    return at;
}

/* Read the numbers of a part of an array, nested or flat; return their number, or -1. */
INLINE ptrdiff_t
read_array(cursor at, cursor end, int size, int open_before, int open_after, char *to)
{
    int depth = open_before;
    ptrdiff_t count = 0;
    if (depth < 0 || depth > MAX_DEPTH)
        return -1;
    for (;;) {
        /* An element must follow. */
        at = behind_space(at, end);
        if (at < end && *at == '[') {
            if (++depth > MAX_DEPTH)
                return -1;
            at = behind_space(at + 1, end);
            if (at == end || *at != ']')
                continue;
        } else {
            at = depth ? read_float(at, end, size, to + count * size) : NULL;
            if (at == NULL)
                return -1;
            count++;
            at = behind_space(at, end);
        }
        while (depth > 0 && at < end && *at == ']') {
            at = behind_space(at + 1, end);
            depth--;
        }
        if (at == end)
            return depth == open_after ? count : -1;
        if (depth == 0 || *at++ != ',')
            return -1;
    }
}

ptrdiff_t
decode_numbers(
    const char *text, size_t size, enum datatype datatype, int open_before, int open_after, char *to)
{
    if (datatype == FP32)
        return read_array(text, text + size, 4, open_before, open_after, to);
    if (datatype == FP64)
        return read_array(text, text + size, 8, open_before, open_after, to);
    return -1;
}
