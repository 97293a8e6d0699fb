/* Encodes integers and booleans as text. */
#include "encode_integers.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "digits.h"

/* ---- One integer ---- */

/* Write eight digits without the zeros before them. */
INLINE char *
write_digits(uint64_t digits, char *to)
{
    int zeros = __builtin_clzll(digits | 1) / 8;
    store_word(to, as_text(digits << 8 * zeros));
    return to + 8 - zeros;
}

/* Write a number below 10^8 without zeros before it. */
INLINE char *
write_short(uint64_t value, char *to)
{
    if (value < 1000)
        return write_three(value, to);
    if (value < 1000000) {
        to = write_three(value / 1000, to);
        memcpy(to, &SHORT_NUMBERS[value % 1000][1], 4);
        return to + 3;
    }
    return write_digits(eight_digits(value), to);
}

INLINE char *
write_eight(uint64_t value, char *to)
{
    store_word(to, as_text(eight_digits(value)));
    return to + 8;
}

/* Write an integer of ``size`` bytes. */
INLINE char *
write_unsigned(uint64_t value, int size, char *to)
{
    const uint64_t e8 = 100000000;
    if (size == 1)
        return write_three(value, to);
    if (size == 2 || value < e8)
        return write_short(value, to);
    uint64_t upper = value / e8;
    if (size == 4)
        to = write_three(upper, to);
    else if (upper < e8)
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

/* Write elements, each with a comma behind it; as all functions for elements. */
INLINE char *
write_plainly(const char *data, size_t count, int size, bool is_signed, char *to)
{
    for (size_t i = 0; i < count; i++) {
        to = write_integer(load(data, i, size), size, is_signed, to);
        *to++ = ',';
    }
    return to;
}

/*
 * ---- Four integers at once, with vectors ----
 *
 * How many digits each has is computed rather than branched on. Only the largest of four decides
 * which way they are written: it takes half of the time, or two thirds with 32 bits.
 */

#ifdef WIDE

static const uint64_t COMMA_ZEROS = 0x2C30303030303030; /* "0000000," */

/* From byte 16 - n on: where n digits are, and then a comma if they are less than sixteen. */
static const unsigned char PLACES[32] = {
    15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 15,
};

/* Split four numbers below 2^32 into their digits. */
WIDE INLINE struct sixteens
ten_digits(quad values)
{
    /* 2^57 / 10^8, rounded up; 2^10 / 10 */
    quad upper = multiply_lower(values, fill(1441151881)) >> 57;
    quad tens = multiply_lower(upper, fill(103)) >> 10;
    quad lower = digits_of(values - multiply_lower(upper, fill(100000000)));
    upper += multiply_lower(tens, fill((1 << 8) - 10));
    return (struct sixteens){interleave(lower, upper, false), interleave(lower, upper, true)};
}

/* Replace negative numbers by their absolutes; return a bit for each of them. */
WIDE INLINE unsigned
take_signs(quad *values, int size)
{
    const uint64_t all = size == 8 ? UINT64_MAX : UINT32_MAX;
    quad negative = size == 8 ? more(fill(0), *values) : more(*values, fill(INT32_MAX));
    *values = (*values ^ (negative & all)) - negative;
    return bits_of_quad(negative);
}

INLINE char *
write_sign(unsigned signs, int i, char *to)
{
    *to = '-';
    return to + (signs >> i & 1);
}

/* Write four numbers below 1000, or below 10^8; a bit of ``signs`` is set for each with a minus. */
WIDE INLINE char *
write_four_short(quad values, unsigned signs, bool have_three, char *to)
{
    uint64_t each[4];
    quad parts = have_three ? values : digits_of(values);
    memcpy(each, &parts, sizeof each);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        to = write_sign(signs, i, to);
        to = have_three ? write_three(each[i], to) : write_digits(each[i], to);
        *to++ = ',';
    }
    return to;
}

/* Tell whether none of four numbers is above ``most``. */
WIDE INLINE bool
are_at_most(quad values, uint64_t most)
{
    return bits_of_quad(values | more(values, fill(most))) == 0;
}

/* Write four numbers of any size. */
WIDE INLINE char *
write_four_long(quad values, int size, unsigned signs, char *to)
{
    const uint64_t e16 = 10000000000000000;
    uint64_t upper[4] = {0};
    if (size == 8 && !are_at_most(values, e16 - 1)) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            upper[i] = values[i] / e16;
            values[i] -= upper[i] * e16;
        }
    }
    struct sixteens digits = size == 8 ? sixteen_digits(values) : ten_digits(values);
    uint32_t kept[2] = {bits_of_digits(digits.even), bits_of_digits(digits.odd)};
    unsigned lengths[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        uint32_t bits = kept[i % 2] >> 8 * (i & 2) & 0xFFFF;
        lengths[i] = upper[i] ? 16 : 32 - (unsigned)__builtin_clz(bits | 1);
    }
    const unsigned char *places = PLACES + 16;
    const quad even_places = load_halves(places - lengths[0], places - lengths[2]);
    const quad odd_places = load_halves(places - lengths[1], places - lengths[3]);
    const uint64_t upper_text = size == 8 ? EIGHT_ZEROS : COMMA_ZEROS;
    const quad text = {EIGHT_ZEROS, upper_text, EIGHT_ZEROS, upper_text};
    quad texts[2] = {
        bytes_at(digits.even | text, even_places), bytes_at(digits.odd | text, odd_places)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        to = write_sign(signs, i, to);
        if (size == 8 && upper[i] != 0)
            to = write_short(upper[i], to);
        block each = half_of(texts[i % 2], i / 2);
        memcpy(to, &each, sizeof each);
        to += lengths[i];
        if (size == 8)
            *to = ',';
        to++;
    }
    return to;
}

WIDE INLINE char *
write_four(const char *data, int size, bool is_signed, char *to)
{
    quad values = load_quad(data, size);
    unsigned signs = is_signed ? take_signs(&values, size) : 0;
    if (are_at_most(values, 999))
        return write_four_short(values, signs, true, to);
    if (are_at_most(values, 99999999))
        return write_four_short(values, signs, false, to);
    return write_four_long(values, size, signs, to);
}

/* As write_plainly(). */
WIDE INLINE char *
write_fours(const char *data, size_t count, int size, bool is_signed, char *to)
{
    const size_t step = 4 * (size_t)size;
    for (; count >= 4; count -= 4, data += step)
        to = write_four(data, size, is_signed, to);
    return write_plainly(data, count, size, is_signed, to);
}

WIDE static char *
encode_wide(const char *data, size_t count, enum datatype datatype, char *to)
{
    if (datatype == UINT32)
        return write_fours(data, count, 4, false, to);
    if (datatype == INT32)
        return write_fours(data, count, 4, true, to);
    if (datatype == UINT64)
        return write_fours(data, count, 8, false, to);
    return write_fours(data, count, 8, true, to);
}

#endif

/* ---- Elements of one datatype ---- */

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

char *
encode_integers(const char *data, size_t count, enum datatype datatype, char *to)
{
#ifdef WIDE
    if (ELEMENT_SIZES[datatype] >= 4 && has_wide())
        return encode_wide(data, count, datatype, to);
#endif
    switch (datatype) {
    case BOOL:
        return write_booleans(data, count, to);
    case UINT8:
        return write_plainly(data, count, 1, false, to);
    case UINT16:
        return write_plainly(data, count, 2, false, to);
    case UINT32:
        return write_plainly(data, count, 4, false, to);
    case UINT64:
        return write_plainly(data, count, 8, false, to);
    case INT8:
        return write_plainly(data, count, 1, true, to);
    case INT16:
        return write_plainly(data, count, 2, true, to);
    case INT32:
        return write_plainly(data, count, 4, true, to);
    default:
        return write_plainly(data, count, 8, true, to);
    }
}
