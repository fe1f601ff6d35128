// Causal attention of a few tokens of one request over its pages, for some of its key/value heads.
//
// Keys and values pass by in blocks of 64 positions counted from the request's start, whatever the page size and
// however the tokens are cut into steps, so a token's result is the same bits in a chunk as alone. Every 512 positions,
// a segment, a sum begins anew, and segments' sums are added in order: so whether one thread passes through all of them
// or each is somebody else's work changes no bit either.
// Over bfloat16 pages queries and weights are rounded to bfloat16 too, and products are taken in pairs.
#pragma once
#include <algorithm>
#include <type_traits>

#include "vec.h"

constexpr int BLOCK = 64;      // positions
constexpr int SEGMENT = 512;   // positions; whole blocks
constexpr int ROWS = 48;       // query rows (tokens * heads of the group) of one head that a unit of work aims at
constexpr int ALL_ROWS = 160;  // with more query rows than this, a unit's key/value heads are worked on apart

inline int segments(int length) { return (length + SEGMENT - 1) / SEGMENT; }

struct Pages {
    const int32_t* pages;  // of one request, by logical page
    int32_t page_tokens;
    int64_t place(int position) const {
        return (int64_t)pages[position / page_tokens] * page_tokens + position % page_tokens;
    }
};

// T: what pages hold, float or bf16. Scratch words are floats, or pairs of bfloat16:
//   query    [rows][head_dim]       pairs along head_dim
//   keys     [head_dim][BLOCK]      pairs along head_dim
//   values   [BLOCK][wide]          pairs along positions
//   weights  [rows][BLOCK]          pairs along positions
// What a segment says of a query row is a record: the weighted values so far [wide], then the largest score and the sum
// of weights, both relative to it.
template <class T>
struct Attention {
    static constexpr bool PAIRS = std::is_same<T, bf16>::value;
    static constexpr int PER = PAIRS ? 2 : 1;  // elements in a word
    typedef typename std::conditional<PAIRS, u32x16, f32x16>::type Words;
    typedef typename std::conditional<PAIRS, uint32_t, float>::type Word;

    const int heads, kv_heads, head_dim, words, wide;  // query heads of a group; words of a key; head_dim padded to 16
    const int record;                                  // floats of one
    Word *query, *keys, *values, *weights;
    float *scores, *sums, *more, *out;  // out: the records that are being written

    // Query rows of the largest unit: a few tokens of one head, or of all heads.
    static int rows(int group, int kv_heads) { return std::max({ROWS, ALL_ROWS, group * kv_heads}); }
    static int record_floats(int head_dim) { return (head_dim + 15) / 16 * 16 + 16; }
    static size_t floats(int group, int kv_heads, int head_dim) {
        size_t wide = (head_dim + 15) / 16 * 16;
        return (size_t)rows(group, kv_heads) * (wide + 2 * BLOCK + 2 * record_floats(head_dim)) + 2 * BLOCK * wide;
    }
    Attention(float* memory, int group, int all_kv_heads, int dim)
        : heads(group), kv_heads(all_kv_heads), head_dim(dim), words(dim / PER), wide((dim + 15) / 16 * 16),
          record(record_floats(dim)) {
        const size_t n = rows(group, kv_heads);
        keys = (Word*)memory, values = keys + BLOCK * wide, query = values + BLOCK * wide, weights = query + n * wide;
        scores = (float*)weights + n * BLOCK, sums = scores + n * BLOCK, more = sums + n * record, out = sums;
    }

    // Key/value heads [head, last): queries [tokens][stride] from query head 0 on, roped, at positions first,
    // first + 1, ...; results to target, strided alike. layer_keys, layer_values: [place][kv_heads][head_dim].
    void run(const Pages& pages, const T* layer_keys, const T* layer_values, int head, int last, int first, int tokens,
             const float* queries, int64_t stride, float* target, int64_t target_stride) {
        take(head, last, tokens, queries, stride);
        const int length = first + tokens;
        touch(pages, layer_keys, layer_values, head, last, 0, std::min(BLOCK, length));
        for (int start = 0; start < length; start += SEGMENT) {
            out = start ? more : sums;
            pass(pages, layer_keys, layer_values, head, last, first, tokens, start, std::min(start + SEGMENT, length),
                 length);
            if (start) add(sums, more, start, head, last, first, tokens);
        }
        finish(sums, head, last, tokens, target, target_stride);
    }

    // One segment of that, up to its records [heads][tokens][group's heads]; what lies behind a token says nothing.
    void run_segment(const Pages& pages, const T* layer_keys, const T* layer_values, int head, int last, int first,
                     int tokens, int start, const float* queries, int64_t stride, float* records) {
        take(head, last, tokens, queries, stride);
        const int end = std::min(start + SEGMENT, first + tokens);
        touch(pages, layer_keys, layer_values, head, last, start, std::min(start + BLOCK, end));
        out = records;
        pass(pages, layer_keys, layer_values, head, last, first, tokens, start, end, end);
    }

    // The records of all segments, one after the other, become results.
    void join(float* records, int head, int last, int first, int tokens, float* target, int64_t target_stride) {
        const size_t size = (size_t)(last - head) * tokens * heads * record;
        for (int start = SEGMENT; start < first + tokens; start += SEGMENT)
            add(records, records + start / SEGMENT * size, start, head, last, first, tokens);
        finish(records, head, last, tokens, target, target_stride);
    }

   private:
    void take(int head, int last, int tokens, const float* queries, int64_t stride) {
        const int count = tokens * heads;  // rows of one key/value head: [tokens][heads of its group]
        const float scale = 1.0f / std::sqrt((float)head_dim);
        for (int h = head; h < last; h++)
            for (int i = 0; i < count; i++) {
                const float* from = queries + (i / heads) * stride + (h * heads + i % heads) * head_dim;
                const int r = (h - head) * count + i;
                int d = 0;
                for (; d + 16 <= head_dim; d += 16) store16((T*)(query + r * wide) + d, load16(from + d) * scale);
                for (; d < head_dim; d++) from_float((T*)(query + r * wide) + d, from[d] * scale);
            }
    }

    // Positions [start, end) of one segment; up to `until` they are touched in advance.
    void pass(const Pages& pages, const T* layer_keys, const T* layer_values, int head, int last, int first, int tokens,
              int start, int end, int until) {
        const int count = tokens * heads, n = last - head;
        for (int r = 0; r < n * count; r++) {
            for (int d = 0; d < wide; d += 16) store(out + r * record + d, f32x16{});
            out[r * record + wide] = -INFINITY, out[r * record + wide + 1] = 0;
        }
        for (; start < end; start += BLOCK) {
            const int here = std::min(BLOCK, end - start), next = start + BLOCK;
            for (int h = 0; h < n; h++) {
                gather(pages, layer_keys, layer_values, head + h, start, here);
                // The next block is touched while this one is worked on, a share with each head.
                const int ahead = std::max(0, std::min(BLOCK, until - next));
                touch(pages, layer_keys, layer_values, head, last, next + ahead * h / n, next + ahead * (h + 1) / n);
                block(h * count, count, first, start, here);
            }
        }
    }

    // Adds the records of the segment from `start` on to those of all before. Never inlined: compiled once, it rounds
    // in one way.
    __attribute__((noinline)) void add(float* to, const float* from, int start, int head, int last, int first,
                                       int tokens) {
        const int count = tokens * heads;
        for (int r = 0; r < (last - head) * count; r++) {
            if (first + r % count / heads < start) continue;  // the segment lies behind this token
            float* a = to + r * record;
            const float* b = from + r * record;
            const float largest = a[wide] > b[wide] ? a[wide] : b[wide];
            const f32x16 shrink = exp16(f32x16{a[wide], b[wide]} - largest);
            const f32x16 x = splat(shrink[0]), y = splat(shrink[1]);
            for (int d = 0; d < wide; d += 16) store(a + d, load16(a + d) * x + load16(b + d) * y);
            a[wide] = largest, a[wide + 1] = a[wide + 1] * shrink[0] + b[wide + 1] * shrink[1];
        }
    }

    void finish(const float* records, int head, int last, int tokens, float* target, int64_t target_stride) {
        const int count = tokens * heads;
        for (int h = head; h < last; h++)
            for (int i = 0; i < count; i++) {
                float* to = target + (i / heads) * target_stride + (h * heads + i % heads) * head_dim;
                const float* from = records + ((h - head) * count + i) * record;
                const float inverse = 1.0f / from[wide + 1];
                for (int d = 0; d < head_dim; d++) to[d] = from[d] * inverse;
            }
    }

    // Rows [r, r + count) meet a block.
    void block(int start_row, int count, int first, int start, int here) {
        for (int i = 0; i < count; i += 2) {
            const int r = start_row + i, pair = std::min(2, count - i);
            pair == 2 ? score<2>(r) : score<1>(r);
            for (int j = 0; j < pair; j++) soften(r + j, std::min(here, first + (i + j) / heads + 1 - start));
            for (int d = 0; d < wide; d += 64) switch (std::min(4, (wide - d) / 16)) {
                    case 1: pair == 2 ? weigh<2, 1>(r, d, here) : weigh<1, 1>(r, d, here); break;
                    case 2: pair == 2 ? weigh<2, 2>(r, d, here) : weigh<1, 2>(r, d, here); break;
                    case 3: pair == 2 ? weigh<2, 3>(r, d, here) : weigh<1, 3>(r, d, here); break;
                    default: pair == 2 ? weigh<2, 4>(r, d, here) : weigh<1, 4>(r, d, here);
                }
        }
    }

    // Touches the heads' keys and values at positions [from, to) in the order in which they lie in memory. Loads, not
    // prefetches: only they set the hardware's own prefetcher going, which keeps more lines in flight than we can.
    void touch(const Pages& pages, const T* layer_keys, const T* layer_values, int head, int last, int from, int to) {
        if (last - head < kv_heads) return;  // one head's rows lie apart
        const int bytes = (last - head) * head_dim * sizeof(T);
        for (const T* layer : {layer_keys, layer_values}) {
            int page = from / pages.page_tokens, offset = from % pages.page_tokens;
            for (int j = from; j < to; j++) {
                const int64_t place = (int64_t)pages.pages[page] * pages.page_tokens + offset;
                const char* at = (const char*)(layer + (place * kv_heads + head) * head_dim);
                for (int b = 0; b < bytes; b += 64) (void)*(const volatile char*)(at + b);
                if (++offset == pages.page_tokens) page++, offset = 0;
            }
        }
    }

    // A block's keys and values in the scratch, up to the next 16 positions; what lies behind gets no weight.
    void gather(const Pages& pages, const T* layer_keys, const T* layer_values, int kv_head, int start, int here) {
        int page = start / pages.page_tokens, offset = start % pages.page_tokens;
        for (int j = 0; j < here; j += 16) {
            const int count = std::min(16, here - j);
            const T *key[16], *value[16];
            for (int i = 0; i < count; i++) {
                const int64_t place = (int64_t)pages.pages[page] * pages.page_tokens + offset;
                const int64_t at = (place * kv_heads + kv_head) * head_dim;
                key[i] = layer_keys + at, value[i] = layer_values + at;
                if (++offset == pages.page_tokens) page++, offset = 0;
            }
            int d = 0;
            for (; d + 16 <= words; d += 16) {
                f32x16 square[16];
                if (count == 16) {
                    UNROLL for (int i = 0; i < 16; i++) square[i] = load<f32x16>(key[i] + d * PER);
                } else {
                    UNROLL for (int i = 0; i < 16; i++)
                        square[i] = i < count ? load<f32x16>(key[i] + d * PER) : f32x16{};
                }
                transpose16(square);
                UNROLL for (int i = 0; i < 16; i++) store(keys + (d + i) * BLOCK + j, square[i]);
            }
            for (; d < words; d++)
                for (int i = 0; i < 16; i++)
                    keys[d * BLOCK + j + i] = i < count ? load<Word>(key[i] + d * PER) : Word{};
            for (int i = 0; i < count; i += PER) gather_values(values + (j + i) / PER * wide, value + i, count - i);
        }
    }

    void gather_values(Word* to, const T* const* value, int left) {
        int d = 0;
        if constexpr (PAIRS) {
            for (; d + 16 <= head_dim; d += 16) {
                u32x16 low = widen(load<u16x16>(value[0] + d)), high = {};
                if (left > 1) high = widen(load<u16x16>(value[1] + d)) << 16;
                store(to + d, low | high);
            }
            for (; d < wide; d++)
                to[d] = d >= head_dim ? 0 : value[0][d] | (left > 1 ? (uint32_t)value[1][d] << 16 : 0);
        } else {
            for (; d + 16 <= head_dim; d += 16) store(to + d, load16(value[0] + d));
            for (; d < wide; d++) to[d] = d >= head_dim ? 0 : value[0][d];
        }
    }

    static INLINE f32x16 multiply_add(f32x16 sum, Words a, Word b) {
        if constexpr (PAIRS) return dot_bf16(sum, a, b);
        else return sum + a * b;
    }

    template <int R>
    void score(int r) {
        f32x16 sum[R][4] = {};
        for (int d = 0; d < words; d++) {
            UNROLL for (int c = 0; c < 4; c++) {
                Words k = load<Words>(keys + d * BLOCK + 16 * c);
                UNROLL for (int i = 0; i < R; i++) sum[i][c] = multiply_add(sum[i][c], k, query[(r + i) * wide + d]);
            }
        }
        UNROLL for (int i = 0; i < R; i++)
            UNROLL for (int c = 0; c < 4; c++) store(scores + (r + i) * BLOCK + 16 * c, sum[i][c]);
    }

    // Scores of row r become weights relative to the largest score so far; positions from `visible` on get none.
    void soften(int r, int visible) {
        float *s = scores + r * BLOCK, *sum_of = out + r * record, &most = sum_of[wide], &total = sum_of[wide + 1];
        for (int j = std::max(visible, 0); j < BLOCK; j++) s[j] = -INFINITY;
        f32x16 v[4], best = splat(most), sum = {};
        UNROLL for (int c = 0; c < 4; c++) best = max16(best, v[c] = load16(s + 16 * c));
        const float largest = largest16(best);
        UNROLL for (int c = 0; c < 4; c++) {
            f32x16 weight = exp16(v[c] - largest);
            sum += weight;
            if constexpr (PAIRS) store((bf16*)(weights + r * BLOCK) + 16 * c, to_bf16(weight));
            else store(weights + r * BLOCK + 16 * c, weight);
        }
        const float shrink = most == largest ? 1.0f : exp16(splat(most - largest))[0];
        most = largest;
        total = total * shrink + sum16(sum);
        if (shrink != 1)
            for (int d = 0; d < wide; d += 16) store(sum_of + d, load16(sum_of + d) * shrink);
    }

    template <int R, int N>
    void weigh(int r, int d, int here) {
        f32x16 sum[R][N];
        UNROLL for (int i = 0; i < R; i++)
            UNROLL for (int c = 0; c < N; c++) sum[i][c] = load16(out + (r + i) * record + d + 16 * c);
        for (int j = 0; j < (here + PER - 1) / PER; j++) {
            UNROLL for (int c = 0; c < N; c++) {
                Words v = load<Words>(values + j * wide + d + 16 * c);
                UNROLL for (int i = 0; i < R; i++) sum[i][c] = multiply_add(sum[i][c], v, weights[(r + i) * BLOCK + j]);
            }
        }
        UNROLL for (int i = 0; i < R; i++)
            UNROLL for (int c = 0; c < N; c++) store(out + (r + i) * record + d + 16 * c, sum[i][c]);
    }
};
