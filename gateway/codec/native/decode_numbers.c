/*
 * Decodes the text of a JSON array of numbers in one pass.
 *
 * orjson parses any JSON, and numpy rounds its doubles. This module handles the one case that large
 * requests consist of, without the steps between. Text that it does not decode with certainty,
 * invalid text included, is left to them.
 *
 * Most text is read by blocks (decode_blocks.h), and here what is unusual there.
 *
 * After Daniel Lemire, "Number Parsing at a Gigabyte per Second" (2021). The digits are multiplied
 * by the first 128 bits of the power of ten (powers_of_ten.h, made by the build). The product gives
 * the nearest float of any size. No float is rounded from a double, as that would round twice.
 */
#include "decode_numbers.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "compare_decimal.h"
#include "decode_blocks.h"
#include "powers_of_ten.h"
#include "vectors.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "digits are loaded, and elements are stored, as little-endian words"
#endif

typedef unsigned __int128 uint128_t;

enum { MAX_DIGITS = 19 /* any number of so many digits fits into 64 bits */ };

/* A position in the text; NULL if the text is left to the caller. */
typedef const char *cursor;

/* Everything for a number is inlined, once per format of elements: calls would cost a fifth. */
#define INLINE __attribute__((always_inline)) static inline

INLINE bool
is_digit(char c)
{
    return (unsigned char)(c - '0') < 10;
}

/* ---- Many digits at a time ---- */

enum {
    LOOK_AHEAD = 32, /* characters that are classified together */
    LOOK_BACK = 32,  /* characters that may be converted together */
    AT_ONCE = 16,    /* characters that are converted in one step */
};

static const uint64_t TEN_TO_16 = 10000000000000000;

/* Make bytes 0xFF that are digits, and all others 0. */
INLINE block
are_digits(block characters)
{
    /* '0' becomes the least signed byte: digits are the ten least ones. */
    return (block)((signed_block)(characters + (128 - '0')) < 10 - 128);
}

/* Return a bit for each of LOOK_AHEAD characters, the first one least: whether it is a digit. */
INLINE uint32_t
find_digits(cursor at)
{
    return bits_of(are_digits(load_block(at)), are_digits(load_block(at + sizeof(block))));
}

/* For each number of digits: masks of which so many bytes at the end keep the value of a digit. */
#define FIFTEENS 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15
/* It fills a cache line. Across two, loads would take 3 % of the time of a number. */
static const _Alignas(64) unsigned char KEPT_BITS[2 * LOOK_BACK] = {
    [LOOK_BACK] = FIFTEENS, FIFTEENS};

/*
 * Return the value of the digits among the AT_ONCE characters that end ``offset`` characters before
 * a position. There are ``count`` digits before it, the last ``fraction`` ones behind a point.
 */
INLINE uint64_t
value_of_sixteen(cursor behind, ptrdiff_t offset, ptrdiff_t count, ptrdiff_t fraction)
{
    cursor at = behind - offset - AT_ONCE;
    const unsigned char *kept = KEPT_BITS + LOOK_BACK - AT_ONCE - offset;
    block last = load_block(kept + fraction), all = load_block(kept + count);
    /* Those before the point move by one, onto it. */
    block moved = load_block(at - 1), digits = load_block(at);
    return value_of_digits((digits & last) | (moved & (all ^ last)));
}

/*
 * Return the value of up to AT_ONCE + 7 digits before a position, modulo 2^64; of these, the last
 * ``fraction`` ones are behind a point. LOOK_BACK characters are read, whatever they are: how many
 * digits there are costs no branch.
 */
INLINE uint64_t
value_before(cursor behind, ptrdiff_t count, ptrdiff_t fraction)
{
    uint64_t value = value_of_sixteen(behind, 0, count, fraction);
    /* Shortest floats have fewer digits, doubles more: this is predictable. */
    if (count > 12)
        value += value_of_sixteen(behind, AT_ONCE, count, fraction) * TEN_TO_16;
    return value;
}

/* Append digits to a value; bits beyond 64 are lost. */
INLINE cursor
read_digits(cursor at, cursor end, uint64_t *value)
{
    for (; at < end && is_digit(*at); at++)
        *value = *value * 10 + (uint64_t)(*at - '0');
    return at;
}

/* Tell whether so many characters can be read around a position. */
INLINE bool
is_amid(cursor at, cursor begin, cursor end)
{
    return at - begin > LOOK_BACK && end - at >= LOOK_AHEAD;
}

/* ---- A float ---- */

/* A format of IEEE 754, or BF16. */
struct format {
    int size;   /* bytes */
    int stored; /* bits of the mantissa */
    int bias;   /* of the exponent */
};

static const struct format HALF = {2, 10, 15}, BRAIN = {2, 7, 127}, SINGLE = {4, 23, 127},
                           DOUBLE = {8, 52, 1023};

INLINE uint64_t
infinity(struct format form)
{
    return (uint64_t)(2 * form.bias + 1) << form.stored;
}

/* Compute the bits of the float nearest to digits * 10^exponent; false if it is too large. */
INLINE bool
nearest(uint64_t digits, int64_t exponent, struct format form, uint64_t *bits)
{
    if (digits == 0 || (uint64_t)(exponent - LEAST_POWER) > MOST_POWER - LEAST_POWER) {
        *bits = 0;
        return digits == 0 || exponent < LEAST_POWER;
    }
    const uint64_t *power = POWERS_OF_TEN[exponent - LEAST_POWER];
    int zeros = __builtin_clzll(digits);
    digits <<= zeros;
    uint128_t product = (uint128_t)digits * power[0];
    uint64_t high = (uint64_t)(product >> 64), low = (uint64_t)product;
    const uint64_t beyond = UINT64_MAX >> (form.stored + 3);
    if ((high & beyond) == beyond) {
        /*
         * The power's lower half may carry into the significant bits. What that lacks cannot, as
         * Noble Mushtak and Daniel Lemire found ("Fast Number Parsing Without Fallback", 2023): no
         * digits give UINT64_MAX here and all bits beyond, where the power is not exact.
         */
        uint64_t more = (uint64_t)((uint128_t)digits * power[1] >> 64);
        low += more;
        high += low < more;
    }
    int top = (int)(high >> 63), shift = top + 61 - form.stored;
    /* floor(log2(10^exponent)) and the bias, less 1: the leading bit, or a carry, adds that. */
    int binary = ((217706 * (int)exponent) >> 16) + 63 + top - zeros + form.bias - 1;
    if (binary < 0) {
        /* A subnormal float, which has fewer bits. */
        shift -= binary;
        binary = 0;
        if (shift > 63) {
            *bits = 0;
            return true;
        }
    }
    uint64_t mantissa = high >> shift; /* with one bit more, for rounding */
    /* To nearest, ties to even. The direction is unpredictable: a branch would cost a fifth. */
    uint64_t up = mantissa & 1;
    /*
     * Halfway between two floats, 5^-exponent divides the digits, or 5^exponent the mantissa: at
     * most 5^27 fits into 64 bits. Up to it, low is 0 in this case, and in no other: the power is
     * exact, or what it lacks is less than a unit of low, and the least distance is more than that.
     * Where the lower half was not needed, only a power of even more twos would give 0.
     */
    if (low == 0 && exponent >= -27 && exponent <= 27 && mantissa << shift == high)
        up &= mantissa >> 1;
    *bits = ((uint64_t)binary << form.stored) + ((mantissa + up) >> 1);
    return *bits < infinity(form);
}

/*
 * Do the same for floats of fewer bits than doubles, by way of a double, in a quarter of the time.
 * False also means that they may be rounded wrongly, or are subnormal.
 */
INLINE bool
nearest_by_double(uint64_t digits, int64_t exponent, struct format form, uint64_t *bits)
{
    static const double TENTHS[] = {
        1e-0,  1e-1,  1e-2,  1e-3,  1e-4,  1e-5,  1e-6,  1e-7,  1e-8,  1e-9,
        1e-10, 1e-11, 1e-12, 1e-13, 1e-14, 1e-15, 1e-16, 1e-17, 1e-18, 1e-19,
    };
    if (exponent > 0 || exponent < -MAX_DIGITS || digits > INT64_MAX)
        return false;
    double product = (double)(int64_t)digits * TENTHS[-exponent];
    uint64_t wide;
    memcpy(&wide, &product, sizeof wide);
    /* Three roundings move it by three units at most: not past the middle of two floats. */
    const int cut = 52 - form.stored;
    const uint64_t middle = 1ULL << (cut - 1), rest = wide & (2 * middle - 1);
    wide -= (uint64_t)(1023 - form.bias) << 52;
    *bits = (wide + middle) >> cut;
    const uint64_t least_normal = 1ULL << form.stored;
    return rest - (middle - 4) > 8 && *bits - least_normal < infinity(form) - least_normal;
}

/*
 * Tell whether a number is to be rounded up from a float that is not above it, or hardly: whether
 * it is beyond the middle of this float and the next one, or there and the next one is even.
 */
__attribute__((noinline)) static bool
is_rounded_up(cursor start, cursor stop, int64_t exponent, struct format form, uint64_t bits)
{
    const uint64_t implicit = 1ULL << form.stored;
    uint64_t mantissa = bits & (implicit - 1);
    int binary = (int)(bits >> form.stored);
    if (binary == 0)
        binary = 1; /* subnormal */
    else
        mantissa |= implicit;
    binary -= form.bias + form.stored + 1;
    int order = compare_decimal(start, stop, exponent, 2 * mantissa + 1, binary);
    return order > 0 || (order == 0 && (mantissa & 1));
}

/*
 * Compute the bits of the float nearest to a number of any length, without its sign and without the
 * exponent, which is written behind its digits.
 */
__attribute__((noinline)) static bool
nearest_to_long(
    cursor start, cursor stop, int64_t written, struct format form, uint64_t *bits)
{
    uint64_t digits = 0, next;
    int64_t exponent = written;
    int count = 0;
    bool is_cut = false, is_fraction = false;
    for (cursor at = start; at < stop; at++) {
        if (*at == '.') {
            is_fraction = true;
            continue;
        }
        if (count < MAX_DIGITS) {
            digits = digits * 10 + (uint64_t)(*at - '0');
            count += digits != 0;
            exponent -= is_fraction;
        } else {
            is_cut |= *at != '0';
            exponent += !is_fraction;
        }
    }
    if (!nearest(digits, exponent, form, bits))
        return false;
    /* What is cut off adds less than one to the digits. */
    if (!is_cut || (nearest(digits + 1, exponent, form, &next) && next == *bits))
        return true;
    *bits += is_rounded_up(start, stop, written, form, *bits);
    return *bits < infinity(form);
}

/* More than this makes any text 0 or too large: its other digits are passed over. */
static const int64_t MOST_EXPONENT = 1000000000000000;

INLINE cursor
read_exponent(cursor at, cursor end, int64_t *exponent)
{
    bool negative = at < end && *at == '-';
    at += negative || (at < end && *at == '+');
    int64_t value = 0;
    cursor start = at;
    for (; at < end && is_digit(*at); at++) {
        if (value < MOST_EXPONENT)
            value = value * 10 + (*at - '0');
    }
    *exponent += negative ? -value : value;
    return at == start ? NULL : at;
}

INLINE bool
starts_with(cursor at, cursor end, const char *word, size_t size)
{
    return (size_t)(end - at) >= size && memcmp(at, word, size) == 0;
}

/* Write the bits of a float with its sign. As an integer, -0 has none. */
INLINE void
write_float(uint64_t bits, bool negative, bool is_integer, struct format form, char *to)
{
    /* The sign is unpredictable: no branch. */
    bits |= (uint64_t)(negative & ((bits != 0) | !is_integer)) << (8 * form.size - 1);
    memcpy(to, &bits, (size_t)form.size);
}

/*
 * Read NaN and infinities, which are not JSON, as clients write them. Servers may write null for
 * NaN.
 */
__attribute__((noinline)) static cursor
read_nonfinite(
    cursor at, cursor end, bool negative, bool null_is_nan, struct format form, char *to)
{
    uint64_t bits = (uint64_t)negative << (8 * form.size - 1) | infinity(form);
    ptrdiff_t size = 0;
    if (starts_with(at, end, "Infinity", 8))
        size = 8;
    else if (!negative) {
        bits |= 1ULL << (form.stored - 1);
        if (starts_with(at, end, "NaN", 3))
            size = 3;
        else if (null_is_nan && starts_with(at, end, "null", 4))
            size = 4;
    }
    if (size == 0)
        return NULL;
    memcpy(to, &bits, (size_t)form.size);
    return at + size;
}

/*
 * Read a number of up to MAX_DIGITS digits amid a text, and write the float nearest to it. Return
 * NULL for all others. The branches are those that mostly go one way in an array.
 */
INLINE cursor
read_float_amid(cursor start, cursor end, struct format form, char *to)
{
    bool negative = *start == '-', is_integer = true;
    uint32_t others = ~(find_digits(start) | negative);
    if (others == 0)
        return NULL;
    cursor at = start + negative, stop = start + __builtin_ctz(others);
    ptrdiff_t whole = stop - at, fraction = 0;
    if (whole < 1 || (whole > 1 && *at == '0'))
        return NULL;
    if (*stop == '.') {
        others &= others - 1;
        if (others == 0)
            return NULL;
        stop = start + __builtin_ctz(others);
        fraction = stop - at - whole - 1;
        if (fraction == 0)
            return NULL;
        is_integer = false;
    }
    ptrdiff_t count = whole + fraction;
    if (count > MAX_DIGITS)
        return NULL;
    uint64_t digits = value_before(stop, count, is_integer ? count : fraction), bits;
    int64_t exponent = -fraction;
    if ((*stop | 0x20) == 'e') {
        stop = read_exponent(stop + 1, end, &exponent);
        is_integer = false;
    }
    if ((form.size == 8 || !nearest_by_double(digits, exponent, form, &bits))
        && !nearest(digits, exponent, form, &bits))
        return NULL;
    write_float(bits, negative, is_integer, form, to);
    return stop;
}

/* Read a number of RFC 8259, section 6, or a word for NaN or an infinity, if it fits. */
__attribute__((noinline)) static cursor
read_any_float(cursor at, cursor end, bool null_is_nan, struct format form, char *to)
{
    bool negative = at < end && *at == '-', is_integer = true;
    at += negative;
    cursor start = at;
    uint64_t digits = 0, bits; /* the digits may be too many, and are read again */
    at = read_digits(start, end, &digits);
    if (at == start)
        return read_nonfinite(at, end, negative, null_is_nan, form, to);
    if (at - start > 1 && *start == '0')
        return NULL;
    if (at < end && *at == '.') {
        cursor fraction = at + 1;
        at = read_digits(fraction, end, &digits);
        if (at == fraction)
            return NULL;
        is_integer = false;
    }
    cursor stop = at;
    int64_t exponent = 0;
    if (at < end && (*at | 0x20) == 'e') {
        at = read_exponent(at + 1, end, &exponent);
        is_integer = false;
    }
    if (at == NULL || !nearest_to_long(start, stop, exponent, form, &bits))
        return NULL;
    write_float(bits, negative, is_integer, form, to);
    return at;
}

/* Read a number as above, the usual way if possible. */
INLINE cursor
read_float(
    cursor at, cursor begin, cursor end, bool null_is_nan, struct format form, char *to)
{
    cursor behind = is_amid(at, begin, end) ? read_float_amid(at, end, form, to) : NULL;
    return behind == NULL ? read_any_float(at, end, null_is_nan, form, to) : behind;
}

/* ---- Integers and booleans ---- */

/* Read the digits of an integer amid a text; return NULL for too many. */
INLINE cursor
read_digits_amid(cursor start, bool negative, uint64_t *value)
{
    uint32_t others = ~(find_digits(start) | negative);
    if (others == 0)
        return NULL;
    cursor behind = start + __builtin_ctz(others);
    ptrdiff_t count = behind - start - negative;
    if (count > AT_ONCE + 7)
        return NULL;
    *value = value_before(behind, count, count);
    return behind;
}

/* Read an integer without fraction and exponent, if it fits. */
INLINE cursor
read_integer(cursor at, cursor begin, cursor end, int size, bool is_signed, char *to)
{
    const uint64_t most = UINT64_MAX >> (64 - 8 * size + is_signed);
    bool negative = at < end && *at == '-';
    cursor start = at + negative, behind = NULL;
    uint64_t value = 0;
    if (is_amid(at, begin, end))
        behind = read_digits_amid(at, negative, &value);
    if (behind == NULL)
        behind = read_digits(start, end, &value);
    ptrdiff_t count = behind - start;
    if (count == 0 || (count > 1 && *start == '0'))
        return NULL;
    /* Of more digits, 2^64 and up to twice as much would become less than 10^19. */
    if (count > MAX_DIGITS
        && (count > MAX_DIGITS + 1 || *start != '1' || value < 1000 * TEN_TO_16))
        return NULL;
    /* The sign is unpredictable: no branch. */
    uint64_t sign = -(uint64_t)negative, limit = is_signed ? most + negative : most & ~sign;
    if (value > limit)
        return NULL;
    value = (value ^ sign) - sign;
    memcpy(to, &value, (size_t)size);
    return behind;
}

INLINE cursor
read_boolean(cursor at, cursor end, char *to)
{
    /* Which of both is unpredictable: they differ by a byte in length, not by a branch. */
    bool is_true = starts_with(at, end, "true", 4), is_false = starts_with(at, end, "false", 5);
    *to = (char)is_true;
    return is_true | is_false ? at + 5 - is_true : NULL;
}

/* ---- The array ---- */

INLINE cursor
behind_space(cursor at, cursor end)
{
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r'))
        at++;
    return at;
}

/* Move behind a comma, or a comma and a space, if an element follows there; else stay. */
INLINE bool
skip_comma(cursor *at, cursor end)
{
    if (*at == end || **at != ',')
        return false;
    cursor next = *at + 1;
    /* A branch, as it is predictable: the position of the next one does not wait for it. */
    if (next < end && *next == ' ')
        next++;
    if (next == end || *next <= ' ' || *next == '[')
        return false;
    *at = next;
    return true;
}

/*
 * Read an element, and those that follow with nothing but a comma, or a comma and a space, between,
 * as far as they begin before ``until``. Move ``to`` behind what is written.
 */
INLINE cursor
read_elements(
    cursor at, cursor begin, cursor end, cursor until, enum datatype datatype, int size,
    bool null_is_nan, char **to)
{
    do {
        switch (datatype) {
        case BOOL: at = read_boolean(at, end, *to); break;
        case FP16: at = read_float(at, begin, end, null_is_nan, HALF, *to); break;
        case BF16: at = read_float(at, begin, end, null_is_nan, BRAIN, *to); break;
        case FP32: at = read_float(at, begin, end, null_is_nan, SINGLE, *to); break;
        case FP64: at = read_float(at, begin, end, null_is_nan, DOUBLE, *to); break;
        default: at = read_integer(at, begin, end, size, datatype >= INT8, *to);
        }
        if (at == NULL)
            return NULL;
        *to += size;
    } while (at < until && skip_comma(&at, end));
    return at;
}

/* Where blocks may begin, and how far from there if none does. */
struct blocks {
    cursor next;
    ptrdiff_t pause;
};

/* Return the position so many characters ahead; the end if no block can begin there. */
INLINE cursor
position_ahead(cursor at, cursor end, ptrdiff_t distance)
{
    return end - at - distance >= BLOCK_AHEAD ? at + distance : end;
}

/* Read elements by blocks. In text that has none, each pause is twice as long as the one before. */
INLINE cursor
read_blocks(
    cursor at, cursor end, enum datatype datatype, struct blocks *blocks, int *depth, char **to)
{
    decode_function *decode = datatype < FP16 ? decode_integers : decode_floats;
    cursor behind = decode(at, end, datatype, depth, to);
    blocks->pause = behind == at ? 2 * blocks->pause : BLOCK_AHEAD;
    if (behind != NULL)
        blocks->next = position_ahead(behind, end, blocks->pause);
    return behind;
}

/* Read the elements of a part of an array, nested or flat; return their number, or -1. */
INLINE ptrdiff_t
read_array(
    cursor begin, cursor end, enum datatype datatype, int size, int open_before, int open_after,
    bool null_is_nan, char *to)
{
    int depth = open_before;
    cursor at = begin;
    char *const start = to;
    if (depth < 0 || depth > MAX_DEPTH)
        return -1;
    struct blocks blocks = {position_ahead(begin, end, BLOCK_BEHIND), BLOCK_AHEAD};
    for (;;) {
        /* An element must follow. */
        if (at >= blocks.next && depth > 0) {
            at = read_blocks(at, end, datatype, &blocks, &depth, &to);
            if (at == NULL)
                return -1;
        }
        at = behind_space(at, end);
        if (at < end && *at == '[') {
            if (++depth > MAX_DEPTH)
                return -1;
            at = behind_space(at + 1, end);
            if (at == end || *at != ']')
                continue;
        } else {
            if (depth == 0)
                return -1;
            at = read_elements(at, begin, end, blocks.next, datatype, size, null_is_nan, &to);
            if (at == NULL)
                return -1;
            at = behind_space(at, end);
        }
        while (depth > 0 && at < end && *at == ']') {
            at = behind_space(at + 1, end);
            depth--;
        }
        if (at == end)
            return depth == open_after ? (to - start) / size : -1;
        if (depth == 0 || *at++ != ',')
            return -1;
    }
}

/* The functions above become one for each datatype: this and its size are constants there. */
#define CASE(datatype, element_size) \
    case datatype:                   \
        return read_array(           \
            text, end, datatype, element_size, open_before, open_after, null_is_nan, to)

/* Apart from floats: among these, gcc 12 would have FP64 take 1.6 times as long. */
__attribute__((noinline)) static ptrdiff_t
decode_integers_and_booleans(
    cursor text, cursor end, enum datatype datatype, int open_before, int open_after, char *to)
{
    const bool null_is_nan = false;
    switch (datatype) {
        CASE(BOOL, 1);
        CASE(UINT8, 1);
        CASE(UINT16, 2);
        CASE(UINT32, 4);
        CASE(UINT64, 8);
        CASE(INT8, 1);
        CASE(INT16, 2);
        CASE(INT32, 4);
        CASE(INT64, 8);
    default: return -1;
    }
}

ptrdiff_t
decode_numbers(
    const char *text, size_t size, enum datatype datatype, int open_before, int open_after,
    bool null_is_nan, char *to)
{
    cursor end = text + size;
    switch (datatype) {
        CASE(FP16, 2);
        CASE(BF16, 2);
        CASE(FP32, 4);
        CASE(FP64, 8);
    default:
        return decode_integers_and_booleans(text, end, datatype, open_before, open_after, to);
    }
}

#undef CASE
