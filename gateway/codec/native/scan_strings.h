/* Finds the brackets and commas between JSON strings; needs no Python object. */
#ifndef SCAN_STRINGS_H
#define SCAN_STRINGS_H

#include <stdbool.h>
#include <stddef.h>

/* How far a text consists of complete elements: see scan_strings in plain.py. */
struct string_scan {
    ptrdiff_t position;
    ptrdiff_t cut;
    ptrdiff_t depth_at_cut;
    ptrdiff_t max_depth;
    ptrdiff_t last_string; /* -1 if there is none */
    bool ended;
};

/* Scan text of strings, brackets and commas outside of any string, ``depth`` brackets deep. */
void scan_strings(const char *text, size_t size, ptrdiff_t depth, struct string_scan *scan);

/*
 * Return the offset of the quote that ends the string within which the text begins; of an escape
 * that is incomplete or half of a pair of surrogates; or of the end.
 */
size_t find_string_end(const char *text, size_t size);

/*
 * Collect the brackets and commas outside of strings, which must be complete. ``to`` has room for
 * as many bytes as the text has. Return their number.
 */
size_t collect_marks(const char *text, size_t size, char *to);

/* A part of an array that consists of complete values: see scan_array_values. */
struct value_scan {
    ptrdiff_t end;
    bool is_array_end;
    ptrdiff_t max_depth;
};

/* Find the last comma between the values of an array, or its end; the text begins within it. */
void scan_array_values(const char *text, size_t size, struct value_scan *scan);

#endif
