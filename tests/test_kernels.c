/* Products, vector functions and every layer: against plain loops in double, and backward against
   central differences. */
#include "test.h"

/* Matrices lie inside larger ones full of NaN, so that an element read or written outside shows. */
static void test_gemm(void)
{
    static const size_t size[][3] = {
        { 1, 1, 1 }, { 2, 3, 4 }, { 12, 32, 8 }, { 13, 33, 9 }, { 11, 31, 7 }, { 24, 64, 385 },
        { 5, 200, 17 }, { 200, 5, 40 }, { 97, 130, 800 }, { 1, 77, 50 }, { 64, 2100, 3 },
        { 410, 41, 23 },
        { 37, 300, 500 }, { 300, 70, 401 } };
    for (size_t s = 0; s < sizeof size / sizeof *size; s++)
        for (int form = 0; form < 12; form++) {
            const size_t M = size[s][0], N = size[s][1], K = size[s][2], pad = 3;
            const int ta = form & 1, tb = form & 2;
            enum { NOTHING, ITSELF, ANOTHER } added = form >> 2;
            const size_t lda = (ta ? M : K) + pad, ldb = (tb ? K : N) + pad, ldc = N + pad;
            const size_t na = (ta ? K : M) * lda, nb = (tb ? N : K) * ldb, nc = M * ldc;
            float *a = xmalloc(na * 4), *b = xmalloc(nb * 4);
            float *c = xmalloc(nc * 4), *before = xmalloc(nc * 4);
            for (size_t i = 0; i < na; i++) a[i] = i % lda < lda - pad ? random_normal(1, i) : NAN;
            for (size_t i = 0; i < nb; i++) b[i] = i % ldb < ldb - pad ? random_normal(2, i) : NAN;
            for (size_t i = 0; i < nc; i++)
                before[i] = i % ldc < N && added ? random_normal(3, i) : NAN;
            for (size_t i = 0; i < nc; i++) c[i] = added == ITSELF ? before[i] : NAN;
            gemm(c, ldc, a, ta ? 1 : lda, ta ? lda : 1, b, tb ? 1 : ldb, tb ? ldb : 1, M, N, K,
                 added == ITSELF ? c : added ? before : NULL);
            double worst = 0;
            int outside = 0;
            for (size_t i = 0; i < M; i++)
                for (size_t j = 0; j < ldc; j++) {
                    if (j >= N) { outside += !isnan(c[i * ldc + j]); continue; }
                    double sum = added ? (double)before[i * ldc + j] : 0;
                    for (size_t k = 0; k < K; k++) {
                        const float aik = a[ta ? k * lda + i : i * lda + k];
                        const float bkj = b[tb ? j * ldb + k : k * ldb + j];
                        sum += (double)aik * (double)bkj;
                    }
                    const double error = fabs(sum - (double)c[i * ldc + j]);
                    worst = error <= worst ? worst : error;    // a NaN is the worst
                }
            char text[64];
            snprintf(text, sizeof text, "%zux%zux%zu form %d", M, N, K, form);
            context = text;
            CHECK(outside == 0);
            CHECK_CLOSE(worst, 0, 1e-5 * sqrt((double)K));
            free(a), free(b), free(c), free(before);
        }
    context = "";
}

/* The same with inputs rounded to bf16: exactly the products of the rounded numbers, 8 bits each,
   up to the rounding of the sum. */
static float to_bf16(float x)
{
    const double unit = ldexp(1, ilogb((double)x) - 7);
    return x == 0 ? 0 : (float)(nearbyint((double)x / unit) * unit);    // ties to even
}

static void test_bf16(void)
{
    CHECK(bf16_set(1) == HAS_BF16);
    static const size_t size[][3] = { { 12, 32, 8 }, { 37, 70, 401 }, { 300, 40, 7 } };
    for (size_t s = 0; HAS_BF16 && s < sizeof size / sizeof *size; s++) {
        const size_t M = size[s][0], N = size[s][1], K = size[s][2];
        float *a = xmalloc(M * K * 4), *b = xmalloc(N * K * 4), *c = xmalloc(M * N * 4);
        fill(a, M * K, 1), fill(b, N * K, 2);
        gemm(c, N, a, K, 1, b, 1, K, M, N, K, NULL);
        double worst = 0, plain = 0;
        for (size_t i = 0; i < M; i++)
            for (size_t j = 0; j < N; j++) {
                double sum = 0, unrounded = 0;
                for (size_t k = 0; k < K; k++) {
                    const float x = a[i * K + k], y = b[j * K + k];
                    sum += (double)to_bf16(x) * (double)to_bf16(y);
                    unrounded += (double)x * (double)y;
                }
                worst = worse(worst, sum, c[i * N + j]);
                plain = worse(plain, unrounded, c[i * N + j]);
            }
        CHECK_CLOSE(worst, 0, 1e-5 * sqrt((double)K));
        CHECK(plain > 1e-3);    // it did round
        free(a), free(b), free(c);
    }
    CHECK(!bf16_set(0));
}

/* A sum longer than a block, with few rows and with many: the same bits whatever the threads. */
static void test_gemm_threads(void)
{
    enum { N = 70, K = 1000 };
    for (size_t M = 5; M < 400; M += 300) {
        float *a = xmalloc(M * K * 4), *b = xmalloc(N * K * 4), *c = xmalloc(M * N * 4);
        uint64_t want = 0;
        fill(a, M * K, 1), fill(b, N * K, 2);
        for (int threads = 1; threads <= 5; threads++) {
            threads_set(threads);
            gemm(c, N, a, K, 1, b, 1, K, M, N, K, NULL);
            if (threads == 1) want = checksum(c, M * N * 4);
            CHECK(checksum(c, M * N * 4) == want);
        }
        free(a), free(b), free(c);
    }
    threads_set(0);
}

static void test_matvec(void)
{
    for (size_t n = 1; n < 70; n += 3)
        for (size_t m = 1; m < 20; m++) {
            float w[70 * 20], x[70], y[20];
            fill(w, m * n, 1), fill(x, n, 2);
            matvec(y, x, w, (Quantized){0}, n, m, NULL);
            for (size_t i = 0; i < m; i++) {
                double sum = 0;
                for (size_t k = 0; k < n; k++) sum += (double)w[i * n + k] * (double)x[k];
                CHECK_CLOSE(y[i], sum, 1e-4);
            }
        }
}

/* int8: within half a step of the weights, for a row that ends within a group too; one row of x and
   several give the same. */
static void test_int8(void)
{
    enum { ROWS_X = 5, OUT = 9 };
    for (size_t n = 1; n < 200; n += 33) {
        float w[200 * OUT], x[200 * ROWS_X], y[OUT], many[ROWS_X * OUT], plus[ROWS_X * OUT];
        fill(w, n * OUT, 1), fill(x, n * ROWS_X, 2), fill(plus, ROWS_X * OUT, 3);
        Matrices m = { { w, w + 4 * n }, { 4, OUT - 4 }, {0} };
        const Quantized q = m.int8 = quantized(m, n);
        linear_forward(many, x, m, ROWS_X, n, plus);
        for (size_t r = 0; r < ROWS_X; r++) {
            linear_forward(y, x + r * n, m, 1, n, plus + r * OUT);
            for (size_t o = 0; o < OUT; o++) {
                double sum = (double)plus[r * OUT + o], room = 1e-4;
                for (size_t g = 0; g < n; g += GROUP) {
                    double most = 0;
                    for (size_t i = g; i < n && i < g + GROUP; i++)
                        most = fmax(most, fabs((double)w[o * n + i]));
                    for (size_t i = g; i < n && i < g + GROUP; i++) {
                        sum += (double)w[o * n + i] * (double)x[r * n + i];
                        room += 0.501 * most / 127 * fabs((double)x[r * n + i]);
                    }
                }
                CHECK_CLOSE(y[o], sum, room);
                CHECK_CLOSE(y[o], many[r * OUT + o], 1e-4);
            }
        }
        free(q.scale), free(q.q);
    }
}

static void test_vexp(void)
{
    double worst = 0;
    for (int i = -86000; i <= 87900; i += 7) {
        const float x = (float)i / 1000;
        const double error = fabs((double)vexp(splat(x))[0] / exp((double)x) - 1);
        if (error > worst) worst = error;
    }
    CHECK_CLOSE(worst, 0, 2 * 1.2e-7);
    CHECK(vexp(splat(0))[VL - 1] == 1);
    CHECK(vexp(splat(-INFINITY))[0] == 0 && vexp(splat(-1000))[0] == 0);
    CHECK(isinf(vexp(splat(INFINITY))[0]) && isinf(vexp(splat(100))[0]));
    CHECK(isnan(vexp(splat(NAN))[0]));
}

/* Central differences of sum_i weight_i y_i(x), with x and y behind a function, against the
   analytic gradient. */
typedef void (*Forward)(float *y, const float *x);
static void check_gradient(Forward f, float *x, size_t nx, size_t ny, const float *weight,
                           const float *gradient)
{
    float *y = xmalloc(ny * 4);
    double largest = 0;
    for (size_t i = 0; i < nx; i++) {
        double value[2];
        const float keep = x[i];
        for (int side = 0; side < 2; side++) {
            x[i] = keep + (side ? 1e-2f : -1e-2f);
            f(y, x);
            value[side] = 0;
            for (size_t k = 0; k < ny; k++) value[side] += (double)y[k] * (double)weight[k];
        }
        x[i] = keep;
        const double size = fabs((double)gradient[i]);
        CHECK_CLOSE(gradient[i], (value[1] - value[0]) / 2e-2, 2e-3 * (1 + size));
        if (size > largest) largest = size;
    }
    CHECK(largest > 1e-3);    // a gradient of zeros must not pass
    free(y);
}

enum { ROWS = 3, WIDTH = 21 };
static float gain[WIDTH], rows_in[ROWS * WIDTH];
static void norm_of_x(float *y, const float *x) { rmsnorm_forward(y, x, gain, ROWS, WIDTH); }
static void norm_of_gain(float *y, const float *g) { rmsnorm_forward(y, rows_in, g, ROWS, WIDTH); }
static void glu(float *y, const float *x) { swiglu_forward(y, x, ROWS, WIDTH); }

static void test_layers(void)
{
    float dy[ROWS * WIDTH], dx[2 * ROWS * WIDTH] = {0}, dgain[WIDTH] = {0};
    float ab[2 * ROWS * WIDTH], before[ROWS * WIDTH];
    fill(rows_in, ROWS * WIDTH, 1), fill(gain, WIDTH, 2);
    fill(dy, ROWS * WIDTH, 3), fill(ab, 2 * ROWS * WIDTH, 4);
    rmsnorm_backward(dx, dgain, dy, rows_in, gain, ROWS, WIDTH);
    context = "rmsnorm x", check_gradient(norm_of_x, rows_in, ROWS * WIDTH, ROWS * WIDTH, dy, dx);
    context = "rmsnorm gain", check_gradient(norm_of_gain, gain, WIDTH, ROWS * WIDTH, dy, dgain);
    memcpy(before, dx, sizeof before);
    rmsnorm_backward(dx, dgain, dy, rows_in, gain, ROWS, WIDTH);
    context = "backward adds", CHECK_CLOSE(dx[5], 2 * before[5], 1e-5);
    memcpy(dx, ab, sizeof dx);
    swiglu_backward(dx, dy, ROWS, WIDTH);
    context = "swiglu", check_gradient(glu, ab, 2 * ROWS * WIDTH, ROWS * WIDTH, dy, dx);
    context = "";
}

static void test_cross_entropy(void)
{
    enum { V = 45 };
    float x[V], d[V], scratch[V];
    fill(x, V, 9);
    memcpy(d, x, sizeof d);
    const double loss = (double)cross_entropy(d, V, 7, 0.5f);
    double sum = 0, total = 0;
    for (int i = 0; i < V; i++) sum += exp((double)x[i]);
    CHECK_CLOSE(loss, log(sum) - (double)x[7], 1e-5);
    for (int i = 0; i < V; i++) {
        CHECK_CLOSE(d[i], 0.5 * (exp((double)x[i]) / sum - (i == 7)), 1e-6);
        total += (double)d[i];
    }
    CHECK_CLOSE(total, 0, 1e-6);
    for (int i = 0; i < V; i++) scratch[i] = 1e4f * x[i];    // far out: finite
    CHECK(isfinite(cross_entropy(scratch, V, 3, 0)));
}

/* ---- attention against its definition -------------------------------------------------------- */

typedef struct { int B, T, start, H, G, D, bias, rel_k, rel_v, clip, spread; } Case;
typedef struct { PosTables pos; int *positions; float *qkv; size_t width, n; Attention a; } Setup;

static void setup(Setup *s, Case c)
{
    const int S = c.start + c.T, len = c.spread ? 4 * S : S;
    *s = (Setup){ .width = (size_t)((c.H + 2 * c.G) * c.D) };
    s->n = (size_t)(c.B * S) * s->width;
    s->qkv = xmalloc(s->n * 4);
    fill(s->qkv, s->n, 20);
    s->pos = (PosTables){ .len = len, .clip = c.clip };
    if (c.bias) {
        s->pos.bias = pos_alloc(&s->pos, (size_t)c.H * pos_bias_stride(&s->pos));
        for (int h = 0; h < c.H; h++)
            for (int n = 0; n < len; n++)
                *pos_bias(&s->pos, h, n) = random_normal(30 + (uint64_t)h, (size_t)n);
    }
    const size_t rel = (size_t)((c.clip + 1) * c.D);
    if (c.rel_k) fill(s->pos.rel_k = xmalloc(rel * 4), rel, 40);
    if (c.rel_v) fill(s->pos.rel_v = xmalloc(rel * 4), rel, 41);
    if (c.spread) {
        s->positions = xmalloc((size_t)(c.B * S) * sizeof(int));
        for (int b = 0; b < c.B; b++)
            for (int j = 0, p = b; j < S; j++, p += 1 + j % 3) s->positions[b * S + j] = p;
    }
    s->a = (Attention){ .B = c.B, .T = c.T, .S = S, .start = c.start, .H = c.H, .G = c.G, .D = c.D,
                        .q_stride = s->width, .kv_stride = s->width, .pos = &s->pos,
                        .positions = s->positions };
}

static void teardown(Setup *s)
{
    free(s->qkv), free(s->positions), free(s->pos.rel_k), free(s->pos.rel_v), free(s->pos.owned[0]);
}

/* o_i straight from the formula, in double. qkv has S rows per sequence; queries are the last T. */
static void naive_attention(double *out, const Setup *s)
{
    const Attention *a = &s->a;
    for (int b = 0; b < a->B; b++)
        for (int h = 0; h < a->H; h++)
            for (int t = 0; t < a->T; t++) {
                const int i = a->start + t, g = h / (a->H / a->G);
                const float *row = s->qkv + (size_t)(b * a->S) * s->width;
                const float *q = row + (size_t)i * s->width + (size_t)(h * a->D);
                const int *positions = s->positions ? s->positions + b * a->S : NULL;
                double p[1024], sum = 0;
                for (int j = 0; j <= i; j++) {
                    const float *k = row + (size_t)j * s->width + (size_t)((a->H + g) * a->D);
                    const int n = positions ? positions[i] - positions[j] : i - j;
                    const int c = n < s->pos.clip ? n : s->pos.clip;
                    double dots = 0;
                    for (int d = 0; d < a->D; d++) {
                        const double r = s->pos.rel_k ? (double)s->pos.rel_k[c * a->D + d] : 0;
                        dots += (double)q[d] * ((double)k[d] + r);
                    }
                    const double bias = s->pos.bias ? (double)*pos_bias(&s->pos, h, n) : 0;
                    p[j] = exp(dots / sqrt(a->D) + bias);
                    sum += p[j];
                }
                for (int d = 0; d < a->D; d++) {
                    double o = 0;
                    for (int j = 0; j <= i; j++) {
                        const float *v = row + (size_t)j * s->width
                                         + (size_t)((a->H + a->G + g) * a->D);
                        const int n = positions ? positions[i] - positions[j] : i - j;
                        const int c = n < s->pos.clip ? n : s->pos.clip;
                        const double r = s->pos.rel_v ? (double)s->pos.rel_v[c * a->D + d] : 0;
                        o += p[j] / sum * ((double)v[d] + r);
                    }
                    out[(size_t)((b * a->T + t) * a->H + h) * (size_t)a->D + (size_t)d] = o;
                }
            }
}

static const Case CASES[] = {
    { 1, 1, 0, 1, 1, 4, 0, 0, 0, 0, 0 },     { 2, 7, 0, 2, 1, 8, 1, 0, 0, 0, 0 },
    { 1, 49, 0, 2, 2, 16, 0, 1, 0, 5, 0 },   { 1, 97, 0, 4, 2, 12, 1, 1, 1, 3, 0 },
    { 2, 100, 0, 2, 2, 5, 0, 1, 1, 0, 0 },   { 1, 193, 0, 2, 1, 20, 1, 1, 1, 16, 0 },
    { 1, 130, 0, 2, 2, 33, 1, 0, 1, 40, 0 }, { 2, 60, 0, 2, 1, 8, 1, 1, 1, 9, 1 },
    { 1, 150, 0, 2, 2, 16, 1, 1, 1, 200, 1 }, { 1, 3, 95, 2, 1, 8, 1, 1, 1, 7, 0 },
    { 1, 60, 70, 2, 2, 16, 1, 1, 1, 16, 0 },
};

static void test_attention_forward(void)
{
    for (size_t x = 0; x < sizeof CASES / sizeof *CASES; x++) {
        Setup s;
        char text[32];
        snprintf(text, sizeof text, "case %zu", x);
        context = text;
        setup(&s, CASES[x]);
        const Attention *a = &s.a;
        const size_t n = (size_t)(a->B * a->T * a->H * a->D);
        const size_t D = (size_t)a->D, dim = (size_t)a->H * D;
        const float *k = s.qkv + dim, *v = k + (size_t)a->G * D;
        double *want = xmalloc(n * sizeof *want), worst = 0;
        float *got = xmalloc(n * 4), *lse = xmalloc((size_t)(a->B * a->T * a->H) * 4);
        naive_attention(want, &s);
        attention_forward(got, dim, lse, s.qkv + (size_t)a->start * s.width, k, v, a);
        for (size_t i = 0; i < n; i++) worst = worse(worst, want[i], got[i]);
        CHECK_CLOSE(worst, 0, 2e-5);
        if (!s.positions && a->B == 1) {    // one query at a time, as in generation
            const size_t kv_dim = (size_t)a->G * D, start = (size_t)a->start;
            float *ck = xmalloc(2 * cache_floats((size_t)a->S, kv_dim) * 4);
            float *cv = ck + cache_floats((size_t)a->S, kv_dim), *back = xmalloc(s.n * 4);
            Attention one = *a;
            one.head_stride = cache_floats((size_t)a->S, D);
            // in two parts, as a prompt and what follows; and back
            cache_copy(ck, s.qkv + dim, s.width, &one, 0, start, 0);
            cache_copy(ck, s.qkv + start * s.width + dim, s.width, &one, start, (size_t)a->T, 0);
            cache_copy(cv, s.qkv + dim + kv_dim, s.width, &one, 0, (size_t)a->S, 0);
            cache_copy(ck, back, kv_dim, &one, 0, (size_t)a->S, 1);
            for (size_t j = 0; j < (size_t)a->S; j++)
                CHECK(!memcmp(back + j * kv_dim, s.qkv + j * s.width + dim, kv_dim * 4));
            for (int t = 0; t < a->T; t++) {
                one.T = 1, one.start = a->start + t, one.S = one.start + 1;
                const float *q = s.qkv + (size_t)one.start * s.width;
                attention_step(got + (size_t)t * dim, q, ck, cv, &one);
            }
            for (size_t i = 0; i < n; i++) worst = worse(worst, want[i], got[i]);
            CHECK_CLOSE(worst, 0, 2e-5);
            free(ck), free(back);
        }
        free(want), free(got), free(lse);
        teardown(&s);
    }
    context = "";
}

/* The loss is sum_i w_i o_i; naive_attention in double gives its central differences. */
static double attention_loss(const Setup *s, const float *w, size_t n)
{
    double *o = xmalloc(n * sizeof *o), sum = 0;
    naive_attention(o, s);
    for (size_t i = 0; i < n; i++) sum += o[i] * (double)w[i];
    free(o);
    return sum;
}

static void compare(const Setup *s, const float *w, size_t n, float *x, size_t count,
                    const float *gradient, const char *what)
{
    double largest = 0;
    for (size_t k = 0; k < 40 && k < count; k++) {
        const size_t i = count <= 40 ? k : (size_t)(rng(1, RNG_TEST, k) % count);
        const float keep = x[i];
        x[i] = keep + 0.01f;
        const double above = attention_loss(s, w, n);
        x[i] = keep - 0.01f;
        const double below = attention_loss(s, w, n);
        x[i] = keep;
        const double d = (above - below) / 0.02;
        if (fabs(d - (double)gradient[i]) > 1e-3 * (1 + fabs(d))) printf("%s ", what);
        CHECK_CLOSE(gradient[i], d, 1e-3 * (1 + fabs(d)));
        largest = fmax(largest, fabs((double)gradient[i]));
    }
    CHECK(largest > 1e-4);
}

static void test_attention_backward(void)
{
    for (size_t x = 1; x < sizeof CASES / sizeof *CASES; x++) {
        Case c = CASES[x];
        Setup s;
        char text[32];
        snprintf(text, sizeof text, "case %zu", x);
        context = text;
        // only whole sequences are trained; clip 0 has a zero gradient, below
        if (c.start || (!c.clip && c.rel_k)) continue;
        setup(&s, c);
        const Attention *a = &s.a;
        const size_t D = (size_t)a->D, dim = (size_t)a->H * D, n = (size_t)(a->B * a->T) * dim;
        const size_t rel = (size_t)(c.clip + 1) * D;
        float *out = xmalloc(n * 4), *lse = xmalloc((size_t)(a->B * a->T * a->H) * 4);
        float *dout = xmalloc(n * 4), *dqkv = xmalloc(s.n * 4);
        PosTables d = s.pos;
        d.owned[0] = NULL;
        if (s.pos.bias) d.bias = pos_alloc(&d, (size_t)a->H * pos_bias_stride(&d));
        if (s.pos.rel_k) d.rel_k = xmalloc(rel * 4);
        if (s.pos.rel_v) d.rel_v = xmalloc(rel * 4);
        fill(dout, n, 50);
        attention_forward(out, dim, lse, s.qkv, s.qkv + dim, s.qkv + dim + (size_t)a->G * D, a);
        memcpy(dqkv, s.qkv, s.n * 4);
        attention_backward(dqkv, &d, dout, out, lse, a);
        compare(&s, dout, n, s.qkv, s.n, dqkv, "qkv");
        if (s.pos.bias) {
            const size_t stride = pos_bias_stride(&d), T = (size_t)a->T, from = (size_t)d.len - T;
            compare(&s, dout, n, s.pos.bias + from, T, d.bias + from, "bias");
            // softmax ignores a constant, so the gradients of a head add up to zero
            for (int h = 0; h < a->H; h++) {
                const float *row = d.bias + (size_t)h * stride;
                double sum = 0, size = 0;
                for (int k = 0; k < d.len; k++) sum += (double)row[k], size += fabs((double)row[k]);
                CHECK_CLOSE(sum, 0, 1e-5 * size);
            }
        }
        if (s.pos.rel_k) compare(&s, dout, n, s.pos.rel_k, rel, d.rel_k, "rel_k");
        if (s.pos.rel_v) compare(&s, dout, n, s.pos.rel_v, rel, d.rel_v, "rel_v");
        free(out), free(lse), free(dout), free(dqkv), free(d.owned[0]);
        if (d.rel_k) free(d.rel_k);
        if (d.rel_v) free(d.rel_v);
        teardown(&s);
    }
    context = "";
}

int main(int argc, char **argv)
{
    (void)argc;
    program_begin("test_kernels", argv);
    RUN(test_gemm);
    RUN(test_gemm_threads);
    RUN(test_bf16);
    RUN(test_matvec);
    RUN(test_int8);
    RUN(test_vexp);
    RUN(test_layers);
    RUN(test_cross_entropy);
    RUN(test_attention_forward);
    RUN(test_attention_backward);
    return report();
}
