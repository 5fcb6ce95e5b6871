/* The parts of a decoder that a few rows go through on a CPU, each one call: kernels=native.

   A processor reads a small model's weights in less time than a framework needs to call its operators, so what counts
   is how many calls a layer is and how many bytes a weight has.

   Every sum runs in one order, whatever the number of rows: a row's result is bit for bit what it is alone.

   Functions that are not static are called from Python (parts.py). They return 0, or 1 where memory for intermediate
   rows is short. */

#include "vectors.h"

#include "products.h"

#include "tiles.h"

#include "attention.h"

static int64_t product_memory(const product_t *p, int64_t num_rows) {
    return p->layout == TILES ? tiles_memory(p, num_rows) : 0;
}

/* out [rows, num_outputs] = x [rows, num_inputs] times the weight, plus the bias, plus `residual` where it is given. */
static void multiply(float *out, const float *x, const float *residual, const product_t *p, int64_t num_rows,
                     float *memory) {
    if (p->layout == TILES)
        multiply_by_tiles(out, x, p, num_rows, memory);
    else
        multiply_by_vectors(out, x, p, num_rows);
    if (!p->bias && !residual) return;
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t i = 0; i < p->num_outputs; i++, out++)
            *out = *out + (p->bias ? p->bias[i] : 0) + (residual ? *residual++ : 0);
}

/* The first half of attention: norm (of a whole layer), product, heads normed and turned, KV written. */
static void project_rows(float *heads, const float *rows, float *kv, const layer_t *layer, const place_t *place,
                         int64_t num_rows, float *memory) {
    if (layer->attention_norm.weight) {
        norm_rows(memory, rows, &layer->attention_norm, layer->qkv.num_inputs, num_rows);
        rows = memory;
    }
    multiply(heads, rows, NULL, &layer->qkv, num_rows, memory + num_rows * layer->qkv.num_inputs);
    turn_and_write(heads, kv, layer, place, num_rows);
}

static int64_t project_memory(const layer_t *layer, int64_t num_rows) {
    return num_rows * layer->qkv.num_inputs + product_memory(&layer->qkv, num_rows);
}

/* What is behind attention: its output product, the residual, and the MLP with its norm and residual. */
static void finish_rows(float *out, const float *attended, const float *residual, const layer_t *layer,
                        int64_t num_rows, float *memory) {
    const int64_t hidden = layer->o.num_outputs, width = layer->down.num_inputs;
    float *stream = memory, *gates = stream + num_rows * hidden, *inner = gates + num_rows * 2 * width;
    memory = inner + num_rows * width;
    multiply(stream, attended, residual, &layer->o, num_rows, memory);
    norm_rows(out, stream, &layer->mlp_norm, hidden, num_rows);
    multiply(gates, out, NULL, &layer->gate_up, num_rows, memory);
    for (int64_t row = 0; row < num_rows; row++) {
        const float *gate = gates + row * 2 * width, *up = gate + width;
        float *to = inner + row * width;
        for (int64_t i = 0; i < width; i += LANES) {
            const vec g = *(const vec *)(gate + i);
            *(vec *)(to + i) = g / (1.0f + exp_of(-g)) * *(const vec *)(up + i);
        }
    }
    multiply(out, inner, stream, &layer->down, num_rows, memory);
}

static int64_t finish_memory(const layer_t *layer, int64_t num_rows) {
    const int64_t mlp = more(product_memory(&layer->gate_up, num_rows), product_memory(&layer->down, num_rows));
    return num_rows * (layer->o.num_outputs + 3 * layer->down.num_inputs) +
           more(product_memory(&layer->o, num_rows), mlp);
}

/* A whole decoder layer, of `rows` that are the residual stream themselves or, without a first norm, a norm of it. */
int native_layer(const layer_t *layer, const place_t *place, float *out, float *kv, const float *rows,
                 const float *residual, int64_t num_rows) {
    const int64_t num_heads = num_rows * layer->qkv.num_outputs, num_mixed = num_rows * layer->o.num_inputs;
    const int64_t shared = more(attention_memory(layer, place), finish_memory(layer, num_rows));
    float *heads = scratch(num_heads + num_mixed + more(shared, project_memory(layer, num_rows)));
    if (!heads) return 1;
    float *mixed = heads + num_heads, *memory = mixed + num_mixed;
    project_rows(heads, rows, kv, layer, place, num_rows, memory);
    attend_rows(mixed, heads, layer->qkv.num_outputs, kv, layer, place, num_rows, memory);
    finish_rows(out, mixed, residual, layer, num_rows, memory);
    return 0;
}

/* The same in three parts, between which rows may be dropped. */
int native_project(const layer_t *layer, const place_t *place, float *heads, float *kv, const float *rows,
                   int64_t num_rows) {
    float *memory = scratch(project_memory(layer, num_rows));
    if (!memory) return 1;
    project_rows(heads, rows, kv, layer, place, num_rows, memory);
    return 0;
}

int native_attend(const layer_t *layer, const place_t *place, float *out, const float *kv, const float *queries,
                  int64_t query_stride, int64_t num_rows) {
    float *memory = scratch(attention_memory(layer, place));
    if (!memory) return 1;
    attend_rows(out, queries, query_stride, kv, layer, place, num_rows, memory);
    return 0;
}

int native_finish(const layer_t *layer, float *out, const float *attended, const float *residual, int64_t num_rows) {
    float *memory = scratch(finish_memory(layer, num_rows));
    if (!memory) return 1;
    finish_rows(out, attended, residual, layer, num_rows, memory);
    return 0;
}

void native_norm(const norm_t *norm, float *out, const float *rows, int64_t size, int64_t num_rows) {
    norm_rows(out, rows, norm, size, num_rows);
}

/* Tell whether weights may lie in tiles: the system is asked for the registers. */
int native_has_tiles(void) { return has_tiles(); }

int native_product(const product_t *product, float *out, const float *rows, int64_t num_rows) {
    float *memory = scratch(product_memory(product, num_rows));
    if (!memory) return 1;
    multiply(out, rows, NULL, product, num_rows, memory);
    return 0;
}

/* The likeliest token of each row, the lowest id of equal ones; NaN counts as the most, as torch has it. */
int native_likeliest(const product_t *head, const norm_t *norm, const int64_t *token_map, int64_t *tokens,
                     const float *rows, int64_t num_rows) {
    float *logits = scratch(num_rows * (head->num_inputs + head->num_outputs) + product_memory(head, num_rows));
    if (!logits) return 1;
    float *normed = logits + num_rows * head->num_outputs;
    if (norm->weight) {
        norm_rows(normed, rows, norm, head->num_inputs, num_rows);
        rows = normed;
    }
    multiply(logits, rows, NULL, head, num_rows, normed + num_rows * head->num_inputs);
    for (int64_t row = 0; row < num_rows; row++, logits += head->num_outputs) {
        int64_t best = 0;
        for (int64_t i = 1; i < head->num_outputs && !isnan(logits[best]); i++)
            if (logits[i] > logits[best] || isnan(logits[i])) best = i;
        tokens[row] = token_map ? token_map[best] : best;
    }
    return 0;
}

/* The normed embeddings of tokens beside normed hidden states: [rows, 2 * size]. */
void native_draft_input(const norm_t *embedding_norm, const norm_t *hidden_norm, const float *embedding,
                        int64_t size, float *out, const int64_t *tokens, const float *hidden, int64_t num_rows) {
    for (int64_t row = 0; row < num_rows; row++, out += 2 * size, hidden += size) {
        norm_rows(out, embedding + tokens[row] * size, embedding_norm, size, 1);
        norm_rows(out + size, hidden, hidden_norm, size, 1);
    }
}

/* The cache slot of a position; those behind the last page, and negative ones, are in the last page, which is scratch. */
static int64_t slot_of(const int64_t *pages, int64_t num_pages, int64_t page_size, int64_t position) {
    const int64_t column = position < 0 ? num_pages - 1 : less(position / page_size, num_pages - 1);
    const int64_t offset = position % page_size;
    return pages[column] * page_size + (offset < 0 ? offset + page_size : offset);
}

/* The metadata of rows at `wanted` positions [requests, num_queries] that see `keys` [requests]. */
void native_build(int64_t *positions, int64_t *slots, int64_t *lengths, const int64_t *wanted, const int64_t *keys,
                  const int64_t *pages, int64_t num_requests, int64_t num_queries, int64_t num_pages,
                  int64_t page_size, int64_t num_positions) {
    for (int64_t request = 0; request < num_requests; request++, pages += num_pages) {
        lengths[request] = more(keys[request], 1);
        for (int64_t row = request * num_queries; row < (request + 1) * num_queries; row++) {
            positions[row] = less(more(wanted[row], 0), num_positions - 1);
            slots[row] = slot_of(pages, num_pages, page_size, wanted[row]);
        }
    }
}

/* The metadata of one row a request, one position on. */
void native_advance(int64_t *positions, int64_t *slots, int64_t *lengths, const int64_t *pages, int64_t num_requests,
                    int64_t num_pages, int64_t page_size, int64_t num_positions) {
    for (int64_t request = 0; request < num_requests; request++, pages += num_pages) {
        const int64_t position = lengths[request]++;
        positions[request] = less(position, num_positions - 1);
        slots[request] = slot_of(pages, num_pages, page_size, position);
    }
}
