/* Encodes BYTES elements as the text of JSON strings; needs no Python object. */
#ifndef ENCODE_STRINGS_H
#define ENCODE_STRINGS_H

#include <stddef.h>
#include <stdint.h>

/* How an element is written: as text, as base64, or as V1's {"b64": "..."}. */
enum string_form {
    TEXT,
    BASE64,
    BASE64_OBJECT,
    STRING_FORM_COUNT,
};

/* Where the elements stand in their tensor, and how they are written. */
struct string_layout {
    enum string_form form;
    uint64_t first_index;     /* of the first element */
    const char *row_sizes;    /* uint64 each: elements in a row of each level, innermost first */
    size_t level_count;       /* levels of rows; 0 for a flat array, which gets no brackets */
};

enum { NOT_UTF8 = -1, NO_ROOM = -2 };

/*
 * Encode BYTES elements as JSON, with the commas and brackets before each. An incomplete element
 * at the end is left: ``used`` is set to the size of the others, ``count`` to their number.
 * Return the size of the text written to ``to``, NOT_UTF8, or NO_ROOM if it exceeds ``room``.
 */
ptrdiff_t encode_strings(
    const char *data, size_t size, const struct string_layout *layout, char *to, size_t room,
    size_t *used, uint64_t *count);

/*
 * Encode a part of an element as text without quotes. A character that is incomplete at the end
 * is left: ``used`` is set to the size of the others. Returns what encode_strings does.
 */
ptrdiff_t encode_text(const char *data, size_t size, char *to, size_t room, size_t *used);

#endif
