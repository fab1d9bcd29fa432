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
    // learned: a parameter for each head, the logarithm of a factor of its slope
    PosTables fixed = t;
    float g[12] = {0};
    CHECK(!c.pos->shared_params(&c));
    c.pos_opt[pos_option(c.pos, "alibi-learned")] = 1;
    CHECK(c.pos->shared_params(&c) == 12);
    tables_create(&t, &c, g, 8);
    c.pos->forward(&t, g, &c);
    CHECK(!memcmp(t.bias, fixed.bias, 12 * (size_t)t.len * 4));    // starts as they are
    g[8] = logf(3);
    c.pos->forward(&t, g, &c);
    CHECK_CLOSE(*pos_bias(&t, 8, 2), -6 * .707107, 1e-5);
    CHECK(*pos_bias(&t, 7, 7) == *pos_bias(&fixed, 7, 7));
    free(t.owned[0]), free(fixed.owned[0]);
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

/* Tables of rope for `len` positions after training at L. */
static void scaled_tables(PosTables *t, int dims, double base, int L, const char *scaling,
                          double factor, double high, int len)
{
    Config c;
    configure(&c, "rope", dims, 1, L);
    const int which = pos_option(c.pos, "rope-scaling");
    while (strcmp(c.pos->options[which].words[(int)c.pos_opt[which]], scaling))
        c.pos_opt[which]++;
    c.pos_opt[pos_option(c.pos, "rope-base")] = base;
    c.pos_opt[pos_option(c.pos, "rope-factor")] = factor;
    c.pos_opt[pos_option(c.pos, "rope-high")] = high;
    CHECK(!config_check(&c));
    tables_create(t, &c, NULL, len);
}

/* Angles of some pairs at position 1; `want` is an angle, or with `divisor` by how much it is
   slower. */
static void test_rope_scaling(void)
{
    static const struct {
        const char *scaling;
        int dims, L, len;
        double base, factor, high;
        int divisor, pair;
        double want;
    } golden[] = {
        { "linear", 8, 8, 32, 1e4, 4, 4, 0, 0, .25 },
        { "linear", 8, 8, 32, 1e4, 4, 4, 0, 3, .00025 },
        { "ntk", 8, 8, 32, 1e4, 4, 4, 0, 0, 1 },
        { "ntk", 8, 8, 32, 1e4, 4, 4, 0, 1, .0629961 },
        { "ntk", 8, 8, 32, 1e4, 4, 4, 0, 2, .0039685 },
        { "ntk", 8, 8, 32, 1e4, 4, 4, 0, 3, .00025 },
        { "dynamic", 64, 256, 256, 1e4, 9, 4, 1, 31, 1 },
        { "dynamic", 64, 256, 512, 1e4, 9, 4, 1, 31, 2 },
        { "dynamic", 64, 256, 1024, 1e4, 9, 4, 1, 31, 4 },
        { "yarn", 8, 2048, 2, 1e4, 4, 32, 0, 0, 1 },
        { "yarn", 8, 2048, 2, 1e4, 4, 32, 0, 1, .1 },
        { "yarn", 8, 2048, 2, 1e4, 4, 32, 0, 2, .00304665 },
        { "yarn", 8, 2048, 2, 1e4, 4, 32, 0, 3, .00025 },
        { "llama3", 128, 8192, 2, 5e5, 8, 4, 1, 28, 1 },
        { "llama3", 128, 8192, 2, 5e5, 8, 4, 1, 29, 1.2075 },
        { "llama3", 128, 8192, 2, 5e5, 8, 4, 1, 31, 2.0263 },
        { "llama3", 128, 8192, 2, 5e5, 8, 4, 1, 33, 3.6843 },
        { "llama3", 128, 8192, 2, 5e5, 8, 4, 1, 35, 8 },
        { "llama3", 32, 128, 2, 1e4, 4, 4, 1, 2, 1 },
        { "llama3", 32, 128, 2, 1e4, 4, 4, 1, 3, 1.104 },
        { "llama3", 32, 128, 2, 1e4, 4, 4, 1, 4, 1.963 },
        { "llama3", 32, 128, 2, 1e4, 4, 4, 1, 5, 3.492 },
        { "llama3", 32, 128, 2, 1e4, 4, 4, 1, 6, 4 } };
    static const struct { double factor, m; } magnitude[] = {
        { 1, 1 }, { 2, 1.069315 }, { 4, 1.138629 }, { 8, 1.207944 }, { 16, 1.277259 } };
    // the base that ntk and dynamic arrive at
    static const struct { const char *scaling; int dims, len; double factor, base; } bases[] = {
        { "ntk", 8, 2, 4, 63496.04 }, { "ntk", 32, 2, 4, 43873.00 }, { "ntk", 64, 2, 4, 41829.37 },
        { "ntk", 128, 2, 4, 40889.94 }, { "ntk", 128, 2, 16, 167198.74 },
        { "dynamic", 64, 512, 1, 20452.23 }, { "dynamic", 64, 1024, 1, 41829.37 },
        { "dynamic", 64, 255, 1, 1e4 } };
    PosTables t;
    for (size_t k = 0; k < sizeof golden / sizeof *golden; k++) {
        const int half = golden[k].dims / 2, i = golden[k].pair;
        scaled_tables(&t, golden[k].dims, golden[k].base, golden[k].L, golden[k].scaling,
                      golden[k].factor, golden[k].high, golden[k].len);
        const double w = atan2((double)t.sin[half + i], (double)t.cos[half + i]);
        const double plain = pow(golden[k].base, -2.0 * i / golden[k].dims);
        context = golden[k].scaling;
        CHECK_CLOSE((golden[k].divisor ? plain / w : w) / golden[k].want, 1, 4e-4);
        free(t.owned[0]), free(t.owned[1]);
    }
    for (size_t k = 0; k < sizeof bases / sizeof *bases; k++) {
        const int half = bases[k].dims / 2;
        scaled_tables(&t, bases[k].dims, 1e4, 256, bases[k].scaling, bases[k].factor, 4,
                      bases[k].len);
        context = bases[k].scaling;
        for (int i = 0; i < half; i++) {
            const double w = atan2((double)t.sin[half + i], (double)t.cos[half + i]);
            CHECK_CLOSE(w / pow(bases[k].base, -2.0 * i / bases[k].dims), 1, 1e-6);
        }
        free(t.owned[0]), free(t.owned[1]);
    }
    for (size_t k = 0; k < sizeof magnitude / sizeof *magnitude; k++) {
        scaled_tables(&t, 8, 1e4, 64, "yarn", magnitude[k].factor, 4, 8);
        for (int i = 0; i < 8 * 4; i++)
            CHECK_CLOSE(hypot((double)t.cos[i], (double)t.sin[i]), magnitude[k].m, 1e-6);
        free(t.owned[0]), free(t.owned[1]);
    }
    context = "";
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

/* Without its parameters, or its factor, an encoding must be `none`, bit for bit. What alibi trains
   is the logarithm of a factor of its slopes. */
static void test_reduces_to_none(void)
{
    int *tokens = random_tokens(B * T, V, 1);
    float *want = xmalloc(B * T * V * 4), *got = xmalloc(B * T * V * 4);
    float *with = xmalloc(B * T * V * 4);
    for (const PosEnc *e = posencs; e->name; e++)
        for (int variant = 0; variant < variants(e); variant++) {
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
                const float nothing = !strcmp(e->name, "alibi") ? -INFINITY : 0;
                for (size_t k = 0; t->kind == POSITION && k < t->count; k++)
                    m.params.data[t->offset + k] = nothing;
            }
            if (!m.params.pos) {    // fixed tables
                if (m.pos.bias) memset(m.pos.bias, 0, 4 * (size_t)m.pos.len * 4);
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
        for (int variant = 0; variant < variants(e); variant++) {
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

/* Every scaling by 1 is none, bit for bit; and tables built anew are those of a model that was made
   with these options. */
static void test_scaling_by_one(void)
{
    int *tokens = random_tokens(B * T, V, 1);
    float *want = xmalloc(B * T * V * 4), *got = xmalloc(B * T * V * 4);
    const PosEnc *rope = posenc_find("rope");
    const int scaling = pos_option(rope, "rope-scaling"), factor = pos_option(rope, "rope-factor");
    for (int k = 0; k < variants(rope); k++) {
        Model m, made;
        context = rope->options[scaling].words[k];
        small_model(&m, rope, 0, T, T);
        logits_of(&m, want, tokens, NULL);
        const size_t floats = (size_t)m.pos.len * (size_t)(m.pos.rotary / 2);
        float *cosine = m.pos.cos, *sine = m.pos.sin;
        m.pos.owned[0] = m.pos.owned[1] = NULL;    // kept here
        m.config.pos_opt[scaling] = k, m.config.pos_opt[factor] = 1;
        CHECK(!config_check(&m.config));
        model_tables(&m, T);
        CHECK(!memcmp(cosine, m.pos.cos, floats * 4) && !memcmp(sine, m.pos.sin, floats * 4));
        logits_of(&m, got, tokens, NULL);
        CHECK(!memcmp(want, got, B * T * V * 4));
        m.config.pos_opt[factor] = 4;
        model_tables(&m, 2 * T);
        small_model(&made, rope, k, T, 2 * T);
        CHECK(m.pos.len == 2 * T);
        CHECK(!memcmp(made.pos.cos, m.pos.cos, 2 * floats * 4));
        CHECK(!k == !memcmp(cosine, m.pos.cos, floats * 4));
        free(cosine), free(sine);
        model_free(&m), model_free(&made);
    }
    context = "";
    free(tokens), free(want), free(got);
}

/* What the table says of an option: that it has a word for every value, and whether the number of
   parameters depends on it. */
static void test_options(void)
{
    for (const PosEnc *e = posencs; e->name; e++)
        for (int i = 0; i < POS_OPTIONS && e->options[i].name; i++) {
            const PosOption *o = &e->options[i];
            Config c;
            int words = 0;
            context = o->name;
            configure(&c, e->name, 64, 2, 128);
            const size_t before = config_params(&c);
            c.pos_opt[i] = o->value == 0 ? fmin(20, o->max) : 2 * o->value;
            CHECK(!config_check(&c));
            CHECK((config_params(&c) != before) == o->shape);
            while (o->words && o->words[words]) words++;
            CHECK(!o->words || words == (int)o->max + 1);
            CHECK(!o->words || !strcmp(pos_option_text(o, words - 1), o->words[words - 1]));
        }
    context = "";
}

/* -m (i - j) and +m j differ by a constant of the row, which softmax ignores: ALiBi may be written
   either way. Here the weights of the first layer with the one against those of the same layer
   without an encoding, times e^(m j). */
static void test_alibi_key_form(void)
{
    enum { S = 12, H = 4 };
    Model none, alibi;
    float without[H * S * S], with[H * S * S];
    int *tokens = random_tokens(S, V, 1);
    small_model(&none, posenc_find("none"), 0, S, S);
    small_model(&alibi, posenc_find("alibi"), 0, S, S);
    stir(&none), stir(&alibi);
    model_attention(&none, without, 0, tokens, S);
    model_attention(&alibi, with, 0, tokens, S);
    for (int h = 0; h < H; h++) {
        const double m = -(double)*pos_bias(&alibi.pos, h, 1);
        const float *a = without + (h * S + S - 1) * S, *b = with + (h * S + S - 1) * S;
        double sum = 0;
        for (int j = 0; j < S; j++) sum += (double)a[j] * exp(m * j);
        for (int j = 0; j < S; j++) CHECK_CLOSE(b[j], (double)a[j] * exp(m * j) / sum, 1e-6);
    }
    model_free(&none), model_free(&alibi);
    free(tokens);
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
    RUN(test_rope_scaling);
    RUN(test_options);
    RUN(test_reduces_to_none);
    RUN(test_shift);
    RUN(test_scaling_by_one);
    RUN(test_alibi_key_form);
    return report();
}
