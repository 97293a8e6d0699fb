/* Decodes the text of a JSON array of numbers into binary elements; needs no Python object. */
#ifndef DECODE_NUMBERS_H
#define DECODE_NUMBERS_H

#include <stdbool.h>
#include <stddef.h>

#include "datatypes.h"

/* The most elements that a text of so many bytes can have: each takes a byte and a comma. */
static inline size_t
most_elements(size_t size)
{
    return size / 2 + 1;
}

/*
 * Decode the elements of a text that stands between two commas of an array, nested or flat, or is
 * a whole array. ``open_before`` brackets are open before the text, and ``open_after`` behind it.
 * With ``null_is_nan``, null is NaN among floats.
 *
 * Return the number of elements written to ``to``, which has room for most_elements(size); -1 if
 * the text is no such array, or if any number does not fit.
 */
ptrdiff_t decode_numbers(
    const char *text, size_t size, enum datatype datatype, int open_before, int open_after,
    bool null_is_nan, char *to);

#endif
