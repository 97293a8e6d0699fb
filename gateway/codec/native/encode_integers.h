/* Encodes integers and booleans as text; needs no Python object. */
#ifndef ENCODE_INTEGERS_H
#define ENCODE_INTEGERS_H

#include <stddef.h>

#include "datatypes.h"

/*
 * Write elements, each with a comma behind it; ``to`` has the room that encode_numbers() needs.
 * Return where the text ends; NULL if a BOOL is neither 0 nor 1.
 */
char *encode_integers(const char *data, size_t count, enum datatype datatype, char *to);

#endif
