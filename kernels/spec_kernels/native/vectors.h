/* Vectors that fill one register, by extensions of GCC and Clang, and the shapes of tiles that fit the register file.

   All shapes follow from the number of registers and of floats in each. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define REGISTER_FILE "avx512"
enum { LANES = 16, REGISTERS = 32 };
#elif defined(__AVX__)
#define REGISTER_FILE "avx2"
enum { LANES = 8, REGISTERS = 16 };
#elif defined(__aarch64__)
#define REGISTER_FILE "neon"
enum { LANES = 4, REGISTERS = 32 };
#else
#define REGISTER_FILE "other"
enum { LANES = 4, REGISTERS = 16 };
#endif

/* A weight's outputs lie in columns of 16, and four columns are a panel. */
enum { COLUMN = 16, PANEL = 64, VECTORS = COLUMN / LANES };

/* The most rows for which registers hold the sums of a column, or of a panel of short columns, and its weights. */
enum { MOST_ROWS = VECTORS == 4 && REGISTERS == 16 ? 2 : 6 };

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Inlined at each call, so that each shape has its own code. */
#define STEP static inline __attribute__((always_inline))

/* With few registers it is read at each use, and takes none throughout a loop. */
static const volatile int32_t HIGH_BITS = (int32_t)0xFFFF0000;

/* Two vectors of bfloat16 that lie in one: the first in the low halves of its lanes, the second in the high ones. */
STEP vec low_half(ints pair) { return (vec)(pair << 16); }
STEP vec high_half(ints pair) { return (vec)(pair & (REGISTERS > 16 ? (int32_t)0xFFFF0000 : HIGH_BITS)); }

/* One step in summing the lanes of two vectors: the halves of each are added, and the results alternate. */
STEP vec fold(vec a, vec b) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23) +
           __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX__)
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11) +
           __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

/* Sum the lanes of each of LANES / 2 vectors down to two lanes, which `fold` still has to add. */
STEP vec pairs_of(vec *x) {
    for (int n = LANES / 4; n; n /= 2)
        for (int i = 0; i < n; i++) x[i] = fold(x[i], x[i + n]);
    return x[0];
}

STEP float sum_of(vec x) {
    for (int n = LANES; n > 1; n /= 2) x = fold(x, x);
    return x[0];
}

static inline float most_of(vec x) {
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}

static inline vec chosen(ints where, vec a, vec b) { return (vec)((where & (ints)a) | (~where & (ints)b)); }

/* e^x to 1 or 2 units in the last place; 0 below -87, e^88 above 88. 2^n times a polynomial (Cephes' expf). */
static inline vec exp_of(vec x) {
    const ints is_nothing = x < (vec){} - 87.0f;
    x = chosen(is_nothing, (vec){}, x);
    x = chosen(x > (vec){} + 88.0f, (vec){} + 88.0f, x);
    const vec shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23 rounds to an integer */
    const ints n = (ints)shifted - 0x4B400000;
    const vec whole = shifted - 12582912.0f;
    const vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return chosen(is_nothing, (vec){}, y * (vec)((n + 127) << 23));
}

static inline int64_t less(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t more(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t filled_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }
