/*
 * Decodes JSON strings into BYTES elements: a little-endian uint32 length, and UTF-8.
 *
 * Most strings are short and plain: ASCII without escapes. Eight bytes are copied at once, and
 * then looked through for one that is not plain. No more is written than read, so these words stay
 * within the room: see most_element_bytes().
 */
#include "decode_strings.h"

#include "base64.h"
#include "string_bytes.h"

enum { MAX_DEPTH = 64 /* nested arrays */ };

/* A position in the text; NULL if the text is left to the caller. */
typedef const char *cursor;

/* ---- One string ---- */

static int
hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Read four hexadecimal digits; -1 if there are none. */
static int32_t
read_hex(cursor at, cursor end)
{
    if (end - at < 4)
        return -1;
    int digits[4], invalid = 0;
    for (int i = 0; i < 4; i++) {
        digits[i] = hex_digit(at[i]);
        invalid |= digits[i];
    }
    return invalid < 0 ? -1 : digits[0] << 12 | digits[1] << 8 | digits[2] << 4 | digits[3];
}

static char *
write_character(uint32_t code, char *to)
{
    if (code < 0x80) {
        *to++ = (char)code;
        return to;
    }
    if (code < 0x800) {
        *to++ = (char)(0xC0 | code >> 6);
    } else {
        if (code < 0x10000) {
            *to++ = (char)(0xE0 | code >> 12);
        } else {
            *to++ = (char)(0xF0 | code >> 18);
            *to++ = (char)(0x80 | (code >> 12 & 0x3F));
        }
        *to++ = (char)(0x80 | (code >> 6 & 0x3F));
    }
    *to++ = (char)(0x80 | (code & 0x3F));
    return to;
}

/* Read what follows \u: four digits, or a pair of surrogates. */
static cursor
read_unicode_escape(cursor at, cursor end, char **to)
{
    int32_t code = read_hex(at, end);
    if (code < 0)
        return NULL;
    at += 4;
    if (code >= 0xD800 && code < 0xE000) {
        bool is_pair = code < 0xDC00 && end - at >= 2 && at[0] == '\\' && at[1] == 'u';
        int32_t low = is_pair ? read_hex(at + 2, end) : -1;
        if (low < 0xDC00 || low >= 0xE000)
            return NULL;
        at += 6;
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    *to = write_character((uint32_t)code, *to);
    return at;
}

/* Read what follows a backslash. */
static cursor
read_escape(cursor at, cursor end, char **to)
{
    if (at == end)
        return NULL;
    char code;
    switch (*at++) {
    case '"': code = '"'; break;
    case '\\': code = '\\'; break;
    case '/': code = '/'; break;
    case 'b': code = '\b'; break;
    case 'f': code = '\f'; break;
    case 'n': code = '\n'; break;
    case 'r': code = '\r'; break;
    case 't': code = '\t'; break;
    case 'u': return read_unicode_escape(at, end, to);
    default: return NULL;
    }
    *(*to)++ = code;
    return at;
}

/* Copy plain bytes up to one that is not, or to the end. */
STRING_INLINE cursor
copy_plain(cursor at, cursor end, char **to)
{
    char *out = *to;
    for (; end - at >= 8; at += 8, out += 8) {
        uint64_t word = load_eight(at), special = mask_special(word);
        store_eight(out, word);
        if (special) {
            *to = out + bytes_before(special);
            return at + bytes_before(special);
        }
    }
    while (at < end && !is_special(*at))
        *out++ = *at++;
    *to = out;
    return at;
}

/* Read the text of a string up to its quote, or to the end. */
STRING_INLINE cursor
read_text(cursor at, cursor end, char **to)
{
    for (;;) {
        at = copy_plain(at, end, to);
        if (at == end || *at == '"')
            return at;
        cursor start = at;
        if (*at == '\\')
            at = read_escape(at + 1, end, to);
        else if ((unsigned char)*at >= 0x80)
            at = copy_characters(at, end, to);
        if (at == NULL || at == start)
            return NULL; /* invalid, or a control character */
    }
}

/* Write the length of an element before it; ``to`` is where its length begins. */
STRING_INLINE bool
write_length(char *to, const char *end)
{
    size_t size = (size_t)(end - to) - PREFIX_SIZE;
    uint32_t length = (uint32_t)size;
    memcpy(to, &length, sizeof length);
    return size <= UINT32_MAX;
}

/* Read a string behind its opening quote into an element. */
STRING_INLINE cursor
read_string(cursor at, cursor end, char **to)
{
    char *element = *to;
    *to += PREFIX_SIZE;
    at = read_text(at, end, to);
    return at == NULL || at == end || !write_length(element, *to) ? NULL : at + 1;
}

/* ---- V1's objects ---- */

STRING_INLINE cursor
behind_space(cursor at, cursor end)
{
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r'))
        at++;
    return at;
}

/* Return the position behind a token, and the space before it. */
static cursor
behind_token(cursor at, cursor end, const char *token, size_t size)
{
    at = behind_space(at, end);
    return (size_t)(end - at) >= size && memcmp(at, token, size) == 0 ? at + size : NULL;
}

/* Read {"b64": "..."} behind its opening brace into an element. */
static cursor
read_object(cursor at, cursor end, char **to)
{
    static const char KEY[] = "\"b64\"";
    at = behind_token(at, end, KEY, sizeof KEY - 1);
    if (at != NULL)
        at = behind_token(at, end, ":", 1);
    if (at != NULL)
        at = behind_token(at, end, "\"", 1);
    cursor quote = at == NULL ? NULL : memchr(at, '"', (size_t)(end - at));
    if (quote == NULL)
        return NULL;
    /* Escapes are not in the alphabet. */
    char *element = *to;
    *to = decode_base64(at, (size_t)(quote - at), false, element + PREFIX_SIZE);
    if (*to == NULL || !write_length(element, *to))
        return NULL;
    return behind_token(quote + 1, end, "}", 1);
}

/* ---- The array ---- */

/* Append a bracket or a comma, if anybody wants them. */
STRING_INLINE void
add_mark(struct decoded_strings *to, bool has_marks, char mark)
{
    if (has_marks)
        to->marks[to->marks_size++] = mark;
}

/* Read the elements of a part of an array; return their number, or -1. */
STRING_INLINE ptrdiff_t
read_array(
    cursor at, cursor end, int open_before, int open_after, bool in_v1, struct decoded_strings *to)
{
    char *elements = to->elements;
    int depth = open_before;
    ptrdiff_t count = 0;
    to->marks_size = 0;
    to->has_base64 = false;
    if (depth < 0 || depth > MAX_DEPTH)
        return -1;
    for (;;) {
        /* An element must follow. */
        at = behind_space(at, end);
        if (at == end)
            return -1;
        if (*at == '[') {
            add_mark(to, in_v1, '[');
            if (++depth > MAX_DEPTH)
                return -1;
            at = behind_space(at + 1, end);
            if (at == end || *at != ']')
                continue;
        } else {
            if (depth == 0)
                return -1;
            if (*at == '"') {
                at = read_string(at + 1, end, &elements);
            } else if (in_v1 && *at == '{') {
                at = read_object(at + 1, end, &elements);
                to->has_base64 = true;
            } else {
                return -1;
            }
            if (at == NULL)
                return -1;
            count++;
            at = behind_space(at, end);
        }
        while (depth > 0 && at < end && *at == ']') {
            add_mark(to, in_v1, ']');
            at = behind_space(at + 1, end);
            depth--;
        }
        if (at == end) {
            to->elements_size = (size_t)(elements - to->elements);
            return depth == open_after ? count : -1;
        }
        if (depth == 0 || *at++ != ',')
            return -1;
        add_mark(to, in_v1, ',');
    }
}

ptrdiff_t
decode_strings(
    const char *text, size_t size, int open_before, int open_after, struct decoded_strings *to)
{
    return read_array(text, text + size, open_before, open_after, false, to);
}

ptrdiff_t
decode_elements(
    const char *text, size_t size, int open_before, int open_after, struct decoded_strings *to)
{
    return read_array(text, text + size, open_before, open_after, true, to);
}

ptrdiff_t
decode_text(const char *text, size_t size, char *to)
{
    char *start = to;
    return read_text(text, text + size, &to) == text + size ? to - start : -1;
}

ptrdiff_t
decode_base64_elements(
    const char *data, size_t size, char *to, size_t *used, size_t *written)
{
    const char *at = data, *end = data + size;
    char *start = to;
    ptrdiff_t count = 0;
    while (end - at >= PREFIX_SIZE) {
        uint32_t length;
        memcpy(&length, at, sizeof length);
        if ((size_t)(end - at) - PREFIX_SIZE < length)
            break;
        char *element = to;
        to = decode_base64(at + PREFIX_SIZE, length, true, element + PREFIX_SIZE);
        if (to == NULL)
            return -1;
        write_length(element, to);
        at += PREFIX_SIZE + length;
        count++;
    }
    *used = (size_t)(at - data);
    *written = (size_t)(to - start);
    return count;
}
