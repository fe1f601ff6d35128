// What sampling asks of a row of logits, in one or two passes. The rules are in sampling.py; the noise is its formula.
#pragma once
#include <algorithm>
#include <cfloat>
#include <utility>
#include <vector>

#include "vec.h"

// The first place of the largest of n values that `at(i)` yields 16 at a time, or one by one behind the last 16.
template <class F>
INLINE int first_largest(int n, float& largest, const F& at) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f32x16 most = splat(-INFINITY);
    i32x16 place = {};
    for (int i = 0; i < n; i += 16) {
        f32x16 v = at(i);
        if (n - i < 16) v = lanes < n - i ? v : splat(-INFINITY);
        i32x16 more = (i32x16)(v > most);
        most = max16(v, most);
        place = (more & (lanes + i)) | (~more & place);
    }
    largest = largest16(most);
    int first = n;
    for (int l = 0; l < 16; l++)
        if (most[l] == largest) first = std::min(first, (int)place[l]);
    return first < n ? first : 0;
}

INLINE f32x16 load_tail(const float* x, int i, int n) {
    if (n - i >= 16) return load16(x + i);
    f32x16 v = {};
    memcpy(&v, x + i, (n - i) * sizeof(float));
    return v;
}

inline void best_of(const float* logits, int n, float& value, int32_t& token) {
    i32x16 good = i32x16{} - 1;
    token = first_largest(n, value, [&](int i) {
        f32x16 v = load_tail(logits, i, n);
        good &= (i32x16)(v <= splat(FLT_MAX));
        return v;
    });
    for (int l = 0; l < 16; l++)
        if (!good[l]) value = NAN;
}

INLINE u32x16 mix16(u32x16 x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

inline int32_t draw_from(const float* logits, int n, float temperature, uint32_t first, uint32_t second) {
    const u32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float largest;
    return first_largest(n, largest, [&](int i) {
        u32x16 bits = mix16(mix16((lanes + (uint32_t)i) ^ first) + second);
        f32x16 uniform = (__builtin_convertvector((i32x16)(bits >> 9), f32x16) + 0.5f) * 0x1p-23f;
        return load_tail(logits, i, n) / temperature - log16(-log16(uniform));
    });
}

inline float largest_of(const float* logits, int n, float temperature, int count, float* values, int32_t* tokens) {
    constexpr int RUN = 64;
    const int runs = (n + RUN - 1) / RUN;
    std::vector<float> peaks(runs);
    for (int r = 0; r < runs; r++) {
        f32x16 most = splat(-INFINITY);
        int i = r * RUN;
        const int end = std::min(n, i + RUN);
        for (; i + 16 <= end; i += 16) most = max16(load16(logits + i), most);
        peaks[r] = largest16(most);
        for (; i < end; i++) peaks[r] = std::max(peaks[r], logits[i]);
    }
    // At least `count` logits reach the count-th largest peak: what lies below it is out.
    std::vector<float> order(peaks);
    float bar = -INFINITY;
    if (count <= runs) {
        std::nth_element(order.begin(), order.begin() + count - 1, order.end(), std::greater<float>());
        bar = order[count - 1];
    }
    const float largest = *std::max_element(peaks.begin(), peaks.end());
    std::vector<std::pair<float, int32_t>> found;
    f32x16 sums = {};
    float sum = 0;
    for (int r = 0; r < runs; r++) {
        const int start = r * RUN, end = std::min(n, start + RUN);
        int i = start;
        for (; i + 16 <= end; i += 16) sums += exp16((load16(logits + i) - largest) / temperature);
        for (; i < end; i++) sum += exp16(splat((logits[i] - largest) / temperature))[0];
        if (peaks[r] >= bar)
            for (i = start; i < end; i++)
                if (logits[i] >= bar) found.emplace_back(-logits[i], i);
    }
    const int have = std::min(count, (int)found.size());
    std::nth_element(found.begin(), found.begin() + have, found.end());
    std::sort(found.begin(), found.begin() + have);
    for (int i = 0; i < count; i++) {
        values[i] = i < have ? -found[i].first / temperature : -INFINITY;
        tokens[i] = i < have ? found[i].second : 0;
    }
    return sum + sum16(sums);
}
