/*
 * Sixteen or 32 bytes at a time, by SSE2, AVX2, NEON or plain C: what the compiler's own vectors
 * lack.
 *
 * WIDE is defined for processors that may have more: AVX2, or NEON's table lookup. A function with
 * WIDE may only be called if has_wide(). Whatever has AVX2 and BMI2 has BMI, LZCNT and POPCNT.
 */
#ifndef VECTORS_H
#define VECTORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __x86_64__
#include <immintrin.h>
#define WIDE __attribute__((target("avx2,fma,bmi,bmi2,lzcnt,popcnt")))
#elif defined __aarch64__
#include <arm_neon.h>
#define WIDE
#endif

#define VECTOR_INLINE __attribute__((always_inline)) static inline

/* Vector extensions of gcc and clang, which use the instructions of any machine. */
typedef uint8_t block __attribute__((vector_size(16)));
typedef int8_t signed_block __attribute__((vector_size(16)));
typedef uint16_t pairs __attribute__((vector_size(16)));
typedef uint32_t lanes __attribute__((vector_size(16)));
typedef uint64_t long_lanes __attribute__((vector_size(16)));
typedef int32_t signed_lanes __attribute__((vector_size(16)));

VECTOR_INLINE block
load_block(const void *from)
{
    block bytes;
    memcpy(&bytes, from, sizeof bytes);
    return bytes;
}

#ifdef __aarch64__
/* Add the bytes of each pair, which are 0 or 0xFF, a bit of its own for each of eight bytes. */
VECTOR_INLINE uint8x16_t
join_bits(block first, block second)
{
    const block own = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    return vpaddq_u8((uint8x16_t)(first & own), (uint8x16_t)(second & own));
}
#endif

/* Return a bit for each byte of two blocks, the first one least. Each byte is 0 or 0xFF. */
VECTOR_INLINE uint32_t
bits_of(block first, block second)
{
#ifdef __x86_64__
    uint32_t upper = (uint32_t)_mm_movemask_epi8((__m128i)second) << 16;
    return (uint32_t)_mm_movemask_epi8((__m128i)first) | upper;
#elif defined __aarch64__
    uint8x16_t sums = join_bits(first, second);
    sums = vpaddq_u8(sums, sums);
    sums = vpaddq_u8(sums, sums);
    return vgetq_lane_u32(vreinterpretq_u32_u8(sums), 0);
#else
    uint64_t words[4];
    uint32_t bits = 0;
    memcpy(words, &first, sizeof first);
    memcpy(words + 2, &second, sizeof second);
    for (int part = 0; part < 4; part++)
        bits |= (uint32_t)((words[part] & 0x0101010101010101) * 0x0102040810204080 >> 56)
            << 8 * part;
    return bits;
#endif
}

/* Do the same for four blocks. */
VECTOR_INLINE uint64_t
bits_of_four(block first, block second, block third, block fourth)
{
#ifdef __aarch64__
    uint8x16_t sums = vpaddq_u8(join_bits(first, second), join_bits(third, fourth));
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(sums, sums)), 0);
#else
    return (uint64_t)bits_of(third, fourth) << 32 | bits_of(first, second);
#endif
}

#ifdef WIDE
/* Join digits to numbers of four digits. */
VECTOR_INLINE lanes
join_digits(block digits)
{
#ifdef __x86_64__
    pairs factor = (pairs){0} + (10 * 256 + 1);
    /* Hidden from gcc, which would multiply by two shifts and two additions. */
    __asm__("" : "+x"(factor));
    pairs joined = (pairs)digits * factor >> 8;
    return (lanes)_mm_madd_epi16((__m128i)joined, _mm_set1_epi32(1 << 16 | 100));
#else
    uint8x16_t tens = vreinterpretq_u8_u16(vdupq_n_u16(1 << 8 | 10));
    uint16x8_t hundreds = vreinterpretq_u16_u32(vdupq_n_u32(1 << 16 | 100));
    uint16x8_t joined = vpaddlq_u8(vmulq_u8((uint8x16_t)digits, tens));
    return (lanes)vpaddlq_u16(vmulq_u16(joined, hundreds));
#endif
}

/* Join pairs of these, of two vectors, to numbers of eight digits. */
VECTOR_INLINE lanes
join_fours(lanes first, lanes second)
{
#ifdef __x86_64__
    __m128i fours = _mm_packs_epi32((__m128i)first, (__m128i)second);
    return (lanes)_mm_madd_epi16(fours, _mm_set1_epi32(1 << 16 | 10000));
#else
    const lanes factors = {10000, 1, 10000, 1};
    return (lanes)vpaddq_u32((uint32x4_t)(first * factors), (uint32x4_t)(second * factors));
#endif
}

/* Return all ones for each lane of two vectors that is 0, and 0 for others. */
VECTOR_INLINE lanes
are_zero(long_lanes first, long_lanes second)
{
#ifdef __x86_64__
    return (lanes)((lanes)_mm_packs_epi32((__m128i)first, (__m128i)second) == 0);
#else
    return (lanes)vuzp1q_u32((uint32x4_t)(first == 0), (uint32x4_t)(second == 0));
#endif
}

/* Return the lowest byte of each lane, or the lowest two, the first ones lowest. */
VECTOR_INLINE uint64_t
narrow(lanes values, int size)
{
#ifdef __x86_64__
    if (size == 1) {
        __m128i all = _mm_packs_epi32((__m128i)(values & 0xFF), (__m128i)values);
        return (uint32_t)_mm_cvtsi128_si32(_mm_packus_epi16(all, all));
    }
    /* The upper half of a lane becomes the sign that the instruction needs. */
    __m128i all = _mm_srai_epi32(_mm_slli_epi32((__m128i)values, 16), 16);
    return (uint64_t)_mm_cvtsi128_si64(_mm_packs_epi32(all, all));
#else
    uint16x4_t all = vmovn_u32((uint32x4_t)values);
    if (size == 1)
        all = vreinterpret_u16_u8(vmovn_u16(vcombine_u16(all, all)));
    return vget_lane_u64(vreinterpret_u64_u16(all), 0);
#endif
}
#endif

/* Return the number whose sixteen digits the bytes are, the first one highest. */
VECTOR_INLINE uint64_t
value_of_digits(block bytes)
{
    const uint64_t e8 = 100000000;
#ifdef WIDE
    lanes fours = join_digits(bytes);
    uint64_t eights = ((long_lanes)join_fours(fours, fours))[0];
    return (uint32_t)eights * e8 + (eights >> 32);
#else
    uint64_t words[2], value = 0;
    memcpy(words, &bytes, sizeof words);
    for (int part = 0; part < 2; part++) {
        uint64_t pairs = words[part] * 10 + (words[part] >> 8);
        uint64_t first = (pairs & 0x000000FF000000FF) * (100 + (1000000ULL << 32));
        uint64_t second = (pairs >> 16 & 0x000000FF000000FF) * (1 + (10000ULL << 32));
        value = value * e8 + ((first + second) >> 32);
    }
    return value;
#endif
}

#ifdef WIDE

/* Tell whether this processor has the instructions of WIDE functions. */
VECTOR_INLINE bool
has_wide(void)
{
#ifdef __x86_64__
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")
        && __builtin_cpu_supports("fma");
#else
    return true;
#endif
}

/* Four numbers of 64 bits, or two halves of 16 bytes. */
typedef uint64_t quad __attribute__((vector_size(32)));
typedef int64_t signed_quad __attribute__((vector_size(32)));
typedef double doubles __attribute__((vector_size(32)));

/* Return four times the same number. */
WIDE VECTOR_INLINE quad
fill(uint64_t value)
{
    return (quad){value, value, value, value};
}

/* Load four numbers of ``size`` bytes: 2, 4 or 8. */
WIDE VECTOR_INLINE quad
load_quad(const void *from, int size)
{
    quad values = {0};
    if (size == 8)
        memcpy(&values, from, sizeof values);
#ifdef __x86_64__
    else if (size == 4)
        values = (quad)_mm256_cvtepu32_epi64(_mm_loadu_si128(from));
    else
        values = (quad)_mm256_cvtepu16_epi64(_mm_loadl_epi64(from));
#else
    for (int i = 0; i < 4 && size < 8; i++) {
        uint64_t value = 0;
        memcpy(&value, (const char *)from + i * size, (size_t)size);
        values[i] = value;
    }
#endif
    return values;
}

#ifdef __aarch64__
/* For functions of NEON, which take half as many. */
union double_halves {
    doubles all;
    float64x2_t each[2];
};
#endif

/* Return one half. */
WIDE VECTOR_INLINE block
half_of(quad values, int half)
{
#ifdef __x86_64__
    return (block)(half ? _mm256_extracti128_si256((__m256i)values, 1)
                        : _mm256_castsi256_si128((__m256i)values));
#else
    return (block)(long_lanes){values[2 * half], values[2 * half + 1]};
#endif
}

WIDE VECTOR_INLINE quad
join_halves(block first, block second)
{
#ifdef __x86_64__
    return (quad)_mm256_set_m128i((__m128i)second, (__m128i)first);
#else
    long_lanes lower = (long_lanes)first, upper = (long_lanes)second;
    return (quad){lower[0], lower[1], upper[0], upper[1]};
#endif
}

WIDE VECTOR_INLINE quad
load_halves(const void *first, const void *second)
{
    return join_halves(load_block(first), load_block(second));
}

/* Return numbers of both in turn: the first and the third of each, or the second and the fourth. */
WIDE VECTOR_INLINE quad
interleave(quad some, quad others, bool odd)
{
#ifdef __x86_64__
    return (quad)(odd ? _mm256_unpackhi_epi64((__m256i)some, (__m256i)others)
                       : _mm256_unpacklo_epi64((__m256i)some, (__m256i)others));
#else
    return (quad){some[odd], others[odd], some[2 + odd], others[2 + odd]};
#endif
}

/* Compare signed numbers: -1 where one is more than the other, else 0. */
WIDE VECTOR_INLINE quad
more(quad some, quad others)
{
    return (quad)((signed_quad)some > (signed_quad)others);
}

/* Multiply the lower 32 bits of each number. */
WIDE VECTOR_INLINE quad
multiply_lower(quad some, quad others)
{
#ifdef __x86_64__
    return (quad)_mm256_mul_epu32((__m256i)some, (__m256i)others);
#else
    uint64x2_t first = vmull_u32(
        vmovn_u64((uint64x2_t)half_of(some, 0)), vmovn_u64((uint64x2_t)half_of(others, 0)));
    uint64x2_t second = vmull_u32(
        vmovn_u64((uint64x2_t)half_of(some, 1)), vmovn_u64((uint64x2_t)half_of(others, 1)));
    return join_halves((block)first, (block)second);
#endif
}

/* Return the highest bit of each number, that of the first one least. */
WIDE VECTOR_INLINE unsigned
bits_of_quad(quad values)
{
#ifdef __x86_64__
    return (unsigned)_mm256_movemask_pd((__m256d)values);
#else
    values >>= 63;
    return (unsigned)(values[0] | values[1] << 1 | values[2] << 2 | values[3] << 3);
#endif
}

/* Split four numbers below 10^8 into eight digits each, the last one first. */
WIDE VECTOR_INLINE quad
digits_of(quad numbers)
{
#ifdef __x86_64__
    __m256i values = (__m256i)numbers;
    __m256i fours = _mm256_srli_epi64(_mm256_mul_epu32(values, (__m256i)fill(3518437209)), 45);
    fours = _mm256_mul_epu32(fours, (__m256i)fill((1LL << 32) - 10000));
    values = _mm256_add_epi64(values, fours);
    __m256i hundreds = _mm256_mulhi_epu16(values, _mm256_set1_epi32(5243));
    hundreds = _mm256_srli_epi16(hundreds, 3);
    hundreds = _mm256_mullo_epi32(hundreds, _mm256_set1_epi32((1 << 16) - 100));
    values = _mm256_add_epi32(values, hundreds);
    __m256i tens = _mm256_mulhi_epu16(values, _mm256_set1_epi16(6554));
    __m256i factor = _mm256_set1_epi16((1 << 8) - 10);
    /* Hidden from gcc, which would multiply by five shifts and subtractions. */
    __asm__("" : "+x"(factor));
    return (quad)_mm256_add_epi16(values, _mm256_mullo_epi16(tens, factor));
#else
    block halves[2];
    for (int i = 0; i < 2; i++) {
        uint64x2_t values = (uint64x2_t)half_of(numbers, i);
        uint64x2_t quotients = vshrq_n_u64(vmull_n_u32(vmovn_u64(values), 3518437209), 45);
        values = vmlal_n_u32(values, vmovn_u64(quotients), UINT32_MAX - 9999);
        uint32x4_t fours = vreinterpretq_u32_u64(values);
        uint32x4_t hundreds = vshrq_n_u32(vmulq_n_u32(fours, 5243), 19);
        uint16x8_t pairs = vreinterpretq_u16_u32(vmlaq_n_u32(fours, hundreds, (1 << 16) - 100));
        /* 3277 * x >> 15, which is x / 10 of all below 100. */
        int16x8_t tens = vqdmulhq_n_s16(vreinterpretq_s16_u16(pairs), 3277);
        halves[i] = (block)vmlaq_n_u16(pairs, vreinterpretq_u16_s16(tens), (1 << 8) - 10);
    }
    return join_halves(halves[0], halves[1]);
#endif
}

/* Return a bit for each digit, the first one least: whether it is other than 0. */
WIDE VECTOR_INLINE uint32_t
bits_of_digits(quad digits)
{
#ifdef __x86_64__
    __m256i is_other = _mm256_cmpgt_epi8((__m256i)digits, _mm256_setzero_si256());
    return (uint32_t)_mm256_movemask_epi8(is_other);
#else
    return bits_of((block)(half_of(digits, 0) > 0), (block)(half_of(digits, 1) > 0));
#endif
}

/* In each half, return the bytes at some places; 0 where the place is 0x80. */
WIDE VECTOR_INLINE quad
bytes_at(quad bytes, quad places)
{
#ifdef __x86_64__
    return (quad)_mm256_shuffle_epi8((__m256i)bytes, (__m256i)places);
#else
    uint8x16_t first = vqtbl1q_u8((uint8x16_t)half_of(bytes, 0), (uint8x16_t)half_of(places, 0));
    uint8x16_t second = vqtbl1q_u8((uint8x16_t)half_of(bytes, 1), (uint8x16_t)half_of(places, 1));
    return join_halves((block)first, (block)second);
#endif
}

/* In each half, put a byte before the others, of which the last one goes. */
WIDE VECTOR_INLINE quad
push_bytes(quad bytes, quad before)
{
#ifdef __x86_64__
    return (quad)_mm256_slli_si256((__m256i)bytes, 1) | before;
#else
    return bytes << 8 | (quad){0, bytes[0] >> 56, 0, bytes[2] >> 56} | before;
#endif
}

/* Return the position of the lowest bit; 64 if there is none. */
WIDE VECTOR_INLINE ptrdiff_t
position_of_lowest(uint64_t bits)
{
#ifdef __x86_64__
    return (ptrdiff_t)_tzcnt_u64(bits);
#else
    /* gcc would make a branch of the case without a bit. */
    ptrdiff_t position;
    __asm__("rbit %0, %1\n\tclz %0, %0" : "=r"(position) : "r"(bits));
    return position;
#endif
}

/* ---- Four lanes ---- */

/* The operators and conversions of the compiler use two instructions where it needs them. */
typedef float floats __attribute__((vector_size(16)));

/* Return a bit for each lane, the first one least. Each lane is 0 or all ones. */
WIDE VECTOR_INLINE unsigned
bits_of_lanes(lanes each)
{
#ifdef __x86_64__
    return (unsigned)_mm_movemask_ps((__m128)each);
#else
    return vaddvq_u32((uint32x4_t)(each & (lanes){1, 2, 4, 8}));
#endif
}

#ifdef __aarch64__
/* Join the digits of two numbers: to pairs, to fours, and to eights. */
VECTOR_INLINE block
join_two(block first, block second)
{
    block tens = (block)vdupq_n_u16(1 << 8 | 10);
    uint8x8_t hundreds = vreinterpret_u8_u16(vdup_n_u16(1 << 8 | 100));
    uint16x4_t thousands = vreinterpret_u16_u32(vdup_n_u32(1 << 16 | 10000));
    uint8x16_t twos = vpaddq_u8((uint8x16_t)(first * tens), (uint8x16_t)(second * tens));
    uint16x8_t products = vmull_u8(vget_low_u8(twos), hundreds);
    uint16x8_t fours = vpaddq_u16(products, vmull_u8(vget_high_u8(twos), hundreds));
    uint32x4_t upper = vmull_u16(vget_low_u16(fours), thousands);
    return (block)vpaddq_u32(upper, vmull_u16(vget_high_u16(fours), thousands));
}
#else
/* Join the digits of two numbers to numbers of four digits. */
WIDE VECTOR_INLINE __m256i
join_two(quad digits)
{
    __m256i twos = _mm256_maddubs_epi16((__m256i)digits, _mm256_set1_epi16(1 << 8 | 10));
    return _mm256_madd_epi16(twos, _mm256_set1_epi32(1 << 16 | 100));
}
#endif

/*
 * Join the sixteen digits of numbers a and c, b and d: in the order of the alphabet, the first
 * eight become the lower half of a lane, and the others the upper one.
 */
WIDE VECTOR_INLINE quad
join_sixteens(quad a_c, quad b_d)
{
#ifdef __x86_64__
    __m256i fours = _mm256_packus_epi32(join_two(a_c), join_two(b_d));
    return (quad)_mm256_madd_epi16(fours, _mm256_set1_epi32(1 << 16 | 10000));
#else
    block first = join_two(half_of(a_c, 0), half_of(b_d, 0));
    return join_halves(first, join_two(half_of(a_c, 1), half_of(b_d, 1)));
#endif
}

/* Copy the highest bit of each lane to the upper half of one twice as wide. */
WIDE VECTOR_INLINE quad
widen(lanes values)
{
#ifdef __x86_64__
    return (quad)_mm256_cvtepi32_epi64((__m128i)values);
#else
    return (quad)__builtin_convertvector((signed_lanes)values, quad);
#endif
}

#ifdef __x86_64__
/* Move the lower half of each lane to the front. */
WIDE VECTOR_INLINE __m256i
part_halves(quad values)
{
    __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    return _mm256_permutevar8x32_epi32((__m256i)values, order);
}
#endif

/* Return the lower half of each lane. */
WIDE VECTOR_INLINE lanes
lower_halves(quad values)
{
#ifdef __x86_64__
    return (lanes)_mm256_castsi256_si128(part_halves(values));
#else
    uint32x4_t first = (uint32x4_t)half_of(values, 0);
    return (lanes)vuzp1q_u32(first, (uint32x4_t)half_of(values, 1));
#endif
}

/* Return the upper half of each lane. */
WIDE VECTOR_INLINE lanes
upper_halves(quad values)
{
#ifdef __x86_64__
    return (lanes)_mm256_extracti128_si256(part_halves(values), 1);
#else
    uint32x4_t first = (uint32x4_t)half_of(values, 0);
    return (lanes)vuzp2q_u32(first, (uint32x4_t)half_of(values, 1));
#endif
}

/* Convert integers below 2^31. */
WIDE VECTOR_INLINE doubles
doubles_of(lanes values)
{
#ifdef __x86_64__
    return (doubles)_mm256_cvtepi32_pd((__m128i)values);
#else
    float64x2_t first = vcvtq_f64_u64(vmovl_u32(vget_low_u32((uint32x4_t)values)));
    float64x2_t second = vcvtq_f64_u64(vmovl_high_u32((uint32x4_t)values));
    return (union double_halves){.each = {first, second}}.all;
#endif
}

/* Return a * b + c, rounded once. */
WIDE VECTOR_INLINE doubles
multiply_add(doubles a, doubles b, doubles c)
{
#ifdef __x86_64__
    return (doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
    union double_halves some = {a}, others = {b}, sums = {c};
    sums.each[0] = vfmaq_f64(sums.each[0], some.each[0], others.each[0]);
    sums.each[1] = vfmaq_f64(sums.each[1], some.each[1], others.each[1]);
    return sums.all;
#endif
}

#endif

#endif
