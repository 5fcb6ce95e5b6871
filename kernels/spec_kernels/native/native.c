/* The parts of a decoder for a few rows on a CPU, one or several in a call, for kernels=native.

   With a small model and a framework, most of the time goes to calling operators and to reading weights. So here a
   layer is one call, and weights are stored in bfloat16 if that represents them exactly.

   Every sum runs in one order, whatever the number of rows and threads. So a row has the same bits as if it were alone.

   Functions that are not static are called from Python (signatures.py lists them). Those that need memory for
   intermediate rows return 1 if there is not enough, else 0. */

#include "vectors.h"

#include "threads.h"

#include "products.h"

#include "tiles.h"

#include "attention.h"

#include "rounds.h"

static int64_t product_memory(const product_t *p, int64_t num_rows) {
    return p->layout == TILES ? tiles_memory(p, num_rows) : 0;
}

/* out [rows, num_outputs] = x [rows, num_inputs] times the weight, plus the bias and `residual` if there are any. */
static void multiply(float *out, const float *x, const float *residual, const product_t *p, int64_t num_rows,
                     float *memory) {
    const multiplied_t job = {out, x, p, num_rows, NULL};
    if (p->layout == TILES)
        multiply_by_tiles(job, memory);
    else
        multiply_panels(multiply_by_vectors, &job);
    if (!p->bias && !residual) return;
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t i = 0; i < p->num_outputs; i++, out++)
            *out = *out + (p->bias ? p->bias[i] : 0) + (residual ? *residual++ : 0);
}

/* The first part of a layer: the norm if it has one, the product, the norms of heads if there are any, the rotation,
   and the KV write. */
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

/* The part of a layer after attention: the output product, the residual, and the MLP with its norm and residual. */
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

static void pick_rows(float *out, const float *rows, const int64_t *picked, int64_t num_picked, int64_t width) {
    for (int64_t i = 0; i < num_picked; i++, out += width)
        memcpy(out, rows + picked[i] * width, (size_t)width * sizeof(float));
}

/* A whole decoder layer. `rows` are the residual stream, or the input of `qkv` if the layer has no first norm. All rows
   write keys and values. If `live` is given, only these rows go on: behind attention with `all_attend`, otherwise before
   it, and then `place` has their lengths. Without live rows nothing else is done. */
static void layer_rows(float *out, const float *rows, const float *residual, float *kv, const layer_t *layer,
                       const place_t *place, const int64_t *live, int64_t num_rows, int64_t num_live,
                       int64_t all_attend, float *memory) {
    const int64_t width = layer->qkv.num_outputs, num_inputs = layer->o.num_inputs;
    float *queries = memory, *mixed = queries + num_rows * width, *picked = mixed + num_rows * num_inputs;
    project_rows(queries, rows, kv, layer, place, num_rows, mixed);
    if (!num_live) return;
    memory = live ? picked + num_live * width : picked;
    if (live && !all_attend) {
        pick_rows(picked, queries, live, num_live, width);
        queries = picked;
    }
    attend_rows(mixed, queries, width, kv, layer, place, live && !all_attend ? num_live : num_rows, memory);
    if (live && all_attend) {
        pick_rows(picked, mixed, live, num_live, num_inputs);
        mixed = picked;
    }
    finish_rows(out, mixed, residual, layer, num_live, memory);
}

static int64_t layer_memory(const layer_t *layer, const place_t *place, int64_t num_rows) {
    const int64_t shared = more(attention_memory(layer, place), finish_memory(layer, num_rows));
    return num_rows * (2 * layer->qkv.num_outputs + layer->o.num_inputs) + more(shared, project_memory(layer, num_rows));
}

int native_layer(const layer_t *layer, const place_t *place, float *out, float *kv, const float *rows,
                 const float *residual, const int64_t *live, int64_t num_rows, int64_t num_live, int64_t all_attend) {
    float *memory = scratch(layer_memory(layer, place, num_rows));
    if (!memory) return 1;
    layer_rows(out, rows, residual, kv, layer, place, live, num_rows, num_live, all_attend, memory);
    return 0;
}

/* Run layers one after another. Their caches have one shape and lie `kv_stride` numbers apart. The first layer reads
   `stream`. The output of each is written to `streams` [num_layers, rows, hidden_size]. */
int native_layers(const layer_t *const *layers, int64_t num_layers, const place_t *place, float *streams, float *kv,
                  int64_t kv_stride, const float *stream, int64_t num_rows) {
    for (int64_t i = 0; i < num_layers; i++, kv += kv_stride) {
        float *out = streams + i * num_rows * layers[i]->o.num_outputs;
        if (native_layer(layers[i], place, out, kv, stream, stream, NULL, num_rows, num_rows, 1))
            return 1;
        stream = out;
    }
    return 0;
}

void native_norm(const norm_t *norm, float *out, const float *rows, int64_t size, int64_t num_rows) {
    norm_rows(out, rows, norm, size, num_rows);
}

/* Return the register file for which the tiles were compiled. */
const char *native_register_file(void) { return REGISTER_FILE; }

/* Return whether this process may use tile registers, for which it asks the system. */
int native_has_tiles(void) { return has_tiles(); }

/* Let `num_threads` threads share the work from now on, and return how many there are. */
int64_t native_threads(int64_t num_threads) { return resize_team(num_threads); }

int native_product(const product_t *product, float *out, const float *rows, int64_t num_rows) {
    float *memory = scratch(product_memory(product, num_rows));
    if (!memory) return 1;
    multiply(out, rows, NULL, product, num_rows, memory);
    return 0;
}

/* Find the likeliest token of each row, with the ties and NaN of torch's argmax. */
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
        const int64_t best = likeliest_of(logits, head->num_outputs);
        tokens[row] = token_map ? token_map[best] : best;
    }
    return 0;
}

/* Write to out [rows, 2 * size] the normed embedding of each token, then its normed hidden state. */
void native_draft_input(const norm_t *embedding_norm, const norm_t *hidden_norm, const float *embedding,
                        int64_t size, float *out, const int64_t *tokens, const float *hidden, int64_t num_rows) {
    for (int64_t row = 0; row < num_rows; row++, out += 2 * size, hidden += size) {
        norm_rows(out, embedding + tokens[row] * size, embedding_norm, size, 1);
        norm_rows(out + size, hidden, hidden_norm, size, 1);
    }
}

/* A draft head's layer and its input. */
typedef struct {
    layer_t layer; /* without an attention_norm */
    norm_t embedding_norm, hidden_norm;
    const float *embedding;     /* [vocabulary, hidden_size] */
    int64_t residual_is_normed; /* the residual is the hidden state after its norm, not before */
} draft_layer_t;

/* Run a draft head on tokens [rows] and hidden states [rows, hidden_size]; write out [live rows, hidden_size]. */
int native_draft_layer(const draft_layer_t *draft, const place_t *place, float *out, float *kv, const int64_t *tokens,
                       const float *hidden, const int64_t *live, int64_t num_rows, int64_t num_live,
                       int64_t all_attend) {
    const layer_t *layer = &draft->layer;
    const int64_t size = layer->o.num_outputs;
    float *inputs = scratch(num_rows * 3 * size + layer_memory(layer, place, num_rows));
    if (!inputs) return 1;
    float *residual = inputs + num_rows * 2 * size, *memory = residual + num_rows * size;
    native_draft_input(&draft->embedding_norm, &draft->hidden_norm, draft->embedding, size, inputs, tokens, hidden,
                       num_rows);
    for (int64_t i = 0; i < num_live; i++) {
        const int64_t row = live ? live[i] : i;
        const float *kept = draft->residual_is_normed ? inputs + (2 * row + 1) * size : hidden + row * size;
        memcpy(residual + i * size, kept, (size_t)size * sizeof(float));
    }
    layer_rows(out, inputs, residual, kv, layer, place, live, num_rows, num_live, all_attend, memory);
    return 0;
}

/* Run a catch-up step of num_rows rows a request, and find the likeliest token after each live row. The steps are
   native_catchup, `fuse` over `features` [rows, inputs of fuse], the layer, `norm` and the head. `places` takes the
   output of native_catchup, then those tokens [requests]. `hiddens` takes the layer's output for the live rows
   [requests, hidden_size]. The rest of `hiddens` is scratch: the output of `fuse` [rows, hidden_size], and without
   `is_pruned` the layer's output for all rows [rows, hidden_size]. */
int native_draft_start(const draft_layer_t *draft, const product_t *fuse, const norm_t *norm, const product_t *head,
                       const int64_t *token_map, const place_t *keys, int64_t *places, float *hiddens, float *kv,
                       const float *features, const int64_t *tokens, const int64_t *kv_lens, const int64_t *num_emitted,
                       int64_t num_requests, int64_t num_rows, int64_t num_positions, int64_t is_pruned,
                       int64_t all_attend) {
    const int64_t size = draft->layer.o.num_outputs, all_rows = num_requests * num_rows;
    int64_t *lengths = places + 2 * all_rows, *live_lengths = lengths + 3 * num_requests;
    int64_t *live_rows = live_lengths + num_requests, *likeliest = live_rows + 2 * num_requests;
    float *fused = hiddens + num_requests * size, *whole = fused + all_rows * size;
    native_catchup(places, kv_lens, num_emitted, keys->pages, 0, num_requests, num_rows, keys->num_pages,
                   draft->layer.page_size, num_positions);
    place_t place = *keys;
    place.positions = places, place.slots = places + all_rows;
    place.lengths = all_attend ? lengths : live_lengths, place.num_queries = all_attend ? num_rows : 1;
    if (native_product(fuse, fused, features, all_rows)) return 1;
    if (native_draft_layer(draft, &place, is_pruned ? hiddens : whole, kv, tokens, fused, is_pruned ? live_rows : NULL,
                           all_rows, is_pruned ? num_requests : all_rows, all_attend))
        return 1;
    for (int64_t i = 0; i < num_requests && !is_pruned; i++)
        memcpy(hiddens + i * size, whole + live_rows[i] * size, (size_t)size * sizeof(float));
    return native_likeliest(head, norm, token_map, likeliest, hiddens, num_requests);
}

/* Run the draft steps of a chain after its first draft. Each step advances the rows in `place` by one position, and
   runs layer and head on the token and the hidden state of the previous step. `drafts` [num_drafts, requests] begins
   with `first`. `hiddens` [num_drafts - 1, requests, hidden_size] takes the layer's output, before `norm`. */
int native_draft_steps(const draft_layer_t *draft, const norm_t *norm, const product_t *head, const int64_t *token_map,
                       const place_t *place, int64_t *positions, int64_t *slots, int64_t *lengths, int64_t *drafts,
                       float *hiddens, const int64_t *first, const float *hidden, float *kv, int64_t num_requests,
                       int64_t num_drafts, int64_t num_positions) {
    const int64_t size = draft->layer.o.num_outputs;
    memcpy(drafts, first, (size_t)num_requests * sizeof(int64_t));
    for (int64_t step = 1; step < num_drafts; step++, hiddens += num_requests * size) {
        const int64_t *tokens = drafts;
        drafts += num_requests;
        native_advance(positions, slots, lengths, place->pages, num_requests, place->num_pages,
                       draft->layer.page_size, num_positions);
        if (native_draft_layer(draft, place, hiddens, kv, tokens, hidden, NULL, num_requests, num_requests, 1))
            return 1;
        if (native_likeliest(head, norm, token_map, drafts, hiddens, num_requests)) return 1;
        hidden = hiddens;
    }
    return 0;
}
