/* Attention of a few rows over a paged KV cache. Query and key heads are normed, if the layer has such norms, and
   rotated. Keys and values are written, and then the rows attend. */

typedef struct {
    product_t qkv, o, gate_up, down;
    norm_t attention_norm, mlp_norm, head_norm; /* head_norm: [query and key heads, head_dim], or none */
    float scale;
    int64_t num_heads, num_kv_heads, head_dim, rotary_dim;
    int64_t window; /* how many of the newest keys a row sees; 0 for all */
    int64_t page_size;
} layer_t;

/* The rotations, cache slots and keys of the rows of one forward. */
typedef struct {
    const float *cos, *signed_sin; /* [rows, rotary_dim], rows `rotary_stride` apart */
    const int64_t *positions;      /* [rows] each row's index in cos and signed_sin; NULL if row i has index i */
    const int64_t *slots;          /* [rows] cache slots that are written */
    const int64_t *pages;          /* [requests, num_pages] pages of the keys */
    const int64_t *lengths;        /* [requests] number of keys of each up to its last row */
    int64_t rotary_stride, num_pages, num_queries;
} place_t;

static void turn(float *head, const float *cos, const float *signed_sin, int64_t rotary_dim) {
    const int64_t half = rotary_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float low = head[i], high = head[i + half];
        head[i] = low * cos[i] + high * signed_sin[i];
        head[i + half] = high * cos[i + half] + low * signed_sin[i + half];
    }
}

/* Norm (if the layer does) and rotate the query and key heads of `heads` in place, and write keys and values. */
static void turn_and_write(float *heads, float *kv, const layer_t *layer, const place_t *place, int64_t num_rows) {
    const int64_t dim = layer->head_dim, num_turned = layer->num_heads + layer->num_kv_heads;
    const int64_t width = (num_turned + layer->num_kv_heads) * dim, kv_width = 2 * layer->num_kv_heads * dim;
    for (int64_t row = 0; row < num_rows; row++, heads += width) {
        for (int64_t h = 0; h < num_turned; h++) {
            float *head = heads + h * dim;
            if (layer->head_norm.weight)
                norm_row(head, head, layer->head_norm.weight + h * dim, layer->head_norm.eps, dim);
            const int64_t at = (place->positions ? place->positions[row] : row) * place->rotary_stride;
            turn(head, place->cos + at, place->signed_sin + at, layer->rotary_dim);
        }
        memcpy(kv + place->slots[row] * kv_width, heads + layer->num_heads * dim, (size_t)kv_width * sizeof(float));
    }
}

/* Find where a request's keys lie in the cache, from its pages. A cache slot has `stride` numbers. The last tile of
   keys is filled up with the place of the last key. */
static void find_keys(int64_t *offsets, const int64_t *pages, int64_t num_pages, int64_t page_size, int64_t stride,
                      int64_t num_keys) {
    for (int64_t first = 0, column = 0; first < num_keys; first += page_size, column++) {
        const int64_t slot = pages[column < num_pages ? column : num_pages - 1] * page_size;
        for (int64_t i = 0; i < page_size && first + i < num_keys; i++) offsets[first + i] = (slot + i) * stride;
    }
    for (int64_t t = num_keys; t % LANES; t++) offsets[t] = offsets[num_keys - 1];
}

/* The keys [begin, end) that one query row sees, of the `num_keys` that the pages hold. A row that sees none gives
   zeros. The request has `length` keys, the last of which may be past its pages. */
typedef struct {
    int64_t begin, end;
} span_t;

static span_t seen_by(const layer_t *layer, const place_t *place, int64_t query, int64_t length, int64_t num_keys) {
    const int64_t end = less(length - (place->num_queries - 1 - query), num_keys);
    return (span_t){layer->window && end > layer->window ? end - layer->window : 0, end};
}

enum { PAIR = 2, CHUNK = 64 }; /* heads that share each read, and keys whose values stay in the L1 cache */
enum { KEYS = LANES / 2, VALUES = 4 }; /* keys, and vectors of a value, at once: PAIR times as many registers of sums */

/* The number of each lane. */
STEP ints lanes(void) {
    ints lane;
    for (int l = 0; l < LANES; l++) lane[l] = l;
    return lane;
}

/* Multiply every other key of 2 * KEYS by the queries of `num_heads` heads, which lie `dim` apart. Each product is
   summed down to two lanes, which `fold` still has to add. */
STEP void multiply_keys(vec *folded, const float *query, const float *keys, const int64_t *offsets,
                        int64_t dim, const int num_heads) {
    vec products[PAIR][KEYS];
    for (int h = 0; h < num_heads; h++)
        for (int k = 0; k < KEYS; k++) products[h][k] = (vec){};
    for (int64_t i = 0; i < dim; i += LANES)
        for (int k = 0; k < KEYS; k++) {
            const vec key = *(const vec *)(keys + offsets[2 * k] + i);
            for (int h = 0; h < num_heads; h++) products[h][k] += *(const vec *)(query + h * dim + i) * key;
        }
    for (int h = 0; h < num_heads; h++) folded[h] = pairs_of(products[h]);
}

/* Write the scores [heads, width] of the LANES keys from position `first` on for one query row; -inf for keys that the row
   does not see. */
STEP void score_tile(float *scores, int64_t width, const float *query, const float *keys, int64_t dim,
                     float scale, const int64_t *offsets, int64_t first, span_t span, const int num_heads) {
    vec left[PAIR], right[PAIR];
    multiply_keys(left, query, keys, offsets + first, dim, num_heads);
    multiply_keys(right, query, keys, offsets + first + 1, dim, num_heads);
    const ints at = lanes() + (int32_t)first;
    const ints is_seen = (at >= (int32_t)span.begin) & (at < (int32_t)span.end);
    for (int h = 0; h < num_heads; h++)
        *(vec *)(scores + h * width + first) = chosen(is_seen, fold(left[h], right[h]) * scale, (vec){} - INFINITY);
}

/* Turn scores into weights whose sum is 1. */
static void softmax(float *scores, int64_t first, int64_t end) {
    vec tops = (vec){} - INFINITY, sums = {};
    for (int64_t t = first; t < end; t += LANES) {
        const vec found = *(const vec *)(scores + t);
        tops = chosen(found > tops, found, tops);
    }
    const float top = most_of(tops);
    for (int64_t t = first; t < end; t += LANES) {
        const vec weights = exp_of(*(const vec *)(scores + t) - top);
        *(vec *)(scores + t) = weights;
        sums += weights;
    }
    const float share = 1.0f / sum_of(sums);
    for (int64_t t = first; t < end; t += LANES) *(vec *)(scores + t) *= share;
}

/* Add the weighted values at positions [begin, end) to `num_vectors` vectors of the output of each head. */
STEP void add_some(float *out, const float *weights, int64_t width, const float *values, int64_t dim,
                   const int64_t *offsets, int64_t begin, int64_t end, const int num_heads,
                   const int num_vectors) {
    vec sums[PAIR][VALUES];
    for (int h = 0; h < num_heads; h++)
        for (int v = 0; v < num_vectors; v++) sums[h][v] = *(const vec *)(out + h * dim + v * LANES);
    for (int64_t t = begin; t < end; t++)
        for (int v = 0; v < num_vectors; v++) {
            const vec part = *(const vec *)(values + offsets[t] + v * LANES);
            for (int h = 0; h < num_heads; h++) sums[h][v] += part * weights[h * width + t];
        }
    for (int h = 0; h < num_heads; h++)
        for (int v = 0; v < num_vectors; v++) *(vec *)(out + h * dim + v * LANES) = sums[h][v];
}

STEP void add_values(float *out, const float *weights, int64_t width, const float *values, int64_t dim,
                     const int64_t *offsets, int64_t begin, int64_t end, const int num_heads) {
    int64_t i = 0;
    for (; i + VALUES * LANES <= dim; i += VALUES * LANES)
        add_some(out + i, weights, width, values + i, dim, offsets, begin, end, num_heads, VALUES);
    for (; i < dim; i += LANES) add_some(out + i, weights, width, values + i, dim, offsets, begin, end, num_heads, 1);
}

/* One KV head of a request: its `num_keys` keys and values, which `num_heads` query heads of all rows share. */
typedef struct {
    const float *keys, *values;
    const int64_t *offsets;
    int64_t dim, num_heads, length, num_keys;
} group_t;

/* Write scores [rows, heads, width], LANES keys at a time. These keys stay in the L1 cache while all queries of the group
   are multiplied by them. */
static void score_group(float *scores, int64_t width, const float *queries, int64_t query_stride, const group_t *group,
                        const layer_t *layer, const place_t *place, int64_t first) {
    const int64_t dim = group->dim;
    for (int64_t tile = first; tile < group->num_keys; tile += LANES)
        for (int64_t row = 0; row < place->num_queries; row++) {
            const span_t span = seen_by(layer, place, row, group->length, group->num_keys);
            const float *query = queries + row * query_stride;
            float *to = scores + row * group->num_heads * width;
            int64_t h = 0;
            for (; h + PAIR <= group->num_heads; h += PAIR)
                score_tile(to + h * width, width, query + h * dim, group->keys, dim, layer->scale, group->offsets, tile,
                           span, PAIR);
            for (; h < group->num_heads; h++)
                score_tile(to + h * width, width, query + h * dim, group->keys, dim, layer->scale, group->offsets, tile,
                           span, 1);
        }
}

/* Add the values, weighted by `weights` [rows, heads, width], to out [rows, heads, dim], whose rows lie `out_stride`
   apart. */
static void add_group(float *out, int64_t out_stride, const float *weights, int64_t width, const group_t *group,
                      const layer_t *layer, const place_t *place, int64_t first) {
    const int64_t dim = group->dim;
    for (int64_t chunk = first; chunk < group->num_keys; chunk += CHUNK)
        for (int64_t row = 0; row < place->num_queries; row++) {
            const span_t span = seen_by(layer, place, row, group->length, group->num_keys);
            const int64_t begin = more(chunk, span.begin), end = less(chunk + CHUNK, span.end);
            const float *from = weights + row * group->num_heads * width;
            float *to = out + row * out_stride;
            int64_t h = 0;
            for (; h + PAIR <= group->num_heads; h += PAIR)
                add_values(to + h * dim, from + h * width, width, group->values, dim, group->offsets, begin, end, PAIR);
            for (; h < group->num_heads; h++)
                add_values(to + h * dim, from + h * width, width, group->values, dim, group->offsets, begin, end, 1);
        }
}

/* Attend the query heads of a group; `out` and `queries` point to its first row and head. */
static void attend_group(float *out, int64_t out_stride, const float *queries, int64_t query_stride,
                         const group_t *group, const layer_t *layer, const place_t *place, float *scores) {
    const int64_t width = filled_up(group->num_keys, LANES), num_heads = group->num_heads;
    const int64_t first = seen_by(layer, place, 0, group->length, group->num_keys).begin / LANES * LANES;
    score_group(scores, width, queries, query_stride, group, layer, place, first);
    for (int64_t row = 0; row < place->num_queries; row++) {
        const span_t span = seen_by(layer, place, row, group->length, group->num_keys);
        for (int64_t h = 0; h < num_heads; h++)
            softmax(scores + (row * num_heads + h) * width, span.begin / LANES * LANES, span.end);
        memset(out + row * out_stride, 0, (size_t)(num_heads * group->dim) * sizeof(float));
    }
    add_group(out, out_stride, scores, width, group, layer, place, first);
}

/* The attention of one layer. `memory` has `memory_each` numbers for every thread. */
typedef struct {
    float *out;
    const float *queries, *kv;
    const layer_t *layer;
    const place_t *place;
    int64_t query_stride, memory_each;
    float *memory;
} attended_t;

/* Attend the KV heads [first, last), which are numbered through all requests: request 0 has the first ones. */
static void attend_some(const void *argument, int64_t first_head, int64_t last_head, int64_t thread) {
    const attended_t *job = argument;
    const layer_t *layer = job->layer;
    const place_t *place = job->place;
    const int64_t dim = layer->head_dim, num_heads = layer->num_heads / layer->num_kv_heads;
    const int64_t capacity = place->num_pages * layer->page_size, kv_width = layer->num_kv_heads * dim;
    float *memory = job->memory + thread * job->memory_each; /* need not be aligned */
    int64_t *offsets = (int64_t *)filled_up((int64_t)memory, 64);
    float *scores = (float *)(offsets + capacity + LANES);
    for (int64_t i = first_head, found = -1; i < last_head; i++) {
        const int64_t request = i / layer->num_kv_heads, head = i % layer->num_kv_heads;
        const int64_t length = more(place->lengths[request], 1), num_keys = less(length, capacity);
        if (request != found)
            find_keys(offsets, place->pages + request * place->num_pages, place->num_pages, layer->page_size,
                      2 * kv_width, num_keys);
        found = request;
        const float *keys = job->kv + head * dim;
        const group_t group = {keys, keys + kv_width, offsets, dim, num_heads, length, num_keys};
        const int64_t row = request * place->num_queries, first = head * num_heads * dim;
        attend_group(job->out + row * layer->num_heads * dim + first, layer->num_heads * dim,
                     job->queries + row * job->query_stride + first, job->query_stride, &group, layer, place, scores);
    }
}

static int64_t attention_memory_each(const layer_t *layer, const place_t *place) {
    const int64_t capacity = place->num_pages * layer->page_size + LANES;
    return capacity * (2 + place->num_queries * layer->num_heads / layer->num_kv_heads) + LANES;
}

static int64_t attention_memory(const layer_t *layer, const place_t *place) {
    return team.num_threads * attention_memory_each(layer, place);
}

/* Attend queries [rows, heads * head_dim], whose rows lie `query_stride` apart; out has the same shape. */
static void attend_rows(float *out, const float *queries, int64_t query_stride, const float *kv, const layer_t *layer,
                        const place_t *place, int64_t num_rows, float *memory) {
    if (num_rows == 0) return;
    const attended_t job = {out, queries, kv, layer, place, query_stride, attention_memory_each(layer, place), memory};
    share(attend_some, &job, num_rows / place->num_queries * layer->num_kv_heads);
}
