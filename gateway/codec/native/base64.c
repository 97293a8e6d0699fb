#include "base64.h"

#include <stdint.h>
#include <string.h>

static const char ALPHABET[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/* The value of each character of the alphabet, with VALID added; 0 for all others. */
enum { VALID = 64 };
static const unsigned char VALUES[256] = {
    ['A'] = 64, ['B'] = 65, ['C'] = 66, ['D'] = 67, ['E'] = 68, ['F'] = 69, ['G'] = 70,
    ['H'] = 71, ['I'] = 72, ['J'] = 73, ['K'] = 74, ['L'] = 75, ['M'] = 76, ['N'] = 77,
    ['O'] = 78, ['P'] = 79, ['Q'] = 80, ['R'] = 81, ['S'] = 82, ['T'] = 83, ['U'] = 84,
    ['V'] = 85, ['W'] = 86, ['X'] = 87, ['Y'] = 88, ['Z'] = 89, ['a'] = 90, ['b'] = 91,
    ['c'] = 92, ['d'] = 93, ['e'] = 94, ['f'] = 95, ['g'] = 96, ['h'] = 97, ['i'] = 98,
    ['j'] = 99, ['k'] = 100, ['l'] = 101, ['m'] = 102, ['n'] = 103, ['o'] = 104, ['p'] = 105,
    ['q'] = 106, ['r'] = 107, ['s'] = 108, ['t'] = 109, ['u'] = 110, ['v'] = 111, ['w'] = 112,
    ['x'] = 113, ['y'] = 114, ['z'] = 115, ['0'] = 116, ['1'] = 117, ['2'] = 118, ['3'] = 119,
    ['4'] = 120, ['5'] = 121, ['6'] = 122, ['7'] = 123, ['8'] = 124, ['9'] = 125, ['+'] = 126,
    ['/'] = 127,
};

/* What VALID adds to the value of four characters. */
static const uint32_t VALID_FOUR = VALID << 18 ^ VALID << 12 ^ VALID << 6 ^ VALID;

static unsigned char
value_of(char c)
{
    return VALUES[(unsigned char)c];
}

/* Return the value of four characters; sets ``valid`` to 0 if any is not in the alphabet. */
static inline uint32_t
value_of_four(const char *text, unsigned *valid)
{
    unsigned char first = value_of(text[0]), second = value_of(text[1]);
    unsigned char third = value_of(text[2]), fourth = value_of(text[3]);
    *valid &= first & second & third & fourth;
    return ((uint32_t)first << 18 ^ (uint32_t)second << 12 ^ (uint32_t)third << 6 ^ fourth)
        ^ VALID_FOUR;
}

/* ---- Encoding ---- */

/* Write the four characters of three bytes. */
static inline void
encode_three(uint32_t value, char *to)
{
    to[0] = ALPHABET[value >> 18 & 63];
    to[1] = ALPHABET[value >> 12 & 63];
    to[2] = ALPHABET[value >> 6 & 63];
    to[3] = ALPHABET[value & 63];
}

static inline uint32_t
load_three(const unsigned char *from)
{
    return (uint32_t)from[0] << 16 | (uint32_t)from[1] << 8 | from[2];
}

char *
encode_base64(const char *data, size_t size, char *to)
{
    const unsigned char *at = (const unsigned char *)data, *end = at + size;
    for (; end - at >= 8; at += 6, to += 8) {
        uint64_t word;
        memcpy(&word, at, sizeof word);
        word = __builtin_bswap64(word);
        encode_three((uint32_t)(word >> 40), to);
        encode_three((uint32_t)(word >> 16), to + 4);
    }
    for (; end - at >= 3; at += 3, to += 4)
        encode_three(load_three(at), to);
    if (at < end) {
        const unsigned char last[3] = {at[0], end - at > 1 ? at[1] : 0, 0};
        encode_three(load_three(last), to);
        if (end - at == 1)
            to[2] = '=';
        to[3] = '=';
        to += 4;
    }
    return to;
}

/* ---- Decoding ---- */

static inline void
store_three(uint32_t value, char *to)
{
    to[0] = (char)(value >> 16);
    to[1] = (char)(value >> 8);
    to[2] = (char)value;
}

/* Decode the last two or three characters before the padding; NULL if they are invalid. */
static char *
decode_last(const char *text, size_t size, bool canonical, char *to)
{
    const char last[4] = {text[0], text[1], size == 3 ? text[2] : 'A', 'A'};
    unsigned valid = VALID;
    uint32_t value = value_of_four(last, &valid);
    uint32_t unused = value & (size == 3 ? 0xFF : 0xFFFF);
    if (!valid || (canonical && unused))
        return NULL;
    *to++ = (char)(value >> 16);
    if (size == 3)
        *to++ = (char)(value >> 8);
    return to;
}

char *
decode_base64(const char *text, size_t size, bool canonical, char *to)
{
    size_t padding = 0;
    if (size > 0 && text[size - 1] == '=')
        padding = size > 1 && text[size - 2] == '=' ? 2 : 1;
    if ((padding || canonical) && size % 4)
        return NULL;
    const char *at = text, *end = text + (size - padding);
    unsigned valid = VALID;
    /* While there is a ninth character, there is room for eight bytes. */
    for (; end - at > 8; at += 8, to += 6) {
        uint64_t word = (uint64_t)value_of_four(at, &valid) << 40;
        word = __builtin_bswap64(word | (uint64_t)value_of_four(at + 4, &valid) << 16);
        memcpy(to, &word, sizeof word);
    }
    for (; end - at >= 4; at += 4, to += 3)
        store_three(value_of_four(at, &valid), to);
    if (!valid || end - at == 1)
        return NULL;
    return at < end ? decode_last(at, (size_t)(end - at), canonical, to) : to;
}
