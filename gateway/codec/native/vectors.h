/*
 * Sixteen bytes at a time, by SSE2, NEON or plain C: what the compiler's own vectors lack.
 *
 * WIDE is defined for processors that may have more: AVX2, or NEON's table lookup. A function with
 * WIDE may only be called if has_wide().
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

/* Split two numbers below 10^8 into sixteen digits, the last of the lower one first. */
WIDE VECTOR_INLINE block
digits_of(uint64_t upper, uint64_t lower)
{
#ifdef __x86_64__
    __m128i values = _mm_set_epi64x((int64_t)upper, (int64_t)lower);
    __m128i fours = _mm_srli_epi64(_mm_mul_epu32(values, _mm_set1_epi64x(3518437209)), 45);
    values = _mm_add_epi64(values, _mm_mul_epu32(fours, _mm_set1_epi64x((1LL << 32) - 10000)));
    __m128i hundreds = _mm_srli_epi16(_mm_mulhi_epu16(values, _mm_set1_epi32(5243)), 3);
    values = _mm_add_epi32(values, _mm_mullo_epi32(hundreds, _mm_set1_epi32((1 << 16) - 100)));
    __m128i tens = _mm_mulhi_epu16(values, _mm_set1_epi16(6554));
    __m128i factor = _mm_set1_epi16((1 << 8) - 10);
    /* Hidden from gcc, which would multiply by five shifts and subtractions. */
    __asm__("" : "+x"(factor));
    return (block)_mm_add_epi16(values, _mm_mullo_epi16(tens, factor));
#else
    uint64x2_t values = vcombine_u64(vcreate_u64(lower), vcreate_u64(upper));
    uint64x2_t quotients = vshrq_n_u64(vmull_n_u32(vmovn_u64(values), 3518437209), 45);
    values = vmlal_n_u32(values, vmovn_u64(quotients), UINT32_MAX - 9999);
    uint32x4_t fours = vreinterpretq_u32_u64(values);
    uint32x4_t hundreds = vshrq_n_u32(vmulq_n_u32(fours, 5243), 19);
    uint16x8_t pairs = vreinterpretq_u16_u32(vmlaq_n_u32(fours, hundreds, (1 << 16) - 100));
    /* 3277 * x >> 15, which is x / 10 of all below 100. */
    int16x8_t tens = vqdmulhq_n_s16(vreinterpretq_s16_u16(pairs), 3277);
    return (block)vmlaq_n_u16(pairs, vreinterpretq_u16_s16(tens), (1 << 8) - 10);
#endif
}

/* Count the zeros at the end of a number with such digits, the last but one first, and ``last``. */
WIDE VECTOR_INLINE int
count_zeros(block digits, uint64_t last)
{
#ifdef __x86_64__
    __m128i is_other = _mm_cmpgt_epi8((__m128i)digits, _mm_setzero_si128());
    return __builtin_ctz((unsigned)_mm_movemask_epi8(is_other) << 1 | (last != 0));
#else
    /* Four bits for each byte. */
    uint8x8_t is_other = vshrn_n_u16((uint16x8_t)(digits > 0), 4);
    uint64_t bits = vget_lane_u64(vreinterpret_u64_u8(is_other), 0);
    return last ? 0 : __builtin_ctzll(bits) / 4 + 1;
#endif
}

/* Return the bytes at some places; 0 where the place is 0x80. */
WIDE VECTOR_INLINE block
bytes_at(block bytes, block places)
{
#ifdef __x86_64__
    return (block)_mm_shuffle_epi8((__m128i)bytes, (__m128i)places);
#else
    return (block)vqtbl1q_u8((uint8x16_t)bytes, (uint8x16_t)places);
#endif
}

#endif

#endif
