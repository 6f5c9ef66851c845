/* The steps of a recipe on one rank: what comm/execute.py does in Python, without its price for each piece.
 *
 * Structures are arrays of 8-byte words, laid out by comm/execute.py in the order in which they stand here. A count that a
 * peer waits for is stored with release order and read with acquire order: who sees the count sees what was written before it.
 */
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define WIDE __attribute__((target_clones("avx2", "default"), optimize("O3")))
#define LOOP __attribute__((target_clones("avx2", "default"), optimize("O3", "no-tree-loop-distribute-patterns")))
#else
#define WIDE
#define LOOP
#endif

enum { X, INTO, MEMBER };                     /* where bytes lie: in the caller's tensor, in its result, with a member of the group */
enum { COPY, COMBINE };                       /* what is done with them */
enum { SUM, AVG, MAX, MIN };                  /* comm/combine.py's first four */
enum { F64, F32, BF16, I64, I32 };            /* the dtypes that are combined here */
enum { DONE, WAITING, MISMATCH };             /* what `advance` answers */
enum { SLOTS_MOST = 8, BLOCK = 1024 };        /* BLOCK: elements of a partial result, which stay in the first cache */

typedef struct { int64_t where, offset; } Place;
typedef struct { int64_t what, length, accumulate; Place to; int64_t first, parts; } Act;   /* length: bytes, or elements */
typedef struct { int64_t stage, piece, previous, first, acts; } Step;
typedef struct {
    Step *steps; Act *acts; Place *places; char **peers; int64_t *after;
    int64_t length, pieces, slots, fills, last, dtype, op, afters;
    uint64_t asked;
} Recipe;
typedef struct {
    uint64_t *words; char *slots; int64_t size, index, slot, many, stride, calls_at, calls_kept;
    uint64_t count, start, calls; int64_t turn, first, step, agreed;
    uint64_t free[SLOTS_MOST];
} State;

static inline void pause_(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static inline uint64_t seen(const State *s, int64_t member) { return __atomic_load_n(&s->words[member * s->stride], __ATOMIC_ACQUIRE); }

static int reached(const State *s, const Recipe *r, const Step *t) {
    if (t->stage) {
        uint64_t number = s->start + (uint64_t)t->previous + 1;
        for (int64_t i = 0; i < r->afters; i++)
            if (seen(s, r->after[i]) < number) return 0;
    } else if (r->fills) {
        uint64_t number = s->free[(s->first + t->piece) % s->many];
        for (int64_t i = 0; i < s->size; i++)
            if (i != s->index && seen(s, i) < number) return 0;
    }
    return 1;
}

static int agreed(const State *s, const Recipe *r) {
    int64_t at = s->calls_at + (int64_t)((s->calls - 1) % (uint64_t)s->calls_kept);
    for (int64_t i = 0; i < r->afters; i++)
        if (s->words[r->after[i] * s->stride + at] != r->asked) return 0;
    return 1;
}

static inline float from_bf16(uint16_t x) { uint32_t bits = (uint32_t)x << 16; float f; memcpy(&f, &bits, 4); return f; }
static inline uint16_t to_bf16(float f) { /* to nearest, ties to even */
    uint32_t bits; memcpy(&bits, &f, 4);
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(f != f ? 0x7FC0 : rounded);
}
#define SAME(x) (x)
#define PLUS(a, b) ((a) + (b))
#define MOST(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define LEAST(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))

/* out = (or +=) parts[0] op parts[1] op ... in this order; every partial result is rounded to the dtype, as torch's operators do. */
#define COMBINES(NAME, T, W, READ, WRITE)                                                                                          \
    WIDE static void NAME(T *out, T **parts, int64_t n, int64_t length, int64_t op, int64_t accumulate) {                          \
        T block[BLOCK];                                                                                                            \
        for (int64_t low = 0; low < length; low += BLOCK) {                                                                        \
            int64_t many = length - low < BLOCK ? length - low : BLOCK;                                                            \
            if (n == 2 && op == SUM && !accumulate) {                                                                              \
                const T *a = parts[0] + low, *b = parts[1] + low;                                                                  \
                T *sum = out + low;                                                                                                \
                _Pragma("GCC ivdep") /* out is one of them, or apart */                                                            \
                for (int64_t i = 0; i < many; i++) sum[i] = WRITE(PLUS(READ(a[i]), READ(b[i])));                                   \
                continue;                                                                                                          \
            }                                                                                                                      \
            memcpy(block, parts[0] + low, (size_t)many * sizeof(T));                                                               \
            for (int64_t k = 1; k < n; k++) {                                                                                      \
                const T *part = parts[k] + low;                                                                                    \
                if (op == MAX) for (int64_t i = 0; i < many; i++) { W a = READ(block[i]), b = READ(part[i]); block[i] = WRITE(MOST(a, b)); } \
                else if (op == MIN) for (int64_t i = 0; i < many; i++) { W a = READ(block[i]), b = READ(part[i]); block[i] = WRITE(LEAST(a, b)); } \
                else for (int64_t i = 0; i < many; i++) block[i] = WRITE(PLUS(READ(block[i]), READ(part[i])));                     \
            }                                                                                                                      \
            if (op == AVG) for (int64_t i = 0; i < many; i++) block[i] = WRITE(READ(block[i]) / (W)n);                             \
            T *to = out + low;                                                                                                     \
            if (accumulate) for (int64_t i = 0; i < many; i++) to[i] = WRITE(PLUS(READ(to[i]), READ(block[i])));                   \
            else memcpy(to, block, (size_t)many * sizeof(T));                                                                      \
        }                                                                                                                          \
    }
COMBINES(combine_f64, double, double, SAME, SAME)
COMBINES(combine_f32, float, float, SAME, SAME)
COMBINES(combine_bf16, uint16_t, float, from_bf16, to_bf16)
COMBINES(combine_i64, int64_t, int64_t, SAME, SAME)
COMBINES(combine_i32, int32_t, int32_t, SAME, SAME)

static inline char *at(const State *s, const Recipe *r, const Place *p, char *x, char *into, int64_t slot) {
    if (p->where == X) return x + p->offset;
    if (p->where == INTO) return into + p->offset;
    int64_t member = p->where - MEMBER;
    return (r->peers ? r->peers[member] : s->slots + (member * s->many + slot) * s->slot) + p->offset;
}

/* A loop, not memcpy: the C library copies pieces of this size by one string instruction, which takes several times as long on
 * some processors where the two places lie alike in their pages, as a slot and a large tensor do. */
LOOP static void copy(char *restrict to, const char *restrict from, int64_t bytes) {
    int64_t many = bytes / 8;
    for (int64_t i = 0; i < many; i++) ((uint64_t *)to)[i] = ((const uint64_t *)from)[i];
    for (int64_t i = 8 * many; i < bytes; i++) to[i] = from[i];
}

static void act(const State *s, const Recipe *r, const Act *a, char *x, char *into, int64_t slot) {
    char *to = at(s, r, &a->to, x, into, slot);
    if (a->what == COPY) {
        copy(to, at(s, r, &r->places[a->first], x, into, slot), a->length);
        return;
    }
    char *parts[a->parts];
    for (int64_t k = 0; k < a->parts; k++) parts[k] = at(s, r, &r->places[a->first + k], x, into, slot);
    switch (r->dtype) {
    case F64: combine_f64((double *)to, (double **)parts, a->parts, a->length, r->op, a->accumulate); break;
    case F32: combine_f32((float *)to, (float **)parts, a->parts, a->length, r->op, a->accumulate); break;
    case BF16: combine_bf16((uint16_t *)to, (uint16_t **)parts, a->parts, a->length, r->op, a->accumulate); break;
    case I64: combine_i64((int64_t *)to, (int64_t **)parts, a->parts, a->length, r->op, a->accumulate); break;
    case I32: combine_i32((int32_t *)to, (int32_t **)parts, a->parts, a->length, r->op, a->accumulate); break;
    }
}

/* Go on with the call under way, or begin one, as far as peers allow; before it gives up it looks `looks` times for each step. */
EXPORT int64_t advance(State *s, const Recipe *r, char *x, char *into, int64_t looks) {
    uint64_t *mine = s->words + s->index * s->stride;
    if (s->step < 0) {
        mine[s->calls_at + (int64_t)(s->calls % (uint64_t)s->calls_kept)] = r->asked;
        s->calls++;
        s->step = 0, s->agreed = 0, s->start = s->count, s->first = s->turn;
        if (r->slots) s->turn += r->pieces;
    }
    while (s->step < r->length) {
        const Step *t = &r->steps[s->step];
        for (int64_t look = 0; !reached(s, r, t); look++) {
            if (look >= looks) return WAITING;
            pause_();
        }
        if (t->stage && !s->agreed) {
            if (!agreed(s, r)) return MISMATCH;
            s->agreed = 1;
        }
        int64_t slot = (s->first + t->piece) % s->many;
        for (int64_t i = 0; i < t->acts; i++) act(s, r, &r->acts[t->first + i], x, into, slot);
        __atomic_store_n(mine, ++s->count, __ATOMIC_RELEASE);
        if (r->slots && t->stage == r->last) s->free[slot] = s->count;
        s->step++;
    }
    s->step = -1;
    return DONE;
}
