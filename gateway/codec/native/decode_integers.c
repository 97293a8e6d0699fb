/*
 * Decodes integers and booleans of an array by blocks of text.
 *
 * With SSE2 alone, the caller also reads numbers of more than seven digits, just as quickly.
 */
#include "decode_blocks.h"

#include "text_blocks.h"

#ifdef WIDE

/* What a block has up to the comma that it is read to. */
struct text_block {
    int size;                /* up to behind this comma; 0 if there is none */
    uint64_t starts;         /* the first digits or letters of elements */
    uint64_t ends;           /* what follows on their last ones */
    uint64_t opened, closed; /* brackets */
    bool is_long;            /* whether any number has more than 7 digits */
    bool is_longest;         /* whether any has more than 16 digits */
};

/* What differs between processors. ``convert_long`` is NULL if only shorter numbers are read. */
struct functions {
    finder *find;
    char *(*convert_long)(
        cursor at, const struct text_block *block, enum datatype datatype, int size, char *to);
};

/* Find words that end in no e, or have one before, and those of six letters. */
INLINE uint64_t
find_misspelled(cursor at, uint64_t letters, finder *find)
{
    /* Whether the last letter of a block ends a word is unknown. */
    uint64_t last = letters & ~(letters >> 1), known = UINT64_MAX >> 1;
    return find_runs(letters, 6) | ((find(at, 'e', 'e') ^ last) & known);
}

/* Find digits behind a first zero, and those that are too many. */
INLINE uint64_t
find_miswritten(cursor at, uint64_t digits, int size, struct functions use)
{
    uint64_t first_zeros = use.find(at, '0', '0') & ~(digits << 1);
    int too_many = size == 1 ? 4 : size == 2 || use.convert_long == NULL ? 8 : size == 4 ? 17 : 21;
    return (digits & first_zeros << 1) | find_runs(digits, too_many);
}

/* Read the characters of a block, and cut it behind a comma. */
INLINE struct text_block
read_block(cursor at, enum datatype datatype, int size, struct functions use)
{
    struct text_block block = {0};
    struct kinds of = {
        .digits = datatype == BOOL ? use.find(at, 'a', 'z') : use.find(at, '0', '9'),
        .minus = datatype >= INT8 ? use.find(at, '-', '-') : 0,
        .commas = use.find(at, ',', ','),
        .spaces = use.find(at, ' ', ' '),
    };
    uint64_t wrong = find_wrong(at, &of, use.find);
    wrong |= datatype == BOOL ? find_misspelled(at, of.digits, use.find)
                              : find_miswritten(at, of.digits, size, use);
    /* A branch: the position of the next block does not wait for all this. */
    if (!LIKELY(wrong == 0))
        of.commas &= (wrong & -wrong) - 1;
    if (of.commas == 0)
        return block;
    uint64_t ends = of.digits << 1 & ~of.digits;
    block.size = BLOCK - __builtin_clzll(of.commas);
    if (size >= 4 && use.convert_long != NULL) {
        uint64_t valid = UINT64_MAX >> (BLOCK - block.size);
        block.is_long = (find_runs(of.digits, 8) & valid) != 0;
        block.is_longest = size == 8 && (find_runs(of.digits, 17) & valid) != 0;
        if (block.is_long)
            block.size = find_size_of_four(of.commas, ends, block.size);
    }
    uint64_t valid = UINT64_MAX >> (BLOCK - block.size);
    block.starts = of.digits & ~(of.digits << 1) & valid;
    block.ends = ends & valid;
    block.opened = of.opened & valid;
    block.closed = of.closed & valid;
    return block;
}

/* ---- Short elements ---- */

INLINE uint64_t
load_eight(const void *from)
{
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

/* Load four characters for each of the next four bits. */
INLINE lanes
gather_lanes(cursor at, uint64_t *bits)
{
    uint32_t first = load_four(at + take_bit(bits)), second = load_four(at + take_bit(bits));
    uint32_t third = load_four(at + take_bit(bits)), fourth = load_four(at + take_bit(bits));
    return (lanes){first, second, third, fourth};
}

INLINE lanes
load_lanes(const void *from)
{
    lanes all;
    memcpy(&all, from, sizeof all);
    return all;
}

/* Negate all values but the positive ones. */
INLINE lanes
negate(lanes values, lanes are_positive)
{
    return (values ^ ~are_positive) - ~are_positive;
}

/* Convert numbers of up to three digits. Each is at the end of a lane, behind another character. */
INLINE lanes
convert_three_digits(cursor at, uint64_t *ends, bool is_signed)
{
    block text = (block)gather_lanes(at - 4, ends) ^ '0';
    /* What is no digit, and all before it in a lane. */
    lanes others = (lanes)((signed_block)text > 9);
    others |= others >> 8;
    others |= others >> 16;
    lanes values = join_digits(text & ~(block)others);
    if (!is_signed)
        return values;
    lanes minus = (lanes)(text == ('-' ^ '0')) & ~(others >> 8);
    return negate(values, (lanes)(minus == 0));
}

/* Convert two numbers of up to seven digits; ``minus`` is not 0 in lanes of negative ones. */
INLINE lanes
convert_two(cursor at, uint64_t *ends, long_lanes *minus)
{
    uint64_t first = load_eight(at + take_bit(ends)), second = load_eight(at + take_bit(ends));
    block text = (block)(long_lanes){first, second} ^ '0';
    long_lanes others = (long_lanes)((signed_block)text > 9);
    others |= others >> 8;
    others |= others >> 16;
    others |= others >> 32;
    *minus = (long_lanes)(text == ('-' ^ '0')) & ~(others >> 8);
    return join_digits(text & ~(block)others);
}

/* Convert four numbers of up to seven digits. */
INLINE lanes
convert_seven_digits(cursor at, uint64_t *ends, bool is_signed)
{
    long_lanes minus[2];
    lanes first = convert_two(at - 8, ends, &minus[0]);
    lanes values = join_fours(first, convert_two(at - 8, ends, &minus[1]));
    return is_signed ? negate(values, are_zero(minus[0], minus[1])) : values;
}

/* Convert words that end in e; ``misfits`` are those that are neither true nor false. */
INLINE lanes
convert_booleans(cursor at, uint64_t *starts, lanes *misfits)
{
    lanes text = gather_lanes(at, starts);
    lanes are_true = (lanes)(text == load_four("true"));
    *misfits = ~(are_true | (lanes)(text == load_four("fals")));
    return -are_true;
}

INLINE void
store_lanes(lanes values, int size, bool is_signed, char *to)
{
    if (size <= 2) {
        uint64_t word = narrow(values, size);
        memcpy(to, &word, (size_t)(TOGETHER * size));
    } else if (size == 4) {
        memcpy(to, &values, sizeof values);
    } else {
        quad all = __builtin_convertvector(values, quad);
        if (is_signed)
            all = (quad)__builtin_convertvector((signed_lanes)values, quad);
        memcpy(to, &all, sizeof all);
    }
}

/*
 * Convert the elements of a block without long ones. Return NULL if one does not fit. The last step
 * may write more elements than there are: the text that is left has room for them.
 */
INLINE char *
convert_short(cursor at, const struct text_block *block, enum datatype datatype, int size, char *to)
{
    static const uint32_t used[2 * TOGETHER] = {~0U, ~0U, ~0U, ~0U};
    const bool is_signed = datatype >= INT8;
    const uint32_t least = is_signed && size < 4 ? -(1U << (8 * size - 1)) : 0;
    uint64_t left = datatype == BOOL ? block->starts : block->ends;
    const int count = __builtin_popcountll(left), unused = -count & (TOGETHER - 1);
    lanes misfits = {0}, last = {0};
    while (left != 0) {
        misfits |= last;
        lanes values;
        if (datatype == BOOL) {
            values = convert_booleans(at, &left, &last);
        } else if (size == 1) {
            values = convert_three_digits(at, &left, is_signed);
            last = (values - least) >> 8;
        } else {
            values = convert_seven_digits(at, &left, is_signed);
            if (size == 2)
                last = (values - least) >> 16;
        }
        store_lanes(values, size, is_signed, to);
        to += TOGETHER * size;
    }
    long_lanes all = (long_lanes)(misfits | (last & load_lanes(used + unused)));
    return all[0] | all[1] ? NULL : to - unused * size;
}

/* ---- Long numbers ---- */

/* Where a number of a block starts and ends. */
struct number {
    ptrdiff_t start, end;
};

INLINE struct number
take_number(uint64_t *starts, uint64_t *ends)
{
    ptrdiff_t start = take_bit(starts);
    return (struct number){start, take_bit(ends)};
}

INLINE const unsigned char *
kept_bits(struct number number)
{
    return KEPT_BITS + (number.end - number.start);
}

/* Return the last 16 digits of two numbers. */
WIDE INLINE quad
load_two(cursor at, struct number a, struct number b)
{
    quad text = load_halves(at + a.end - 16, at + b.end - 16);
    return text & load_halves(kept_bits(a) + 4, kept_bits(b) + 4);
}

/* Add what is before the last 16 digits. The highest bits of ``misfits`` tell what is too large. */
WIDE INLINE quad
add_upper(quad values, lanes digits, bool is_signed, quad *misfits)
{
    const uint64_t unit = 10000000000000000;
    lanes fours = join_digits((block)digits), most = (lanes){0} + (is_signed ? 922U : 1844U);
    quad upper = multiply_lower(widen(fours), fill((uint32_t)unit));
    upper += multiply_lower(widen(fours), fill(unit >> 32)) << 32;
    quad sums = values + upper;
    /* A carry: the highest bit was set before, and is not now. */
    *misfits = widen(most - fours) | (upper & ~sums);
    return sums;
}

/* Convert up to four numbers, which the block was cut behind. Return NULL if one does not fit. */
WIDE INLINE char *
convert_long(cursor at, const struct text_block *block, enum datatype datatype, int size, char *to)
{
    const bool is_signed = datatype >= INT8;
    const int count = __builtin_popcountll(block->ends);
    uint64_t starts = block->starts, ends = block->ends;
    struct number a = take_number(&starts, &ends), b = take_number(&starts, &ends);
    struct number c = take_number(&starts, &ends), d = take_number(&starts, &ends);
    quad misfits = {0};
    quad eights = join_sixteens(load_two(at, a, c), load_two(at, b, d));
    quad values = multiply_lower(eights, fill(100000000)) + (eights >> 32);
    if (block->is_longest) {
        cursor from = at - 20;
        lanes text = {
            load_four(from + a.end), load_four(from + b.end), load_four(from + c.end),
            load_four(from + d.end)};
        lanes kept = {
            load_four(kept_bits(a)), load_four(kept_bits(b)), load_four(kept_bits(c)),
            load_four(kept_bits(d))};
        values = add_upper(values, text & kept, is_signed, &misfits);
    }
    if (is_signed) {
        cursor from = at - 4;
        lanes text = {
            load_four(from + a.start), load_four(from + b.start), load_four(from + c.start),
            load_four(from + d.start)};
        quad negative = widen((lanes)(text >> 24 == '-'));
        /* Of what does not fit, the highest bit is set, even less one where a minus allows this. */
        misfits |= values & (values + negative);
        values = (values ^ negative) - negative;
    }
    if (size == 4) {
        quad above = values + (is_signed ? 1ULL << 31 : 0);
        misfits = above | (UINT32_MAX - above);
        lanes lower = lower_halves(values);
        memcpy(to, &lower, sizeof lower);
    } else {
        memcpy(to, &values, sizeof values);
    }
    return bits_of_quad(misfits) & ((1U << count) - 1) ? NULL : to + count * size;
}

/* ---- The array ---- */

INLINE cursor
decode_blocks(
    cursor at, cursor end, enum datatype datatype, int size, struct functions use, int *depth,
    char **to)
{
    char *behind = *to;
    int open = *depth;
    while (end - at >= BLOCK_AHEAD) {
        struct text_block block = read_block(at, datatype, size, use);
        int open_behind = depth_behind(block.opened, block.closed, open);
        if (block.size == 0 || open_behind == 0)
            break;
        open = open_behind;
        if (block.is_long)
            behind = use.convert_long(at, &block, datatype, size, behind);
        else
            behind = convert_short(at, &block, datatype, size, behind);
        if (behind == NULL)
            return NULL;
        at += block.size;
    }
    *to = behind;
    *depth = open;
    return at;
}

INLINE cursor
decode_datatype(
    cursor at, cursor end, enum datatype datatype, struct functions use, int *depth, char **to)
{
    switch (datatype) {
    case BOOL: return decode_blocks(at, end, BOOL, 1, use, depth, to);
    case UINT8: return decode_blocks(at, end, UINT8, 1, use, depth, to);
    case UINT16: return decode_blocks(at, end, UINT16, 2, use, depth, to);
    case UINT32: return decode_blocks(at, end, UINT32, 4, use, depth, to);
    case UINT64: return decode_blocks(at, end, UINT64, 8, use, depth, to);
    case INT8: return decode_blocks(at, end, INT8, 1, use, depth, to);
    case INT16: return decode_blocks(at, end, INT16, 2, use, depth, to);
    case INT32: return decode_blocks(at, end, INT32, 4, use, depth, to);
    case INT64: return decode_blocks(at, end, INT64, 8, use, depth, to);
    default: return at;
    }
}

WIDE static cursor
decode_wide(cursor at, cursor end, enum datatype datatype, int *depth, char **to)
{
    const struct functions use = {find_characters_wide, convert_long};
    return decode_datatype(at, end, datatype, use, depth, to);
}

static cursor
decode_plainly(cursor at, cursor end, enum datatype datatype, int *depth, char **to)
{
    const struct functions use = {find_characters, NULL};
    return decode_datatype(at, end, datatype, use, depth, to);
}

const char *
decode_integers(
    const char *at, const char *end, enum datatype datatype, int *depth, char **to)
{
    if (has_wide())
        return decode_wide(at, end, datatype, depth, to);
    return decode_plainly(at, end, datatype, depth, to);
}

#else

const char *
decode_integers(
    const char *at, const char *end, enum datatype datatype, int *depth, char **to)
{
    (void)end, (void)datatype, (void)depth, (void)to;
    return at;
}

#endif
