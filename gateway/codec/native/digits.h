/* Digits of numbers as bytes of words or vectors: the last digit in the lowest byte. */
#ifndef DIGITS_H
#define DIGITS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "powers_of_ten.h"
#include "vectors.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "eight digits are stored as a little-endian word"
#endif

/* Everything for an element is inlined, once per datatype. */
#define INLINE __attribute__((always_inline)) static inline
#define UNLIKELY(condition) __builtin_expect(condition, 0)

static const uint64_t EIGHT_ZEROS = 0x3030303030303030; /* "00000000" */

INLINE void
store_word(char *to, uint64_t word)
{
    memcpy(to, &word, sizeof word);
}

/* Split a number below 10^8 into its eight digits: into fours, then pairs, then digits. */
INLINE uint64_t
eight_digits(uint64_t value)
{
    uint64_t fours = value + value / 10000 * ((1ULL << 32) - 10000);
    /* Quotients by 100 below 10^4, and by 10 below 100, are exact with these multipliers. */
    uint64_t pairs = fours + (fours * 5243 >> 19 & 0x0000007F0000007F) * ((1 << 16) - 100);
    return pairs + (pairs * 103 >> 10 & 0x000F000F000F000F) * ((1 << 8) - 10);
}

/* Turn digits into text, whose first character is the lowest byte. */
INLINE uint64_t
as_text(uint64_t digits)
{
    return __builtin_bswap64(digits) | EIGHT_ZEROS;
}

/* Write a number below 1000. */
INLINE char *
write_three(uint64_t value, char *to)
{
    uint32_t text = SHORT_NUMBERS[value][0];
    memcpy(to, &text, sizeof text);
    return to + (text >> 24);
}

INLINE uint64_t
load(const char *data, size_t index, int size)
{
    uint64_t bits = 0;
    memcpy(&bits, data + index * (size_t)size, (size_t)size);
    return bits;
}

#ifdef WIDE

/* Sixteen bytes for each of four numbers, the last digit first. */
struct sixteens {
    quad even, odd; /* of the first and the third, and of the others */
};

/* Split four numbers below 10^16 into their digits. */
WIDE INLINE struct sixteens
sixteen_digits(quad values)
{
    const uint64_t e8 = 100000000;
    /* 2^58 / 10^8: this is the quotient, or one less. */
    quad upper = multiply_lower(values >> 22, fill(2882303761)) >> 36;
    quad lower = values - multiply_lower(upper, fill(e8));
    quad is_less = more(lower, fill(e8 - 1));
    upper -= is_less;
    lower -= is_less & e8;
    quad even = interleave(lower, upper, false), odd = interleave(lower, upper, true);
    return (struct sixteens){digits_of(even), digits_of(odd)};
}

#endif

#endif
