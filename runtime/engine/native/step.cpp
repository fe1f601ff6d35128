// A step of a decoder on a team of threads: token ids in, hidden states and logits out, one call from Python.
// The structs are mirrored in model.py.
#include <deque>

#include "attention.h"
#include "linear.h"
#include "pool.h"
#include "sampling.h"

struct Layer {
    const float *attn_norm, *q_norm, *k_norm, *mlp_norm;  // q_norm and k_norm may be null
    void *keys, *values;                                  // [places][kv_heads][head_dim], in kv_format
    Linear qkv, o, gate_up, down;
};

struct Model {
    int32_t layers, vocab, hidden, q_heads, kv_heads, head_dim, mlp;
    int32_t embed_format, kv_format;  // F32 or BF16
    float eps;
    const void* embed;        // [vocab][hidden]
    const float *cos, *sin;   // [positions][head_dim / 2]
    const float* norm;
    const Layer* layer;
    Linear head;
};

// Requests i < rows compute positions [cached, cached + extend); tokens and pages are tables indexed by slot.
struct Step {
    int32_t rows, tokens, page_tokens, outputs;
    const int32_t *slots, *cached, *extend;
    const int32_t *token_table, *page_table;
    int64_t token_stride, page_stride;
    const int32_t* output_rows;  // of all tokens of the step, those whose logits are wanted
    float* logits;               // [outputs][vocab]
    float* hidden;               // [tokens][hidden], before the final norm; or null
};

struct Engine {
    Pool pool;
    char* memory = nullptr;
    size_t size = 0;
    explicit Engine(int threads) : pool(threads) {}
    ~Engine() { free(memory); }

    char* workspace(size_t bytes) {
        if (bytes > size) {
            free(memory);
            size = (bytes + 4095) / 4096 * 4096;
            memory = (char*)aligned_alloc(4096, size);
            if (!memory) size = 0;
        }
        return memory;
    }
};

namespace {

constexpr int GATHER = 10;  // bringing a position's key and value costs as much as so many query rows
constexpr size_t MOST_RECORDS = 16 << 20;  // floats; contexts beyond are not split
constexpr int FEW = 16;  // up to this many tokens, every thread prepares all operands for itself and waits for nobody

void norm_row(const float* x, const float* weight, int n, float eps, float* out, int width) {
    f32x16 squares = {};
    int i = 0;
    for (; i + 16 <= n; i += 16) squares += load16(x + i) * load16(x + i);
    float sum = sum16(squares);
    for (int j = i; j < n; j++) sum += x[j] * x[j];
    const float scale = 1.0f / std::sqrt(sum / n + eps);
    i = 0;
    for (; i + 16 <= n; i += 16) store(out + i, load16(x + i) * scale * load16(weight + i));
    for (; i < n; i++) out[i] = x[i] * scale * weight[i];
    for (; i < width; i++) out[i] = 0;
}

void rope(float* x, const float* cos, const float* sin, int head_dim) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

template <class T>
void copy_row(T* to, const float* from, int n) {
    int i = 0;
    for (; i + 16 <= n; i += 16) store16(to + i, load16(from + i));
    for (; i < n; i++) from_float(to + i, from[i]);
}

struct Unit {  // attention of some tokens of one request for key/value heads [head, last)
    int32_t row, first, tokens, head, last;  // tokens of the row from the first-th on
    int32_t token;                           // the first one's place in the step
    int32_t segment, split;                  // only this segment, a part of that split; or all, and none (-1)
};

struct Split {  // a unit whose segments are units of their own; who finishes the last one joins them
    size_t records;
    int32_t parts;
    std::atomic<int32_t> left;
    Split(size_t at, int32_t parts) : records(at), parts(parts), left(parts) {}
};

// One step in flight: its memory and the phases.
class Forward {
   public:
    Forward(Engine& engine, const Model& m, const Step& s)
        : e(engine), m(m), s(s), tokens(s.tokens), few(tokens <= FEW), x_stride(padded(m.hidden)),
          qkv_stride(padded((m.q_heads + 2 * m.kv_heads) * m.head_dim)), attn_stride(padded(m.q_heads * m.head_dim)),
          act_stride(padded(m.mlp)), group(m.q_heads / m.kv_heads) {}

    bool run() {
        if (!arrange()) return false;
        e.pool.run([this](int thread) { job(thread); });
        return true;
    }

    // The final norm and the head alone, on given rows [outputs][hidden].
    bool run_head(float* hidden) {
        if (!arrange()) return false;
        x = hidden, x_stride = m.hidden;
        e.pool.run([this](int thread) { head(thread, nullptr); });
        return true;
    }

   private:
    Engine& e;
    const Model& m;
    const Step& s;
    const int tokens;
    const bool few;
    int x_stride;
    const int qkv_stride, attn_stride, act_stride, group;
    float *x, *qkv, *attn, *act, *scratch;
    char* operands;
    size_t operand_size, scratch_size;
    std::vector<int32_t> token_row, token_position;
    std::vector<Unit> units;
    std::deque<Split> splits;
    float* records;

    bool arrange() {
        const int widest = std::max({x_stride, attn_stride, act_stride}), team = e.pool.threads();
        const size_t record_floats = share_out();
        operand_size = (operand_bytes(tokens, widest) + 63) / 64 * 64;
        scratch_size = (std::max(Attention<float>::floats(group, m.kv_heads, m.head_dim), (size_t)widest) + 15) / 16 * 16;
        const size_t floats = (size_t)tokens * (x_stride + qkv_stride + attn_stride + act_stride) + record_floats;
        char* memory = e.workspace(floats * 4 + (few ? team : 1) * operand_size + team * scratch_size * 4);
        if (!memory) return false;
        x = (float*)memory, qkv = x + (size_t)tokens * x_stride, attn = qkv + (size_t)tokens * qkv_stride;
        act = attn + (size_t)tokens * attn_stride, records = act + (size_t)tokens * act_stride;
        scratch = records + record_floats, operands = (char*)(scratch + team * scratch_size);
        return true;
    }

    // Cuts attention into units of work. Returns how many floats the records of segments take.
    size_t share_out() {
        const int team = e.pool.threads(), block = std::max(1, ROWS / group);
        int pieces = 0;
        for (int r = 0; r < s.rows; r++) pieces += ceil_div(s.extend[r], block) * segments(s.cached[r] + s.extend[r]);
        std::vector<Unit> whole;
        int64_t work = 0;
        for (int r = 0, before = 0; r < s.rows; r++) {
            for (int i = 0; i < s.extend[r]; i++) token_row.push_back(r), token_position.push_back(s.cached[r] + i);
            for (int i = 0; i < s.extend[r]; i += block) {
                const int count = std::min(block, s.extend[r] - i);
                // All heads together read pages from end to end; few pieces are shared out by heads.
                const bool together = pieces >= 2 * team && (count == 1 || count * m.q_heads <= ALL_ROWS);
                const int heads = together ? m.kv_heads : 1;
                for (int h = 0; h < m.kv_heads; h += heads) {
                    whole.push_back({r, i, count, h, h + heads, before + i, 0, -1});
                    work += cost(whole.back());
                }
            }
            before += s.extend[r];
        }
        size_t floats = 0;
        for (Unit& u : whole) {
            const int parts = segments(end(u));
            const size_t rows = (size_t)(u.last - u.head) * u.tokens * group;
            const size_t size = rows * Attention<float>::record_floats(m.head_dim);
            if (parts == 1 || team == 1 || cost(u) * 8 * team <= work || floats + parts * size > MOST_RECORDS) {
                units.push_back(u);
                continue;
            }
            u.split = (int)splits.size();
            splits.emplace_back(floats, parts);
            floats += parts * size;
            for (; u.segment < parts; u.segment++) units.push_back(u);
        }
        // The longest first: what is left at the end is short.
        std::stable_sort(units.begin(), units.end(),
                         [this](const Unit& a, const Unit& b) { return cost(a) > cost(b); });
        return floats;
    }

    int end(const Unit& u) const { return s.cached[u.row] + u.first + u.tokens; }

    int64_t cost(const Unit& u) const {
        const int start = u.segment * SEGMENT, positions = u.split < 0 ? end(u) : std::min(end(u) - start, SEGMENT);
        return (int64_t)positions * (u.last - u.head) * (GATHER + u.tokens * group);
    }

    float* mine(int thread) { return scratch + thread * scratch_size; }

    void job(int thread) {
        share(tokens, [&](int t) { embed(t); });
        for (int i = 0; i < m.layers; i++) {
            const Layer& layer = m.layer[i];
            Operand a = normed(thread, tokens, layer.attn_norm, layer.qkv.format, nullptr);
            linear(layer.qkv, a, tokens, [&](int t, int p, const f32x16* v, int n) {
                for (int j = 0; j < n; j++) store(qkv + (size_t)t * qkv_stride + (p + j) * LANES, v[j]);
            });
            share(tokens, [&](int t) { place(layer, t); });
            share((int)units.size(), [&](int u) { attend(layer, units[u], mine(thread)); });
            a = plain(thread, attn, attn_stride, m.q_heads * m.head_dim, layer.o.format);
            linear(layer.o, a, tokens, [&](int t, int p, const f32x16* v, int n) { add(t, p, v, n); });
            a = normed(thread, tokens, layer.mlp_norm, layer.gate_up.format, nullptr);
            linear(layer.gate_up, a, tokens, [&](int t, int p, const f32x16* v, int) {
                store(act + (size_t)t * act_stride + p / 2 * LANES, silu16(v[0]) * v[1]);
            });
            a = plain(thread, act, act_stride, m.mlp, layer.down.format);
            linear(layer.down, a, tokens, [&](int t, int p, const f32x16* v, int n) { add(t, p, v, n); });
        }
        if (s.hidden) share(tokens, [&](int t) { copy_row(s.hidden + (size_t)t * m.hidden, row(t), m.hidden); });
        if (s.outputs) head(thread, s.output_rows);
    }

    // Logits of the rows `which`, or of the first ones. There are never more of them than tokens.
    void head(int thread, const int32_t* which) {
        Operand a = normed(thread, s.outputs, m.norm, m.head.format, which);
        linear(m.head, a, s.outputs, [&](int t, int p, const f32x16* v, int n) {
            for (int j = 0; j < n; j++) {
                float* to = s.logits + (size_t)t * m.vocab + (p + j) * LANES;
                const int left = m.vocab - (p + j) * LANES;
                if (left >= LANES) store(to, v[j]); else for (int c = 0; c < left; c++) to[c] = v[j][c];
            }
        });
    }

    float* row(int t) { return x + (size_t)t * x_stride; }

    template <class F>
    void share(int count, const F& f) {
        e.pool.each(count, f);
    }

    void embed(int t) {
        const Step& step = s;
        int32_t id = step.token_table[step.slots[token_row[t]] * step.token_stride + token_position[t]];
        float* to = row(t);
        int i = 0;
        if (m.embed_format == BF16)
            for (const bf16* from = (const bf16*)m.embed + (size_t)id * m.hidden; i < m.hidden; i++) to[i] = to_float(from[i]);
        else
            for (const float* from = (const float*)m.embed + (size_t)id * m.hidden; i < m.hidden; i++) to[i] = from[i];
        // Rows are multiplied in whole groups: what pads them is zero.
        for (; i < x_stride; i++) to[i] = 0;
        for (i = m.q_heads * m.head_dim; i < attn_stride; i++) attn[(size_t)t * attn_stride + i] = 0;
        for (i = m.mlp; i < act_stride; i++) act[(size_t)t * act_stride + i] = 0;
    }

    // Operands of all tokens: each thread its own copy when there are few, else one copy made together.
    template <class F>
    Operand operand(int thread, int count, int inputs, const F& fill) {
        Operand a = make_operand(operands + (few ? thread * operand_size : 0), count, inputs);
        if (few)
            for (int t = 0; t < count; t++) fill(a, t);
        else
            share(ceil_div(count, 8), [&](int u) {
                for (int t = u * 8; t < std::min(count, u * 8 + 8); t++) fill(a, t);
            });
        return a;
    }

    Operand normed(int thread, int count, const float* weight, int format, const int32_t* which) {
        return operand(thread, count, m.hidden, [&](const Operand& a, int t) {
            norm_row(row(which ? which[t] : t), weight, m.hidden, m.eps, mine(thread), padded(m.hidden));
            prepare(a, t, mine(thread), m.hidden, format);
        });
    }

    Operand plain(int thread, const float* from, int stride, int inputs, int format) {
        return operand(thread, tokens, inputs,
                       [&](const Operand& a, int t) { prepare(a, t, from + (size_t)t * stride, inputs, format); });
    }

    template <class E>
    void linear(const Linear& w, const Operand& a, int count, const E& epilogue) {
        // A few units a thread, of whole pairs of panels.
        const int panels = w.panels(), grain = std::max(2, ceil_div(panels, 8 * e.pool.threads()) / 2 * 2);
        share(ceil_div(panels, grain), [&](int u) {
            multiply(w, a, count, u * grain, std::min(panels, u * grain + grain),
                     [&](int t, int p, f32x16* v, int n) {
                         if (w.bias)
                             for (int j = 0; j < n; j++) v[j] += load16(w.bias + (p + j) * LANES);
                         epilogue(t, p, v, n);
                     });
        });
    }

    void add(int t, int p, const f32x16* v, int n) {
        float* to = row(t) + p * LANES;
        for (int j = 0; j < n; j++) store(to + j * LANES, load16(to + j * LANES) + v[j]);
    }

    Pages pages(int r) const { return {s.page_table + s.slots[r] * s.page_stride, s.page_tokens}; }

    // Head norms and rotary embedding in place; key and value to their place.
    void place(const Layer& layer, int t) {
        const int position = token_position[t], dim = m.head_dim;
        const float *cos = m.cos + (size_t)position * dim / 2, *sin = m.sin + (size_t)position * dim / 2;
        float* heads = qkv + (size_t)t * qkv_stride;
        for (int h = 0; h < m.q_heads + m.kv_heads; h++) {
            const float* weight = h < m.q_heads ? layer.q_norm : layer.k_norm;
            if (weight) norm_row(heads + h * dim, weight, dim, m.eps, heads + h * dim, dim);
            rope(heads + h * dim, cos, sin, dim);
        }
        const int64_t at = pages(token_row[t]).place(position) * m.kv_heads * dim;
        const float *k = heads + m.q_heads * dim, *v = k + m.kv_heads * dim;
        if (m.kv_format == BF16) {
            copy_row((bf16*)layer.keys + at, k, m.kv_heads * dim);
            copy_row((bf16*)layer.values + at, v, m.kv_heads * dim);
        } else {
            copy_row((float*)layer.keys + at, k, m.kv_heads * dim);
            copy_row((float*)layer.values + at, v, m.kv_heads * dim);
        }
    }

    void attend(const Layer& layer, const Unit& u, float* mine) {
        m.kv_format == BF16 ? attend<bf16>(layer, u, mine) : attend<float>(layer, u, mine);
    }

    template <class T>
    void attend(const Layer& layer, const Unit& u, float* mine) {
        const float* q = qkv + (size_t)u.token * qkv_stride;
        float* to = attn + (size_t)u.token * attn_stride;
        const T *keys = (const T*)layer.keys, *values = (const T*)layer.values;
        const int first = s.cached[u.row] + u.first;
        Attention<T> attention(mine, group, m.kv_heads, m.head_dim);
        if (u.split < 0) {
            attention.run(pages(u.row), keys, values, u.head, u.last, first, u.tokens, q, qkv_stride, to, attn_stride);
            return;
        }
        Split& split = splits[u.split];
        float* all = records + split.records;
        const size_t size = (size_t)(u.last - u.head) * u.tokens * group * attention.record;
        attention.run_segment(pages(u.row), keys, values, u.head, u.last, first, u.tokens, u.segment * SEGMENT, q,
                              qkv_stride, all + u.segment * size);
        if (split.left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        split.left.store(split.parts, std::memory_order_relaxed);  // for the next layer
        attention.join(all, u.head, u.last, first, u.tokens, to, attn_stride);
    }
};

}  // namespace

extern "C" {

Engine* engine_new(int threads) { return new Engine(threads); }
void engine_free(Engine* engine) { delete engine; }
int64_t engine_workspace_bytes(const Engine* engine) { return (int64_t)engine->size; }

int64_t linear_bytes(int outputs, int inputs, int format, int paired) {
    Linear w{nullptr, nullptr, outputs, inputs, format, paired};
    return (int64_t)w.panel_bytes() * w.panels();
}

// source: [outputs][inputs], floats or (source_format BF16) bfloat16; out: linear_bytes.
void linear_pack(Engine* engine, char* out, const void* source, int source_format, int outputs, int inputs, int format,
                 int paired) {
    Linear w{out, nullptr, outputs, inputs, format, paired};
    engine->pool.run([&](int) {
        engine->pool.each(w.panels(), [&](int p) {
            if (source_format == BF16) pack_panel(w, out, (const bf16*)source, p);
            else pack_panel(w, out, (const float*)source, p);
        });
    });
}

// For each row of logits [rows][vocab]: the largest, NaN where any is NaN or +inf, and its first place.
void rows_best(Engine* engine, const float* logits, int rows, int vocab, float* value, int32_t* token) {
    engine->pool.run([&](int) {
        engine->pool.each(rows, [&](int r) { best_of(logits + (size_t)r * vocab, vocab, value[r], token[r]); });
    });
}

// For each listed row a draw from softmax(logits / temperature), by the noise of keys first and second.
void rows_draw(Engine* engine, const float* logits, int rows, int vocab, const int32_t* which, const float* temperature,
               const uint32_t* first, const uint32_t* second, int32_t* token) {
    engine->pool.run([&](int) {
        engine->pool.each(rows, [&](int r) {
            token[r] = draw_from(logits + (size_t)which[r] * vocab, vocab, temperature[r], first[r], second[r]);
        });
    });
}

// For each listed row the `count` largest of logits / temperature, descending, equal ones by place, and the sum of
// exp(logit / temperature - largest) over all.
void rows_largest(Engine* engine, const float* logits, int rows, int vocab, const int32_t* which,
                  const float* temperature, int count, float* values, int32_t* tokens, float* mass) {
    engine->pool.run([&](int) {
        engine->pool.each(rows, [&](int r) {
            mass[r] = largest_of(logits + (size_t)which[r] * vocab, vocab, temperature[r], count,
                                 values + (size_t)r * count, tokens + (size_t)r * count);
        });
    });
}

// Both return 0 when there was no memory for the step.
int step_run(Engine* engine, const Model* model, const Step* step) { return Forward(*engine, *model, *step).run(); }

// hidden: [rows][hidden] -> logits [rows][vocab]
int head_run(Engine* engine, const Model* model, float* hidden, int rows, float* logits) {
    Step step{};
    step.tokens = step.outputs = rows;
    step.logits = logits;
    return Forward(*engine, *model, step).run_head(hidden);
}
}
