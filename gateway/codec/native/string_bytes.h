/* Reads the bytes of strings, eight at a time where they are plain; shared by all that does so. */
#ifndef STRING_BYTES_H
#define STRING_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "eight bytes are loaded as a little-endian word"
#endif

/* Everything for a short string is inlined: it takes less time than a few calls. */
#define STRING_INLINE __attribute__((always_inline)) static inline

enum { PREFIX_SIZE = 4 /* bytes of the length before each element */ };

/* ---- Eight bytes at a time ---- */

static const uint64_t EACH_BYTE = 0x0101010101010101;
static const uint64_t TOP_BITS = 0x8080808080808080;

STRING_INLINE uint64_t
load_eight(const char *from)
{
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

STRING_INLINE void
store_eight(char *to, uint64_t word)
{
    memcpy(to, &word, sizeof word);
}

/* Set the top bit of each byte that equals one of ASCII; the lowest one set is certain. */
STRING_INLINE uint64_t
mask_equal(uint64_t word, char code)
{
    return ((word ^ EACH_BYTE * (unsigned char)code) - EACH_BYTE) & ~word & TOP_BITS;
}

/* Set the top bits of quotes, backslashes, controls and all but ASCII; the lowest is certain. */
STRING_INLINE uint64_t
mask_special(uint64_t word)
{
    uint64_t quotes = (word ^ EACH_BYTE * '"') - EACH_BYTE;
    uint64_t backslashes = (word ^ EACH_BYTE * '\\') - EACH_BYTE;
    uint64_t controls = word - EACH_BYTE * ' ';
    return (quotes | backslashes | controls | word) & TOP_BITS;
}

/* Return the number of bytes before the lowest one marked. */
STRING_INLINE int
bytes_before(uint64_t mask)
{
    return __builtin_ctzll(mask) / 8;
}

STRING_INLINE bool
is_special(char c)
{
    return (unsigned char)c < ' ' || (unsigned char)c >= 0x80 || c == '"' || c == '\\';
}

/* ---- UTF-8 ---- */

/* Return the size of the character other than ASCII that stands here; 0 if it is invalid. */
STRING_INLINE int
character_size(const char *at, const char *end)
{
    uint32_t word = 0;
    if (end - at >= 4)
        memcpy(&word, at, sizeof word);
    else
        memcpy(&word, at, (size_t)(end - at)); /* zeros continue no character */
    if ((word & 0xC0E0) == 0x80C0)
        return word & 0x1E ? 2 : 0; /* else it is an overlong form of ASCII */
    if ((word & 0xC0C0F0) == 0x8080E0) {
        uint32_t top = word & 0x200F; /* 0: overlong, D with the upper bit: a surrogate */
        return top != 0 && top != 0x200D ? 3 : 0;
    }
    if ((word & 0xC0C0C0F8) != 0x808080F0 || (word & 0x3007) == 0)
        return 0;
    return (word & 7) < 4 || (word & 0x3007) == 4 ? 4 : 0; /* up to U+10FFFF */
}

/*
 * Copy a character other than ASCII, and those that follow it; stops at one that is invalid. No
 * more is written than is read.
 */
STRING_INLINE const char *
copy_characters(const char *at, const char *end, char **to)
{
    char *out = *to;
    do {
        int size = character_size(at, end);
        if (size == 0)
            break;
        memcpy(out, at, end - at >= 4 ? 4 : (size_t)size);
        /* Branches, as these are predicted: the next character need not wait for the size. */
        if (size == 3) {
            at += 3;
            out += 3;
        } else if (size == 2) {
            at += 2;
            out += 2;
        } else {
            at += 4;
            out += 4;
        }
    } while (at < end && (unsigned char)*at >= 0x80);
    *to = out;
    return at;
}

#endif
