// Causal attention of a few tokens of one request over its pages, for one key/value head.
//
// Keys and values pass by in blocks of 64 positions counted from the request's start, whatever the page size and
// however the tokens are cut into steps, so a token's result is the same bits in a chunk as alone.
#pragma once
#include <algorithm>

#include "vec.h"

constexpr int BLOCK = 64;  // positions
constexpr int ROWS = 48;   // query rows (tokens * heads of the group) that a unit of work aims at

struct Pages {
    const int32_t* pages;  // of one request, by logical page
    int32_t page_tokens;
    int64_t place(int position) const {
        return (int64_t)pages[position / page_tokens] * page_tokens + position % page_tokens;
    }
};

struct Attention {
    int heads, head_dim, wide;  // query heads of the group; head_dim padded to 16
    float *q, *keys, *values, *scores, *out, *most, *total;

    static int rows(int group) { return std::max(ROWS, group); }
    static size_t floats(int group, int head_dim) {
        size_t wide = (head_dim + 15) / 16 * 16;
        return (size_t)rows(group) * (2 * wide + BLOCK + 2) + 2 * BLOCK * wide + 16;
    }
    Attention(float* memory, int group, int dim) : heads(group), head_dim(dim), wide((dim + 15) / 16 * 16) {
        const size_t n = rows(group);
        q = memory, out = q + n * wide, keys = out + n * wide, values = keys + BLOCK * wide;
        scores = values + BLOCK * wide, most = scores + n * BLOCK, total = most + n;
    }

    // queries [tokens][stride] from the group's first head on, roped, at positions first, first + 1, ...; results to
    // target, strided alike. keys/values: the layer's pages [place][kv_heads][head_dim].
    template <class T>
    void run(const Pages& pages, const T* layer_keys, const T* layer_values, int kv_heads, int kv_head, int first,
             int tokens, const float* queries, int64_t stride, float* target, int64_t target_stride) {
        const int count = tokens * heads;
        const float scale = 1.0f / std::sqrt((float)head_dim);
        for (int r = 0; r < count; r++) {
            const float* from = queries + (r / heads) * stride + (r % heads) * head_dim;
            for (int d = 0; d < head_dim; d++) q[r * wide + d] = from[d] * scale;
            for (int d = 0; d < wide; d++) out[r * wide + d] = 0;
            most[r] = -INFINITY, total[r] = 0;
        }
        const int length = first + tokens;
        for (int start = 0; start < length; start += BLOCK) {
            const int here = std::min(BLOCK, length - start);
            gather(pages, layer_keys, layer_values, kv_heads, kv_head, start, here);
            for (int r = 0; r < count; r += 2) {
                const int pair = std::min(2, count - r);
                if (pair == 2) score<2>(r); else score<1>(r);
                for (int i = r; i < r + pair; i++) soften(i, std::min(here, first + i / heads + 1 - start));
                for (int d = 0; d < wide; d += 64) switch (std::min(4, (wide - d) / 16)) {
                        case 1: pair == 2 ? weigh<2, 1>(r, d, here) : weigh<1, 1>(r, d, here); break;
                        case 2: pair == 2 ? weigh<2, 2>(r, d, here) : weigh<1, 2>(r, d, here); break;
                        case 3: pair == 2 ? weigh<2, 3>(r, d, here) : weigh<1, 3>(r, d, here); break;
                        default: pair == 2 ? weigh<2, 4>(r, d, here) : weigh<1, 4>(r, d, here);
                    }
            }
        }
        for (int r = 0; r < count; r++) {
            float* to = target + (r / heads) * target_stride + (r % heads) * head_dim;
            const float inverse = 1.0f / total[r];
            for (int d = 0; d < head_dim; d++) to[d] = out[r * wide + d] * inverse;
        }
    }

   private:
    // Keys of a block transposed to [head_dim][BLOCK], values as they are [BLOCK][wide], both as floats; zeros behind.
    template <class T>
    void gather(const Pages& pages, const T* layer_keys, const T* layer_values, int kv_heads, int kv_head, int start,
                int here) {
        for (int j = 0; j < BLOCK; j += 16) {
            const T* row[16];
            for (int i = 0; i < 16 && j + i < here; i++) {
                const int64_t at = (pages.place(start + j + i) * kv_heads + kv_head) * head_dim;
                row[i] = layer_keys + at;
                const T* value = layer_values + at;
                float* to = values + (j + i) * wide;
                int d = 0;
                for (; d + 16 <= head_dim; d += 16) store(to + d, load16(value + d));
                for (; d < wide; d++) to[d] = d < head_dim ? to_float(value[d]) : 0;
            }
            const int rows_here = std::max(0, std::min(16, here - j));
            int d = 0;
            for (; d + 16 <= head_dim; d += 16) {
                f32x16 square[16] = {};
                for (int i = 0; i < rows_here; i++) square[i] = load16(row[i] + d);
                transpose16(square);
                for (int i = 0; i < 16; i++) store(keys + (d + i) * BLOCK + j, square[i]);
            }
            for (; d < head_dim; d++)
                for (int i = 0; i < 16; i++) keys[d * BLOCK + j + i] = i < rows_here ? to_float(row[i][d]) : 0;
        }
    }

    template <int R>
    void score(int r) {
        f32x16 sum[R][4] = {};
        for (int d = 0; d < head_dim; d++)
            for (int c = 0; c < 4; c++) {
                f32x16 k = load16(keys + d * BLOCK + 16 * c);
                for (int i = 0; i < R; i++) sum[i][c] += k * q[(r + i) * wide + d];
            }
        for (int i = 0; i < R; i++)
            for (int c = 0; c < 4; c++) store(scores + (r + i) * BLOCK + 16 * c, sum[i][c]);
    }

    // Scores of row r become weights relative to the largest score so far; positions from `visible` on get none.
    void soften(int r, int visible) {
        float* s = scores + r * BLOCK;
        for (int j = std::max(visible, 0); j < BLOCK; j++) s[j] = -INFINITY;
        f32x16 v[4], best = splat(most[r]), sum = {};
        for (int c = 0; c < 4; c++) best = max16(best, v[c] = load16(s + 16 * c));
        const float largest = largest16(best);
        for (int c = 0; c < 4; c++) {
            f32x16 weight = exp16(v[c] - largest);
            sum += weight;
            store(s + 16 * c, weight);
        }
        const float shrink = exp16(splat(most[r] - largest))[0];
        most[r] = largest;
        total[r] = total[r] * shrink + sum16(sum);
        if (shrink != 1)
            for (int d = 0; d < wide; d += 16) store(out + r * wide + d, load16(out + r * wide + d) * shrink);
    }

    template <int R, int N>
    void weigh(int r, int d, int here) {
        f32x16 sum[R][N];
        for (int i = 0; i < R; i++)
            for (int c = 0; c < N; c++) sum[i][c] = load16(out + (r + i) * wide + d + 16 * c);
        for (int j = 0; j < here; j++)
            for (int c = 0; c < N; c++) {
                f32x16 v = load16(values + j * wide + d + 16 * c);
                for (int i = 0; i < R; i++) sum[i][c] += v * scores[(r + i) * BLOCK + j];
            }
        for (int i = 0; i < R; i++)
            for (int c = 0; c < N; c++) store(out + (r + i) * wide + d + 16 * c, sum[i][c]);
    }
};
