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

VECTOR_INLINE block
load_block(const void *from)
{
    block bytes;
    memcpy(&bytes, from, sizeof bytes);
    return bytes;
}

/* Return a bit for each byte of two blocks, the first one least. Each byte is 0 or 0xFF. */
VECTOR_INLINE uint32_t
bits_of(block first, block second)
{
#ifdef __x86_64__
    uint32_t upper = (uint32_t)_mm_movemask_epi8((__m128i)second) << 16;
    return (uint32_t)_mm_movemask_epi8((__m128i)first) | upper;
#elif defined __aarch64__
    /* A bit of its own for each of eight bytes: their sum joins them. */
    const block own = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint8x16_t sums = vpaddq_u8((uint8x16_t)(first & own), (uint8x16_t)(second & own));
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

/* Return the number whose sixteen digits the bytes are, the first one highest. */
VECTOR_INLINE uint64_t
value_of_digits(block bytes)
{
    const uint64_t e8 = 100000000;
    /* Join them to pairs, to fours, and to eights. */
#ifdef __x86_64__
    __m128i digits = (__m128i)bytes;
    digits = _mm_srli_epi16(_mm_mullo_epi16(digits, _mm_set1_epi16(10 * 256 + 1)), 8);
    digits = _mm_madd_epi16(digits, _mm_set1_epi32(1 << 16 | 100));
    digits = _mm_packs_epi32(digits, digits);
    digits = _mm_madd_epi16(digits, _mm_set1_epi32(1 << 16 | 10000));
    uint64_t eights = (uint64_t)_mm_cvtsi128_si64(digits);
    return (uint32_t)eights * e8 + (eights >> 32);
#elif defined __aarch64__
    uint8x16_t tens = vreinterpretq_u8_u16(vdupq_n_u16(1 << 8 | 10));
    uint16x8_t hundreds = vreinterpretq_u16_u32(vdupq_n_u32(1 << 16 | 100));
    uint32x4_t thousands = vreinterpretq_u32_u64(vdupq_n_u64(1ULL << 32 | 10000));
    uint16x8_t pairs = vpaddlq_u8(vmulq_u8((uint8x16_t)bytes, tens));
    uint32x4_t fours = vpaddlq_u16(vmulq_u16(pairs, hundreds));
    uint64x2_t eights = vpaddlq_u32(vmulq_u32(fours, thousands));
    return vgetq_lane_u64(eights, 0) * e8 + vgetq_lane_u64(eights, 1);
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

/* Return one half. */
WIDE VECTOR_INLINE block
half_of(quad values, int half)
{
#ifdef __x86_64__
    return (block)(half ? _mm256_extracti128_si256((__m256i)values, 1)
                        : _mm256_castsi256_si128((__m256i)values));
#else
    block blocks[2];
    memcpy(blocks, &values, sizeof blocks);
    return blocks[half];
#endif
}

WIDE VECTOR_INLINE quad
join_halves(block first, block second)
{
#ifdef __x86_64__
    return (quad)_mm256_set_m128i((__m128i)second, (__m128i)first);
#else
    block blocks[] = {first, second};
    return load_quad(blocks, 8);
#endif
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
    return (some & UINT32_MAX) * (others & UINT32_MAX);
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
    block halves[2];
    for (int i = 0; i < 2; i++) {
        uint8x16_t half = (uint8x16_t)half_of(bytes, i);
        halves[i] = (block)vqtbl1q_u8(half, (uint8x16_t)half_of(places, i));
    }
    return join_halves(halves[0], halves[1]);
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

#endif

#endif
