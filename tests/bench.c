/* make bench: what the program does beside the limits of this machine. Every measurement is a
   process of its own (so that its peak memory is its own), measures the limit that it is compared
   with in between (machines change by the minute), takes the median of several repeats, and prints
   ratios.
       bench                                  all
       bench limits
       bench train SHAPE POS THREADS          one training step of a shape below
       bench generate SHAPE
       bench start                            loads a 110M checkpoint, to the first token
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

static volatile float sink;       // so that no result is without a use

static double peak_flops(void)    // GFLOP/s
{
    double best = 0;
    for (int repeat = 0; repeat < 3; repeat++) {
        enum { CHAINS = 12 };
        const long steps = 5000000;
        const double t0 = seconds();
        #pragma omp parallel
        {
            vec a[CHAINS], x = splat(0.999f), y = splat(1e-4f);
            for (int i = 0; i < CHAINS; i++) a[i] = splat((float)(i + omp_get_thread_num()));
            for (long k = 0; k < steps; k++)
                for (int i = 0; i < CHAINS; i++) a[i] = a[i] * x + y;
            for (int i = 1; i < CHAINS; i++) a[0] += a[i];
            sink = vsum(a[0]);
        }
        const double operations = 2.0 * VL * CHAINS * (double)steps * omp_get_max_threads();
        best = fmax(best, operations / (seconds() - t0) / 1e9);
    }
    return best;
}

static double read_bandwidth(void)    // GB/s
{
    static float *p;
    const size_t n = (size_t)1 << 27;
    if (!p) p = xmalloc(n * sizeof *p);
    double best = 0;
    for (int repeat = 0; repeat < 3; repeat++) {
        const double t0 = seconds();
        #pragma omp parallel for schedule(static)
        for (long block = 0; block < 64; block++) {
            vec s[4] = {0};
            const float *q = p + (size_t)block * (n / 64);
            for (size_t i = 0; i < n / 64; i += 4 * VL)
                for (int k = 0; k < 4; k++) s[k] += load(q + i + (size_t)k * VL);
            sink = vsum(s[0] + s[1] + s[2] + s[3]);
        }
        best = fmax(best, (double)n * 4 / (seconds() - t0) / 1e9);
    }
    return best;
}

/* Nanoseconds in which a number goes from one thread to another and back; 0: there is but one.
   About 100 where two processors share a cache, several hundred where they do not: there, what one
   thread has written is far away for the other, while reads have two ways to memory. */
static double round_trip(void)
{
    enum { TRIPS = 200, REPEATS = 10 };
    static _Alignas(128) int there, back;    // in lines of their own
    double best = INFINITY;
    if (omp_get_max_threads() < 2) return 0;
    for (int repeat = 0; repeat < REPEATS; repeat++) {
        const double t0 = seconds();
        there = back = 0;
        #pragma omp parallel num_threads(2)
        for (int i = 1; i <= TRIPS && omp_get_num_threads() == 2; i++)
            if (omp_get_thread_num() == 0) {
                __atomic_store_n(&there, i, __ATOMIC_RELEASE);
                while (__atomic_load_n(&back, __ATOMIC_ACQUIRE) != i) { }
            } else {
                while (__atomic_load_n(&there, __ATOMIC_ACQUIRE) != i) { }
                __atomic_store_n(&back, i, __ATOMIC_RELEASE);
            }
        best = fmin(best, (seconds() - t0) / TRIPS * 1e9);
    }
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
    if (getenv("BF16")) bf16_set(1);
    create(&m, s, pos, 0);
    model_train_begin(&m);
    int *x = random_tokens(n, s->vocab, 1), *y = random_tokens(n, s->vocab, 2);
    for (int i = -1; i < s->repeats; i++) {    // the first one warms up
        const double t0 = seconds();
        model_backward(&m, x, y, NULL, s->batch, s->ctx, 1);
        model_update(&m, i + 2, &adamw, 1e-4f);
        if (i >= 0) time[i] = seconds() - t0;
    }
    const double t = median(time, s->repeats), tokens = n, peak = peak_mib();
    // 6 operations per parameter and token; attention 12 dim per pair of tokens, half of which are
    // masked
    const double work = 6 * (double)m.params.count * tokens
                        + 6.0 * s->layers * s->dim * tokens * s->ctx;
    printf("train %.6f %.0f %.1f %.1f %.0f %016llx\n", t, tokens / t, work / t / 1e9, peak_flops(),
           peak, (unsigned long long)checksum(m.params.data, m.params.count * 4));
    model_free(&m);
}

/* ---- prompt, generation, sampling ------------------------------------------------------------ */

enum { PROMPT = 200, MOST = 2300 };

static double per_second(Model *m, Cache *kv, const int *tokens, int n)    // one token at a time
{
    const double t0 = seconds();
    for (int k = 0; k < n; k++) model_decode(m, kv, tokens + k, 1);
    return n / (seconds() - t0);
}

static void bench_generate(const char *name)
{
    const Shape *s = shape_of(name);
    Model m;
    Cache kv;
    // of_flops, of_read: over the machine's limit; late: with 2000 tokens in the cache over 200;
    // over_one: all threads over one; draw: sampling over a token
    double prompt[9], of_flops[9], fp32[9], of_read[9], late[9], over_one[9], draw[9];
    double int8[9], int8_read[9];
    const int generate = s->dim < 100 ? 1000 : s->dim < 500 ? 200 : 24, past = 2000;
    create(&m, s, "rope", MOST);
    int *x = random_tokens(MOST, s->vocab, 1);
    const double weights = (double)m.params.count;
    const double multiplied = weights - (double)s->vocab * s->dim;    // by every token of a prompt
    const int all = threads_set(0);
    cache_create(&kv, &m, MOST);
    model_decode(&m, &kv, x, PROMPT);    // warms up
    for (int quantised = 0; quantised < 2; quantised++) {
        if (quantised) model_quantize(&m);
        for (int i = 0; i < s->repeats; i++) {
            kv.used = 0;
            double t0 = seconds();
            model_decode(&m, &kv, x, PROMPT);
            const double prompt_rate = PROMPT / (seconds() - t0);
            const double read = read_bandwidth(), rate = per_second(&m, &kv, x, generate);
            if (quantised) {
                int8[i] = rate;
                int8_read[i] = rate * weights * 68 / 64 / 1e9 / read;    // 64 and a scale
                continue;
            }
            prompt[i] = prompt_rate;
            of_flops[i] = prompt_rate * 2 * multiplied / 1e9 / peak_flops();
            fp32[i] = rate;
            of_read[i] = rate * weights * 4 / 1e9 / read;
            t0 = seconds();
            for (int k = 0; k < 20; k++)
                sample(kv.logits, s->vocab, 1, 0, 0.9f, rng_uniform(1, 1, (uint64_t)k));
            draw[i] = (seconds() - t0) / 20 * rate;
            kv.used = PROMPT;
            threads_set(1);
            over_one[i] = rate / per_second(&m, &kv, x, generate);
            threads_set(all);
            model_decode(&m, &kv, x, past - kv.used);
            late[i] = per_second(&m, &kv, x, generate < 300 ? generate : 300) / rate;
        }
    }
    const int n = s->repeats;
    printf("generate %.1f %.4f %.1f %.4f %.4f %.4f %.4f %.1f %.4f\n", median(prompt, n),
           median(of_flops, n), median(fp32, n), median(of_read, n), median(late, n),
           median(over_one, n), median(draw, n), median(int8, n), median(int8_read, n));
    cache_free(&kv), model_free(&m), free(x);
}

/* From opening a checkpoint in llama2.c's format, which the system still holds in memory, to the
   logits behind a first token. */
static void bench_start(void)
{
    const Shape *s = shape_of("110M");
    const char *path = "build/bench-110M.bin";
    const int32_t header[7] = { s->dim, s->hidden, s->layers, s->heads, s->kv_heads, s->vocab,
                                s->ctx };
    double time[5];
    Model m;
    create(&m, s, "rope", 0);
    const size_t n = m.params.count, angles = (size_t)(s->ctx * s->dim / s->heads);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(header, 4, 7, f) != 7 || fwrite(m.params.data, 4, n, f) != n
        || fwrite(m.params.data, 4, angles, f) != angles || fclose(f))
        die(1, "cannot write %s", path);
    model_free(&m);
    for (int i = 0; i < 5; i++) {
        Cache kv;
        const int token = 1;
        const double t0 = seconds();
        model_load(&m, path, NULL, NULL);
        cache_create(&kv, &m, s->ctx);
        model_decode(&m, &kv, &token, 1);
        time[i] = seconds() - t0;
        cache_free(&kv), model_free(&m);
    }
    unlink(path);
    printf("start %.4f\n", median(time, 5));
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
            free(tokenizer_encode(&t, text, half ? size / 2 : size, &n, NULL));
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
    if (!strcmp(what, "start")) return bench_start(), 0;
    if (!strcmp(what, "text")) return bench_text(), 0;

    double limit[5], v[9], one[9];
    char bits[2][64];
    run(limit, 5, NULL, "limits");
    printf("machine: %.0f GFLOP/s multiply-add (%.0f on one thread), "
           "%.1f GB/s read (%.1f on one), %.0f threads, vectors of %d floats\n"
           "round trip: from one thread to another and back, as the processors lay just then\n\n",
           limit[0], limit[1], limit[2], limit[3], limit[4], VL);
    printf("training step             ms     tok/s   GFLOP/s  of limit  peak MiB  round trip\n");
    static const char *const shapes[] = { "S", "M", "L", "long" };
    for (int i = 0; i < 4; i++) {
        char arguments[64];
        snprintf(arguments, sizeof arguments, "train %s rope 0", shapes[i]);
        run(v, 5, bits[0], arguments);
        const Shape *s = shape_of(shapes[i]);
        printf("%-5s %dx%dx%d ctx %-5d%7.1f %9.0f %9.0f %8.0f%% %9.0f %8.0f ns\n",
               s->name, s->layers, s->heads, s->dim, s->ctx,
               1e3 * v[0], v[1], v[2], 100 * v[2] / v[3], v[4], round_trip());
        fflush(stdout);
    }
    double ratio[3];
    int same = 1;
    for (int k = 0; k < 3; k++) {
        run(v, 5, bits[0], "train M rope 0");
        run(one, 5, bits[1], "train M rope 1");
        ratio[k] = one[0] / v[0];
        same = same && !strcmp(bits[0], bits[1]);
    }
    printf("M: all threads over one (median of 3 pairs) %.2f, %s\n", median(ratio, 3),
           same ? "the same bits" : "OTHER BITS");
    printf("\nencodings, step M over none (median of 3 pairs)\n");
    static const char *const encodings[] = {
        "sinusoidal", "learned", "rope", "alibi", "t5", "rpe", "rpe+v" };
    for (int i = 0; i < 7; i++) {
        for (int k = 0; k < 3; k++) {
            char arguments[64];
            snprintf(arguments, sizeof arguments, "train M %s 0", encodings[i]);
            run(v, 5, bits[0], arguments);
            run(one, 5, bits[0], "train M none 0");
            ratio[k] = v[0] / one[0];
        }
        printf("%-12s %.3f\n", encodings[i], median(ratio, 3));
        fflush(stdout);
    }
    printf("\n         prompt of 200      generation, fp32                                  "
           "   int8\n"
           "model    tok/s  of limit    tok/s  of read  over 1 thread  at 2000  sampling    "
           "tok/s  over fp32  of read  round trip\n");
    static const char *const models[] = { "260K", "15M", "110M" };
    for (int i = 0; i < 3; i++) {
        char arguments[64];
        snprintf(arguments, sizeof arguments, "generate %s", models[i]);
        run(v, 9, NULL, arguments);
        printf("%-6s %7.0f %8.0f%% %8.1f %7.0f%% %14.2f %7.0f%% %8.1f%% %8.1f %10.2f %7.0f%% "
               "%8.0f ns\n", models[i], v[0], 100 * v[1], v[2], 100 * v[3], v[5], 100 * v[4],
               100 * v[6], v[7], v[7] / v[2], 100 * v[8], round_trip());
        fflush(stdout);
    }
    run(v, 1, NULL, "start");
    printf("start of 110M to the first token: %.0f ms\n", 1e3 * v[0]);
    run(v, 3, NULL, "text");
    printf("\ntokenizing   %.2f MB in %.0f ms, %.1f MB/s; "
           "the half in %.0f ms, %.2f times less\n",
           v[2] / 1e6, 1e3 * v[0], v[2] / v[0] / 1e6, 1e3 * v[1], v[0] / v[1]);
    return 0;
}
