/* Encodes binary elements as the text of JSON numbers; needs no Python object. */
#ifndef ENCODE_NUMBERS_H
#define ENCODE_NUMBERS_H

#include <stddef.h>

#include "datatypes.h"

/* What becomes of a NaN or an infinity, which JSON does not have. */
enum nonfinite {
    NONFINITE_ERROR,   /* the elements are refused */
    NONFINITE_NULL,    /* null */
    NONFINITE_LITERAL, /* NaN, Infinity, -Infinity */
    NONFINITE_STRING,  /* the same in quotes */
};

/* Bytes that are written behind the text: whole words are stored, and overwritten by the next. */
enum { ENCODE_SLACK = 32 };

/* The most bytes that an element takes, with the comma behind it. */
size_t most_text(enum datatype datatype);

/*
 * Encode elements, with commas between them, but no brackets. The data may be unaligned.
 * Return the number of bytes written to ``to``, which has room for count * most_text(datatype) +
 * ENCODE_SLACK; -1 if an element is refused: a NaN or an infinity with NONFINITE_ERROR, a BOOL
 * other than 0 and 1.
 */
ptrdiff_t encode_numbers(
    const char *data, size_t count, enum datatype datatype, enum nonfinite nonfinite, char *to);

/*
 * Encode elements as above, as nested arrays; the outermost has no brackets. ``sizes`` are the
 * numbers of elements in the arrays of each of ``levels`` levels, from the innermost outwards: each
 * is a multiple of the one before, and ``count`` is one of all. ``to`` needs nested_text(...) more
 * bytes.
 */
ptrdiff_t encode_nested(
    const char *data, size_t count, enum datatype datatype, enum nonfinite nonfinite,
    const size_t *sizes, int levels, char *to);

/* The bytes of the brackets. */
size_t nested_text(size_t count, const size_t *sizes, int levels);

#endif
