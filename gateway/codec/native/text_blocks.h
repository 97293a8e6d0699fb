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

#ifdef __x86_64__

#define INLINE VECTOR_INLINE

/* Keeps a branch, of which the next instructions do not wait for the condition. */
#define LIKELY(condition) __builtin_expect(condition, 1)

typedef const char *cursor;

/* Vectors of gcc and clang, whose operators apply to each lane. */
typedef uint16_t pairs __attribute__((vector_size(16)));
typedef uint32_t lanes __attribute__((vector_size(16)));
typedef uint64_t long_lanes __attribute__((vector_size(16)));

enum {
    BLOCK = 64,   /* characters */
    TOGETHER = 4, /* elements that are converted in one step */
};

/* ---- The characters of a block ---- */

/* Returns a bit for each character of a block, the first one lowest: whether it is in a range. */
typedef uint64_t finder(cursor at, char least, char most);

/* The range is moved to the least signed bytes, as bytes are compared with their signs. */
INLINE uint64_t
find_characters(cursor at, char least, char most)
{
    const __m128i offset = _mm_set1_epi8((char)(128 - least));
    const __m128i beyond = _mm_set1_epi8((char)(most - least + 1 - 128));
    uint64_t bits = 0;
    for (int part = 0; part < BLOCK; part += 16) {
        __m128i text = _mm_loadu_si128((const __m128i *)(at + part));
        __m128i found = least == most ? _mm_cmpeq_epi8(text, _mm_set1_epi8(least))
                                      : _mm_cmplt_epi8(_mm_add_epi8(text, offset), beyond);
        bits |= (uint64_t)(uint32_t)_mm_movemask_epi8(found) << part;
    }
    return bits;
}

WIDE INLINE uint64_t
find_characters_avx2(cursor at, char least, char most)
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

/* Join digits to numbers of four digits. */
INLINE lanes
join_digits(block digits)
{
    pairs factor = (pairs){0} + (10 * 256 + 1);
    /* Hidden from gcc, which would multiply by two shifts and two additions. */
    __asm__("" : "+x"(factor));
    pairs joined = (pairs)digits * factor >> 8;
    return (lanes)_mm_madd_epi16((__m128i)joined, _mm_set1_epi32(1 << 16 | 100));
}

WIDE INLINE __m256i
load_halves(const void *first, const void *second)
{
    __m256i half = _mm256_castsi128_si256(_mm_loadu_si128(first));
    return _mm256_inserti128_si256(half, _mm_loadu_si128(second), 1);
}

#endif

#endif
