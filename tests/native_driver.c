/* Compares tiles, attention and a chain of drafts of kernels=native with plain loops, where there is no Python of the
   processor: `make arm` runs it under qemu. It prints what differs, and returns how much does. */

#include "../kernels/spec_kernels/native/native.c"

#include <stdio.h>

static int num_wrong = 0;

static float drawn(void) {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / (1 << 24) - 0.5f;
}

static float *numbers(int64_t count) {
    float *x = malloc((size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++) x[i] = drawn();
    return x;
}

static void compare(const char *what, const float *got, const float *expected, int64_t count) {
    double error = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        error += ((double)got[i] - expected[i]) * ((double)got[i] - expected[i]);
        size += (double)expected[i] * expected[i];
    }
    if (error <= 1e-10 * size) return; /* also false for NaN */
    printf("%s: the error is %g of %g\n", what, sqrt(error), sqrt(size));
    num_wrong++;
}

/* A weight [outputs, inputs], and the same in panels, as packing.py lays them out. */
typedef struct {
    float *dense;
    product_t product;
} weight_t;

static weight_t packed(int64_t num_outputs, int64_t num_inputs, int64_t layout) {
    weight_t made = {numbers(num_outputs * num_inputs), {NULL, NULL, num_outputs, num_inputs, layout}};
    const int64_t column = column_of(&made.product), num_columns = filled_up(num_outputs, PANEL) / COLUMN;
    /* Behind it lies what prefetching and the last panel's columns may read. */
    uint32_t *panels = calloc((size_t)(num_columns * column), 4);
    for (int64_t n = 0; n < num_outputs; n++)
        for (int64_t k = 0; k < num_inputs; k++) {
            uint32_t bits;
            memcpy(&bits, made.dense + n * num_inputs + k, 4);
            if (layout == HALVES) bits &= 0xFFFF0000;
            memcpy(made.dense + n * num_inputs + k, &bits, 4);
            uint32_t *to = panels + n / COLUMN * column + n % COLUMN;
            if (layout == FLOATS)
                to[k * COLUMN] = bits;
            else
                to[k / 2 * COLUMN] |= k % 2 ? bits : bits >> 16;
        }
    made.product.panels = panels;
    return made;
}

static void plain_product(float *out, const float *x, const weight_t *weight, int64_t num_rows) {
    const int64_t outputs = weight->product.num_outputs, inputs = weight->product.num_inputs;
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t n = 0; n < outputs; n++) {
            double sum = 0;
            for (int64_t k = 0; k < inputs; k++) sum += (double)x[row * inputs + k] * weight->dense[n * inputs + k];
            out[row * outputs + n] = (float)sum;
        }
}

static void check_products(void) {
    const int64_t shapes[][2] = {{64, 48}, {130, 7}, {5, 33}, {192, 70}};
    for (int s = 0; s < 4; s++)
        for (int64_t layout = FLOATS; layout <= HALVES; layout++) {
            const int64_t outputs = shapes[s][0], inputs = shapes[s][1];
            const weight_t weight = packed(outputs, inputs, layout);
            const float *x = numbers(20 * inputs);
            float got[20 * 192], expected[20 * 192], alone[192];
            for (int64_t rows = 1; rows <= 20; rows++) {
                char name[80];
                snprintf(name, sizeof name, "%d rows, %d x %d, layout %d", (int)rows, (int)outputs, (int)inputs, (int)layout);
                native_product(&weight.product, got, x, rows);
                plain_product(expected, x, &weight, rows);
                compare(name, got, expected, rows * outputs);
                native_product(&weight.product, alone, x + (rows - 1) * inputs, 1);
                if (memcmp(alone, got + (rows - 1) * outputs, (size_t)outputs * sizeof(float))) {
                    printf("%s: the last row has other bits alone\n", name);
                    num_wrong++;
                }
            }
        }
}

enum { HIDDEN = 48, HEADS = 4, KV_HEADS = 2, DIM = 32, WIDTH = 80, PAGE = 4, PAGES = 12, WORDS = 70, POSITIONS = 48 };

typedef struct {
    weight_t qkv, o, gate_up, down;
    layer_t layer;
} plain_layer_t;

static plain_layer_t make_layer(int64_t num_inputs, int64_t window) {
    plain_layer_t made = {
        .qkv = packed((HEADS + 2 * KV_HEADS) * DIM, num_inputs, HALVES),
        .o = packed(HIDDEN, HEADS * DIM, FLOATS),
        .gate_up = packed(2 * WIDTH, HIDDEN, HALVES),
        .down = packed(HIDDEN, WIDTH, FLOATS),
    };
    made.layer = (layer_t){.qkv = made.qkv.product, .o = made.o.product, .gate_up = made.gate_up.product,
                           .down = made.down.product, .mlp_norm = {numbers(HIDDEN), 1e-5f}, .scale = 0.5f,
                           .num_heads = HEADS, .num_kv_heads = KV_HEADS, .head_dim = DIM, .rotary_dim = DIM,
                           .window = window, .page_size = PAGE};
    return made;
}

static void plain_norm(float *out, const float *x, const norm_t *norm, int64_t size) {
    double squares = 0;
    for (int64_t i = 0; i < size; i++) squares += (double)x[i] * x[i];
    for (int64_t i = 0; i < size; i++) out[i] = (float)(x[i] / sqrt(squares / size + norm->eps) * norm->weight[i]);
}

/* One row at `position` through a layer without a first norm, with keys in the slots of their positions. */
static void plain_row(float *out, const float *row, const float *residual, float *kv, const plain_layer_t *plain,
                      const place_t *place, int64_t position) {
    const layer_t *layer = &plain->layer;
    const int64_t kv_width = 2 * KV_HEADS * DIM;
    float heads[(HEADS + 2 * KV_HEADS) * DIM], attended[HEADS * DIM] = {}, stream[HIDDEN], normed[HIDDEN];
    float gates[2 * WIDTH], inner[WIDTH];
    plain_product(heads, row, &plain->qkv, 1);
    for (int h = 0; h < HEADS + KV_HEADS; h++)
        turn(heads + h * DIM, place->cos + position * DIM, place->signed_sin + position * DIM, DIM);
    memcpy(kv + slot_of(place->pages, PAGES, PAGE, position) * kv_width, heads + HEADS * DIM, kv_width * sizeof(float));
    for (int h = 0; h < HEADS; h++) {
        double weights[POSITIONS], total = 0;
        const int64_t first = layer->window ? more(position + 1 - layer->window, 0) : 0;
        for (int64_t t = first; t <= position; t++) {
            const float *key = kv + slot_of(place->pages, PAGES, PAGE, t) * kv_width + h / 2 * DIM;
            double score = 0;
            for (int i = 0; i < DIM; i++) score += (double)heads[h * DIM + i] * key[i];
            total += weights[t] = exp(score * layer->scale);
        }
        for (int64_t t = first; t <= position; t++) {
            const float *value = kv + slot_of(place->pages, PAGES, PAGE, t) * kv_width + (KV_HEADS + h / 2) * DIM;
            for (int i = 0; i < DIM; i++) attended[h * DIM + i] += (float)(weights[t] / total * value[i]);
        }
    }
    plain_product(stream, attended, &plain->o, 1);
    for (int i = 0; i < HIDDEN; i++) stream[i] += residual[i];
    plain_norm(normed, stream, &layer->mlp_norm, HIDDEN);
    plain_product(gates, normed, &plain->gate_up, 1);
    for (int i = 0; i < WIDTH; i++) inner[i] = (float)(gates[i] / (1 + exp(-gates[i]))) * gates[WIDTH + i];
    plain_product(out, inner, &plain->down, 1);
    for (int i = 0; i < HIDDEN; i++) out[i] += stream[i];
}

/* The pages of one request out of order, and rotations of positions. */
static place_t make_place(int64_t num_rows) {
    int64_t *pages = malloc(PAGES * sizeof(int64_t));
    float *cosines = malloc(POSITIONS * DIM * sizeof(float)), *sines = malloc(POSITIONS * DIM * sizeof(float));
    for (int64_t i = 0; i < PAGES; i++) pages[i] = i * 5 % PAGES;
    for (int p = 0; p < POSITIONS; p++)
        for (int i = 0; i < DIM; i++) {
            const double angle = p / pow(100, (i % (DIM / 2)) / 16.0);
            cosines[p * DIM + i] = (float)cos(angle);
            sines[p * DIM + i] = (float)(i < DIM / 2 ? -sin(angle) : sin(angle));
        }
    return (place_t){.cos = cosines, .signed_sin = sines, .pages = pages, .rotary_stride = DIM, .num_pages = PAGES,
                     .num_queries = num_rows};
}

/* Rows 0 to 32 one by one, then the last five of them at once. */
static void check_attention(int64_t window) {
    const plain_layer_t plain = make_layer(HIDDEN, window);
    place_t place = make_place(5);
    const float *rows = numbers(33 * HIDDEN);
    float *kv = numbers(PAGES * PAGE * 2 * KV_HEADS * DIM), *expected = numbers(33 * HIDDEN), got[5 * HIDDEN];
    for (int64_t i = 0; i < 33; i++)
        plain_row(expected + i * HIDDEN, rows + i * HIDDEN, rows + i * HIDDEN, kv, &plain, &place, i);
    int64_t positions[5], slots[5], length = 33;
    for (int64_t i = 0; i < 5; i++) positions[i] = 28 + i, slots[i] = slot_of(place.pages, PAGES, PAGE, 28 + i);
    place.positions = positions, place.slots = slots, place.lengths = &length;
    native_layer(&plain.layer, &place, got, kv, rows + 28 * HIDDEN, rows + 28 * HIDDEN, NULL, 5, 5, 1);
    compare(window ? "attention in a window" : "attention", got, expected + 28 * HIDDEN, 5 * HIDDEN);
}

static int64_t plain_likeliest(const float *hidden, const norm_t *norm, const weight_t *head) {
    float normed[HIDDEN], logits[WORDS];
    plain_norm(normed, hidden, norm, HIDDEN);
    plain_product(logits, normed, head, 1);
    int64_t best = 0;
    for (int64_t i = 0; i < WORDS; i++) best = logits[i] > logits[best] ? i : best;
    return best;
}

/* A chain of five drafts behind position 0. */
static void check_chain(void) {
    enum { DRAFTS = 5 };
    const plain_layer_t plain = make_layer(2 * HIDDEN, 0);
    const weight_t head = packed(WORDS, HIDDEN, FLOATS);
    const norm_t norm = {numbers(HIDDEN), 1e-5f};
    const draft_layer_t draft = {plain.layer, {numbers(HIDDEN), 1e-5f}, {numbers(HIDDEN), 1e-5f},
                                 numbers(WORDS * HIDDEN), 0};
    place_t place = make_place(1);
    float *kv = numbers(PAGES * PAGE * 2 * KV_HEADS * DIM), *same = numbers(PAGES * PAGE * 2 * KV_HEADS * DIM);
    memcpy(same, kv, PAGES * PAGE * 2 * KV_HEADS * DIM * sizeof(float));
    const float *hidden = numbers(HIDDEN), *before = hidden;
    float hiddens[(DRAFTS - 1) * HIDDEN], expected[(DRAFTS - 1) * HIDDEN];
    int64_t position = 0, slot = 0, length = 1, first = 3, drafts[DRAFTS], token = first;
    place.positions = &position, place.slots = &slot, place.lengths = &length;
    native_draft_steps(&draft, &norm, &head.product, NULL, &place, &position, &slot, &length, drafts, hiddens, &first,
                       hidden, kv, 1, DRAFTS, POSITIONS);
    for (int i = 1; i < DRAFTS; i++) {
        float input[2 * HIDDEN], *out = expected + (i - 1) * HIDDEN;
        plain_norm(input, draft.embedding + token * HIDDEN, &draft.embedding_norm, HIDDEN);
        plain_norm(input + HIDDEN, before, &draft.hidden_norm, HIDDEN);
        plain_row(out, input, before, same, &plain, &place, i);
        token = plain_likeliest(out, &norm, &head), before = out;
        if (drafts[i] != token) printf("draft %d is %d, not %d\n", i, (int)drafts[i], (int)token), num_wrong++;
    }
    compare("the chain's hidden states", hiddens, expected, (DRAFTS - 1) * HIDDEN);
}

int main(void) {
    check_products();
    check_attention(0);
    check_attention(6);
    check_chain();
    printf("%s registers: %d of products, attention and the chain differ from plain loops\n", REGISTER_FILE, num_wrong);
    return num_wrong > 0;
}
