// Linear layers: weights packed in panels of 16 output rows, three formats, one tiling.
//
//   F32   [panel][in][16]                                   float products
//   BF16  [panel][in / 2][16][2]                            bfloat16 products, float sums
//   I8    [panel][in / 64] { u8 [16][16][4], float [16] }   8-bit integers (plus 128), a scale per row and 64 inputs;
//                                                           activations are rounded to 8 bits per token and 64 inputs
//
// Before they are rounded to integers, each 64 inputs of weights and activations are turned by the same Hadamard matrix:
// products stay what they are, and a few large values no longer decide the scale of all (QuaRot, arXiv 2404.00456).
//
// An output's sum runs over its inputs in the same order whatever else is in the batch and however many threads there
// are: a request computes the same bits alone, in a batch, as a chunk of its prompt, or token by token.
#pragma once
#include <algorithm>

#include "vec.h"

enum Format { F32 = 0, BF16 = 1, I8 = 2 };

constexpr int LANES = 16, GROUP = 64, GROUP_BYTES = LANES * GROUP + LANES * 4;
constexpr int TOKENS_TILE = 8;

INLINE int ceil_div(int a, int b) { return (a + b - 1) / b; }
INLINE int padded(int n) { return ceil_div(n, GROUP) * GROUP; }

struct Linear {
    const char* weights;  // packed
    const float* bias;    // by packed row, or null
    int32_t outputs, inputs, format;
    int32_t paired;  // panels alternate between the halves of the outputs: gate, up, gate, up ...

    int panels() const { return paired ? 2 * ceil_div(outputs / 2, LANES) : ceil_div(outputs, LANES); }
    size_t panel_bytes() const {
        if (format == F32) return (size_t)inputs * LANES * 4;
        if (format == BF16) return (size_t)ceil_div(inputs, 2) * LANES * 4;
        return (size_t)ceil_div(inputs, GROUP) * GROUP_BYTES;
    }
    // The original row of a packed one, -1 for padding.
    int row(int panel, int lane) const {
        int block = paired ? panel / 2 : panel, half = paired ? outputs / 2 : outputs;
        int r = block * LANES + lane;
        return r >= half ? -1 : paired && panel % 2 ? half + r : r;
    }
};

// Multiplies 64 values by the orthonormal Hadamard matrix.
INLINE void turn(f32x16 v[4]) {
    const f32x16 a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
    UNROLL for (int i = 0; i < 4; i++) {
        f32x16 x = v[i];
        x = __builtin_shuffle(x, i32x16{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}) +
            x * f32x16{1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1};
        x = __builtin_shuffle(x, i32x16{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}) +
            x * f32x16{1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1};
        x = __builtin_shuffle(x, i32x16{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}) +
            x * f32x16{1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1};
        x = __builtin_shuffle(x, i32x16{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}) +
            x * f32x16{1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1};
        v[i] = x * 0.125f;
    }
}

// Activations in the form that a format multiplies: rows of padded(inputs) elements.
struct Operand {
    char* data;     // float, bf16 or int8
    float* scale;   // I8: [tokens][groups]
    int32_t* bias;  // I8: [tokens][groups], -128 * the group's sum: what the weights' offset adds
};

inline size_t operand_bytes(int tokens, int inputs) {
    return (size_t)tokens * padded(inputs) * 4 + (size_t)tokens * padded(inputs) / GROUP * 8;
}

inline Operand make_operand(char* memory, int tokens, int inputs) {
    char* scale = memory + (size_t)tokens * padded(inputs) * 4;
    return {memory, (float*)scale, (int32_t*)(scale + (size_t)tokens * padded(inputs) / GROUP * 4)};
}

// x [padded(inputs)], zeros behind the inputs, becomes row t of the operand.
inline void prepare(const Operand& a, int t, const float* x, int inputs, int format) {
    const int width = padded(inputs);
    if (format == F32) {
        memcpy(a.data + (size_t)t * width * 4, x, (size_t)width * 4);
        return;
    }
    if (format == BF16) {
        bf16* out = (bf16*)a.data + (size_t)t * width;
        for (int i = 0; i < width; i += LANES) store16(out + i, load16(x + i));
        return;
    }
    const float magic = 12582912.0f;
    for (int g = 0; g < width / GROUP; g++) {
        f32x16 v[4], total = {}, most = {};
        UNROLL for (int j = 0; j < 4; j++) v[j] = load16(x + g * GROUP + j * LANES);
        turn(v);
        UNROLL for (int j = 0; j < 4; j++) {
            total += abs16(v[j]);
            most = max16(most, abs16(v[j]));
        }
        float largest = largest16(most), all = sum16(total);
        float inverse = largest > 0 ? 127.0f / largest : 0.0f;
        i32x16 sum = {};
        int8_t* out = (int8_t*)a.data + (size_t)t * width + g * GROUP;
        for (int j = 0; j < 4; j++) {
            i32x16 rounded = (i32x16)(v[j] * inverse + magic) - 0x4B400000;
            sum += rounded;
            store(out + j * LANES, narrow8(rounded));
        }
        int32_t lanes[16], whole = 0;
        store(lanes, sum);
        for (int i = 0; i < 16; i++) whole += lanes[i];
        // What is not a number must not turn into one: the scale carries it on.
        a.scale[(size_t)t * (width / GROUP) + g] = all - all == 0 ? largest / 127.0f : NAN;
        a.bias[(size_t)t * (width / GROUP) + g] = -128 * whole;
    }
}

// ---- dot products of four 8-bit pairs for 16 outputs; int32 sums are exact, so all variants agree ----

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
typedef i32x16 Weights;
struct Sums {
    i32x16 v;
    INLINE void start(int32_t x) { v = i32x16{} + x; }
    INLINE void add(Weights w, int32_t four) {
        // Not the intrinsic: gcc 12 copies the sums from register to register around it.
        __asm__("vpdpbusd %2, %1, %0" : "+v"(v) : "v"(w), "v"(i32x16{} + four));
    }
    INLINE f32x16 floats() const { return __builtin_convertvector(v, f32x16); }
};
#elif defined(__AVX2__)
struct Weights {
    __m128i v[4];
};
struct Sums {  // each __m256i holds two partial sums for each of four outputs
    __m256i v[4];
    int32_t first;
    INLINE void start(int32_t x) {
        for (auto& part : v) part = _mm256_setzero_si256();
        first = x;
    }
    INLINE void add(const Weights& w, int32_t four) {
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_set1_epi32(four));
        UNROLL for (int i = 0; i < 4; i++)
            v[i] = _mm256_add_epi32(v[i], _mm256_madd_epi16(_mm256_cvtepu8_epi16(w.v[i]), wide));
    }
    INLINE f32x16 floats() const {
        const __m256i order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
        i32x16 out = i32x16{} + first;
        __m256i halves[2];
        for (int i = 0; i < 2; i++)
            halves[i] = _mm256_permutevar8x32_epi32(_mm256_hadd_epi32(v[2 * i], v[2 * i + 1]), order);
        return __builtin_convertvector(out + load<i32x16>(halves), f32x16);
    }
};
#else
typedef u32x16 Weights;
struct Sums {
    i32x16 v;
    INLINE void start(int32_t x) { v = i32x16{} + x; }
    INLINE void add(Weights w, int32_t four) {
        UNROLL for (int j = 0; j < 4; j++) v += (i32x16)(w >> (8 * j) & 255) * (int32_t)(int8_t)(four >> (8 * j));
    }
    INLINE f32x16 floats() const { return __builtin_convertvector(v, f32x16); }
};
#endif

// ---- one tile: TOKENS rows of the operand from t on, PANELS panels from p on ----

// Weights come from memory once, for the first tokens. While panels are multiplied the next ones are on their way: each
// tile of `of` over the same panels asks for its share of their cache lines.
struct Ahead {
    int share, of;
};
INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

template <int TOKENS, int PANELS>
struct Tile {
    f32x16 out[TOKENS][PANELS];

    void f32(const Linear& w, const Operand& a, int p, int t, Ahead ahead) {
        const int width = padded(w.inputs), inputs = w.inputs;
        const size_t stride = (size_t)inputs * LANES;
        const float* panel = (const float*)w.weights + p * stride;
        const float* x = (const float*)a.data + (size_t)t * width;
        f32x16 sum[TOKENS][PANELS] = {};
        for (int k = 0; k < inputs; k++) {
            if (k == ahead.share) {
                UNROLL for (int j = 0; j < PANELS; j++) fetch(panel + (PANELS + j) * stride + k * LANES);
                ahead.share += ahead.of;
            }
            f32x16 weights[PANELS];
            UNROLL for (int j = 0; j < PANELS; j++) weights[j] = load16(panel + j * stride + (size_t)k * LANES);
            UNROLL for (int i = 0; i < TOKENS; i++) {
                f32x16 one = splat(x[i * width + k]);
                UNROLL for (int j = 0; j < PANELS; j++) sum[i][j] += weights[j] * one;
            }
        }
        memcpy(out, sum, sizeof out);
    }

    void bfloat(const Linear& w, const Operand& a, int p, int t, Ahead ahead) {
        const int width = padded(w.inputs), pairs = ceil_div(w.inputs, 2);
        const size_t stride = (size_t)pairs * LANES * 4;
        const char* panel = w.weights + p * stride;
        const bf16* x = (const bf16*)a.data + (size_t)t * width;
        f32x16 sum[TOKENS][PANELS] = {};
        for (int k = 0; k < pairs; k++) {
            if (k == ahead.share) {
                UNROLL for (int j = 0; j < PANELS; j++) fetch(panel + (PANELS + j) * stride + k * 64);
                ahead.share += ahead.of;
            }
            u32x16 weights[PANELS];
            UNROLL for (int j = 0; j < PANELS; j++) weights[j] = load<u32x16>(panel + j * stride + (size_t)k * 64);
            UNROLL for (int i = 0; i < TOKENS; i++) {
                uint32_t two = load<uint32_t>(x + i * width + 2 * k);
                UNROLL for (int j = 0; j < PANELS; j++) sum[i][j] = dot_bf16(sum[i][j], weights[j], two);
            }
        }
        memcpy(out, sum, sizeof out);
    }

    void int8(const Linear& w, const Operand& a, int p, int t, Ahead ahead) {
        const int width = padded(w.inputs), groups = width / GROUP;
        const size_t stride = (size_t)groups * GROUP_BYTES;
        const char* panel = w.weights + p * stride;
        const int8_t* x = (const int8_t*)a.data + (size_t)t * width;
        const float* scale = a.scale + (size_t)t * groups;
        const int32_t* bias = a.bias + (size_t)t * groups;
        memset(out, 0, sizeof out);
        for (int g = 0; g < groups; g++, panel += GROUP_BYTES, x += GROUP) {
            Sums part[TOKENS][PANELS];
            UNROLL for (int i = 0; i < TOKENS; i++)
                UNROLL for (int j = 0; j < PANELS; j++) part[i][j].start(bias[i * groups + g]);
            for (int line = ahead.share * 64; line < GROUP_BYTES; line += ahead.of * 64)
                UNROLL for (int j = 0; j < PANELS; j++) fetch(panel + (PANELS + j) * stride + line);
            UNROLL for (int k = 0; k < GROUP; k += 4) {
                Weights weights[PANELS];
                UNROLL for (int j = 0; j < PANELS; j++) weights[j] = load<Weights>(panel + j * stride + k * LANES);
                UNROLL for (int i = 0; i < TOKENS; i++) {
                    int32_t four = load<int32_t>(x + i * width + k);
                    UNROLL for (int j = 0; j < PANELS; j++) part[i][j].add(weights[j], four);
                }
            }
            UNROLL for (int j = 0; j < PANELS; j++) {
                f32x16 s = load<f32x16>(panel + j * stride + GROUP * LANES);
                UNROLL for (int i = 0; i < TOKENS; i++) out[i][j] += part[i][j].floats() * (s * scale[i * groups + g]);
            }
            KEEP_IN_MEMORY(out);  // the registers are for the integer sums
        }
    }

    __attribute__((noinline)) void compute(const Linear& w, const Operand& a, int p, int t, Ahead ahead) {
        if (w.format == F32) f32(w, a, p, t, ahead);
        if (w.format == BF16) bfloat(w, a, p, t, ahead);
        if (w.format == I8) int8(w, a, p, t, ahead);
    }
};

// Tokens [0, tokens) times panels [first, last): epilogue(token, panel, values[PANELS]) gets PANELS adjacent panels.
template <int TOKENS, int PANELS, class E>
INLINE void one_tile(const Linear& w, const Operand& a, int p, int t, Ahead ahead, const E& epilogue) {
    Tile<TOKENS, PANELS> tile;
    tile.compute(w, a, p, t, ahead);
    for (int i = 0; i < TOKENS; i++) epilogue(t + i, p, tile.out[i], PANELS);
}

template <int PANELS, class E>
void tiles(const Linear& w, const Operand& a, int tokens, int p, const E& epilogue) {
    Ahead ahead{0, ceil_div(tokens, TOKENS_TILE)};
    for (int t = 0; t < tokens; t += TOKENS_TILE, ahead.share++) switch (tokens - t) {
            case 1: one_tile<1, PANELS>(w, a, p, t, ahead, epilogue); break;
            case 2: one_tile<2, PANELS>(w, a, p, t, ahead, epilogue); break;
            case 3: one_tile<3, PANELS>(w, a, p, t, ahead, epilogue); break;
            case 4: one_tile<4, PANELS>(w, a, p, t, ahead, epilogue); break;
            case 5: one_tile<5, PANELS>(w, a, p, t, ahead, epilogue); break;
            case 6: one_tile<6, PANELS>(w, a, p, t, ahead, epilogue); break;
            case 7: one_tile<7, PANELS>(w, a, p, t, ahead, epilogue); break;
            default: one_tile<8, PANELS>(w, a, p, t, ahead, epilogue);
        }
}

template <class E>
void multiply(const Linear& w, const Operand& a, int tokens, int first, int last, const E& epilogue) {
    int p = first;
    for (; p + 2 <= last; p += 2) tiles<2>(w, a, tokens, p, epilogue);
    if (p < last) tiles<1>(w, a, tokens, p, epilogue);
}

// ---- packing, once at load: source [outputs][inputs] as floats or bfloat16 ----

template <class T>
void pack_panel(const Linear& w, char* out, const T* source, int panel) {
    out += panel * w.panel_bytes();
    memset(out, 0, w.panel_bytes());
    for (int lane = 0; lane < LANES; lane++) {
        int row = w.row(panel, lane);
        const T* x = source + (size_t)(row < 0 ? 0 : row) * w.inputs;
        if (w.format == F32) {
            for (int k = 0; k < w.inputs && row >= 0; k++) ((float*)out)[(size_t)k * LANES + lane] = to_float(x[k]);
        } else if (w.format == BF16) {
            for (int k = 0; k < w.inputs && row >= 0; k++)
                from_float((bf16*)out + ((size_t)(k / 2) * LANES + lane) * 2 + k % 2, to_float(x[k]));
        } else {
            for (int g = 0; g < ceil_div(w.inputs, GROUP); g++) {
                char* block = out + (size_t)g * GROUP_BYTES;
                int count = row < 0 ? 0 : std::min(GROUP, w.inputs - g * GROUP);
                float values[GROUP] = {}, largest = 0, all = 0;
                for (int k = 0; k < count; k++) values[k] = to_float(x[g * GROUP + k]);
                f32x16 turned[4];
                memcpy(turned, values, sizeof values);
                turn(turned);
                memcpy(values, turned, sizeof values);
                for (float value : values) largest = std::max(largest, std::fabs(value)), all += std::fabs(value);
                bool finite = all - all == 0;
                float inverse = finite && largest > 0 ? 127.0f / largest : 0;
                for (int k = 0; k < GROUP; k++)
                    ((uint8_t*)block)[(k / 4 * LANES + lane) * 4 + k % 4] =
                        (uint8_t)(128 + (finite ? (int)std::nearbyint(values[k] * inverse) : 0));
                ((float*)(block + GROUP * LANES))[lane] = finite ? largest / 127.0f : NAN;
            }
        }
    }
}
