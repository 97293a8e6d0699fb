/* Finds where a window of an array's text can be cut; needs no Python object. */
#ifndef SCAN_NUMBERS_H
#define SCAN_NUMBERS_H

#include <stddef.h>

/* Brackets before a position of a text. */
struct brackets {
    ptrdiff_t opened, closed;
};

struct number_scan {
    ptrdiff_t stop;  /* where the text stops being numbers and brackets for certain, or ends */
    ptrdiff_t close; /* behind the last closing bracket before that; 0 without one */
    ptrdiff_t cut;   /* the last comma before the stop; -1 without one */
    struct brackets before_close, before_cut;
};

/* Scan a text that begins among the numbers of an array. */
struct number_scan scan_numbers(const char *text, size_t size);

#endif
