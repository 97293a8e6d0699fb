/*
 * Encodes BYTES elements as JSON strings: text with the escapes that orjson writes, or base64.
 *
 * Most elements are short and plain: ASCII without escapes. Eight bytes are copied at once, also
 * from behind the element; what is copied too much is overwritten.
 */
#include "encode_strings.h"

#include "base64.h"
#include "string_bytes.h"

enum {
    MAX_ESCAPE = 6, /* \u001f */
    SPARE = 16,     /* bytes behind the text that may be overwritten, and the closing quote */
};

/* The data that may be read, and the end of the room. */
struct bounds {
    const char *readable;
    char *limit; /* without SPARE */
};

/* ---- One string ---- */

/* Write the escape of a quote, a backslash or a control character. */
static char *
write_escape(char code, char *to)
{
    static const char DIGITS[] = "0123456789abcdef";
    *to++ = '\\';
    switch (code) {
    case '\b': *to++ = 'b'; break;
    case '\t': *to++ = 't'; break;
    case '\n': *to++ = 'n'; break;
    case '\f': *to++ = 'f'; break;
    case '\r': *to++ = 'r'; break;
    case '"':
    case '\\': *to++ = code; break;
    default:
        memcpy(to, "u00", 3);
        to[3] = DIGITS[code >> 4];
        to[4] = DIGITS[code & 15];
        to += 5;
    }
    return to;
}

/* Copy plain bytes up to one that is not, or to the end. */
STRING_INLINE const char *
copy_plain(const char *at, const char *end, const struct bounds *bounds, char **to)
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
    if (at < end && bounds->readable - at >= 8) {
        uint64_t word = load_eight(at), special = mask_special(word);
        store_eight(out, word);
        ptrdiff_t size = special ? bytes_before(special) : 8;
        if (size > end - at)
            size = end - at;
        *to = out + size;
        return at + size;
    }
    while (at < end && !is_special(*at))
        *out++ = *at++;
    *to = out;
    return at;
}

/* Write text; stops where the bytes are not UTF-8. Sets ``to`` to NULL if there is no room. */
STRING_INLINE const char *
write_text(const char *at, const char *end, const struct bounds *bounds, char **to)
{
    if (bounds->limit - *to < end - at) {
        *to = NULL;
        return at;
    }
    for (;;) {
        at = copy_plain(at, end, bounds, to);
        if (at == end)
            return at;
        if ((unsigned char)*at >= 0x80) {
            const char *start = at;
            at = copy_characters(at, end, to);
            if (at == start || at == end)
                return at;
            continue;
        }
        if (bounds->limit - *to < end - at + MAX_ESCAPE) {
            *to = NULL;
            return at;
        }
        *to = write_escape(*at++, *to);
    }
}

/* ---- The array ---- */

/* Write what separates an element from the one before it. */
STRING_INLINE char *
write_separator(uint64_t index, const struct string_layout *layout, char *to)
{
    if (layout->level_count == 0) {
        *to = ',';
        return to + (index > 0);
    }
    size_t begun = 0; /* levels of which a row begins here; of the outermost, only the first */
    for (; begun < layout->level_count - (index > 0); begun++) {
        uint64_t size;
        memcpy(&size, layout->row_sizes + begun * sizeof size, sizeof size);
        if (index % size)
            break;
    }
    if (index > 0) {
        memset(to, ']', begun);
        to += begun;
        *to++ = ',';
    }
    memset(to, '[', begun);
    return to + begun;
}

/* Write an element in its quotes; NULL if there is no room. Sets ``valid`` to 0 if it is no text. */
STRING_INLINE char *
write_element(
    const char *at, size_t size, enum string_form form, const struct bounds *bounds, char *to,
    bool *valid)
{
    if (form == TEXT) {
        *to++ = '"';
        *valid = write_text(at, at + size, bounds, &to) == at + size;
        if (to != NULL)
            *to++ = '"';
        return to;
    }
    if (bounds->limit - to < (ptrdiff_t)base64_size(size))
        return NULL;
    static const char OPENING[] = "{\"b64\":\"";
    bool is_object = form == BASE64_OBJECT;
    if (is_object) {
        memcpy(to, OPENING, sizeof OPENING - 1);
        to += sizeof OPENING - 1;
    } else {
        *to++ = '"';
    }
    to = encode_base64(at, size, to);
    *to++ = '"';
    if (is_object)
        *to++ = '}';
    return to;
}

/* Encode elements in one form: inlined, as a decision for each element costs a tenth. */
STRING_INLINE ptrdiff_t
write_array(
    const char *data, size_t size, enum string_form form, const struct string_layout *layout,
    char *to, size_t room, size_t *used, uint64_t *count)
{
    const char *at = data, *end = data + size;
    char *start = to;
    const size_t spare = SPARE + 2 * layout->level_count; /* the brackets before an element */
    if (room < spare)
        return NO_ROOM;
    const struct bounds bounds = {end, start + room - SPARE};
    uint64_t index = layout->first_index;
    while (end - at >= PREFIX_SIZE) {
        uint32_t length;
        memcpy(&length, at, sizeof length);
        if ((size_t)(end - at) - PREFIX_SIZE < length)
            break;
        if (to > start + (room - spare))
            return NO_ROOM;
        to = write_separator(index, layout, to);
        bool valid = true;
        to = write_element(at + PREFIX_SIZE, length, form, &bounds, to, &valid);
        if (to == NULL)
            return NO_ROOM;
        if (!valid)
            return NOT_UTF8;
        at += PREFIX_SIZE + (size_t)length;
        index++;
    }
    *used = (size_t)(at - data);
    *count = index - layout->first_index;
    return to - start;
}

ptrdiff_t
encode_strings(
    const char *data, size_t size, const struct string_layout *layout, char *to, size_t room,
    size_t *used, uint64_t *count)
{
    if (layout->form == TEXT)
        return write_array(data, size, TEXT, layout, to, room, used, count);
    if (layout->form == BASE64)
        return write_array(data, size, BASE64, layout, to, room, used, count);
    return write_array(data, size, BASE64_OBJECT, layout, to, room, used, count);
}

/* Tell whether a character that is cut off at the end may begin here. */
static bool
is_cut_off(const char *at, const char *end)
{
    unsigned char first = (unsigned char)*at;
    ptrdiff_t size = first < 0xC0 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    return end - at < size;
}

ptrdiff_t
encode_text(const char *data, size_t size, char *to, size_t room, size_t *used)
{
    const char *end = data + size;
    char *start = to;
    if (room < SPARE)
        return NO_ROOM;
    const struct bounds bounds = {end, start + room - SPARE};
    const char *at = write_text(data, end, &bounds, &to);
    if (to == NULL)
        return NO_ROOM;
    if (at < end && !is_cut_off(at, end))
        return NOT_UTF8;
    *used = (size_t)(at - data);
    return to - start;
}
