/* The whole model: targets that do not count, int8, threads, batches in pieces, the optimizer,
   sampling. What it computes is held against plain.h in test_plain.c. */
#include "test.h"

enum { B = 3, T = 53, V = 37 };

/* Targets that do not count: no loss, a mean over the others, and at the ends of sequences no trace
   of what stands there. */
static void test_targets(void)
{
    enum { SHORT = 20 };
    int *x = random_tokens(B * T, V, 1), *y = random_tokens(B * T, V, 2);
    int *cut_x = xmalloc(B * SHORT * sizeof *cut_x), *cut_y = xmalloc(B * SHORT * sizeof *cut_y);
    float losses[B * T], full[B * T];
    Model m, cut;
    small_model(&m, posenc_find("rope"), 0, T, T);
    small_model(&cut, posenc_find("rope"), 0, T, T);
    model_train_begin(&m), model_train_begin(&cut);
    model_loss(&m, full, x, y, NULL, B, T);
    for (int i = 0; i < B * T; i++) {
        const int b = i / T, t = i % T;
        if (t < 5 + b || t >= SHORT) y[i] = -1;
        if (t < SHORT) cut_x[b * SHORT + t] = x[i], cut_y[b * SHORT + t] = y[i];
    }
    const double loss = model_loss(&m, losses, x, y, NULL, B, T);
    double sum = 0;
    int counted = 0;
    for (int i = 0; i < B * T; i++) {
        CHECK(losses[i] == (y[i] < 0 ? 0 : full[i]));
        if (y[i] >= 0) sum += (double)full[i], counted++;
    }
    CHECK(counted == 15 + 14 + 13);
    CHECK_CLOSE(loss, sum / counted, 1e-9);
    CHECK(model_backward(&m, x, y, NULL, B, T, 1) == loss);
    const double without = model_backward(&cut, cut_x, cut_y, NULL, B, SHORT, 1);
    CHECK_CLOSE(without, loss, 1e-6);
    double worst = 0;
    for (size_t i = 0; i < m.grads.count; i++)
        worst = worse(worst, (double)m.grads.data[i], (double)cut.grads.data[i]);
    CHECK_CLOSE(worst, 0, 1e-6);
    for (int i = 0; i < B * T; i++) y[i] = -1;
    CHECK(isnan(model_loss(&m, NULL, x, y, NULL, B, T)));
    model_free(&m), model_free(&cut);
    free(x), free(y), free(cut_x), free(cut_y);
}

/* With int8 weights, generation gives what the forward gives: after a prompt and one token at a
   time, also past the trained length. */
static void test_int8_cache(void)
{
    for (const PosEnc *e = posencs; e->name; e++)
        for (int variant = 0; variant < variants(e); variant++)
            for (int prompt = 1; prompt <= 60; prompt += 59) {
                Model m;
                Cache kv;
                const int len = e->bounded ? 64 : 130;
                int *x = random_tokens(len, V, 3);
                float *want = xmalloc((size_t)len * V * 4);
                double worst = 0, largest = 0;
                context = e->name;
                small_model(&m, e, variant, 64, len);
                stir(&m);
                model_quantize(&m);
                model_logits(&m, want, x, NULL, 1, len);
                cache_create(&kv, &m, len);
                for (int t = prompt; t <= len; t++) {
                    const int n = t == prompt ? prompt : 1;
                    const float *got = model_decode(&m, &kv, x + t - n, n);
                    const float *w = want + (size_t)(t - 1) * V;
                    for (int v = 0; v < V; v++) {
                        worst = worse(worst, got[v], w[v]);
                        largest = fmax(largest, fabs((double)w[v]));
                    }
                }
                CHECK(largest > 0.1);
                CHECK_CLOSE(worst, 0, 1e-4);
                free(x), free(want);
                cache_free(&kv), model_free(&m);
            }
    context = "";
}

/* Three training steps, all encodings: the same bits with 1, 2, 3 and 4 threads, and with
   evaluations in between. The shape is large enough for every parallel region to be one. */
static void test_same_bits(void)
{
    enum { N = 4, LONG = 130, WORDS = 300 };
    int *x = random_tokens(N * LONG, WORDS, 1), *y = random_tokens(N * LONG, WORDS, 2);
    const AdamW adamw = { 0.9f, 0.95f, 1e-8f, 0.1f, 1 };
    for (const PosEnc *e = posencs; e->name; e++) {
        uint64_t want = 0;
        context = e->name;
        for (int threads = 1; threads <= 5; threads++) {    // 5: two threads, and evaluations
            Model m;
            Config c = { .dim = 64, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .seq_len = LONG,
                         .vocab_size = WORDS, .start_token = -1, .pos = e };
            threads_set(threads == 5 ? 2 : threads);
            config_defaults(&c);
            if (!strcmp(e->name, "rpe")) c.pos_opt[1] = 1;
            CHECK(!config_check(&c));
            model_create(&m, &c, LONG);
            model_init(&m, 1);
            model_train_begin(&m);
            CHECK((size_t)WORDS * 64 > MIN_PARALLEL && N * LONG * 64 > MIN_PARALLEL);
            for (int step = 1; step <= 3; step++) {
                model_backward(&m, x, y, NULL, N, LONG, 1);
                CHECK(model_update(&m, step, &adamw, 1e-2f) > 0);
                if (threads == 5) model_loss(&m, NULL, y, x, NULL, N, LONG - step);
            }
            const uint64_t sum = checksum(m.params.data, m.params.count * 4);
            if (threads == 1) want = sum;
            CHECK(sum == want);
            model_free(&m);
        }
    }
    context = "";
    free(x), free(y);
}

/* A batch larger than a piece has the gradient of its parts, and so has one that is accumulated. */
static void test_pieces(void)
{
    enum { N = 48 };    // 48 x 53 tokens: three pieces
    int *x = random_tokens(N * T, V, 1), *y = random_tokens(N * T, V, 2);
    Model whole, parts;
    small_model(&whole, posenc_find("t5"), 0, T, T);
    small_model(&parts, posenc_find("t5"), 0, T, T);
    model_train_begin(&whole), model_train_begin(&parts);
    const double loss = model_backward(&whole, x, y, NULL, N, T, 1);
    double sum = 0;
    for (int i = 0; i < N; i += 4)
        sum += model_backward(&parts, x + i * T, y + i * T, NULL, 4, T, 4.0f / N) * 4 / N;
    CHECK_CLOSE(sum, loss, 1e-6);
    double worst = 0, largest = 0;
    for (size_t i = 0; i < whole.grads.count; i++) {
        worst = worse(worst, whole.grads.data[i], parts.grads.data[i]);
        largest = fmax(largest, fabs((double)whole.grads.data[i]));
    }
    CHECK_CLOSE(worst, 0, 1e-5 * largest);
    const size_t floats = model_scratch_floats(&whole.config, N, T);
    CHECK(model_scratch_floats(&whole.config, 4 * N, T) < floats * 3 / 2);
    model_free(&whole), model_free(&parts);
    free(x), free(y);
}

/* Lengths that change in one process leave nothing behind. */
static void test_lengths(void)
{
    static const int length[] = { 64, 65, 63, 1, 64 };
    int *x = random_tokens(65, V, 1), *y = random_tokens(65, V, 2);
    for (const PosEnc *e = posencs; e->name; e++) {
        Model m;
        double first = 0, last = 0;
        context = e->name;
        small_model(&m, e, 1, 65, 65);
        for (int i = 0; i < 5; i++) {
            last = model_loss(&m, NULL, x, y, NULL, 1, length[i]);
            if (!i) first = last;
        }
        CHECK(first == last);
        model_free(&m);
    }
    context = "";
    free(x), free(y);
}

/* Every encoding learns one batch by heart; rows of a table that no position reaches stay what they
   were. */
static void test_overfit(void)
{
    int *x = random_tokens(2 * 20, V, 1), *y = random_tokens(2 * 20, V, 2);
    const AdamW adamw = { 0.9f, 0.95f, 1e-8f, 0, 1 };
    for (const PosEnc *e = posencs; e->name; e++) {
        Model m;
        double loss = 0, first = 0;
        context = e->name;
        small_model(&m, e, 0, 24, 24);
        model_train_begin(&m);
        const Params *p = &m.params;
        const float unused = p->pos ? p->pos[p->count - 1 - (size_t)(p->pos - p->data)] : 0;
        for (int step = 1; step <= 250; step++) {
            loss = model_backward(&m, x, y, NULL, 2, 20, 1);
            if (step == 1) first = loss;
            model_update(&m, step, &adamw, 1e-2f);
        }
        CHECK_CLOSE(first, log(V), 0.05);
        CHECK(loss < (strcmp(e->name, "none") ? 0.2 : 1.5));
        if (!strcmp(e->name, "learned")) CHECK(m.params.data[m.params.count - 1] == unused);
        model_free(&m);
    }
    context = "";
    free(x), free(y);
}

/* One AdamW step by hand, with clipping; a gradient that is not finite changes nothing. */
static void test_adamw(void)
{
    Model m;
    small_model(&m, posenc_find("learned"), 0, 8, 8);
    model_train_begin(&m);
    const AdamW o = { 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f };
    const double before = (double)m.params.data[3], gain = (double)m.params.rms_final[0];
    const double row = (double)m.params.pos[5];
    m.grads.data[3] = 3, m.grads.rms_final[0] = -4;
    const double norm = model_update(&m, 1, &o, 0.01f);
    CHECK_CLOSE(norm, 5, 1e-6);
    CHECK_CLOSE(m.m[3], 0.1 * 0.3, 1e-7);       // 3 scaled by 0.5 / 5
    CHECK_CLOSE(m.v[3], 0.05 * 0.09, 1e-7);
    CHECK_CLOSE(m.params.data[3], before - 0.01 * (1 + 0.1 * before), 1e-6);
    CHECK_CLOSE(m.params.rms_final[0], gain + 0.01, 1e-6);    // gains and encodings do not decay
    CHECK((double)m.params.pos[5] == row);
    CHECK(m.grads.data[3] == 0);
    m.grads.data[3] = NAN;
    const uint64_t sum = checksum(m.params.data, m.params.count * 4);
    CHECK(!isfinite(model_update(&m, 2, &o, 0.01f)));
    CHECK(sum == checksum(m.params.data, m.params.count * 4));
    model_free(&m);
}

/* The weights of one seed are the same whatever encoding stands beside them: comparisons are
   paired. */
static void test_init(void)
{
    Model a, b;
    small_model(&a, posenc_find("learned"), 0, 8, 8), small_model(&b, posenc_find("rpe"), 0, 8, 8);
    double squares = 0;
    const size_t n = (size_t)a.config.vocab_size * (size_t)a.config.dim;
    for (size_t i = 0; i < n; i++) squares += pow((double)a.params.data[i], 2);
    CHECK_CLOSE(sqrt(squares / (double)n), 0.02, 0.002);
    const size_t w2_bytes = (size_t)a.config.dim * (size_t)a.config.hidden_dim * 4;
    CHECK(!memcmp(a.params.layers[1].w2, b.params.layers[1].w2, w2_bytes));
    CHECK(memcmp(a.params.layers[0].w1, a.params.layers[1].w1, 400));
    model_free(&a), model_free(&b);
}

static void test_sampling(void)
{
    enum { N = 20000 };
    float x[8] = { 1, 3, 2, -1, 3, 0, 2.5f, -4 };
    CHECK(sample(x, 8, 0, 0, 1, 0.9) == 1);    // lowest index of equals
    CHECK(sample(x, 8, 1, 1, 1, 0.9) == 1);
    CHECK(sample(x, 8, 1e-8f, 0, 1, 0.3) == 1 || sample(x, 8, 1e-8f, 0, 1, 0.3) == 4);
    CHECK(sample(x, 8, 1, 0, 0, 0.9) == 1);
    for (int filter = 0; filter < 4; filter++) {    // none, top-k 3, top-p 0.7, both
        const int k = filter & 1 ? 3 : 0;
        const float p = filter & 2 ? 0.7f : 1;
        int count[8] = {0}, order[8] = { 1, 4, 6, 2, 0, 5, 3, 7 }, kept = k ? k : 8;
        double total = 0, nucleus = 0, sum = 0;
        for (int i = 0; i < kept; i++) total += exp((double)x[order[i]]);
        int n = 0;
        while (n < kept && !(p < 1 && nucleus >= (double)p * total))
            nucleus += exp((double)x[order[n++]]);
        for (int i = 0; i < N; i++) {
            const int token = sample(x, 8, 1, k, p, rng_uniform(1, RNG_TEST, (uint64_t)i));
            count[token]++;
        }
        for (int i = 0; i < 8; i++) {
            const double q = i < n ? exp((double)x[order[i]]) / nucleus : 0;
            const double deviation = sqrt(N * q * (1 - q));
            CHECK_CLOSE(count[order[i]], N * q, 4 * deviation);    // exactly 0 for the excluded
            sum += q;
        }
        CHECK_CLOSE(sum, 1, 1e-9);
    }
    x[5] = NAN;
    CHECK(sample(x, 8, 1, 0, 1, 0.5) == -1 && sample(x, 8, 0, 0, 1, 0.5) == -1);
}

int main(int argc, char **argv)
{
    (void)argc;
    program_begin("test_model", argv);
    RUN(test_same_bits);
    threads_set(1);    // the rest is too small for more
    RUN(test_targets);
    RUN(test_int8_cache);
    RUN(test_pieces);
    RUN(test_lengths);
    RUN(test_overfit);
    RUN(test_adamw);
    RUN(test_init);
    RUN(test_sampling);
    return report();
}
