/* Attention of a few rows over a paged KV cache: heads are normed and turned, keys and values written, and read. */

typedef struct {
    product_t qkv, o, gate_up, down;
    norm_t attention_norm, mlp_norm, head_norm; /* head_norm: [query and key heads, head_dim] */
    float scale;
    int64_t num_heads, num_kv_heads, head_dim, rotary_dim;
    int64_t window; /* the newest keys a row sees; 0 is all of them */
    int64_t page_size;
} layer_t;

/* Where the rows of one forward stand. */
typedef struct {
    const float *cos, *signed_sin; /* [rows, rotary_dim], rows `rotary_stride` apart */
    const int64_t *positions;      /* [rows] of each in these tables, or NULL where row i has theirs */
    const int64_t *slots;          /* [rows] cache slots that are written */
    const int64_t *pages;          /* [requests, num_pages] of the keys */
    const int64_t *lengths;        /* [requests] keys that the last row of each sees */
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

/* Norm and turn the query and key heads of `heads` in place, and write keys and values. */
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

/* The slots of a request's keys, from its pages, up to a whole tile; positions behind the last page are in that one. */
static void find_slots(int64_t *slots, const int64_t *pages, int64_t num_pages, int64_t page_size, int64_t num_keys) {
    for (int64_t first = 0, column = 0; first < num_keys; first += page_size, column++) {
        const int64_t slot = pages[column < num_pages ? column : num_pages - 1] * page_size;
        for (int64_t i = 0; i < page_size && first + i < num_keys; i++) slots[first + i] = slot + i;
    }
    for (int64_t t = num_keys; t % LANES; t++) slots[t] = slots[num_keys - 1];
}

/* The keys [begin, end) that one query row sees, of the `num_keys` of them that the pages hold; a row that sees none, as
   nobody's may, attends to nothing. The request is `length` keys long, whose last ones may be past its pages. */
typedef struct {
    int64_t begin, end;
} span_t;

static span_t seen_by(const layer_t *layer, const place_t *place, int64_t query, int64_t length, int64_t num_keys) {
    const int64_t end = less(length - (place->num_queries - 1 - query), num_keys);
    return (span_t){layer->window && end > layer->window ? end - layer->window : 0, end};
}

static const ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Add the products of `num_vectors` vectors of a query with those of 16 keys. */
static inline void add_products(vec *products, const float *query, const float *keys, int64_t stride,
                                const int64_t *slots, const int num_vectors) {
    vec parts[VECTORS];
    for (int v = 0; v < num_vectors; v++) parts[v] = *(const vec *)(query + v * LANES);
    for (int k = 0; k < LANES; k++)
        for (int v = 0; v < num_vectors; v++)
            products[k] += parts[v] * *(const vec *)(keys + slots[k] * stride + v * LANES);
}

/* The scores of the 16 keys from position `first` on for one query; -inf where the row does not see them. */
static vec score_tile(const float *query, const float *keys, int64_t stride, int64_t dim, float scale,
                      const int64_t *slots, int64_t first, span_t span) {
    vec products[LANES] = {};
    int64_t i = 0;
    for (; i + PANEL <= dim; i += PANEL) add_products(products, query + i, keys + i, stride, slots + first, VECTORS);
    for (; i < dim; i += LANES) add_products(products, query + i, keys + i, stride, slots + first, 1);
    const ints at = LANE + (int32_t)first;
    const ints is_seen = (at >= (int32_t)span.begin) & (at < (int32_t)span.end);
    return chosen(is_seen, sums_of(products) * scale, (vec){} - INFINITY);
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

/* Add the weighted values at positions [begin, end) to `num_vectors` vectors of the outcome. */
static inline void add_values(float *out, const float *values, int64_t stride, const int64_t *slots,
                              const float *weights, int64_t begin, int64_t end, const int num_vectors) {
    vec sums[VECTORS];
    for (int v = 0; v < num_vectors; v++) sums[v] = *(const vec *)(out + v * LANES);
    for (int64_t t = begin; t < end; t++)
        for (int v = 0; v < num_vectors; v++)
            sums[v] += *(const vec *)(values + slots[t] * stride + v * LANES) * weights[t];
    for (int v = 0; v < num_vectors; v++) *(vec *)(out + v * LANES) = sums[v];
}

/* The query heads that share a KV head, of all rows of a request: 16 keys at a time, which stay in the first cache
   while every query meets them. `out` and `queries` are those of the first row and head. */
static void attend_group(float *out, const float *queries, int64_t query_stride, const float *keys,
                         const layer_t *layer, const place_t *place, const int64_t *slots, float *scores,
                         int64_t length, int64_t num_keys) {
    const int64_t dim = layer->head_dim, group = layer->num_heads / layer->num_kv_heads;
    const int64_t stride = 2 * layer->num_kv_heads * dim, out_stride = layer->num_heads * dim;
    const int64_t num_rows = place->num_queries * group, width = (num_keys + LANES - 1) / LANES * LANES;
    const float *values = keys + layer->num_kv_heads * dim;
    const int64_t first = seen_by(layer, place, 0, length, num_keys).begin / LANES * LANES;
    for (int64_t tile = first; tile < num_keys; tile += LANES)
        for (int64_t row = 0; row < num_rows; row++) {
            const span_t span = seen_by(layer, place, row / group, length, num_keys);
            const float *query = queries + row / group * query_stride + row % group * dim;
            *(vec *)(scores + row * width + tile) =
                score_tile(query, keys, stride, dim, layer->scale, slots, tile, span);
        }
    for (int64_t row = 0; row < num_rows; row++) {
        const span_t span = seen_by(layer, place, row / group, length, num_keys);
        softmax(scores + row * width, span.begin / LANES * LANES, span.end);
        memset(out + row / group * out_stride + row % group * dim, 0, (size_t)dim * sizeof(float));
    }
    for (int64_t tile = first; tile < num_keys; tile += LANES)
        for (int64_t row = 0; row < num_rows; row++) {
            const span_t span = seen_by(layer, place, row / group, length, num_keys);
            const int64_t begin = more(tile, span.begin), end = less(tile + LANES, span.end);
            float *to = out + row / group * out_stride + row % group * dim;
            int64_t i = 0;
            for (; i + PANEL <= dim; i += PANEL)
                add_values(to + i, values + i, stride, slots, scores + row * width, begin, end, VECTORS);
            for (; i < dim; i += LANES)
                add_values(to + i, values + i, stride, slots, scores + row * width, begin, end, 1);
        }
}

/* out [rows, heads * head_dim] of queries [rows, heads * head_dim], rows `query_stride` apart. */
static void attend_rows(float *out, const float *queries, int64_t query_stride, const float *kv, const layer_t *layer,
                        const place_t *place, int64_t num_rows, float *memory) {
    const int64_t dim = layer->head_dim, group = layer->num_heads / layer->num_kv_heads;
    const int64_t capacity = place->num_pages * layer->page_size;
    int64_t *slots = (int64_t *)filled_up((int64_t)memory, 64); /* what lies in front of it may be of any size */
    float *scores = (float *)(slots + capacity + LANES);
    for (int64_t row = 0, request = 0; row < num_rows; row += place->num_queries, request++) {
        const int64_t length = more(place->lengths[request], 1), num_keys = less(length, capacity);
        find_slots(slots, place->pages + request * place->num_pages, place->num_pages, layer->page_size, num_keys);
        for (int64_t head = 0; head < layer->num_kv_heads; head++)
            attend_group(out + (row * layer->num_heads + head * group) * dim,
                         queries + row * query_stride + head * group * dim, query_stride, kv + head * dim, layer,
                         place, slots, scores, length, num_keys);
    }
}

static int64_t attention_memory(const layer_t *layer, const place_t *place) {
    const int64_t capacity = place->num_pages * layer->page_size + LANES;
    return capacity * (2 + place->num_queries * layer->num_heads / layer->num_kv_heads) + LANES;
}
