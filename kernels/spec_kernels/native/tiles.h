/* Products by tile registers (Intel AMX), where processor, system and compiler have them.

   The instruction TDPBF16PS multiplies bfloat16 numbers and adds the products in float32. A bfloat16 weight is used as
   it is. A float32 row is the sum of three bfloat16 rows, each with 8 bits of the significand. So every product is
   exact, and only sums are rounded. Parts and sums below 2^-126 count as 0. */

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { TILE_ROWS = 16, TILE = TILE_ROWS * TILE_INPUTS, AHEAD = 2, PARTS = 3 };

typedef uint16_t shorts __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

/* Ask the system to let this process use tile registers; 0 if it refuses. */
static int has_tiles(void) {
    const long request = 0x1023 /* ARCH_REQ_XCOMP_PERM */, tile_data = 18;
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

/* Makes the compiler finish its writes to `memory`, since it does not know that tile instructions read this memory. */
static inline void is_written(const void *memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

/* Registers 0 to 3 are sums of 16 outputs each, 4 to 6 the parts of rows, 7 weights. */
static void shape_tiles(int64_t num_rows) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        shapes.row_bytes[t] = 64;
        shapes.rows[t] = t == 7 ? TILE_ROWS : (uint8_t)num_rows;
    }
    is_written(&shapes);
    _tile_loadconfig(&shapes);
}

static inline ints top_halves(vec x) { return (ints)x & (int32_t)0xFFFF0000; }

/* What remains of numbers after their first part is subtracted; 0 for numbers that are not finite. */
static inline vec rest_of(vec x) {
    const ints exponent = (ints)x & 0x7F800000;
    return (vec)((ints)(x - (vec)top_halves(x)) & (exponent != 0x7F800000));
}

static inline shorts narrowed(vec a, vec b) {
    return __builtin_shufflevector((shorts)a, (shorts)b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33,
                                   35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63);
}

/* The parts of up to 16 rows: [32 inputs][3 parts][16 rows][32]. */
static void split_rows(uint16_t *parts, const float *x, int64_t num_inputs, int64_t num_rows) {
    for (int64_t k = 0; k < num_inputs; k += TILE_INPUTS, parts += PARTS * TILE)
        for (int64_t row = 0; row < num_rows; row++) {
            float filled[TILE_INPUTS] = {};
            const float *from = x + row * num_inputs + k;
            if (num_inputs - k < TILE_INPUTS)
                from = memcpy(filled, from, (size_t)(num_inputs - k) * sizeof(float));
            vec a = *(const vec *)from, b = *(const vec *)(from + LANES);
            for (int part = 0; part < PARTS; part++, a = rest_of(a), b = rest_of(b))
                *(shorts *)(parts + part * TILE + row * TILE_INPUTS) = narrowed(a, b);
        }
}

/* Add the products of three parts and a tile of weights, and prefetch the weights `ahead` numbers further on. */
#define ADD_PRODUCTS(sums, at, ahead)                                                                                 \
    _tile_loadd(7, at, 64);                                                                                            \
    for (int row = 0; row < TILE_ROWS; row++) __builtin_prefetch((at) + (ahead) + row * TILE_INPUTS);                    \
    _tile_dpbf16ps(sums, 4, 7);                                                                                        \
    _tile_dpbf16ps(sums, 5, 7);                                                                                        \
    _tile_dpbf16ps(sums, 6, 7)

/* 64 outputs of up to 16 rows, which lie `stride` floats apart. The weights of the next panel follow, so prefetching
   runs on into them. */
static void multiply_panel(float *out, int64_t stride, const uint16_t *parts, const uint16_t *weights,
                           int64_t num_inputs) {
    const int64_t column = num_inputs * LANES;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < num_inputs; k += TILE_INPUTS, parts += PARTS * TILE, weights += TILE) {
        _tile_loadd(4, parts, 64);
        _tile_loadd(5, parts + TILE, 64);
        _tile_loadd(6, parts + 2 * TILE, 64);
        const int64_t ahead = AHEAD * TILE + (k + AHEAD * TILE_INPUTS < num_inputs ? 0 : 3 * column);
        ADD_PRODUCTS(0, weights, ahead);
        ADD_PRODUCTS(1, weights + column, ahead);
        ADD_PRODUCTS(2, weights + 2 * column, ahead);
        ADD_PRODUCTS(3, weights + 3 * column, ahead);
    }
    const int64_t bytes = stride * (int64_t)sizeof(float);
    _tile_stored(0, out, bytes);
    _tile_stored(1, out + LANES, bytes);
    _tile_stored(2, out + 2 * LANES, bytes);
    _tile_stored(3, out + 3 * LANES, bytes);
}

/* The first row of a group of up to 16. The last group is moved back to end with the last row. Rows in two groups are
   computed twice, with the same result. */
static int64_t group_start(int64_t row, int64_t num_rows) { return less(row, more(num_rows - TILE_ROWS, 0)); }

/* The number of floats that the parts of rows take. */
static int64_t tiles_memory(const product_t *p, int64_t num_rows) {
    return filled_up(num_rows, TILE_ROWS) * filled_up(p->num_inputs, TILE_INPUTS) * PARTS / 2 + LANES;
}

/* out [rows, num_outputs] = the parts of x [rows, num_inputs] times panels [first, last) of the weight. */
static void multiply_tiled_panels(const void *argument, int64_t first_panel, int64_t last_panel, int64_t thread) {
    (void)thread;
    const multiplied_t *job = argument;
    const product_t *p = job->product;
    const int64_t num_inputs = filled_up(p->num_inputs, TILE_INPUTS), height = less(job->num_rows, TILE_ROWS);
    shape_tiles(height);
    for (int64_t first = first_panel * PANEL; first < less(last_panel * PANEL, p->num_outputs); first += PANEL) {
        const uint16_t *weights = (const uint16_t *)p->panels + first * num_inputs;
        const int64_t width = less(PANEL, p->num_outputs - first);
        for (int64_t row = 0; row < job->num_rows; row += TILE_ROWS) {
            float last[TILE_ROWS * PANEL], *to = job->out + group_start(row, job->num_rows) * p->num_outputs + first;
            const int is_whole = width == PANEL;
            multiply_panel(is_whole ? to : last, is_whole ? p->num_outputs : PANEL,
                           job->parts + row * PARTS * num_inputs, weights, num_inputs);
            for (int64_t r = 0; !is_whole && r < height; r++)
                memcpy(to + r * p->num_outputs, last + r * PANEL, (size_t)width * sizeof(float));
        }
    }
    _tile_release();
}

/* out [rows, num_outputs] = x [rows, num_inputs] times the weight. */
static void multiply_by_tiles(multiplied_t job, float *memory) {
    const int64_t num_inputs = filled_up(job.product->num_inputs, TILE_INPUTS), height = less(job.num_rows, TILE_ROWS);
    uint16_t *parts = (uint16_t *)filled_up((int64_t)memory, 64);
    for (int64_t row = 0; row < job.num_rows; row += TILE_ROWS)
        split_rows(parts + row * PARTS * num_inputs, job.x + group_start(row, job.num_rows) * job.product->num_inputs,
                   job.product->num_inputs, height);
    is_written(parts);
    job.parts = parts;
    multiply_panels(multiply_tiled_panels, &job);
}

#else

static int has_tiles(void) { return 0; }

static int64_t tiles_memory(const product_t *p, int64_t num_rows) {
    (void)p, (void)num_rows;
    return 0;
}

static void multiply_by_tiles(multiplied_t job, float *memory) {
    (void)job, (void)memory; /* no weight lies in tiles here */
}

#endif
