/* Products, the exponential and cross entropy against plain loops in double. The other layers are
   held against plain.h in test_plain.c. */
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

static void test_cross_entropy(void)
{
    enum { V = 45 };
    float x[V], d[V], scratch[V];
    fill(x, V, 9);
    memcpy(d, x, sizeof d);
    const int targets[] = { 7, 3 };
    float loss[2];
    cross_entropy(loss, d, targets, 1, V, 0.5f);
    double sum = 0, total = 0;
    for (int i = 0; i < V; i++) sum += exp((double)x[i]);
    CHECK_CLOSE(loss[0], log(sum) - (double)x[7], 1e-5);
    for (int i = 0; i < V; i++) {
        CHECK_CLOSE(d[i], 0.5 * (exp((double)x[i]) / sum - (i == 7)), 1e-6);
        total += (double)d[i];
    }
    CHECK_CLOSE(total, 0, 1e-6);
    for (int i = 0; i < V; i++) scratch[i] = 1e4f * x[i];    // far out: finite
    cross_entropy(loss + 1, scratch, targets + 1, 1, V, 0);
    CHECK(isfinite(loss[1]));
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
    RUN(test_cross_entropy);
    return report();
}
