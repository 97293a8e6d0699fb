/*
 * Numbers contain no quotes, braces and square brackets: 64 bytes without any are skipped at
 * once. That takes a tenth of the time of decoding them.
 */
#include "scan_numbers.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "vectors.h"

enum { BLOCKS = 4 /* that are searched at once */ };

/* Tell whether blocks have a quote, or any of []{}. Y, y, _ and DEL count too: no number has them. */
static bool
has_mark(const char *at)
{
    block marks = {0};
#pragma GCC unroll 4
    for (int index = 0; index < BLOCKS; index++) {
        block bytes = load_block(at + index * sizeof bytes);
        marks |= (block)(bytes == '"') | (block)((bytes | 0x26) == 0x7F);
    }
    uint64_t halves[2];
    memcpy(halves, &marks, sizeof halves);
    return (halves[0] | halves[1]) != 0;
}

/* Scan characters one by one; return whether the text stops there being numbers. */
static bool
scan_characters(const char *text, ptrdiff_t end, struct number_scan *scan, struct brackets *brackets)
{
    for (; scan->stop < end; scan->stop++) {
        switch (text[scan->stop]) {
        case '[':
            brackets->opened++;
            break;
        case ']':
            brackets->closed++;
            scan->close = scan->stop + 1;
            scan->before_close = *brackets;
            break;
        case '"':
        case '{':
        case '}':
            return true;
        }
    }
    return false;
}

struct number_scan
scan_numbers(const char *text, size_t size)
{
    struct number_scan scan = {.cut = -1};
    struct brackets brackets = {0, 0};
    const ptrdiff_t end = (ptrdiff_t)size, step = BLOCKS * sizeof(block);
    bool has_stopped = false;
    while (!has_stopped && end - scan.stop >= step) {
        if (has_mark(text + scan.stop))
            has_stopped = scan_characters(text, scan.stop + step, &scan, &brackets);
        else
            scan.stop += step;
    }
    if (!has_stopped)
        scan_characters(text, end, &scan, &brackets);
    for (ptrdiff_t at = scan.stop - 1; at >= 0; at--) {
        if (text[at] == ',') {
            scan.cut = at;
            scan.before_cut = brackets;
            break;
        }
        brackets.opened -= text[at] == '[';
        brackets.closed -= text[at] == ']';
    }
    return scan;
}
