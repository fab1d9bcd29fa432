/* test.h - what the tests share: checks that count, small configurations, random numbers.
   A test binary is: functions that CHECK, RUN in main, return report(). Failures print what was got
   and wanted. */
#ifndef TEST_H
#define TEST_H

#define MODEL_IMPLEMENTATION
#include "model.h"

static int passed, failed;

#define CHECK(condition) check((condition) != 0, __FILE__, __LINE__, "%s", #condition)
#define CHECK_CLOSE(got, want, tolerance) \
    check(fabs((double)(got) - (double)(want)) <= (tolerance), __FILE__, __LINE__, \
          "%s: got %.9g, want %.9g within %.1e", #got, \
          (double)(got), (double)(want), (double)(tolerance))
#define RUN(function) do { \
    const int f = failed; \
    const double t = seconds(); \
    function(); \
    printf("%s %-40s %6.0f ms\n", failed == f ? "ok  " : "FAIL", #function, \
           1e3 * (seconds() - t)); \
    fflush(stdout); } while (0)

static const char *context = "";    // printed with a failure: which encoding, which size

__attribute__((format(printf, 4, 5), unused))
static void check(int ok, const char *file, int line, const char *format, ...)
{
    if (ok) { passed++; return; }
    va_list args;
    failed++;
    printf("%s:%d: [%s] ", file, line, context);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
}

__attribute__((unused)) static int report(void)
{
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}

/* The larger of `worst` and |a - b|; infinity if that is not a number, which fmax passes over. */
__attribute__((unused)) static double worse(double worst, double a, double b)
{
    const double error = fabs(a - b);
    return error <= worst ? worst : isnan(error) ? INFINITY : error;
}

__attribute__((unused)) static float random_normal(uint64_t stream, size_t i)
{
    return rng_normal(1, RNG_TEST + stream, i);
}

__attribute__((unused)) static void fill(float *x, size_t n, uint64_t stream)
{
    for (size_t i = 0; i < n; i++) x[i] = random_normal(stream, i);
}

__attribute__((unused)) static int *random_tokens(int n, int V, uint64_t stream)
{
    int *t = xmalloc((size_t)n * sizeof *t);
    for (int i = 0; i < n; i++) t[i] = (int)(rng(1, RNG_TEST + stream, (uint64_t)i) % (uint64_t)V);
    return t;
}

/* How many variants of a small model an encoding has: one for each word that an option knows
   (rope-scaling), else two. */
__attribute__((unused)) static int variants(const PosEnc *e)
{
    int n = 2;
    for (const PosOption *o = e->options; o < e->options + POS_OPTIONS && o->name; o++)
        if (o->words) n = (int)o->max + 1;
    return n;
}

/* The shape of a small model of one encoding; variant 0 has its defaults, the others switch on what
   is a switch (rpe-values), and take that word where an option is one of several, with a factor of
   4. */
__attribute__((unused)) static Config small_config(const PosEnc *e, int variant, int seq_len)
{
    Config c = { .dim = 24, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .hidden_dim = 40,
                 .vocab_size = 37, .seq_len = seq_len, .start_token = -1, .untied = variant > 0,
                 .pos = e };
    config_defaults(&c);
    for (int i = 0; i < POS_OPTIONS && e->options[i].name; i++) {
        const PosOption *o = &e->options[i];
        if (o->words || (variant && o->max == 1)) c.pos_opt[i] = variant;
        if (!strcmp(o->name, "rope-factor")) c.pos_opt[i] = 4;
    }
    return c;
}

__attribute__((unused)) static void model_of(Model *m, Config c, int max_len)
{
    const char *wrong = config_check(&c);
    if (wrong) die(1, "%s", wrong);
    model_create(m, &c, max_len);
    model_init(m, 1);
    tokenizer_bytes(&m->tokenizer);
}

__attribute__((unused))
static void small_model(Model *m, const PosEnc *e, int variant, int seq_len, int max_len)
{
    model_of(m, small_config(e, variant, seq_len), max_len);
}

/* Moves the parameters away from their small initial values, so that every path carries a
   gradient. */
__attribute__((unused)) static void stir(Model *m)
{
    for (int i = 0; i < m->params.n_tensors; i++) {
        const Tensor *t = &m->params.tensors[i];
        float *x = m->params.data + t->offset;
        for (size_t k = 0; k < t->count; k++) x[k] += 0.2f * random_normal(100 + (uint64_t)i, k);
    }
}

#endif
