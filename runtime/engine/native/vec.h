// Sixteen floats at a time, in the compiler's own vector types: one source for AVX-512, AVX2, NEON and none of them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

typedef uint16_t bf16;  // its bits

#define INLINE inline __attribute__((always_inline))

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

INLINE f32x16 load16(const float* p) { return load<f32x16>(p); }
INLINE f32x16 load16(const bf16* p) {
    return (f32x16)(__builtin_convertvector(load<u16x16>(p), u32x16) << 16);
}

// Round to nearest even; NaN stays NaN.
INLINE u16x16 to_bf16(f32x16 x) {
    u32x16 bits = (u32x16)x;
    u32x16 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    u32x16 nan = (u32x16)(x != x);
    return __builtin_convertvector((rounded & ~nan) | (nan & 0x7FC0), u16x16);
}
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

INLINE f32x16 splat(float x) { return f32x16{} + x; }
INLINE f32x16 max16(f32x16 a, f32x16 b) { return a > b ? a : b; }
INLINE f32x16 abs16(f32x16 x) { return (f32x16)((u32x16)x & 0x7FFFFFFF); }

// In a fixed order, so that a sum does not depend on the compiler's mood.
INLINE float sum16(f32x16 v) {
    float a[16];
    store(a, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) a[i] += a[i + width];
    return a[0];
}
INLINE float largest16(f32x16 v) {
    float a[16];
    store(a, v);
    float best = a[0];
    for (int i = 1; i < 16; i++) best = a[i] > best ? a[i] : best;
    return best;
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

INLINE f32x16 silu16(f32x16 x) { return x / (exp16(-x) + 1.0f); }

// Transposes 16 rows of 16 floats.
INLINE void transpose16(f32x16 r[16]) {
    typedef int32_t mask __attribute__((vector_size(64)));
    f32x16 t[16];
#define EXCHANGE(to, from, step, low, high)                  \
    for (int i = 0; i < 16; i++)                             \
        if (!(i & step)) {                                   \
            to[i] = __builtin_shuffle(from[i], from[i + step], low);        \
            to[i + step] = __builtin_shuffle(from[i], from[i + step], high); \
        }
    const mask l1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
    const mask h1 = {1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31};
    const mask l2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const mask h2 = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
    const mask l4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
    const mask h4 = {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31};
    const mask l8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const mask h8 = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
    EXCHANGE(t, r, 1, l1, h1)
    EXCHANGE(r, t, 2, l2, h2)
    EXCHANGE(t, r, 4, l4, h4)
    EXCHANGE(r, t, 8, l8, h8)
#undef EXCHANGE
}
