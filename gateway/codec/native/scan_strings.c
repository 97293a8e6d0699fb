#include "scan_strings.h"

#include "string_bytes.h"

/* Return the position of the next quote or backslash, or the end. */
STRING_INLINE const char *
quote_or_backslash(const char *at, const char *end)
{
    for (; end - at >= 8; at += 8) {
        uint64_t word = load_eight(at);
        uint64_t marks = mask_equal(word, '"') | mask_equal(word, '\\');
        if (marks)
            return at + bytes_before(marks);
    }
    while (at < end && *at != '"' && *at != '\\')
        at++;
    return at;
}

/* Return the position behind a string's closing quote; NULL if it is not there. */
STRING_INLINE const char *
behind_string(const char *at, const char *end)
{
    for (;;) {
        at = quote_or_backslash(at, end);
        if (at == end)
            return NULL;
        if (*at == '"')
            return at + 1;
        if (end - at < 2)
            return NULL;
        at += 2; /* an escape, whatever it is */
    }
}

void
scan_strings(const char *text, size_t size, ptrdiff_t depth, struct string_scan *scan)
{
    const char *at = text, *end = text + size;
    *scan = (struct string_scan){0, 0, depth, depth, -1, false};
    for (; at < end; at++) {
        switch (*at) {
        case '"':
            scan->last_string = at - text;
            at = behind_string(at + 1, end);
            if (at == NULL) {
                scan->position = scan->last_string;
                return;
            }
            at--;
            break;
        case ',':
            scan->cut = at + 1 - text;
            scan->depth_at_cut = depth;
            break;
        case '[':
            if (++depth > scan->max_depth)
                scan->max_depth = depth;
            break;
        case ']':
            if (--depth == 0) {
                scan->position = at + 1 - text;
                scan->ended = true;
                return;
            }
            break;
        case ' ':
        case '\t':
        case '\n':
        case '\r':
            break;
        default:
            scan->position = at - text;
            return;
        }
    }
    scan->position = at - text;
}

/* Tell whether text behind \\u begins like the first of a pair of surrogates. */
static bool
is_high_surrogate(const char *digits)
{
    char second = digits[1] | 0x20; /* digits have that bit anyway */
    return (digits[0] | 0x20) == 'd'
        && (digits[1] == '8' || digits[1] == '9' || second == 'a' || second == 'b');
}

/* Return the size of the escape at a backslash; 0 if it is incomplete, or half of a pair. */
static ptrdiff_t
escape_size(const char *at, const char *end)
{
    if (end - at < 2 || at[1] != 'u')
        return end - at < 2 ? 0 : 2;
    if (end - at < 6 || !is_high_surrogate(at + 2))
        return end - at < 6 ? 0 : 6;
    return end - at >= 12 && at[6] == '\\' && at[7] == 'u' ? 12 : 0;
}

size_t
find_string_end(const char *text, size_t size)
{
    const char *at = text, *end = text + size;
    for (;;) {
        at = quote_or_backslash(at, end);
        ptrdiff_t skipped = at < end && *at == '\\' ? escape_size(at, end) : 0;
        if (skipped == 0)
            return (size_t)(at - text);
        at += skipped;
    }
}

/* Return the position behind a string or an escape that begins before it; NULL if it is not there. */
STRING_INLINE const char *
behind_opening(const char *at, const char *end)
{
    if (at[-1] == '"')
        return behind_string(at, end);
    /* Outside of strings, escapes are invalid, but shall not open one. */
    return at + (at < end && (*at == '"' || *at == '\\'));
}

size_t
collect_marks(const char *text, size_t size, char *to)
{
    const char *at = text, *end = text + size;
    char *start = to;
    while (at != NULL && at < end) {
        char code = *at++;
        if (code == '"' || code == '\\')
            at = behind_opening(at, end);
        else if (code == ',' || code == '[' || code == ']')
            *to++ = code;
    }
    return (size_t)(to - start);
}

void
scan_array_values(const char *text, size_t size, struct value_scan *scan)
{
    const char *at = text, *end = text + size;
    ptrdiff_t depth = 0, arrays = 0, max_arrays = 0;
    *scan = (struct value_scan){0, false, 0};
    while (at != NULL && at < end) {
        char code = *at++;
        if (code == '"' || code == '\\') {
            at = behind_opening(at, end);
        } else if (code == '[' || code == '{') {
            depth++;
            arrays += code == '[';
            if (arrays > max_arrays)
                max_arrays = arrays;
        } else if (code == ']' || code == '}' || (code == ',' && depth == 0)) {
            depth -= code != ',';
            if (depth < 0 || code == ',')
                *scan = (struct value_scan){at - 1 - text, depth < 0, max_arrays};
            if (depth < 0)
                return;
            arrays -= code == ']';
        }
    }
}
