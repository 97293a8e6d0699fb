/*
 * Compares with integers of any size, as in David Gay's "Correctly Rounded Binary-Decimal and
 * Decimal-Binary Conversions" (1990). Their size is bounded: the middle of two FP64 has up to 768
 * digits, 2^54 * 5^1075. Of a number near to it, further digits count only if they are not all 0.
 */
#include "compare_decimal.h"

#include <stdbool.h>
#include <string.h>

typedef unsigned __int128 uint128_t;

enum {
    MOST_DIGITS = 800, /* more than 768, and one for a power of ten between both numbers */
    DIGITS_AT_ONCE = 19,
    FIVES_AT_ONCE = 27, /* 5^27 fits into 64 bits */
    /*
     * Both numbers become integers by powers of five and of two. With an exponent of at least 0,
     * they stay below 2^1026. Below 0, the first one's digits are below 2^2658. Its exponent is at
     * least -1124, as it is above 2^-1076: the second one becomes 2^54 * 5^1124 at most. Whichever
     * of them then gets powers of two is hardly greater than the other one afterwards.
     */
    MOST_WORDS = 2666 / 64 + 1,
};

static const uint64_t FIVE_TO_27 = 7450580596923828125;

/* An integer of ``size`` words, the least one first. */
struct integer {
    int size;
    uint64_t words[MOST_WORDS];
};

static void
multiply_and_add(struct integer *number, uint64_t factor, uint64_t more)
{
    for (int index = 0; index < number->size; index++) {
        uint128_t product = (uint128_t)number->words[index] * factor + more;
        number->words[index] = (uint64_t)product;
        more = (uint64_t)(product >> 64);
    }
    if (more)
        number->words[number->size++] = more;
}

static uint64_t
power(uint64_t base, int exponent)
{
    uint64_t result = 1;
    while (exponent-- > 0)
        result *= base;
    return result;
}

static void
multiply_by_fives(struct integer *number, int64_t count)
{
    for (; count >= FIVES_AT_ONCE; count -= FIVES_AT_ONCE)
        multiply_and_add(number, FIVE_TO_27, 0);
    multiply_and_add(number, power(5, (int)count), 0);
}

static void
multiply_by_twos(struct integer *number, int64_t count)
{
    int words = (int)(count / 64);
    multiply_and_add(number, 1ULL << count % 64, 0);
    memmove(number->words + words, number->words, (size_t)number->size * sizeof *number->words);
    memset(number->words, 0, (size_t)words * sizeof *number->words);
    number->size += words;
}

static int
compare(const struct integer *first, const struct integer *second)
{
    if (first->size != second->size)
        return first->size < second->size ? -1 : 1;
    for (int index = first->size - 1; index >= 0; index--) {
        uint64_t one = first->words[index], other = second->words[index];
        if (one != other)
            return one < other ? -1 : 1;
    }
    return 0;
}

/*
 * Read the first MOST_DIGITS digits of a number. Return the exponent of the last one; ``has_more``
 * becomes whether any digit behind them is not 0.
 */
static int64_t
read_decimal(const char *at, const char *stop, struct integer *number, bool *has_more)
{
    int64_t exponent = 0;
    int count = 0, pending = 0; /* digits that are read, and those not yet in the number */
    uint64_t value = 0;
    bool is_fraction = false;
    number->size = 0;
    *has_more = false;
    for (; at < stop; at++) {
        if (*at == '.') {
            is_fraction = true;
            continue;
        }
        if (count == MOST_DIGITS) {
            *has_more |= *at != '0';
            exponent += !is_fraction;
            continue;
        }
        exponent -= is_fraction;
        if (count == 0 && *at == '0')
            continue;
        value = value * 10 + (uint64_t)(*at - '0');
        count++;
        if (++pending == DIGITS_AT_ONCE) {
            multiply_and_add(number, power(10, pending), value);
            value = 0;
            pending = 0;
        }
    }
    multiply_and_add(number, power(10, pending), value);
    return exponent;
}

int
compare_decimal(
    const char *start, const char *stop, int64_t exponent, uint64_t significand, int binary)
{
    struct integer first, second = {.size = 1, .words = {significand}};
    bool has_more;
    exponent += read_decimal(start, stop, &first, &has_more);
    if (exponent >= 0)
        multiply_by_fives(&first, exponent);
    else
        multiply_by_fives(&second, -exponent);
    if (exponent >= binary)
        multiply_by_twos(&first, exponent - binary);
    else
        multiply_by_twos(&second, binary - exponent);
    int order = compare(&first, &second);
    return order == 0 && has_more ? 1 : order;
}
