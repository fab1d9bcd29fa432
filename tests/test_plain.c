/* The fast model against the plain one, for every encoding: logits, losses, every gradient, weights
   of attention, generation; and the plain one against central differences. */
#include "test.h"
#include "plain.h"

/* Shapes around the tiles of attention (48 queries, 96 keys) and the width of vectors. The first
   token of a sequence stands at `from` or a little later, the next up to `step` further; both NULL
   and given positions occur. `some`: two of three targets do not count. */
typedef struct { int B, T, H, G, D, hidden, V, clip, from, step, some; } Shape;
static const Shape SHAPES[] = {
    { 1, 1, 4, 2, 6, 40, 37, 16, 0, 1, 0 },     { 3, 7, 2, 1, 4, 9, 11, 2, 0, 1, 1 },
    { 2, 53, 4, 2, 6, 40, 37, 16, 0, 1, 0 },    { 1, 130, 4, 4, 6, 40, 37, 16, 0, 1, 1 },
    { 2, 48, 3, 3, 5, 17, 20, 0, 0, 1, 0 },     { 1, 49, 2, 1, 20, 33, 37, 5, 0, 1, 0 },
    { 1, 96, 2, 2, 12, 16, 50, 200, 0, 1, 0 },  { 1, 97, 2, 1, 33, 64, 37, 3, 0, 1, 1 },
    { 2, 60, 4, 2, 8, 40, 37, 9, 37, 1, 0 },    { 1, 130, 2, 1, 16, 40, 37, 40, 2, 4, 1 },
    { 2, 53, 4, 1, 4, 40, 37, 0, 0, 3, 0 },     { 1, 193, 2, 1, 8, 16, 20, 100, 0, 1, 0 } };
enum { N_SHAPES = sizeof SHAPES / sizeof *SHAPES };

typedef struct {                  // a model of that shape, what it reads, and what is right
    Model m;
    int *tokens, *targets, *positions;    // (B, T)
    double loss, *losses, *logits, *dw, *A;    // A of the last sequence
    char name[64];
} Setup;

static double plain(Setup *s, int B, int T)    // fills what is right; returns the loss
{
    const Model *m = &s->m;
    const size_t V = (size_t)m->config.vocab_size;
    int counted = 0, *count_up = xmalloc((size_t)T * sizeof *count_up);
    double sum = 0;
    memset(s->losses, 0, (size_t)(B * T) * sizeof *s->losses);
    memset(s->dw, 0, m->params.count * sizeof *s->dw);
    for (int t = 0; t < T; t++) count_up[t] = t;
    Transformer run = { .c = &m->config, .w = m->params.data, .n_params = m->params.count,
                        .len = m->pos.len, .T = T, .dw = s->dw, .A = s->A };
    for (int b = 0, at = 0; b < B; b++, at += T) {
        run.tokens = s->tokens + at;
        run.targets = s->targets + at;
        run.positions = s->positions ? s->positions + at : count_up;
        run.losses = s->losses + at;
        run.logits = s->logits + (size_t)at * V;
        transformer_run(&run);
    }
    for (int i = 0; i < B * T; i++) {
        sum += s->losses[i];
        counted += s->targets[i] >= 0;
    }
    for (size_t k = 0; k < m->params.count; k++) s->dw[k] /= counted;
    free(count_up);
    return s->loss = sum / counted;
}

/* Parameters that carry a gradient everywhere. All but bounded encodings are trained at half the
   length that they are asked for. */
static void setup(Setup *s, const PosEnc *e, int variant, Shape f)
{
    const int n = f.B * f.T, len = f.from + f.T * f.step + f.B;
    const int clip = pos_option(e, "rpe-clip"), dims = pos_option(e, "rope-dims");
    Config c = small_config(e, variant, e->bounded ? len : (f.T + 1) / 2);
    c.n_heads = f.H, c.n_kv_heads = f.G, c.dim = f.H * f.D;
    c.hidden_dim = f.hidden, c.vocab_size = f.V;
    if (clip >= 0) c.pos_opt[clip] = f.clip;
    if (dims >= 0) c.pos_opt[dims] = f.D % 2 ? f.D - 1 : f.D > 12 ? 8 : 0;
    *s = (Setup){ .tokens = random_tokens(n, f.V, 1), .targets = random_tokens(n, f.V, 2) };
    model_of(&s->m, c, len);
    stir(&s->m);
    model_train_begin(&s->m);
    if (f.from || f.step > 1) s->positions = xmalloc((size_t)n * sizeof(int));
    for (int b = 0; s->positions && b < f.B; b++)
        for (int t = 0, p = f.from + b; t < f.T; p += 1 + t++ % f.step)
            s->positions[b * f.T + t] = p;
    for (int i = 0; f.some && i < n; i++)
        if (i % 3) s->targets[i] = -1;
    s->losses = xmalloc((size_t)n * sizeof(double));
    s->logits = xmalloc((size_t)(n * f.V) * sizeof(double));
    s->dw = xmalloc(s->m.params.count * sizeof(double));
    s->A = xmalloc((size_t)(c.n_layers * f.H * f.T * f.T) * sizeof(double));
    snprintf(s->name, sizeof s->name, "%s, variant %d, T %d, D %d", e->name, variant, f.T, f.D);
    context = s->name;
    plain(s, f.B, f.T);
}

static void teardown(Setup *s)
{
    free(s->tokens), free(s->targets), free(s->positions);
    free(s->losses), free(s->logits), free(s->dw), free(s->A);
    model_free(&s->m);
    context = "";
}

/* Runs `test` for every encoding, variant and shape. */
static void everywhere(void (*test)(Setup *, Shape))
{
    for (const PosEnc *e = posencs; e->name; e++)
        for (int variant = 0; variant < variants(e); variant++)
            for (int i = 0; i < N_SHAPES; i++) {
                Setup s;
                setup(&s, e, variant, SHAPES[i]);
                test(&s, SHAPES[i]);
                teardown(&s);
            }
}

static double largest(const double *x, size_t n)
{
    double most = 0;
    for (size_t i = 0; i < n; i++) most = fmax(most, fabs(x[i]));
    return most;
}

static double largest_error(const float *got, const double *want, size_t n)
{
    double most = 0;
    for (size_t i = 0; i < n; i++) most = worse(most, got[i], want[i]);
    return most;
}

enum { EXACT = 50000 };    // errors are below 1/EXACT of the largest value: 2e-5

static void forward(Setup *s, Shape f)
{
    const size_t n = (size_t)(f.B * f.T), all = n * (size_t)f.V;
    float *logits = xmalloc(all * 4), *losses = xmalloc(n * 4);
    model_logits(&s->m, logits, s->tokens, s->positions, f.B, f.T);
    const double loss = model_loss(&s->m, losses, s->tokens, s->targets, s->positions, f.B, f.T);
    CHECK(largest(s->logits, all) > 0.1);
    CHECK_CLOSE(largest_error(logits, s->logits, all), 0, largest(s->logits, all) / EXACT);
    CHECK_CLOSE(largest_error(losses, s->losses, n), 0, largest(s->losses, n) / EXACT);
    CHECK_CLOSE(loss, s->loss, s->loss / EXACT);
    free(logits), free(losses);
}

static void backward(Setup *s, Shape f)
{
    const Params *g = &s->m.grads;
    const double loss = model_backward(&s->m, s->tokens, s->targets, s->positions, f.B, f.T, 1);
    const double most = largest(s->dw, g->count);
    CHECK_CLOSE(loss, s->loss, s->loss / EXACT);
    for (int k = 0; k < g->n_tensors; k++) {
        const Tensor *t = &g->tensors[k];
        const double size = largest(s->dw + t->offset, t->count);
        const double error = largest_error(g->data + t->offset, s->dw + t->offset, t->count);
        char text[128];
        snprintf(text, sizeof text, "%s, %s", s->name, t->name);
        context = text;
        // One token attends to itself whatever the scores, and a clip of 0 adds the same to all:
        // no gradient but rounding. Elsewhere a gradient of zeros must not pass.
        const int scores = strstr(t->name, ".wq") || strstr(t->name, ".wk") || t->kind == POSITION;
        if (scores && (f.T == 1 || f.clip == 0)) {
            CHECK_CLOSE(error, 0, size / EXACT + 1e-6 * most);
        } else {
            CHECK_CLOSE(error, 0, size / EXACT);
            CHECK(size > 1e-4 * most);
        }
    }
    context = s->name;
}

/* Weights of attention: the model gives them for positions 0, 1, ... */
static void weights(Setup *s, Shape f)
{
    if (s->positions) return;
    const size_t layer = (size_t)(f.H * f.T * f.T);
    float *A = xmalloc(layer * 4);
    for (int l = 0; l < s->m.config.n_layers; l++) {
        model_attention(&s->m, A, l, s->tokens + (f.B - 1) * f.T, f.T);
        double error = 0;
        for (size_t i = 0; i < layer; i++) {
            const size_t key = i % (size_t)f.T, query = i / (size_t)f.T % (size_t)f.T;
            error = worse(error, A[i], key > query ? 0 : s->A[(size_t)l * layer + i]);
        }
        CHECK_CLOSE(error, 0, 1.0 / EXACT);
    }
    free(A);
}

/* Generation: what the cache gives after a prompt and one token at a time is what stands at that
   place of the whole sequence. */
static void generation(Setup *s, Shape f)
{
    if (s->positions) return;
    const int *tokens = s->tokens + (f.B - 1) * f.T;
    const size_t V = (size_t)f.V;
    const double *want = s->logits + (size_t)((f.B - 1) * f.T) * V;
    for (int prompt = 1; prompt <= f.T; prompt += f.T > 2 ? f.T / 2 : 1) {
        Cache kv;
        double error = 0;
        cache_create(&kv, &s->m, f.T);
        for (int t = prompt; t <= f.T; t++) {
            const int n = t == prompt ? prompt : 1;
            const float *got = model_decode(&s->m, &kv, tokens + t - n, n);
            error = fmax(error, largest_error(got, want + (size_t)(t - 1) * V, V));
        }
        CHECK_CLOSE(error, 0, largest(want, (size_t)f.T * V) / EXACT);
        cache_free(&kv);
    }
}

static void all_of_it(Setup *s, Shape f)
{
    forward(s, f), backward(s, f), weights(s, f), generation(s, f);
}
static void test_model_is_plain(void) { everywhere(all_of_it); }

/* The plain gradient of every tensor along a random direction, against central differences. */
static void test_plain_gradients(void)
{
    const double STEP = 3e-4;
    static const Shape shape = { 2, 17, 4, 2, 4, 9, 11, 5, 1, 2, 1 };
    for (const PosEnc *e = posencs; e->name; e++)
        for (int variant = 0; variant < variants(e); variant++) {
            Setup s;
            setup(&s, e, variant, shape);
            const Params *p = &s.m.params;
            double *gradient = xmalloc(p->count * sizeof *gradient);
            memcpy(gradient, s.dw, p->count * sizeof *gradient);
            for (int k = 0; k < p->n_tensors; k++) {
                const Tensor *t = &p->tensors[k];
                float *w = p->data + t->offset, *keep = xmalloc(t->count * 4);
                double loss[2], want = 0, size = 0;
                memcpy(keep, w, t->count * 4);
                for (int side = -1; side <= 1; side += 2) {
                    for (size_t i = 0; i < t->count; i++) {
                        w[i] = keep[i] + (float)(side * STEP) * random_normal(60, i);
                        const double d = gradient[t->offset + i];
                        want += side * d * (double)w[i];    // what was stepped, to the last bit
                        size += d * d;
                    }
                    loss[side > 0] = plain(&s, shape.B, shape.T);
                    memcpy(w, keep, t->count * 4);
                }
                CHECK_CLOSE(loss[1] - loss[0], want, 5e-4 * STEP * sqrt(size));
                free(keep);
            }
            free(gradient);
            teardown(&s);
        }
}

int main(int argc, char **argv)
{
    (void)argc;
    program_begin("test_plain", argv);
    threads_set(1);
    RUN(test_plain_gradients);
    RUN(test_model_is_plain);
    return report();
}
