/* Decodes the text of a JSON array of strings into BYTES elements; needs no Python object. */
#ifndef DECODE_STRINGS_H
#define DECODE_STRINGS_H

#include <stdbool.h>
#include <stddef.h>

/* The most bytes of elements that a text of so many bytes can become: "", is three, and four. */
static inline size_t
most_element_bytes(size_t size)
{
    return size + size / 3 + 4;
}

/* What an array becomes: BYTES elements, and the brackets and commas around them. */
struct decoded_strings {
    char *elements; /* with room for most_element_bytes() of the text */
    size_t elements_size;
    char *marks; /* with room for as many bytes as the text has; unused by decode_strings */
    size_t marks_size;
    bool has_base64;
};

/*
 * Decode the strings of a text that stands between two commas of an array, nested or flat, or is a
 * whole array. ``open_before`` brackets are open before the text, and ``open_after`` behind it.
 * Return the number of elements; -1 if the text is no such array, or not UTF-8.
 */
ptrdiff_t decode_strings(
    const char *text, size_t size, int open_before, int open_after, struct decoded_strings *to);

/*
 * Decode strings as decode_strings does, and V1's objects {"b64": "..."}; collect the marks too.
 * Base64 may lack its padding.
 */
ptrdiff_t decode_elements(
    const char *text, size_t size, int open_before, int open_after, struct decoded_strings *to);

/*
 * Decode the text between the quotes of one string, or a part of it, to ``to``, which has room for
 * as many bytes; return the size of what was written, -1 if the text is invalid.
 */
ptrdiff_t decode_text(const char *text, size_t size, char *to);

/*
 * Decode BYTES elements whose bytes are canonical base64, and write elements to ``to``, which has
 * room for as many bytes. An incomplete element at the end is left: ``used`` is set to the size of
 * the others, ``written`` to that of what they become. Return their number; -1 if one is invalid.
 */
ptrdiff_t decode_base64_elements(
    const char *data, size_t size, char *to, size_t *used, size_t *written);

#endif
