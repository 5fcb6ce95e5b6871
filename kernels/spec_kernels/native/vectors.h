/* Vectors of 16 floats, by extensions of GCC and Clang, which use the processor's vectors of any width for them. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 16, PANEL = 64, VECTORS = PANEL / LANES };

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Two vectors of bfloat16 that lie in one: the first in the low halves of its lanes, the second in the high ones. */
static inline vec low_half(ints pair) { return (vec)(pair << 16); }
static inline vec high_half(ints pair) { return (vec)(pair & (int32_t)0xFFFF0000); }

/* One step in summing the lanes of two vectors: the halves of each run of 16, 8, 4 or 2 lanes are added. */
#define FOLD(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
static inline vec fold_8(vec a, vec b) {
    return FOLD(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           FOLD(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
static inline vec fold_4(vec a, vec b) {
    return FOLD(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           FOLD(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
static inline vec fold_2(vec a, vec b) {
    return FOLD(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           FOLD(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
}
static inline vec fold_1(vec a, vec b) {
    return FOLD(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           FOLD(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

/* Sum the lanes of each of 8 vectors down to two lanes, which still have to be added. The vectors keep their order. */
static inline vec pairs_of(const vec *x) {
    vec part[4];
    for (int i = 0; i < 4; i++) part[i] = fold_8(x[2 * i], x[2 * i + 1]);
    for (int i = 0; i < 2; i++) part[i] = fold_4(part[2 * i], part[2 * i + 1]);
    return fold_2(part[0], part[1]);
}

static inline float sum_of(vec x) {
    x = fold_8(x, x);
    x = fold_4(x, x);
    x = fold_2(x, x);
    return x[0] + x[1];
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
