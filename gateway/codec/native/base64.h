/* Base64 with the standard alphabet and padding: RFC 4648, section 4. */
#ifndef BASE64_H
#define BASE64_H

#include <stdbool.h>
#include <stddef.h>

/* The size of the text of so many bytes. */
static inline size_t
base64_size(size_t size)
{
    return (size + 2) / 3 * 4;
}

/* The most bytes that so many characters can become. */
static inline size_t
most_decoded(size_t size)
{
    return (size + 3) / 4 * 3;
}

/* Write the text of some bytes; return its end. */
char *encode_base64(const char *data, size_t size, char *to);

/*
 * Decode a text to ``to``, which has room for most_decoded(size); return the end of what was
 * written, NULL if the text is invalid. If ``canonical``, it must be what encode_base64 writes;
 * else all padding may be missing, and unused bits of the last character may be set.
 */
char *decode_base64(const char *text, size_t size, bool canonical, char *to);

#endif
