/* Every encoding: golden values, what it reduces to without its parameters, what a common shift of
   the positions does. */
#include "test.h"

static void configure(Config *c, const char *name, int dim, int heads, int seq_len)
{
    *c = (Config){ .dim = dim, .n_layers = 1, .n_heads = heads, .vocab_size = 10,
                   .seq_len = seq_len, .pos = posenc_find(name) };
    config_defaults(c);
    CHECK(config_check(c) == NULL);
}

static void test_names(void)
{
    CHECK(posenc_find("RoPE") == posenc_find("rope"));
    CHECK(posenc_find("ALiBi") && posenc_find("NONE"));
    CHECK(!posenc_find("rop") && !posenc_find("") && !posenc_find("ropee"));
}

static void test_sinusoidal(void)
{
    static const float want[2][8] = {
        { .841471f, .540302f, .099833f, .995004f, .010000f, .999950f, .001000f, 1.000000f },
        { -.544021f, -.839072f, .841471f, .540302f, .099833f, .995004f, .010000f, .999950f } };
    static const struct { int dim; double step; } steps[] = {
        { 64, 1.471848 }, { 128, 1.952596 }, { 256, 2.671202 }, { 512, 3.714270 } };
    Config c;
    PosTables t;
    configure(&c, "sinusoidal", 8, 1, 32);
    tables_create(&t, &c, NULL, 32);
    for (int i = 0; i < 8; i++) {
        CHECK(t.embed[i] == (float)(i % 2));    // P[0] = 0 1 0 1 ...
        CHECK_CLOSE(t.embed[8 + i], want[0][i], 1e-6);
        CHECK_CLOSE(t.embed[80 + i], want[1][i], 1e-6);
    }
    free(t.owned[0]);
    for (size_t k = 0; k < 4; k++) {    // neighbours are equally far apart everywhere
        const int d = steps[k].dim;
        configure(&c, "sinusoidal", d, 1, 32);
        tables_create(&t, &c, NULL, 32);
        for (int p = 0; p + 1 < 32; p += 10) {
            double sum = 0;
            const float *row = t.embed + p * d;
            for (int i = 0; i < d; i++) sum += pow((double)(row[d + i] - row[i]), 2);
            CHECK_CLOSE(sqrt(sum), steps[k].step, 1e-5);
        }
        if (d == 64) CHECK_CLOSE(dot(t.embed + 3 * d, t.embed + 13 * d, (size_t)d), 21.0516, 1e-3);
        // the default scale brings it to the embedding's 0.02
        CHECK_CLOSE((double)t.embed_scale * sqrt(0.5), 0.02, 1e-6);
        free(t.owned[0]);
    }
}

static void test_alibi(void)
{
    static const struct { int heads, n; double slope[8]; } want[] = {
        { 1, 1, { 1.0 / 256 } },
        { 2, 2, { 1.0 / 16, 1.0 / 256 } },
        { 3, 3, { 1.0 / 16, 1.0 / 256, 1.0 / 4 } },
        { 4, 4, { 1.0 / 4, 1.0 / 16, 1.0 / 64, 1.0 / 256 } },
        { 6, 6, { .25, .0625, 1.0 / 64, 1.0 / 256, .5, .125 } },
        { 7, 7, { .25, .0625, 1.0 / 64, 1.0 / 256, .5, .125, 1.0 / 32 } },
        { 8, 8, { .5, .25, .125, .0625, .03125, .015625, .0078125, .00390625 } },
        { 16, 4, { .707107, .5, .353553, .25 } } };
    for (size_t k = 0; k < sizeof want / sizeof *want; k++) {
        Config c;
        PosTables t;
        configure(&c, "alibi", 16 * want[k].heads, want[k].heads, 64);
        tables_create(&t, &c, NULL, 64);
        for (int h = 0; h < want[k].n; h++) {
            CHECK(*pos_bias(&t, h, 0) == 0);
            CHECK_CLOSE(*pos_bias(&t, h, 1), -want[k].slope[h], 1e-6);
            CHECK_CLOSE(*pos_bias(&t, h, 63), -63 * want[k].slope[h], 1e-4);
        }
        free(t.owned[0]);
    }
    Config c;
    PosTables t;
    configure(&c, "alibi", 12 * 16, 12, 8);
    tables_create(&t, &c, NULL, 8);
    CHECK_CLOSE(*pos_bias(&t, 8, 1), -.707107, 1e-6);
    CHECK_CLOSE(*pos_bias(&t, 11, 1), -.0883883, 1e-6);
    free(t.owned[0]);
}

static void test_t5(void)
{
    static const int first[] = {    // of buckets 16 ... 31
        16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113 };
    Config c;
    PosTables t;
    float *B = xmalloc(32 * 2 * 4);
    configure(&c, "t5", 32, 2, 256);    // t5-max: half of 256
    CHECK(c.pos_opt[1] == 128);
    for (int i = 0; i < 64; i++) B[i] = (float)i;
    tables_create(&t, &c, B, 512);
    c.pos->forward(&t, B, &c);
    for (int n = 0, bucket = 0; n < 512; n++) {
        if (n < 16) bucket = n;
        else while (bucket < 31 && n >= first[bucket + 1 - 16]) bucket++;
        CHECK_CLOSE(*pos_bias(&t, 1, n), sqrt(32) * (2 * bucket + 1), 1e-3);
    }
    free(t.owned[0]), free(B);
}

static void test_rope(void)
{
    static const struct { int dims, p; float y[8]; } want[] = {
        { 0, 1, { -1.142640f, 1.922076f, 2.585679f, 4.279517f,
                  4.939751f, 6.049699f, 6.991997f, 8.006996f } },
        { 0, 3, { -1.272233f, -1.838865f, 1.683929f, 4.707907f,
                  4.817777f, 6.147278f, 6.975969f, 8.020964f } },
        { 4, 3, { -1.272233f, -1.838865f, 2.878668f, 4.088187f, 5, 6, 7, 8 } },
        { 0, 0, { 1, 2, 3, 4, 5, 6, 7, 8 } } };
    Config c;
    PosTables t;
    for (size_t k = 0; k < 4; k++) {
        float x[24];    // q, k and v of one head
        configure(&c, "rope", 8, 1, 8);
        c.pos_opt[1] = want[k].dims;
        CHECK(config_check(&c) == NULL);
        tables_create(&t, &c, NULL, 8);
        for (int i = 0; i < 24; i++) x[i] = (float)(i % 8 + 1);
        rotate(x, &t, &c, NULL, want[k].p, 1, 1, 1);
        for (int i = 0; i < 8; i++) {
            CHECK_CLOSE(x[i], want[k].y[i], 2e-6 * 8);
            CHECK(x[8 + i] == x[i]);
            CHECK(x[16 + i] == (float)(i + 1));    // v is not turned
        }
        rotate(x, &t, &c, NULL, want[k].p, 1, 1, -1);    // the backward undoes it
        for (int i = 0; i < 8; i++) CHECK_CLOSE(x[i], i + 1, 1e-5);
        free(t.owned[0]), free(t.owned[1]);
    }
    configure(&c, "rope", 8, 1, 128);
    tables_create(&t, &c, NULL, 128);
    static const struct { int m, n; double score; } scores[] = {
        { 3, 0, 70.279033 }, { 5, 2, 70.279033 }, { 105, 102, 70.279033 }, { 2, 5, 78.732475 },
        { 9, 9, 120 } };
    for (size_t k = 0; k < 5; k++) {
        float x[24] = {0}, y[24] = {0};
        for (int i = 0; i < 8; i++) x[i] = (float)(i + 1), y[8 + i] = (float)(8 - i);
        rotate(x, &t, &c, NULL, scores[k].m, 1, 1, 1);
        rotate(y, &t, &c, NULL, scores[k].n, 1, 1, 1);
        CHECK_CLOSE(dot(x, y + 8, 8), scores[k].score, 2e-5);
    }
    free(t.owned[0]), free(t.owned[1]);
    configure(&c, "rope", 8, 1, 8);
    c.n_heads = 8;
    CHECK(config_check(&c) != NULL);    // a head of one dimension has no pair
}

static void test_rpe(void)
{
    Config c;
    PosTables t = {0};
    float block[2 * 17 * 8];
    configure(&c, "rpe", 32, 4, 64);
    CHECK(c.pos->layer_params(&c) == 17 * 8);
    c.pos->layer(&t, block, &c);
    CHECK(t.clip == 16 && t.rel_k == block && !t.rel_v);
    c.pos_opt[1] = 1;
    CHECK(c.pos->layer_params(&c) == 2 * 17 * 8);
    c.pos->layer(&t, block, &c);
    CHECK(t.rel_k == block && t.rel_v == block + 17 * 8);    // keys, then values
}

/* ---- properties of all ----------------------------------------------------------------------- */

enum { B = 2, T = 70, V = 37 };

static void logits_of(Model *m, float *out, const int *tokens, const int *positions)
{
    model_logits(m, out, tokens, positions, B, T);
}

/* Without its parameters, or its factor, an encoding must be `none`, bit for bit. */
static void test_reduces_to_none(void)
{
    int *tokens = random_tokens(B * T, V, 1);
    float *want = xmalloc(B * T * V * 4), *got = xmalloc(B * T * V * 4);
    float *with = xmalloc(B * T * V * 4);
    for (const PosEnc *e = posencs; e->name; e++)
        for (int variant = 0; variant < 2; variant++) {
            Model none, m;
            context = e->name;
            small_model(&none, posenc_find("none"), variant, T, T);
            small_model(&m, e, variant, T, T);
            for (int i = 0; i < m.params.n_tensors; i++) {
                const Tensor *t = &m.params.tensors[i];
                if (t->kind == POSITION) fill(m.params.data + t->offset, t->count, (uint64_t)i);
            }
            logits_of(&none, want, tokens, NULL);
            logits_of(&m, with, tokens, NULL);
            // it does something at all
            CHECK(!strcmp(e->name, "none") == !memcmp(want, with, B * T * V * 4));
            for (int i = 0; i < m.params.n_tensors; i++) {
                const Tensor *t = &m.params.tensors[i];
                if (t->kind == POSITION) memset(m.params.data + t->offset, 0, t->count * 4);
            }
            if (!m.params.pos) {    // fixed tables
                if (m.pos.bias) memset(m.pos.bias, 0, 4 * pos_bias_stride(&m.pos) * 4);
                m.pos.embed_scale = 0;
                m.pos.rotary = 0;
            }
            logits_of(&m, got, tokens, NULL);
            CHECK(!memcmp(want, got, B * T * V * 4));
            model_free(&none), model_free(&m);
        }
    context = "";
    free(tokens), free(want), free(got), free(with);
}

/* Positions shifted by 37: what is added to the embedding changes, everything relative does not;
   and contiguous positions given one by one are the same bits as none given. */
static void test_shift(void)
{
    int *tokens = random_tokens(B * T, V, 1), *positions = xmalloc(B * T * sizeof(int));
    float *want = xmalloc(B * T * V * 4), *got = xmalloc(B * T * V * 4);
    for (const PosEnc *e = posencs; e->name; e++)
        for (int variant = 0; variant < 2; variant++) {
            Model m;
            context = e->name;
            small_model(&m, e, variant, T + 37, T + 37);
            stir(&m);
            logits_of(&m, want, tokens, NULL);
            for (int shift = 0; shift <= 37; shift += 37) {
                for (int i = 0; i < B * T; i++) positions[i] = i % T + shift;
                logits_of(&m, got, tokens, positions);
                double worst = 0;
                for (int i = 0; i < B * T * V; i++)
                    worst = worse(worst, want[i], got[i]);
                if (!shift) CHECK(!memcmp(want, got, B * T * V * 4));
                else if (m.pos.embed) CHECK(worst > 1e-2);
                else CHECK_CLOSE(worst, 0, m.pos.cos ? 1e-4 : 0);
            }
            model_free(&m);
        }
    context = "";
    free(tokens), free(positions), free(want), free(got);
}

/* -m (i - j) and +m j differ by a constant of the row, which softmax ignores: ALiBi may be written
   either way. Here attention with the one against softmax with the other. */
static void test_alibi_key_form(void)
{
    enum { S = 12, D = 16 };
    Config c;
    PosTables t;
    float qkv[S * 3 * D], out[S * D], lse[S];
    configure(&c, "alibi", D, 1, S);
    tables_create(&t, &c, NULL, S);
    fill(qkv, S * 3 * D, 1);
    const Attention a = { .B = 1, .T = S, .S = S, .H = 1, .G = 1, .D = D, .q_stride = 3 * D,
                          .kv_stride = 3 * D, .pos = &t };
    attention_forward(out, D, lse, qkv, qkv + D, qkv + 2 * D, &a);
    const double m = -(double)*pos_bias(&t, 0, 1);
    double weight[S], sum = 0;
    for (int j = 0; j < S; j++) {
        const double score = (double)dot(qkv + (S - 1) * 3 * D, qkv + j * 3 * D + D, D) / sqrt(D);
        weight[j] = exp(score + m * j);
        sum += weight[j];
    }
    for (int d = 0; d < D; d++) {
        double o = 0;
        for (int j = 0; j < S; j++) o += weight[j] / sum * (double)qkv[j * 3 * D + 2 * D + d];
        CHECK_CLOSE(out[(S - 1) * D + d], o, 1e-5);
    }
    free(t.owned[0]);
}

int main(int argc, char **argv)
{
    (void)argc;
    program_begin("test_posenc", argv);
    RUN(test_names);
    RUN(test_sinusoidal);
    RUN(test_alibi);
    RUN(test_t5);
    RUN(test_rpe);
    RUN(test_rope);
    RUN(test_reduces_to_none);
    RUN(test_shift);
    RUN(test_alibi_key_form);
    return report();
}
