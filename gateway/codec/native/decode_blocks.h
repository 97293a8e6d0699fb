/* Decodes elements of an array by blocks of text; needs no Python object. */
#ifndef DECODE_BLOCKS_H
#define DECODE_BLOCKS_H

#include "datatypes.h"

enum {
    MAX_DEPTH = 64, /* nested arrays */
    /* Characters that are read around the start of a block. */
    BLOCK_BEHIND = 20,
    BLOCK_AHEAD = 64 + 20,
};

/*
 * Decode elements of an array from ``at``, where the next one must follow and ``depth`` brackets,
 * at least one, are open. At least BLOCK_BEHIND characters of the text are before it.
 *
 * Return where the next element must follow then: behind a comma, or still ``at`` if the text is
 * unusual there, or has less than BLOCK_AHEAD characters left. Return NULL if an element does not
 * fit. ``to`` is moved behind the elements; most_elements of what is left must have room there.
 */
typedef const char *decode_function(
    const char *at, const char *end, enum datatype datatype, int *depth, char **to);

/* Of integers and booleans. */
decode_function decode_integers;

/* Of FP32 and FP64. Those that do not fit are unusual, as all with exponents. */
decode_function decode_floats;

#endif
