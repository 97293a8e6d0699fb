/*
 * Reads the text of an array of numbers by blocks of 64 characters.
 *
 * After Geoff Langdale and Daniel Lemire, "Parsing Gigabytes of JSON per Second" (2019): a word has
 * a bit for each character. Words for digits, commas and so on tell with a few operations whether
 * the grammar holds, and where each element ends. Then four elements at a time are converted,
 * whatever their lengths are. One by one, each would wait for the end of the one before.
 *
 * The caller reads what is unusual: all but elements, commas, single spaces behind them and
 * brackets.
 */
#ifndef TEXT_BLOCKS_H
#define TEXT_BLOCKS_H

#include <stddef.h>

#include "decode_blocks.h"
#include "vectors.h"

#ifdef WIDE

#define INLINE VECTOR_INLINE

/* Keeps a branch, of which the next instructions do not wait for the condition. */
#define LIKELY(condition) __builtin_expect(condition, 1)

typedef const char *cursor;

enum {
    BLOCK = 64,   /* characters */
    TOGETHER = 4, /* elements that are converted in one step */
};

/* ---- The characters of a block ---- */

/* Returns a bit for each character of a block, the first one lowest: whether it is in a range. */
typedef uint64_t finder(cursor at, char least, char most);

/* The range is moved to the least signed bytes, as bytes are compared with their signs. */
INLINE block
find_in_sixteen(cursor at, char least, char most)
{
    block text = load_block(at);
    const int8_t beyond = (int8_t)(most - least + 1 - 128);
    if (least == most)
        return (block)(text == (uint8_t)least);
    return (block)((signed_block)(text + (uint8_t)(128 - least)) < beyond);
}

INLINE uint64_t
find_characters(cursor at, char least, char most)
{
    block first = find_in_sixteen(at, least, most), second = find_in_sixteen(at + 16, least, most);
    block third = find_in_sixteen(at + 32, least, most);
    return bits_of_four(first, second, third, find_in_sixteen(at + 48, least, most));
}

#ifdef __x86_64__
WIDE INLINE uint64_t
find_characters_wide(cursor at, char least, char most)
{
    __m256i offset = _mm256_set1_epi8((char)(128 - least));
    __m256i beyond = _mm256_set1_epi8((char)(least == most ? least : most - least + 1 - 128));
    /* Hidden from gcc, which would make constants anew for each block, by three instructions. */
    __asm__("" : "+x"(offset), "+x"(beyond));
    uint64_t bits = 0;
    for (int part = 0; part < BLOCK; part += 32) {
        __m256i text = _mm256_loadu_si256((const __m256i *)(at + part));
        __m256i found = least == most ? _mm256_cmpeq_epi8(text, beyond)
                                      : _mm256_cmpgt_epi8(beyond, _mm256_add_epi8(text, offset));
        bits |= (uint64_t)(uint32_t)_mm256_movemask_epi8(found) << part;
    }
    return bits;
}
#else
#define find_characters_wide find_characters
#endif

/* Return the bits that are at least the ``length``-th one in a row. Loops would not be unrolled. */
INLINE uint64_t
find_runs(uint64_t bits, int length)
{
    uint64_t two = bits & bits << 1, four = two & two << 2, eight = four & four << 4;
    uint64_t sixteen = eight & eight << 8;
    switch (length) {
    case 4: return four;
    case 6: return four & two << 4;
    case 8: return eight;
    case 17: return sixteen & bits << 16;
    default: return sixteen & four << 16 & bits << 20;
    }
}

/* Take the lowest bit off a word; return its position, or that of the highest if there is none. */
INLINE ptrdiff_t
take_bit(uint64_t *bits)
{
    ptrdiff_t position = __builtin_ctzll(*bits | 1ULL << 63);
    *bits &= *bits - 1;
    return position;
}

/* The characters of a block by their kind. The digits are letters among booleans. */
struct kinds {
    uint64_t digits, points, minus, commas, spaces, opened, closed;
};

/* Find characters that cannot stand behind those before. The first one is as if behind a comma. */
INLINE uint64_t
find_misplaced(struct kinds of)
{
    uint64_t on_digit = of.digits << 1, on_closed = of.closed << 1, on_comma = of.commas << 1 | 1;
    uint64_t on_start = on_comma | of.spaces << 1 | of.opened << 1;
    uint64_t misplaced = of.digits & on_closed;
    misplaced |= (of.points & ~on_digit) | (of.points << 1 & ~of.digits);
    misplaced |= (of.minus | of.opened) & ~on_start;
    misplaced |= (of.commas | of.closed) & ~(on_digit | on_closed);
    return misplaced | (of.spaces & ~on_comma);
}

/* Find brackets if there are any, and all characters that are unknown or misplaced. */
INLINE uint64_t
find_wrong(cursor at, struct kinds *of, finder *find)
{
    uint64_t others = ~(of->digits | of->points | of->minus | of->commas | of->spaces);
    if (others == 0)
        return find_misplaced(*of); /* with fewer instructions, as there are no brackets */
    of->opened = find(at, '[', '[');
    of->closed = find(at, ']', ']');
    return (others & ~(of->opened | of->closed)) | find_misplaced(*of);
}

/* Return the size up to the comma behind the fourth element, or else up to the last one. */
INLINE int
find_size_of_four(uint64_t commas, uint64_t ends, int size)
{
    for (int i = 1; i < TOGETHER; i++)
        ends &= ends - 1;
    commas &= -(ends & -ends);
    return LIKELY(commas == 0) ? size : __builtin_ctzll(commas) + 1;
}

/* Return how many brackets are open behind some; 0 if ever too many are, or none. */
INLINE int
depth_behind(uint64_t opened, uint64_t closed, int depth)
{
    for (uint64_t all = opened | closed; all != 0; all &= all - 1) {
        depth += opened & all & -all ? 1 : -1;
        if (depth < 1 || depth > MAX_DEPTH)
            return 0;
    }
    return depth;
}

/* ---- Four elements ---- */

enum { MOST_CHARACTERS = 20 /* of a number, with the point */ };

/*
 * Masks that keep the value of each of so many digits among MOST_CHARACTERS: at the end if read
 * from their number on, at the start if read from as far before the last third.
 */
static const _Alignas(64) unsigned char KEPT_BITS[3 * MOST_CHARACTERS] = {
    [MOST_CHARACTERS] = 15, 15, 15, 15, 15, 15, 15, 15, 15, 15,
    15, 15, 15, 15, 15, 15, 15, 15, 15, 15};

INLINE uint32_t
load_four(const void *from)
{
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

#endif

#endif
