/* posenc.c - the positional encodings, one block each, and the table that names them.

   Attention by itself sees a set: without an encoding, the score of a query and a key is the same
   wherever they stand. (A causal mask tells something all the same: the first token sees itself
   alone. That is why `none` is worse, not useless.)

   This file is the lowest of the project and includes nothing of it. First comes its interface:
   the places where an encoding can act, as data. The Transformers, model.h and tests/plain.h, read
   that part (with POSENC_INTERFACE defined) and act on what stands in the places; no encoding
   appears in them by name.

       embed   added to the token embedding              sinusoidal, learned
       rotate  (cos, sin) turns q and k, in every layer  rope
       bias    added to the score, by head and distance  t5, alibi
       rel_k   q . rel_k[distance], added to the score   rpe
       rel_v   added to the values, by distance          rpe --rpe-values 1

   To add one: write a block with its formula and source, the functions it needs of PosEnc (the
   others stay NULL), and a row in the table at the end. --pos, --help, its options, model files,
   tests and scripts walk the table.

   Conventions: p is a position, counted from 0; n >= 0 is the distance from a query back to a key;
   D is the size of a head; H the number of heads. Angles and logarithms are computed in double and
   stored in float. */
#ifndef POSENC_H
#define POSENC_H

#include <stddef.h>

typedef struct PosEnc PosEnc;
enum { POS_OPTIONS = 8 };         // most options that an encoding can have

typedef struct {                  // the shape of a model; its numbers are saved in this order
    int dim;                      // width of the residual stream
    int hidden_dim;               // width of the SwiGLU layer
    int n_layers, n_heads;
    int n_kv_heads;               // divides n_heads; fewer than n_heads is grouped-query attention
    int vocab_size;
    int seq_len;                  // the trained length (context)
    int untied;                   // 1: the output matrix is not the embedding
    int start_token;              // stands before every prompt, -1 for none
    const PosEnc *pos;
    double pos_opt[POS_OPTIONS];  // values of pos->options, in their order
} Config;

/* The places where an encoding can act; a NULL pointer is a place not used. The same struct holds
   the gradients of what can be trained. n = position of the query - position of the key, n >= 0. */
typedef struct {
    int len;                      // positions 0 .. len-1 are served
    float *embed;                 // (len, dim)      added to the token embedding, times embed_scale
    float embed_scale;
    float *cos, *sin;             // (len, rotary/2) turn the pairs (2i, 2i+1) of the first `rotary`
    int rotary;                   //                 dimensions of every head of q and k
    float *bias;                  // (n_heads, len)  added to the score of a head at distance n; a
                                  //                 head's row is stored backwards, see pos_bias
    float *rel_k;                 // (clip+1, D)     q.rel_k[min(n, clip)] / sqrt(D) is added to the
                                  //                 score
    float *rel_v;                 // (clip+1, D)     rel_v[min(n, clip)] is added to v
    int clip;
    float *owned[2];              // memory of this struct's own, see pos_alloc
} PosTables;

typedef struct {                  // one option of an encoding, --name on the command line
    const char *name, *help;
    double value, min, max;       // default and limits
    int whole;                    // 1: integers only
    const char *const *words;     // value k is written as words[k], which ends with NULL; or NULL
    int shape;                    // 1: the number of parameters depends on it
} PosOption;

struct PosEnc {
    const char *name, *help;      // value of --pos; one line for --help
    PosOption options[POS_OPTIONS];
    int bounded;                  // 1: nothing is defined past the trained length

    // Replaces automatic option values and checks the shape; writes what is wrong, if anything,
    // to `why`.
    void (*configure)(Config *c, char *why, size_t size);
    // Number of trained floats: one block for the whole model, and one block per layer.
    size_t (*shared_params)(const Config *c);
    size_t (*layer_params)(const Config *c);
    float init_std;               // their initial standard deviation (normal, mean 0)
    // Allocates (pos_alloc) and fills the tables for positions 0 .. t->len-1, or points into
    // `shared`. Called for the tables, again when their length changes, and for the tables of
    // gradients, where `shared` is the block of gradients.
    void (*build)(PosTables *t, float *shared, const Config *c);
    // Before every forward, and at the start of a generation: parameters -> tables, where they
    // differ.
    void (*forward)(PosTables *t, const float *shared, const Config *c);
    // After every backward: gradient of `bias` -> added to gradients of the parameters.
    void (*backward)(float *dshared, const PosTables *dt, const float *shared, const Config *c);
    // Before a layer: points the tables into that layer's block of parameters, or of gradients.
    void (*layer)(PosTables *t, float *layer, const Config *c);
};

extern const PosEnc posencs[];                  // the table; ends with a row whose name is NULL
const PosEnc *posenc_find(const char *name);    // any letter case; NULL if there is none
int pos_option(const PosEnc *e, const char *name);    // index of an option, -1: no such one
void config_defaults(Config *c);                   // gives the options of c->pos their default values
/* Checks the options of c->pos and replaces automatic ones; the rest of the shape must be complete.
   Writes to `why` (size bytes) what is wrong, or an empty text. */
void pos_check(Config *c, char *why, size_t size);
float *pos_alloc(PosTables *t, size_t floats);  // zeroed, for t->owned; exits 1 without memory

/* The place of distance n in `bias`. A row is stored backwards, so that what one query adds to the
   scores of keys in ascending order lies in ascending memory. */
static inline float *pos_bias(const PosTables *t, int head, int n)
{
    return t->bias + (size_t)head * (size_t)t->len + (size_t)(t->len - 1 - n);
}

#endif

#ifndef POSENC_INTERFACE

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static int head_size(const Config *c) { return c->dim / c->n_heads; }

/* ---- none ---------------------------------------------------------------------------------------
   Nothing is added anywhere: the control of every comparison. (NoPE: Haviv et al. 2022,
   Kazemnejad et al. 2023.)
   Past the trained length: nothing breaks, the loss rises. */

/* ---- sinusoidal ---------------------------------------------------------------------------------
   x_p = e_p + c P[p],   P[p, 2i] = sin(p w_i),  P[p, 2i+1] = cos(p w_i),
   w_i = base^(-2i/dim),  i = 0 .. dim/2 - 1
   Vaswani et al. 2017. Pair 0 turns fastest (once in 2 pi tokens), the last slowest. P[p+k] is a
   fixed rotation of P[p], and P[p].P[q] depends on p - q alone. No parameters. P has an RMS of
   0.707; the default scale c = 0.02 sqrt(2) brings it to the 0.02 of a fresh token embedding (the
   paper instead multiplies the embedding by sqrt(dim)).
   Past the trained length: computable, but the model has not seen these vectors and fails soon. */

enum { POS_SCALE, POS_BASE };    // options of sinusoidal; learned has the first

static void sinusoidal_build(PosTables *t, float *shared, const Config *c)
{
    (void)shared;
    t->embed_scale = (float)c->pos_opt[POS_SCALE];
    t->embed = pos_alloc(t, (size_t)t->len * (size_t)c->dim);
    for (int i = 0; i < c->dim; i++) {
        const double w = pow(c->pos_opt[POS_BASE], -(double)(i / 2 * 2) / c->dim);
        for (int p = 0; p < t->len; p++) {
            const double value = i % 2 ? cos(p * w) : sin(p * w);
            t->embed[(size_t)p * (size_t)c->dim + (size_t)i] = (float)value;
        }
    }
}

/* ---- learned ------------------------------------------------------------------------------------
   x_p = e_p + c E[p],   E (seq_len, dim) trained, from N(0, 0.02).
   Gehring et al. 2017; GPT-2, BERT. seq_len dim parameters.
   Past the trained length: there is no row E[p], so the model refuses. */

static size_t learned_params(const Config *c) { return (size_t)c->seq_len * (size_t)c->dim; }

static void learned_build(PosTables *t, float *shared, const Config *c)
{
    t->embed = shared;    // the table is the parameter, its gradient that of the parameter
    t->embed_scale = (float)c->pos_opt[POS_SCALE];
}

/* ---- rpe ----------------------------------------------------------------------------------------
   s_ij = q_i . (k_j + a[min(n, clip)]) / sqrt(D),
   and with values  o_i = sum_j A_ij (v_j + b[min(n, clip)])
   Relative position representations, Shaw, Uszkoreit & Vaswani 2018; in a causal model their clip(j
   - i, -k, k) leaves k + 1 rows. a and b (clip+1, D) are trained in every layer, shared by the
   heads, from N(0, 0.02): (clip+1) D parameters per layer, twice with values.
   Past the trained length: every distance beyond the clip is the same to the model; degrades
   gently. */

enum { RPE_CLIP, RPE_VALUES };

static size_t rpe_rows(const Config *c) { return (size_t)c->pos_opt[RPE_CLIP] + 1; }

static size_t rpe_params(const Config *c)
{
    return rpe_rows(c) * (size_t)head_size(c) * (c->pos_opt[RPE_VALUES] != 0 ? 2 : 1);
}

static void rpe_layer(PosTables *t, float *layer, const Config *c)
{
    t->clip = (int)c->pos_opt[RPE_CLIP];
    t->rel_k = layer;
    t->rel_v = c->pos_opt[RPE_VALUES] != 0 ? layer + rpe_rows(c) * (size_t)head_size(c) : NULL;
}

/* ---- t5 -----------------------------------------------------------------------------------------
   s_ij = q_i . k_j / sqrt(D) + sqrt(dim) B[bucket(n)][h]
   bucket(n) = n for n < exact = buckets / 2, else
               min(buckets - 1, exact + floor(ln(n / exact) / ln(max / exact) (buckets - exact)))
   Raffel et al. 2020, the causal side. B (buckets, H) is trained, shared by all layers, from zero.
   AdamW moves a parameter by about lr a step whatever its gradient, so in a short run a bare table
   would change a score by about 1 only; sqrt(dim) lets it move (the same device, with sqrt(D), is
   in x-transformers). A bucket that no distance below the trained length reaches would stay at
   zero, a bias for far keys that was never trained, so max defaults to half the context.
   Past the trained length: all that is farther than max shares the last bucket. */

enum { T5_BUCKETS, T5_MAX };

static void t5_configure(Config *c, char *why, size_t size)
{
    const double buckets = c->pos_opt[T5_BUCKETS], exact = floor(buckets / 2);
    const double half = floor(c->seq_len / 2.0);
    if (c->pos_opt[T5_MAX] == 0) c->pos_opt[T5_MAX] = half > exact ? half : exact + 1;
    if (c->pos_opt[T5_MAX] <= exact)
        snprintf(why, size, "t5-max %g must exceed half of t5-buckets %g", c->pos_opt[T5_MAX],
                 buckets);
}

static int t5_bucket(int n, const Config *c)
{
    const int buckets = (int)c->pos_opt[T5_BUCKETS], exact = buckets / 2;
    if (n < exact) return n;
    const double share = log((double)n / exact) / log(c->pos_opt[T5_MAX] / exact);
    const double bucket = exact + floor(share * (buckets - exact));
    return bucket < buckets - 1 ? (int)bucket : buckets - 1;
}

static size_t t5_at(int bucket, int h, const Config *c)
{
    return (size_t)bucket * (size_t)c->n_heads + (size_t)h;
}

static size_t t5_params(const Config *c)
{
    return (size_t)c->pos_opt[T5_BUCKETS] * (size_t)c->n_heads;
}

static void bias_build(PosTables *t, float *shared, const Config *c)
{
    (void)shared;
    t->bias = pos_alloc(t, (size_t)c->n_heads * (size_t)t->len);
}

static void t5_forward(PosTables *t, const float *shared, const Config *c)
{
    for (int n = 0; n < t->len; n++)
        for (int h = 0, b = t5_bucket(n, c); h < c->n_heads; h++)
            *pos_bias(t, h, n) = sqrtf((float)c->dim) * shared[t5_at(b, h, c)];
}

static void t5_backward(float *dshared, const PosTables *dt, const float *shared, const Config *c)
{
    (void)shared;    // linear: its values do not matter
    for (int n = 0; n < dt->len; n++)
        for (int h = 0, b = t5_bucket(n, c); h < c->n_heads; h++)
            dshared[t5_at(b, h, c)] += sqrtf((float)c->dim) * *pos_bias(dt, h, n);
}

/* ---- alibi --------------------------------------------------------------------------------------
   s_ij = q_i . k_j / sqrt(D) - m_h n,   m_h = 2^(-8h/H), h = 1 .. H, when H is a power of two
   Press, Smith & Lewis 2022; otherwise, as in their code, the slopes of the next lower power of
   two, followed by every other slope of the next higher one. No parameters. (Under a causal mask
   the same as adding m_h j: softmax ignores what a whole row has in common.)
   With --alibi-learned 1 the slope is m_h e^(g_h), g (H) trained, shared by all layers, from zero: it
   starts at m_h and keeps its sign, and d/dg_h = sum_n bias[h][n] dbias[h][n]. The authors tried
   trained slopes and kept fixed ones.
   Past the trained length: far keys fade, so the loss stays flat. */

enum { ALIBI_LEARNED };

static double alibi_slope(int h, int H)    // h = 0 .. H-1
{
    int power = 1;
    while (power * 2 <= H) power *= 2;
    return h < power ? pow(2, -8.0 * (h + 1) / power)
                     : pow(2, -4.0 * (2 * (h - power) + 1) / power);
}

static size_t alibi_params(const Config *c)
{
    return c->pos_opt[ALIBI_LEARNED] != 0 ? (size_t)c->n_heads : 0;
}

static void alibi_fill(PosTables *t, const float *g, const Config *c)    // g NULL: all are zero
{
    for (int h = 0; h < c->n_heads; h++) {
        const double m = alibi_slope(h, c->n_heads) * (g ? exp((double)g[h]) : 1);
        for (int n = 0; n < t->len; n++) *pos_bias(t, h, n) = (float)(-m * n);
    }
}

static void alibi_build(PosTables *t, float *g, const Config *c)
{
    bias_build(t, g, c);
    alibi_fill(t, NULL, c);
}

static void alibi_forward(PosTables *t, const float *g, const Config *c)
{
    if (g) alibi_fill(t, g, c);
}

static void alibi_backward(float *dg, const PosTables *dt, const float *g, const Config *c)
{
    if (!g) return;
    for (int h = 0; h < c->n_heads; h++) {
        const double m = alibi_slope(h, c->n_heads) * exp((double)g[h]);
        double sum = 0;
        for (int n = 0; n < dt->len; n++) sum += (double)n * (double)*pos_bias(dt, h, n);
        dg[h] -= (float)(m * sum);
    }
}

/* ---- rope ---------------------------------------------------------------------------------------
   (a, b) -> m (a cos f - b sin f, a sin f + b cos f),   f = p w_i,  w_i = base^(-2i/dims),
   for the pairs (2i, 2i+1), i = 0 .. dims/2 - 1;  m = 1 but for yarn
   Su et al. 2021. Turns the first `dims` dimensions of every head of q and k, in every layer; v is
   not touched. q_i . k_j then depends on n alone. dims below D is partial rotary (GPT-NeoX). No
   parameters. Neighbouring pairs, as Meta's Llama and llama2.c; half-split models (Hugging Face)
   have the same pairs in another order.
   Past the trained length: slow pairs reach angles that were never seen; the loss rises from about
   1.2 times the length on.

   `scaling` slows pairs down so that s = `factor` times the length L = `length` shows them angles
   they know. s = 1 changes no bit.
       linear   w_i / s: as if positions were p / s (Chen et al. 2023)
       ntk      base s^(dims / (dims - 2)): the first pair stays, the last becomes s times slower
                (bloc97 2023, in Peng et al. 2024)
       dynamic  ntk with s = max(1, l / L) instead of `factor`, l the length of the sequence
                (emozilla 2023, in Peng et al. 2024)
       yarn     w_i ((1 - g) / s + g),  g = (r - low) / (high - low) held in [0, 1],
                r = L w_i / (2 pi), the turns of a pair within L: what turns often stays, what has
                not turned once is slowed down; and m = 0.1 ln s + 1, on q and on k, so the scores
                grow by m^2 (Peng et al. 2024)
       llama3   the same with m = 1 (Llama 3.1, Meta 2024)
   The ramp is linear in r, as in the paper; the code that came with it is linear in i between two
   whole pairs, which is coarse for the few pairs of a small head. high = 4 is Llama 3's: the
   paper's 32 is for L = 4096, while at L = 128 no pair turns more than 128 / (2 pi) = 20 times, and
   all would be slowed down. (Bytes of tiny Shakespeare, L = 64, s = 4: bytes 128 .. 255 cost 1.82
   nats with high = 4, 1.93 with 8, 3.18 with 32, and 2.20 without scaling.)
   One table serves all positions and the cache holds turned keys, so l is the length the table was
   built for: of the training, of one context of run --eval, or of run's --ctx. */

enum { ROPE_BASE, ROPE_DIMS, ROPE_SCALING, ROPE_FACTOR, ROPE_LENGTH, ROPE_LOW, ROPE_HIGH };
enum { LINEAR = 1, NTK, DYNAMIC, YARN, LLAMA3 };    // in model files: later ones go to the end
static const char *const rope_scalings[] = {
    "none", "linear", "ntk", "dynamic", "yarn", "llama3", NULL };

static void rope_configure(Config *c, char *why, size_t size)
{
    double *o = c->pos_opt;
    if (o[ROPE_DIMS] == 0) o[ROPE_DIMS] = head_size(c);
    // What is trained without scaling is trained at its own length. With it the length stays that
    // of the model it came from: train --init keeps the options.
    if (o[ROPE_SCALING] == 0 || o[ROPE_LENGTH] == 0) o[ROPE_LENGTH] = c->seq_len;
    const int dims = (int)o[ROPE_DIMS];
    if (dims % 2)
        snprintf(why, size,
                 "rope turns pairs, but a head has an odd number of dimensions to turn: %d", dims);
    else if (dims > head_size(c))
        snprintf(why, size, "rope-dims %d exceeds the %d dimensions of a head", dims, head_size(c));
    else if (o[ROPE_HIGH] <= o[ROPE_LOW])
        snprintf(why, size, "rope-high %g must exceed rope-low %g", o[ROPE_HIGH], o[ROPE_LOW]);
}

static void rope_build(PosTables *t, float *shared, const Config *c)
{
    (void)shared;
    const double *o = c->pos_opt, L = o[ROPE_LENGTH];
    const int dims = (int)o[ROPE_DIMS], half = dims / 2, scaling = (int)o[ROPE_SCALING];
    const double s = scaling == DYNAMIC ? fmax(1, t->len / L) : o[ROPE_FACTOR];
    const double m = scaling == YARN ? 0.1 * log(s) + 1 : 1;
    double base = o[ROPE_BASE];
    if (scaling == NTK || scaling == DYNAMIC) base *= pow(s, dims / (dims - 2.0));
    t->rotary = dims;
    t->cos = pos_alloc(t, (size_t)t->len * (size_t)half);
    t->sin = pos_alloc(t, (size_t)t->len * (size_t)half);
    for (int i = 0; i < half; i++) {
        double w = pow(base, -2.0 * i / dims);
        if (scaling == LINEAR) w /= s;
        if (scaling == YARN || scaling == LLAMA3) {
            const double r = L * w / (2 * M_PI), low = o[ROPE_LOW];
            const double g = fmin(fmax((r - low) / (o[ROPE_HIGH] - low), 0), 1);
            w *= 1 - (1 - g) * (1 - 1 / s);
        }
        for (int p = 0; p < t->len; p++) {
            t->cos[(size_t)p * (size_t)half + (size_t)i] = (float)(m * cos(p * w));
            t->sin[(size_t)p * (size_t)half + (size_t)i] = (float)(m * sin(p * w));
        }
    }
}

/* ---- The table ------------------------------------------------------------------------------- */

#define SCALE(value) \
    { "pos-scale", "factor of the encoding when it is added to the embedding", value, .max = 1e6 }

const PosEnc posencs[] = {
    { .name = "none", .help = "nothing: the control" },
    { .name = "sinusoidal", .help = "sines added to the embedding (Vaswani et al. 2017)",
      .options = { SCALE(0.02 * 1.4142135623730951),
                   { "pos-base", "base of the wavelengths", 10000, 1, .max = 1e12 } },
      .build = sinusoidal_build },
    { .name = "learned", .help = "a trained table added to the embedding (GPT-2)", .bounded = 1,
      .options = { SCALE(1) },
      .shared_params = learned_params, .init_std = 0.02f, .build = learned_build },
    { .name = "rpe", .help = "trained vectors by distance, dotted with q (Shaw et al. 2018)",
      .options = { { "rpe-clip", "distances beyond this are one", 16, 0, 1 << 16, 1, .shape = 1 },
                   { "rpe-values", "1: also add trained vectors to the values", 0, 0, 1, 1,
                     .shape = 1 } },
      .layer_params = rpe_params, .init_std = 0.02f, .layer = rpe_layer },
    { .name = "t5", .help = "a trained bias by head and bucket of distances (Raffel et al. 2020)",
      .options = { { "t5-buckets", "number of buckets", 32, 2, 1 << 16, 1, .shape = 1 },
                   { "t5-max", "distances from here on share a bucket; 0: half the context",
                     0, 0, 1 << 24, .whole = 1 } },
      .configure = t5_configure, .shared_params = t5_params,
      .build = bias_build, .forward = t5_forward, .backward = t5_backward },
    { .name = "alibi",
      .help = "a fixed penalty by distance, one slope per head (Press et al. 2022)",
      .options = { { "alibi-learned", "1: train the slopes, from the fixed ones on", 0, 0, 1, 1,
                     .shape = 1 } },
      .shared_params = alibi_params, .build = alibi_build, .forward = alibi_forward,
      .backward = alibi_backward },
    { .name = "rope", .help = "q and k turned by their position (Su et al. 2021)",
      .options = { { "rope-base", "base of the wavelengths", 10000, 1, .max = 1e12 },
                   { "rope-dims", "dimensions of a head to turn; 0: all",
                     0, 0, 1 << 24, .whole = 1 },
                   { "rope-scaling", "slower pairs, for more than the trained length", 0, 0, LLAMA3,
                     1, .words = rope_scalings },
                   { "rope-factor", "that length over the trained one; dynamic finds its own",
                     1, 1, .max = 1e6 },
                   { "rope-length", "the length trained without scaling; 0: the trained one",
                     0, 0, 1 << 24, .whole = 1 },
                   { "rope-low", "yarn, llama3: slowed down in full up to so many turns in it",
                     1, 0, .max = 1e6 },
                   { "rope-high", "yarn, llama3: not slowed down from so many turns on",
                     4, 0, .max = 1e6 } },
      .configure = rope_configure, .build = rope_build },
    { .name = NULL }
};

/* ---- What walks the table -------------------------------------------------------------------- */

const PosEnc *posenc_find(const char *name)
{
    for (const PosEnc *e = posencs; e->name; e++)
        if (!strcasecmp(e->name, name)) return e;
    return NULL;
}

int pos_option(const PosEnc *e, const char *name)
{
    for (int i = 0; i < POS_OPTIONS && e->options[i].name; i++)
        if (!strcmp(e->options[i].name, name)) return i;
    return -1;
}

void config_defaults(Config *c)
{
    for (int i = 0; i < POS_OPTIONS; i++) c->pos_opt[i] = c->pos->options[i].value;
}

void pos_check(Config *c, char *why, size_t size)
{
    why[0] = 0;
    for (int i = 0; i < POS_OPTIONS && c->pos->options[i].name; i++) {
        const PosOption *o = &c->pos->options[i];
        const double v = c->pos_opt[i];
        if (v >= o->min && v <= o->max && (!o->whole || v == floor(v))) continue;
        snprintf(why, size, "%s: %g is not a %snumber from %.10g to %.10g", o->name, v,
                 o->whole ? "whole " : "", o->min, o->max);
        return;
    }
    if (c->pos->configure) c->pos->configure(c, why, size);
}

float *pos_alloc(PosTables *t, size_t floats)
{
    float *memory = calloc(floats, sizeof *memory);
    if (!memory) {
        fprintf(stderr, "out of memory for the tables of the positional encoding\n");
        exit(1);
    }
    t->owned[t->owned[0] ? 1 : 0] = memory;
    return memory;
}

#endif
