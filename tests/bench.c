/* make bench: this machine's limits first, then what the program does beside them. Every
   measurement is a process of its own (so that its peak memory is its own), takes the median of
   several repeats, and prints ratios: machines differ and are noisy.
       bench                                  all
       bench limits
       bench train SHAPE POS THREADS          one training step of a shape below
       bench generate SHAPE
       bench text */
#include "test.h"

typedef struct {
    const char *name;
    int layers, heads, kv_heads, dim, hidden, ctx, batch, vocab, repeats;
} Shape;

static const Shape SHAPES[] = {
    { "S", 4, 4, 4, 128, 0, 64, 12, 256, 60 },     { "M", 6, 6, 6, 288, 0, 256, 8, 4096, 9 },
    { "L", 8, 8, 8, 512, 0, 512, 4, 4096, 5 },     { "long", 6, 6, 6, 288, 0, 2048, 1, 4096, 7 },
    { "260K", 5, 8, 4, 64, 172, 512, 1, 512, 5 },  { "15M", 6, 6, 6, 288, 768, 256, 1, 32000, 5 },
    { "110M", 12, 12, 12, 768, 2048, 1024, 1, 32000, 3 } };

static int by_size(const void *a, const void *b)
{
    return *(const double *)a > *(const double *)b ? 1 : -1;
}

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, by_size);
    return x[n / 2];
}

static const Shape *shape_of(const char *name)
{
    for (size_t i = 0; i < sizeof SHAPES / sizeof *SHAPES; i++)
        if (!strcmp(SHAPES[i].name, name)) return &SHAPES[i];
    die(2, "no shape %s", name);
}

static void create(Model *m, const Shape *s, const char *pos, int max_len)
{
    const int with_values = !strcmp(pos, "rpe+v");
    Config c = { .dim = s->dim, .hidden_dim = s->hidden, .n_layers = s->layers, .n_heads = s->heads,
                 .n_kv_heads = s->kv_heads, .vocab_size = s->vocab, .seq_len = s->ctx,
                 .start_token = -1, .pos = posenc_find(with_values ? "rpe" : pos) };
    config_defaults(&c);
    if (with_values) c.pos_opt[1] = 1;
    const char *wrong = config_check(&c);
    if (wrong) die(1, "%s", wrong);
    model_create(m, &c, max_len > s->ctx ? max_len : s->ctx);
    model_init(m, 1);
}

/* ---- the limits: multiply-adds from registers, and reads of a block larger than the caches --- */

static double peak_flops(void)    // GFLOP/s
{
    double best = 0;
    for (int repeat = 0; repeat < 5; repeat++) {
        enum { CHAINS = 12 };
        const long steps = 10000000;
        const double t0 = seconds();
        #pragma omp parallel
        {
            vec a[CHAINS], x = splat(0.999f), y = splat(1e-4f);
            for (int i = 0; i < CHAINS; i++) a[i] = splat((float)(i + thread_number()));
            for (long k = 0; k < steps; k++)
                for (int i = 0; i < CHAINS; i++) a[i] = a[i] * x + y;
            for (int i = 1; i < CHAINS; i++) a[0] += a[i];
            volatile float sink = vsum(a[0]);
            (void)sink;
        }
        const double operations = 2.0 * VL * CHAINS * (double)steps * thread_count();
        best = fmax(best, operations / (seconds() - t0) / 1e9);
    }
    return best;
}

static double read_bandwidth(void)    // GB/s
{
    const size_t n = (size_t)1 << 28;
    float *p = xmalloc(n * sizeof *p);
    double best = 0;
    for (int repeat = 0; repeat < 5; repeat++) {
        const double t0 = seconds();
        #pragma omp parallel for schedule(static)
        for (long block = 0; block < 64; block++) {
            vec s[4] = {0};
            const float *q = p + (size_t)block * (n / 64);
            for (size_t i = 0; i < n / 64; i += 4 * VL)
                for (int k = 0; k < 4; k++) s[k] += load(q + i + (size_t)k * VL);
            volatile float sink = vsum(s[0] + s[1] + s[2] + s[3]);
            (void)sink;
        }
        best = fmax(best, (double)n * 4 / (seconds() - t0) / 1e9);
    }
    free(p);
    return best;
}

static void limits(void)
{
    const int all = threads_set(0);
    const double bandwidth = read_bandwidth(), flops = peak_flops();
    threads_set(1);
    printf("limits %.1f %.1f %.2f %.2f %d\n",
           flops, peak_flops(), bandwidth, read_bandwidth(), all);
}

/* ---- one training step ----------------------------------------------------------------------- */

static void bench_train(const char *name, const char *pos, int threads)
{
    const Shape *s = shape_of(name);
    const int n = s->batch * s->ctx;
    Model m;
    double time[64];
    const AdamW adamw = { 0.9f, 0.95f, 1e-8f, 0.1f, 1 };
    threads_set(threads);
    create(&m, s, pos, 0);
    model_train_begin(&m);
    int *x = random_tokens(n, s->vocab, 1), *y = random_tokens(n, s->vocab, 2);
    for (int i = -1; i < s->repeats; i++) {    // the first one warms up
        const double t0 = seconds();
        model_backward(&m, x, y, NULL, s->batch, s->ctx, 1);
        model_update(&m, i + 2, &adamw, 1e-4f);
        if (i >= 0) time[i] = seconds() - t0;
    }
    const double t = median(time, s->repeats), tokens = n;
    // 6 multiply-adds' worth of operations per parameter and token; attention 12 dim per pair of
    // tokens, half of which are masked
    const double work = 6 * (double)m.params.count * tokens
                        + 6.0 * s->layers * s->dim * tokens * s->ctx;
    printf("train %.6f %.0f %.1f %.0f %016llx\n", t, tokens / t, work / t / 1e9, peak_mib(),
           (unsigned long long)checksum(m.params.data, m.params.count * 4));
    model_free(&m);
}

/* ---- prompt, generation, sampling ------------------------------------------------------------ */

static void bench_generate(const char *name)
{
    const Shape *s = shape_of(name);
    Model m;
    Cache kv;
    enum { MOST = 9 };
    double prompt[MOST], step[MOST], late[MOST], one[MOST], draw = 0;
    const int large = s->dim > 256 && s->layers > 6;
    const int generate = large ? 24 : 200, past = large ? 2000 : 0;
    create(&m, s, "rope", 2300);
    int *x = random_tokens(2300, s->vocab, 1);
    const double bytes = 4.0 * (double)m.params.count;
    const int all = threads_set(0);
    for (int i = 0; i < s->repeats; i++) {
        threads_set(all);
        cache_create(&kv, &m, 2300);
        double t0 = seconds();
        model_decode(&m, &kv, x, 200);
        prompt[i] = 200 / (seconds() - t0);
        t0 = seconds();
        for (int k = 0; k < generate; k++) model_decode(&m, &kv, x + k, 1);
        step[i] = generate / (seconds() - t0);
        t0 = seconds();
        for (int k = 0; k < 20; k++)
            sample(kv.logits, s->vocab, 1, 0, 0.9f, rng_uniform(1, 1, (uint64_t)k));
        draw = (seconds() - t0) / 20 * step[i];
        if (past) {
            model_decode(&m, &kv, x, past - kv.used);
            t0 = seconds();
            for (int k = 0; k < generate; k++) model_decode(&m, &kv, x + k, 1);
            late[i] = generate / (seconds() - t0);
        } else {
            late[i] = 0;
        }
        cache_free(&kv);
        threads_set(1);
        cache_create(&kv, &m, 2300);
        model_decode(&m, &kv, x, 100);
        t0 = seconds();
        for (int k = 0; k < generate; k++) model_decode(&m, &kv, x + k, 1);
        one[i] = generate / (seconds() - t0);
        cache_free(&kv);
    }
    const double p = median(prompt, s->repeats), g = median(step, s->repeats);
    const size_t multiplied = m.params.count - (size_t)s->vocab * (size_t)s->dim;
    printf("generate %.1f %.1f %.1f %.1f %.3f %.2f %.1f\n",
           p, g, median(late, s->repeats), median(one, s->repeats), draw,
           g * bytes / 1e9, p * 2 * (double)multiplied / 1e9);
    model_free(&m);
}

static void bench_text(void)
{
    Tokenizer t;
    size_t size, n;
    double time[2][7];
    tokenizer_load(&t, "tokenizer.bin");
    char *text = file_read("tests/data/stories.txt", &size);
    for (int i = 0; i < 7; i++)
        for (int half = 0; half < 2; half++) {
            const double t0 = seconds();
            free(tokenizer_encode(&t, text, half ? size / 2 : size, &n));
            time[half][i] = seconds() - t0;
        }
    printf("text %.4f %.4f %zu\n", median(time[0], 7), median(time[1], 7), size);
    tokenizer_free(&t), free(text);
}

/* ---- the whole table ------------------------------------------------------------------------- */

static const char *self;

/* Runs this program with arguments and reads the numbers of the line that it prints. */
static void run(double *value, int n, char *word, const char *arguments)
{
    char command[512], name[32];
    snprintf(command, sizeof command, "%s %s", self, arguments);
    FILE *f = popen(command, "r");
    if (!f || fscanf(f, "%31s", name) != 1) die(1, "%s failed", command);
    for (int i = 0; i < n; i++) if (fscanf(f, "%lf", &value[i]) != 1) die(1, "%s failed", command);
    if (word && fscanf(f, "%63s", word) != 1) die(1, "%s failed", command);
    if (pclose(f)) die(1, "%s failed", command);
}

int main(int argc, char **argv)
{
    program_begin("bench", argv);
    self = argv[0];
    const char *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "limits")) return limits(), 0;
    if (!strcmp(what, "train") && argc == 5) return bench_train(argv[2], argv[3], atoi(argv[4])), 0;
    if (!strcmp(what, "generate") && argc == 3) return bench_generate(argv[2]), 0;
    if (!strcmp(what, "text")) return bench_text(), 0;

    double limit[5], v[8], all = 0;
    char bits[2][64];
    run(limit, 5, NULL, "limits");
    printf("machine: %.0f GFLOP/s multiply-add (%.0f on one thread), "
           "%.1f GB/s read (%.1f on one), %.0f threads, vectors of %d floats\n\n",
           limit[0], limit[1], limit[2], limit[3], limit[4], VL);
    printf("training step             ms     tok/s   GFLOP/s  of limit  peak MiB\n");
    static const char *const shapes[] = { "S", "M", "L", "long" };
    for (int i = 0; i < 4; i++) {
        char arguments[64];
        snprintf(arguments, sizeof arguments, "train %s rope 0", shapes[i]);
        run(v, 4, bits[0], arguments);
        const Shape *s = shape_of(shapes[i]);
        printf("%-5s %dx%dx%d ctx %-5d%7.1f %9.0f %9.0f %8.0f%% %9.0f\n",
               s->name, s->layers, s->heads, s->dim, s->ctx,
               1e3 * v[0], v[1], v[2], 100 * v[2] / limit[0], v[3]);
        if (!strcmp(shapes[i], "M")) {
            all = v[0];
            run(v, 4, bits[1], "train M rope 1");
            printf("      M on one thread    %7.1f %9.0f %9.0f %8.0f%%            "
                   "%.2f times slower, %s\n",
                   1e3 * v[0], v[1], v[2], 100 * v[2] / limit[1], v[0] / all,
                   strcmp(bits[0], bits[1]) ? "OTHER BITS" : "the same bits");
        }
        fflush(stdout);
    }
    printf("\nencodings, step M over none (median of 3 pairs)\n");
    static const char *const encodings[] = {
        "sinusoidal", "learned", "rope", "alibi", "t5", "rpe", "rpe+v" };
    for (int i = 0; i < 7; i++) {
        double ratio[3];
        for (int k = 0; k < 3; k++) {
            char arguments[64];
            snprintf(arguments, sizeof arguments, "train M %s 0", encodings[i]);
            run(v, 4, bits[0], arguments);
            run(v + 4, 4, bits[0], "train M none 0");
            ratio[k] = v[0] / v[4];
        }
        printf("%-12s %.3f\n", encodings[i], median(ratio, 3));
        fflush(stdout);
    }
    printf("\ngeneration   prompt of 200   of limit   tok/s   one thread   "
           "GB/s  of limit   at 2000   sampling\n");
    static const char *const models[] = { "260K", "15M", "110M" };
    for (int i = 0; i < 3; i++) {
        char arguments[64];
        snprintf(arguments, sizeof arguments, "generate %s", models[i]);
        run(v, 7, NULL, arguments);
        printf("%-10s %8.0f tok/s %9.0f%% %9.1f %9.1f %8.1f %8.0f%% %8.0f%% %8.1f%%\n",
               models[i], v[0], 100 * v[6] / limit[0], v[1], v[3], v[5],
               100 * v[5] / limit[2], 100 * v[2] / v[1], 100 * v[4]);
        fflush(stdout);
    }
    run(v, 3, NULL, "text");
    printf("\ntokenizing   %.2f MB in %.0f ms, %.1f MB/s; "
           "the half in %.0f ms, %.2f times less\n",
           v[2] / 1e6, 1e3 * v[0], v[2] / v[0] / 1e6, 1e3 * v[1], v[0] / v[1]);
    return 0;
}
