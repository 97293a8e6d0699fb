/* Compares a number in decimal digits with a binary one, exactly. */
#ifndef COMPARE_DECIMAL_H
#define COMPARE_DECIMAL_H

#include <stdint.h>

/*
 * Return -1, 0 or 1: whether the number of the digits from ``start`` to ``stop``, which may have a
 * point among them, times 10^exponent is less than significand * 2^binary, equal or greater.
 *
 * The second must be the middle of two FP64, or of two floats of fewer bits, and above 0. The first
 * must be above half of it, and below its double. The time is bounded by the digits: some 800 of
 * them are multiplied, and the others only looked at.
 */
int compare_decimal(
    const char *start, const char *stop, int64_t exponent, uint64_t significand, int binary);

#endif
