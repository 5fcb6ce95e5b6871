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

/* The distance, in units of 4 bytes, between a panel's columns of 16 outputs. */
static int64_t column_of(const product_t *p) {
    return COLUMN * (p->layout == FLOATS ? p->num_inputs : filled_up(p->num_inputs, TILE_INPUTS) / 2);
}

typedef struct {
    const float *weight; /* [size]; NULL if there is no norm */
    float eps;
} norm_t;

/* The columns of outputs that a tile takes at once. Registers hold all sums, the weights of one input, if several rows
   read them, and two vectors more. */
STEP int columns_of(const int rows) {
    int columns = PANEL / COLUMN;
    while (columns > 1 && columns * VECTORS * (rows > 1 ? rows + 1 : 1) + 2 > REGISTERS) columns /= 2;
    return columns;
}

/* Add what one input contributes. `far` is the fourth row of x. A narrow weight has two inputs in each lane, of which
   this is the first or the second. */
STEP void add_input(vec sums[][PANEL / LANES], const float *x, const float *far, const float *at, int64_t column,
                    int64_t num_inputs, const int rows, const int is_narrow, const int is_second) {
    vec w[PANEL / LANES];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < columns_of(rows) * VECTORS; v++) {
            const vec read = *(const vec *)(at + v / VECTORS * column + v % VECTORS * LANES);
            if (r == 0) w[v] = !is_narrow ? read : is_second ? high_half((ints)read) : low_half((ints)read);
            sums[r][v] += w[v] * (r < 3 ? x : far)[r % 3 * num_inputs];
        }
}

/* A tile of a product, out [rows, columns * 16], whose rows lie `stride` apart. */
STEP void product_tile(float *out, int64_t stride, const float *x, const float *at, int64_t column, int64_t num_inputs,
                       const int rows, const int is_narrow) {
    const int columns = columns_of(rows), ahead = 32 / (is_narrow ? 2 : 1) * COLUMN;
    const float *far = x + 3 * num_inputs;
    vec sums[MOST_ROWS][PANEL / LANES];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < columns * VECTORS; v++) sums[r][v] = (vec){};
    int64_t steps = is_narrow ? num_inputs / 2 : num_inputs;
    for (; steps > 0; steps--, x++, far++, at += COLUMN) {
        /* The processor's own prefetching starts anew on each page of memory. It does better alone with one row. */
        for (int c = 0; c < columns && (rows > 1 || is_narrow); c++)
            __builtin_prefetch(at + c * column + (columns < 4 ? columns * column : ahead));
        /* The compiler does not see how these move. Else it keeps a pointer for each row, and has too few registers. */
        if (rows > 3) __asm__("" : "+r"(x), "+r"(far));
        add_input(sums, x, far, at, column, num_inputs, rows, is_narrow, 0);
        if (!is_narrow) continue;
        x++, far++;
        /* Nor that it reads the same weights again, for the second input: it would keep them. */
        if (rows > 3 || REGISTERS == 16) __asm__("" : "+r"(x), "+r"(far), "+r"(at));
        add_input(sums, x, far, at, column, num_inputs, rows, is_narrow, 1);
    }
    if (is_narrow && num_inputs % 2) add_input(sums, x, far, at, column, num_inputs, rows, is_narrow, 0);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < columns * VECTORS; v++) *(vec *)(out + r * stride + v * LANES) = sums[r][v];
}

typedef void tile_t(float *out, int64_t stride, const float *x, const float *at, int64_t column, int64_t num_inputs);

/* Each number of rows has functions of its own, so that its sums are in registers. */
#define TILE(name, rows, is_narrow)                                                                                    \
    __attribute__((noinline)) static void name(float *out, int64_t stride, const float *x, const float *at,           \
                                               int64_t column, int64_t num_inputs) {                                  \
        product_tile(out, stride, x, at, column, num_inputs, less(rows, MOST_ROWS), is_narrow);                       \
    }
TILE(floats_1, 1, 0)
TILE(floats_2, 2, 0)
TILE(floats_3, 3, 0)
TILE(floats_4, 4, 0)
TILE(floats_5, 5, 0)
TILE(floats_6, 6, 0)
TILE(halves_1, 1, 1)
TILE(halves_2, 2, 1)
TILE(halves_3, 3, 1)
TILE(halves_4, 4, 1)
TILE(halves_5, 5, 1)
TILE(halves_6, 6, 1)
static tile_t *const product_tiles[2][6] = {{floats_1, floats_2, floats_3, floats_4, floats_5, floats_6},
                                            {halves_1, halves_2, halves_3, halves_4, halves_5, halves_6}};

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
    float tile[MOST_ROWS * PANEL];
    const int64_t stride = p->num_outputs, column = column_of(p);
    for (int64_t panel = first_panel; panel < last_panel; panel++) {
        const int64_t first = panel * PANEL, width = less(PANEL, p->num_outputs - first);
        const float *at = (const float *)p->panels + panel * PANEL / COLUMN * column;
        for (int64_t row = 0; row < job->num_rows;) {
            const int64_t left = job->num_rows - row, num_tiles = (left + MOST_ROWS - 1) / MOST_ROWS;
            const int rows = (int)((left + num_tiles - 1) / num_tiles);
            float *to = job->out + row * stride + first;
            for (int c = 0; c < PANEL / COLUMN; c += columns_of(rows))
                product_tiles[p->layout != FLOATS][rows - 1](
                    (width == PANEL ? to : tile) + c * COLUMN, width == PANEL ? stride : PANEL,
                    job->x + row * p->num_inputs, at + c * column, column, p->num_inputs);
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
        memory = aligned_alloc(64, (size_t)(count + PANEL) / PANEL * PANEL * sizeof(float));
        capacity = memory ? count : 0;
    }
    return memory;
}
