// Sixteen floats at a time, in the compiler's own vector types: one source for AVX-512, AVX2, NEON and none of them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

typedef uint16_t bf16;  // its bits

#define INLINE inline __attribute__((always_inline))
// Arrays of vectors stay in registers only where loops over them vanish; with few registers that is of no use and
// takes minutes to compile.
#if defined(__AVX2__)
#define UNROLL _Pragma("GCC unroll 16")
#else
#define UNROLL
#endif
#define KEEP_IN_MEMORY(x) __asm__ __volatile__("" : "+m"(x))

template <class V, class T>
INLINE V load(const T* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

template <class V, class T>
INLINE void store(T* p, V v) {
    memcpy(p, &v, sizeof v);
}

// Widening and narrowing: gcc 12 takes detours for these, so they are spelled out where there are instructions.
INLINE u32x16 widen(u16x16 x) {
#if defined(__AVX512F__)
    return (u32x16)_mm512_cvtepu16_epi32((__m256i)x);
#else
    return __builtin_convertvector(x, u32x16);
#endif
}
INLINE i8x16 narrow8(i32x16 x) {
#if defined(__AVX512F__)
    return (i8x16)_mm512_cvtepi32_epi8((__m512i)x);
#else
    return __builtin_convertvector(x, i8x16);
#endif
}
// Round to nearest even; NaN stays NaN.
INLINE u16x16 to_bf16(f32x16 x) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)x);
#else
    u32x16 bits = (u32x16)x;
    u32x16 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    u32x16 nan = (u32x16)(x != x);
    rounded = (rounded & ~nan) | (nan & 0x7FC0);
#if defined(__AVX512F__)
    return (u16x16)_mm512_cvtepi32_epi16((__m512i)rounded);
#else
    return __builtin_convertvector(rounded, u16x16);
#endif
#endif
}

INLINE f32x16 load16(const float* p) { return load<f32x16>(p); }
INLINE f32x16 load16(const bf16* p) { return (f32x16)(widen(load<u16x16>(p)) << 16); }
INLINE void store16(float* p, f32x16 v) { store(p, v); }
INLINE void store16(bf16* p, f32x16 v) { store(p, to_bf16(v)); }

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
INLINE void from_float(float* p, float x) { *p = x; }
INLINE void from_float(bf16* p, float x) {
    f32x16 v = {x};
    *p = to_bf16(v)[0];
}

// Two bfloat16 products for each of 16 sums; w holds 16 pairs, two is one pair for all.
INLINE f32x16 dot_bf16(f32x16 sum, u32x16 w, uint32_t two) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)two));
#else
    sum += (f32x16)(w << 16) * to_float((bf16)two);
    return sum + (f32x16)(w & 0xFFFF0000u) * to_float((bf16)(two >> 16));
#endif
}

INLINE f32x16 splat(float x) { return f32x16{} + x; }
INLINE f32x16 max16(f32x16 a, f32x16 b) { return a > b ? a : b; }
INLINE f32x16 abs16(f32x16 x) { return (f32x16)((u32x16)x & 0x7FFFFFFF); }

// Halves upon halves, in the same order everywhere.
template <class F>
INLINE float fold16(f32x16 v, F f) {
    v = f(v, __builtin_shuffle(v, i32x16{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    v = f(v, __builtin_shuffle(v, i32x16{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    v = f(v, __builtin_shuffle(v, i32x16{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    v = f(v, __builtin_shuffle(v, i32x16{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
    return v[0];
}
INLINE float sum16(f32x16 v) {
    return fold16(v, [](f32x16 a, f32x16 b) { return a + b; });
}
INLINE float largest16(f32x16 v) {
    return fold16(v, [](f32x16 a, f32x16 b) { return max16(a, b); });
}

// exp to within 2 units in the last place; exactly 0 below -87, NaN for NaN (Cephes' expf).
INLINE f32x16 exp16(f32x16 x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    f32x16 y = x > splat(88.0f) ? splat(88.0f) : x;
    y = y < splat(-87.0f) ? splat(-87.0f) : y;
    f32x16 shifted = y * 1.44269504088896341f + magic;
    f32x16 n = shifted - magic;
    y = y - n * 0.693359375f;
    y = y - n * -2.12194440e-4f;
    f32x16 p = splat(1.9875691500e-4f);
    p = p * y + 1.3981999507e-3f;
    p = p * y + 8.3334519073e-3f;
    p = p * y + 4.1665795894e-2f;
    p = p * y + 1.6666665459e-1f;
    p = p * y + 5.0000001201e-1f;
    p = p * (y * y) + y + 1.0f;
    i32x16 power = ((i32x16)shifted - 0x4B400000 + 127) << 23;
    p = p * (f32x16)power;
    return x < splat(-87.0f) ? splat(0.0f) : p;
}

// Natural logarithm of positive normal numbers, to within 2 units in the last place (Cephes' logf).
INLINE f32x16 log16(f32x16 x) {
    i32x16 bits = (i32x16)x;
    i32x16 power = (bits >> 23) - 126;
    f32x16 m = (f32x16)((bits & 0x007FFFFF) | 0x3F000000);  // in [0.5, 1)
    i32x16 small = (i32x16)(m < splat(0.707106781186547524f));
    power += small;  // -1 where small
    m = m + (f32x16)((i32x16)m & small) - 1.0f;
    f32x16 e = __builtin_convertvector(power, f32x16), z = m * m;
    f32x16 p = splat(7.0376836292e-2f);
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    p = p * m * z + e * -2.12194440e-4f - 0.5f * z;
    return m + p + e * 0.693359375f;
}

INLINE f32x16 silu16(f32x16 x) { return x / (exp16(-x) + 1.0f); }

// Transposes 16 rows of 16 floats: pairs, fours, then whole quarters change places.
INLINE void transpose16(f32x16 r[16]) {
    const i32x16 low1 = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
    const i32x16 high1 = {2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31};
    const i32x16 low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const i32x16 high2 = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
    const i32x16 even = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    const i32x16 odd = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
    f32x16 t[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = __builtin_shuffle(r[i], r[i + 1], low1);
        t[i + 1] = __builtin_shuffle(r[i], r[i + 1], high1);
    }
    UNROLL for (int i = 0; i < 16; i += 4)
        UNROLL for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = __builtin_shuffle(t[i + j], t[i + j + 2], low2);
            r[i + 2 * j + 1] = __builtin_shuffle(t[i + j], t[i + j + 2], high2);
        }
    UNROLL for (int j = 0; j < 4; j++) {  // column j of each quarter, four rows at a time in r[j], r[4 + j] ...
        f32x16 a = __builtin_shuffle(r[j], r[4 + j], even), b = __builtin_shuffle(r[j], r[4 + j], odd);
        f32x16 c = __builtin_shuffle(r[8 + j], r[12 + j], even), d = __builtin_shuffle(r[8 + j], r[12 + j], odd);
        t[j] = __builtin_shuffle(a, c, even), t[8 + j] = __builtin_shuffle(a, c, odd);
        t[4 + j] = __builtin_shuffle(b, d, even), t[12 + j] = __builtin_shuffle(b, d, odd);
    }
    UNROLL for (int i = 0; i < 16; i++) r[i] = t[i];
}
