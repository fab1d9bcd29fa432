/* The fast model against the plain one, for every encoding: logits, losses, gradients, weights of
   attention, generation; and the plain one against central differences. */
#include "test.h"
#include "plain.h"

/* Shapes around the tiles of attention (48 queries, 96 keys) and the width of vectors. `from` is
   the first position, `step` how far tokens may lie apart. */
typedef struct { int B, T, H, G, D, hidden, V, clip, from, step, some; } Case;
static const Case CASES[] = {
    { 1, 1, 4, 2, 6, 40, 37, 16, 0, 1, 0 },     { 3, 7, 2, 1, 4, 9, 11, 2, 0, 1, 1 },
    { 2, 53, 4, 2, 6, 40, 37, 16, 0, 1, 0 },    { 1, 130, 4, 4, 6, 40, 37, 16, 0, 1, 1 },
    { 2, 48, 3, 3, 5, 17, 20, 0, 0, 1, 0 },     { 1, 49, 2, 1, 20, 33, 37, 5, 0, 1, 0 },
    { 1, 96, 2, 2, 12, 16, 50, 200, 0, 1, 0 },  { 1, 97, 2, 1, 33, 64, 37, 3, 0, 1, 1 },
    { 2, 60, 4, 2, 8, 40, 37, 9, 37, 1, 0 },    { 1, 130, 2, 1, 16, 40, 37, 40, 2, 4, 1 },
    { 2, 53, 4, 1, 4, 40, 37, 0, 0, 3, 0 },     { 1, 193, 2, 1, 8, 16, 20, 100, 0, 1, 0 } };
enum { N_CASES = sizeof CASES / sizeof *CASES };

/* A model of that shape with parameters that carry a gradient everywhere. */
static void case_model(Model *m, const PosEnc *e, int variant, const Case *s, int seq_len, int len)
{
    Config c = small_config(e, variant, seq_len);
    const int clip = pos_option(e, "rpe-clip"), dims = pos_option(e, "rope-dims");
    c.n_heads = s->H, c.n_kv_heads = s->G, c.dim = s->H * s->D;
    c.hidden_dim = s->hidden, c.vocab_size = s->V;
    if (clip >= 0) c.pos_opt[clip] = s->clip;
    if (dims >= 0) c.pos_opt[dims] = s->D % 2 ? s->D - 1 : s->D > 12 ? 8 : 0;
    model_of(m, c, len);
    stir(m);
}

/* What the plain Transformer finds for B sequences. */
typedef struct { double loss, *losses, *logits, *dw, *A; } Found;

static Found plain(const Model *m, const int *x, const int *y, const int *positions, int B, int T)
{
    const Config *c = &m->config;
    const size_t rows = (size_t)(B * T), V = (size_t)c->vocab_size;
    const Found f = { 0, xmalloc(rows * 8), xmalloc(rows * V * 8), xmalloc(m->params.count * 8),
                      xmalloc((size_t)(c->n_layers * c->n_heads * T * T) * 8) };
    int counted = 0, *zero_to = xmalloc((size_t)T * sizeof *zero_to);
    double sum = 0;
    for (int i = 0; i < B * T; i++) counted += y[i] >= 0;
    for (int t = 0; t < T; t++) zero_to[t] = t;
    for (int b = 0; b < B; b++) {
        Transformer t = { .c = c, .w = m->params.data, .n_params = m->params.count, .T = T,
                          .len = m->pos.len, .tokens = x + b * T, .targets = y + b * T,
                          .positions = positions ? positions + b * T : zero_to,
                          .dw = f.dw, .losses = f.losses + b * T,
                          .logits = f.logits + (size_t)(b * T) * V, .A = f.A };
        transformer_run(&t);
    }
    for (size_t r = 0; r < rows; r++) sum += f.losses[r];
    for (size_t k = 0; k < m->params.count; k++) f.dw[k] /= counted;
    free(zero_to);
    return (Found){ sum / counted, f.losses, f.logits, f.dw, f.A };
}

static void found_free(Found f)
{
    free(f.losses), free(f.logits), free(f.dw), free(f.A);
}

/* The largest difference over the largest value, both held in mind; `floor` is added to the
   latter. */
static double difference(const float *got, const double *want, size_t n, double *largest)
{
    double worst = 0;
    *largest = 0;
    for (size_t i = 0; i < n; i++) {
        worst = worse(worst, (double)got[i], want[i]);
        *largest = fmax(*largest, fabs(want[i]));
    }
    return worst;
}

static double most_seen[4];

static void check_gradients(const Model *m, const Found *f, const Case *s)
{
    const double all = worse(0, 0, 0);
    double largest, most = all;
    difference(m->grads.data, f->dw, m->grads.count, &most);
    for (int k = 0; k < m->params.n_tensors; k++) {
        const Tensor *t = &m->params.tensors[k];
        char text[80];
        snprintf(text, sizeof text, "%s %s T=%d D=%d", m->config.pos->name, t->name, s->T, s->D);
        context = text;
        const double worst = difference(m->grads.data + t->offset, f->dw + t->offset, t->count,
                                        &largest);
        CHECK_CLOSE(worst, 0, 2e-5 * largest + 1e-7 * most);
        most_seen[0] = fmax(most_seen[0], worst / (largest + 1e-2 * most));
        // one token looks at itself alone, whatever the scores; a clip of 0 adds the same to all
        const int scores = strstr(t->name, "wq") || strstr(t->name, "wk") || t->kind == POSITION;
        if (!scores || (s->T > 1 && s->clip > 0)) CHECK(largest > 1e-4 * most);
    }
}

static void test_model_is_plain(void)
{
    for (const PosEnc *e = posencs; e->name; e++)
        for (int variant = 0; variant < variants(e); variant++)
            for (const Case *s = CASES; s < CASES + N_CASES; s++) {
                const int n = s->B * s->T, given = s->from || s->step > 1;
                const int len = s->from + s->T * s->step + s->B;
                int *x = random_tokens(n, s->V, 1), *y = random_tokens(n, s->V, 2);
                int *positions = xmalloc((size_t)n * sizeof *positions);
                const size_t V = (size_t)s->V;
                float *logits = xmalloc((size_t)n * V * 4), *losses = xmalloc((size_t)n * 4);
                double largest;
                char text[80];
                Model m;
                for (int i = 0; s->some && i < n; i++) if (i % 3) y[i] = -1;
                for (int b = 0; b < s->B; b++)
                    for (int t = 0, p = s->from + b; t < s->T; t++, p += 1 + t % s->step)
                        positions[b * s->T + t] = p;
                const int *where = given ? positions : NULL;
                // the others go on past the trained length
                case_model(&m, e, variant, s, e->bounded ? len : (s->T + 1) / 2, len);
                model_train_begin(&m);
                const Found f = plain(&m, x, y, where, s->B, s->T);
                snprintf(text, sizeof text, "%s %d T=%d D=%d", e->name, variant, s->T, s->D);
                context = text;

                model_logits(&m, logits, x, where, s->B, s->T);
                const double worst = difference(logits, f.logits, (size_t)n * V, &largest);
                CHECK(largest > 0.1);
                CHECK_CLOSE(worst, 0, 2e-5 * largest);
                most_seen[1] = fmax(most_seen[1], worst / largest);

                CHECK_CLOSE(model_loss(&m, losses, x, y, where, s->B, s->T), f.loss, 1e-5);
                CHECK_CLOSE(difference(losses, f.losses, (size_t)n, &largest), 0, 2e-5 * largest);

                const double loss = model_backward(&m, x, y, where, s->B, s->T, 1);
                CHECK_CLOSE(loss, f.loss, 1e-5);
                check_gradients(&m, &f, s);
                free(x), free(y), free(positions), free(logits), free(losses);
                found_free(f), model_free(&m);
            }
    context = "";
}

int main(int argc, char **argv)
{
    (void)argc;
    program_begin("test_plain", argv);
    threads_set(1);
    RUN(test_model_is_plain);
    printf("grad %g logits %g\n", most_seen[0], most_seen[1]);
    return report();
}
