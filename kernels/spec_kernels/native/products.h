/* Products of a few rows with a weight, and norms.

   A weight lies in panels of 64 outputs, so that an output's sum needs no reduction across lanes. A panel lies in four
   columns of 16 outputs, [panel][4][input][16], since a core that reads from four pages of memory at once waits less
   than one that reads from a single page. If bfloat16 represents a weight exactly, it is stored in bfloat16:
   [panel][4][pair of inputs][16][2], with zeros after the last input up to a whole tile. Vector code widens such a
   weight as it reads it. Tile registers multiply it as it is. */

enum { FLOATS, HALVES, TILES }; /* the same numbers as in packing.py */
enum { TILE_INPUTS = 32 };

typedef struct {
    const void *panels;
    const float *bias; /* or NULL */
    int64_t num_outputs, num_inputs, layout;
} product_t;

/* The distance, in numbers, between a panel's columns of 16 outputs. */
static int64_t column_of(const product_t *p) {
    return LANES * (p->layout == FLOATS ? p->num_inputs : filled_up(p->num_inputs, TILE_INPUTS));
}

typedef struct {
    const float *weight; /* [size]; NULL if there is no norm */
    float eps;
} norm_t;

/* Inlined at each call, so that each number of rows has its own code. */
#define STEP static inline __attribute__((always_inline))

/* The weights of one input for 64 outputs. */
STEP void load_floats(vec w[][VECTORS], const float *panel, int64_t column, int64_t input) {
    for (int v = 0; v < VECTORS; v++) w[0][v] = *(const vec *)(panel + v * column + input * LANES);
}

/* The same for two inputs. The weights 32 inputs further on are prefetched, since the processor's own prefetching
   starts anew on each page of memory. */
STEP void load_halves(vec w[][VECTORS], const uint16_t *panel, int64_t column, int64_t input) {
    for (int v = 0; v < VECTORS; v++) {
        const uint16_t *at = panel + v * column + input * LANES;
        __builtin_prefetch(at + 32 * LANES);
        const ints pair = *(const ints *)at;
        w[0][v] = low_half(pair);
        w[1][v] = high_half(pair);
    }
}

/* One panel of a product, out [rows, 64], whose rows lie `stride` apart. It reads `inputs` inputs at a time. */
#define PRODUCT_TILE(name, weight_t, load, inputs, rows)                                                               \
    static void name(float *out, int64_t stride, const float *x, const weight_t *panel, int64_t column,                \
                     int64_t num_inputs) {                                                                             \
        vec sums[rows][VECTORS], w[inputs][VECTORS];                                                                   \
        for (int r = 0; r < rows; r++)                                                                                 \
            for (int v = 0; v < VECTORS; v++) sums[r][v] = (vec){};                                                    \
        int64_t k = 0;                                                                                                 \
        for (; k + inputs <= num_inputs; k += inputs) {                                                                \
            load(w, panel, column, k);                                                                                 \
            for (int i = 0; i < inputs; i++)                                                                           \
                for (int r = 0; r < rows; r++)                                                                         \
                    for (int v = 0; v < VECTORS; v++) sums[r][v] += w[i][v] * x[r * num_inputs + k + i];               \
        }                                                                                                              \
        if (k < num_inputs) {                                                                                          \
            load(w, panel, column, k);                                                                                 \
            for (int r = 0; r < rows; r++)                                                                             \
                for (int v = 0; v < VECTORS; v++) sums[r][v] += w[0][v] * x[r * num_inputs + k];                       \
        }                                                                                                              \
        for (int r = 0; r < rows; r++)                                                                                 \
            for (int v = 0; v < VECTORS; v++) *(vec *)(out + r * stride + v * LANES) = sums[r][v];                     \
    }
PRODUCT_TILE(floats_1, float, load_floats, 1, 1)
PRODUCT_TILE(floats_2, float, load_floats, 1, 2)
PRODUCT_TILE(floats_4, float, load_floats, 1, 4)
PRODUCT_TILE(halves_1, uint16_t, load_halves, 2, 1)
PRODUCT_TILE(halves_2, uint16_t, load_halves, 2, 2)
PRODUCT_TILE(halves_4, uint16_t, load_halves, 2, 4)

static void product_tile(float *out, int64_t stride, const float *x, const product_t *p, int64_t panel, int rows) {
    const int64_t column = column_of(p), first = panel * VECTORS * column;
    if (p->layout == FLOATS) {
        const float *at = (const float *)p->panels + first;
        (rows == 4 ? floats_4 : rows == 2 ? floats_2 : floats_1)(out, stride, x, at, column, p->num_inputs);
    } else {
        const uint16_t *at = (const uint16_t *)p->panels + first;
        (rows == 4 ? halves_4 : rows == 2 ? halves_2 : halves_1)(out, stride, x, at, column, p->num_inputs);
    }
}

/* A product, and where its rows come from and go to. `parts` is for tiles. */
typedef struct {
    float *out;
    const float *x;
    const product_t *product;
    int64_t num_rows;
    const uint16_t *parts;
} multiplied_t;

enum { FEWEST_SHARED = 1 << 16 }; /* with fewer multiplications, calling other threads takes longer */

/* Multiply all rows by each panel of 64 outputs; `part` does some of the panels. */
static void multiply_panels(part_t part, const multiplied_t *job) {
    const product_t *p = job->product;
    const int64_t num_panels = (p->num_outputs + PANEL - 1) / PANEL;
    if (p->num_outputs * p->num_inputs * job->num_rows < FEWEST_SHARED)
        part(job, 0, num_panels, 0);
    else
        share(part, job, num_panels);
}

/* out [rows, num_outputs] = x [rows, num_inputs] times panels [first, last) of the weight. */
static void multiply_by_vectors(const void *argument, int64_t first_panel, int64_t last_panel, int64_t thread) {
    (void)thread;
    const multiplied_t *job = argument;
    const product_t *p = job->product;
    float tile[4 * PANEL];
    const int64_t stride = p->num_outputs;
    for (int64_t panel = first_panel; panel < last_panel; panel++) {
        const int64_t first = panel * PANEL, width = less(PANEL, p->num_outputs - first);
        for (int64_t row = 0; row < job->num_rows;) {
            const int64_t left = job->num_rows - row;
            const int rows = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            const float *from = job->x + row * p->num_inputs;
            float *to = job->out + row * stride + first;
            product_tile(width == PANEL ? to : tile, width == PANEL ? stride : PANEL, from, p, panel, rows);
            for (int r = 0; r < rows && width < PANEL; r++)
                memcpy(to + r * stride, tile + r * PANEL, (size_t)width * sizeof(float));
            row += rows;
        }
    }
}

static void norm_row(float *out, const float *x, const float *weight, float eps, int64_t size) {
    vec squares = {};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const vec part = *(const vec *)(x + i);
        squares += part * part;
    }
    for (; i < size; i++) rest += x[i] * x[i];
    const float scale = 1.0f / sqrtf((sum_of(squares) + rest) / (float)size + eps);
    for (i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
}

static void norm_rows(float *out, const float *x, const norm_t *norm, int64_t size, int64_t num_rows) {
    for (int64_t row = 0; row < num_rows; row++)
        norm_row(out + row * size, x + row * size, norm->weight, norm->eps, size);
}

/* Memory for intermediate rows, kept for the next call; NULL if there is not enough. */
static float *scratch(int64_t count) {
    static _Thread_local float *memory = NULL;
    static _Thread_local int64_t capacity = 0;
    if (count > capacity || !memory) {
        free(memory);
        memory = aligned_alloc(64, (size_t)(count + LANES) / LANES * LANES * sizeof(float));
        capacity = memory ? count : 0;
    }
    return memory;
}
