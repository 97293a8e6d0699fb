/*
 * Decodes floats of an array by blocks of text.
 *
 * Of each number, up to 19 digits are two doubles, and the power of ten is another two. Their
 * product is a double and what that lacks: it gives the nearest float, unless it is as near as the
 * roundings are to the middle of two. After T. J. Dekker, "A floating-point technique for extending
 * the available precision" (1971).
 */
#include "text_blocks.h"

#ifdef WIDE

/* What a block has up to the comma that it is read to; four numbers at most. */
struct float_block {
    int size;                /* up to behind this comma; 0 if there is none */
    uint64_t starts;         /* the first digits, or the point behind a single 0 */
    uint64_t points;         /* the points; what follows on the digits where there is none */
    uint64_t ends;           /* what follows on the last digits */
    uint64_t opened, closed; /* brackets */
};

/* Read the characters of a block, and cut it behind a comma. */
WIDE INLINE struct float_block
read_float_block(cursor at)
{
    struct float_block block = {0};
    struct kinds of = {
        .digits = find_characters_wide(at, '0', '9'),
        .points = find_characters_wide(at, '.', '.'),
        .minus = find_characters_wide(at, '-', '-'),
        .commas = find_characters_wide(at, ',', ','),
        .spaces = find_characters_wide(at, ' ', ' '),
    };
    uint64_t wrong = find_wrong(at, &of, find_characters_wide);
    uint64_t starts = of.digits & ~((of.digits | of.points) << 1);
    uint64_t zeros = find_characters_wide(at, '0', '0') & starts;
    /* A carry moves each from the start to behind its digits. */
    uint64_t whole = (of.digits + starts) & ~of.digits, fractions = of.points << 1 & of.digits;
    wrong |= (of.digits + fractions) & of.points; /* a second point */
    wrong |= zeros << 1 & of.digits;
    wrong |= zeros & of.minus << 1 & ~(of.points >> 1); /* -0, which has no sign */
    zeros &= of.points >> 1;
    wrong |= find_runs((of.digits | of.points) ^ zeros, MOST_CHARACTERS + 1);
    /* A branch: the position of the next block does not wait for all this. */
    if (!LIKELY(wrong == 0))
        of.commas &= (wrong & -wrong) - 1;
    if (of.commas == 0)
        return block;
    uint64_t ends = of.digits << 1 & ~(of.digits | of.points);
    block.size = find_size_of_four(of.commas, ends, BLOCK - __builtin_clzll(of.commas));
    uint64_t valid = UINT64_MAX >> (BLOCK - block.size);
    block.starts = (starts + zeros) & valid;
    block.points = whole & valid;
    block.ends = ends & valid;
    block.opened = of.opened & valid;
    block.closed = of.closed & valid;
    return block;
}

enum { MOST_BEFORE_POINT = 15 };

/* Moves the digits behind a point, by the digits before it, onto it; the last one becomes 0. */
static const _Alignas(64) unsigned char WITHOUT_POINT[MOST_BEFORE_POINT + 1][16] = {
    {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 128},
    {0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 128},
    {0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 128},
    {0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 128},
    {0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 128},
    {0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 128},
    {0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 128},
    {0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 128},
    {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 128},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 128},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 128},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 128},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 128},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 15, 128},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 128},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 128},
};

/* What 19 digits are multiplied by, as a sum of two, by how many are before the point. */
static const double UNITS[MOST_BEFORE_POINT + 1][2] = {
    {1e-19, 2.475407316473987e-36},
    {1e-18, -7.154242405462193e-35},
    {1e-17, -7.154242405462192e-34},
    {1e-16, 2.0902213275965398e-33},
    {1e-15, -7.770539987666108e-32},
    {1e-14, 1.1806906454401013e-32},
    {1e-13, -3.037374556340037e-30},
    {1e-12, 2.0113352370744385e-29},
    {1e-11, 6.050303071806019e-28},
    {1e-10, -3.643219731549774e-27},
    {1e-9, -6.228159145777985e-26},
    {1e-8, -2.092256083012847e-25},
    {1e-7, 4.525188817411374e-24},
    {1e-6, 4.525188817411374e-23},
    {1e-5, -8.180305391403131e-22},
    {1e-4, -4.79217360238593e-21},
};

/* Take the lowest bit off a word; return its position, or BLOCK if there is none. */
WIDE INLINE ptrdiff_t
take_bit_wide(uint64_t *bits)
{
    ptrdiff_t position = position_of_lowest(*bits);
    *bits &= *bits - 1;
    return position;
}

/* A number of a block. */
struct number {
    cursor text;
    const unsigned char *kept; /* masks of its characters */
    ptrdiff_t before;          /* digits before the point */
};

WIDE INLINE struct number
take_number(cursor at, struct float_block *block)
{
    ptrdiff_t start = take_bit_wide(&block->starts), point = take_bit_wide(&block->points);
    const unsigned char *kept = KEPT_BITS + 2 * MOST_CHARACTERS;
    kept -= take_bit_wide(&block->ends) - start;
    return (struct number){at + start, kept, point - start};
}

/* Return the first 15 digits of two numbers, and a 0 behind them. */
WIDE INLINE quad
load_two(struct number a, struct number b)
{
    quad digits = load_halves(a.text, b.text) & load_halves(a.kept, b.kept);
    return bytes_at(digits, load_halves(WITHOUT_POINT[a.before], WITHOUT_POINT[b.before]));
}

/* Numbers, each as a sum of two doubles. */
struct sums {
    doubles large, small;
};

/* Add the digits of four numbers. */
WIDE INLINE struct sums
add_digits(struct number a, struct number b, struct number c, struct number d)
{
    quad eights = join_sixteens(load_two(a, c), load_two(b, d));
    lanes text = {
        load_four(a.text + 16), load_four(b.text + 16), load_four(c.text + 16),
        load_four(d.text + 16)};
    lanes kept = {
        load_four(a.kept + 16), load_four(b.kept + 16), load_four(c.kept + 16),
        load_four(d.kept + 16)};
    doubles last = doubles_of(join_digits((block)(text & kept)));
    /* All of them are exact. */
    doubles upper = doubles_of(lower_halves(eights)) * 1e11;
    doubles lower = doubles_of(upper_halves(eights)) * 1e3 + last, sum = upper + lower;
    return (struct sums){sum, lower - (sum - upper)};
}

/* Return four of the doubles of UNITS. */
WIDE INLINE doubles
load_units(struct number a, struct number b, struct number c, struct number d, int part)
{
    return (doubles){
        UNITS[a.before][part], UNITS[b.before][part], UNITS[c.before][part],
        UNITS[d.before][part]};
}

/* Return ones in the lanes of negative numbers: "-" is before them, or "-0" before a point. */
WIDE INLINE lanes
are_negative(struct number a, struct number b, struct number c, struct number d)
{
    lanes text = {
        load_four(a.text - 4), load_four(b.text - 4), load_four(c.text - 4),
        load_four(d.text - 4)};
    return (lanes)((lanes)((block)text == '-') >> 16 != 0);
}

/* Convert up to four numbers, which the block was cut behind. Return NULL if one is unusual. */
WIDE INLINE char *
convert_floats(cursor at, struct float_block block, int size, char *to)
{
    const int count = __builtin_popcountll(block.ends);
    struct number a = take_number(at, &block), b = take_number(at, &block);
    struct number c = take_number(at, &block), d = take_number(at, &block);
    if ((a.before | b.before | c.before | d.before) > MOST_BEFORE_POINT)
        return NULL;
    struct sums digits = add_digits(a, b, c, d);
    doubles unit = load_units(a, b, c, d, 0), product = digits.large * unit;
    lanes negative = are_negative(a, b, c, d);
    unsigned differ;
    if (size == 4) {
        /* Four roundings move it by 2^-51 at most. */
        doubles doubt = product * 0x1p-50;
        lanes least = (lanes)__builtin_convertvector(product - doubt, floats);
        lanes most = (lanes)__builtin_convertvector(product + doubt, floats);
        differ = ~bits_of_lanes((lanes)(least == most));
        least |= negative << 31;
        memcpy(to, &least, sizeof least);
    } else {
        doubles small = multiply_add(digits.large, unit, -product);
        small = multiply_add(digits.small, unit, small);
        small = multiply_add(digits.large, load_units(a, b, c, d, 1), small);
        /* Several roundings move it by 2^-100 at most. */
        doubles doubt = product * 0x1p-98;
        doubles least = product + (small - doubt), most = product + (small + doubt);
        differ = bits_of_quad((quad)(least - most)); /* less than 0, or 0 */
        quad bits = (quad)least | widen(negative) << 63;
        memcpy(to, &bits, sizeof bits);
    }
    return differ & ((1U << count) - 1) ? NULL : to + count * size;
}

WIDE INLINE cursor
decode_floats_of(cursor at, cursor end, int size, int *depth, char **to)
{
    while (end - at >= BLOCK_AHEAD) {
        struct float_block block = read_float_block(at);
        int open_behind = depth_behind(block.opened, block.closed, *depth);
        if (block.size == 0 || open_behind == 0)
            break;
        char *behind = convert_floats(at, block, size, *to);
        if (behind == NULL)
            break;
        *to = behind;
        *depth = open_behind;
        at += block.size;
    }
    return at;
}

/* Tell whether sums are rounded to nearest, which another library may have changed. */
INLINE bool
rounds_to_nearest(void)
{
    const volatile double small = 0x1p-60;
    return 1 + small == 1 - small;
}

WIDE static cursor
decode_fp32(cursor at, cursor end, int *depth, char **to)
{
    return decode_floats_of(at, end, 4, depth, to);
}

WIDE static cursor
decode_fp64(cursor at, cursor end, int *depth, char **to)
{
    return decode_floats_of(at, end, 8, depth, to);
}

const char *
decode_floats(const char *at, const char *end, enum datatype datatype, int *depth, char **to)
{
    if ((datatype != FP32 && datatype != FP64) || !has_wide() || !rounds_to_nearest())
        return at;
    return datatype == FP32 ? decode_fp32(at, end, depth, to) : decode_fp64(at, end, depth, to);
}

#else

const char *
decode_floats(const char *at, const char *end, enum datatype datatype, int *depth, char **to)
{
    (void)end, (void)datatype, (void)depth, (void)to;
    return at;
}

#endif
