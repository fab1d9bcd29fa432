/* plain.h - the Transformer of model.h in plain loops, to learn from and to test against.

   Every layer with its equation, its forward and its backward. No threads, no vectors, no tiles;
   all but the parameters and the tables of the encoding is double. The tests hold the fast model.h against it: same parameters,
   same logits, loss and gradients. A positional encoding acts in the places `embed`, `rotate`,
   `bias`, `rel_k` and `rel_v` (PosTables in posenc.c).

   dx stands for d loss / d x and has the shape of x. For a layer y = f(x, W), f_grad takes dy and
   finds dx and dW by the chain rule. It ADDS to them: what is used twice has a gradient from each
   use. To train: a run, then w -= learning_rate dw, and dw = 0, again and again.

   (T, dim) is an array of T rows of dim numbers; weights are (out, in). T tokens; H query heads and
   G key heads of D = dim / H numbers each. t, i, j count tokens, h heads, d numbers of a head. */
#pragma once
#include <math.h>
#include <stdlib.h>

#define POSENC_INTERFACE
#include "posenc.c"
#undef POSENC_INTERFACE

typedef struct { int rows, n; double *v, *d; } Array;    // (rows, n) values, and their gradients
typedef struct { float *w; double *d; } Weight;          // parameters, and their gradients

typedef struct {                  // one run. Given to it:
    const Config *c;
    float *w; size_t n_params;    // all parameters, in the order in which they are taken below
    int len, T;                   // positions are below len; tokens of the sequence
    const int *tokens, *targets;  // (T) a negative target does not count
    const int *positions;         // (T) not decreasing
    // Written by it: losses (T) of the targets that count, logits (T, V), weights of attention
    // (n_layers, H, T, T; j <= i). Added to: the gradient (n_params) of the sum of the losses.
    double *losses, *logits, *A, *dw;
    // Its own: the places of the encoding, the gradient of its bias, what stands in a place that is
    // not used; how many parameters are taken; the memory of all arrays, and how many they are.
    PosTables pos; double *dbias; Weight none;
    size_t taken; double **memory; int n_memory;
} Transformer;

static Array array(Transformer *m, int rows, int n)    // zeros, until the run ends
{
    double *x = calloc(2 * (size_t)rows * n, sizeof *x);
    m->memory = realloc(m->memory, (m->n_memory + 1) * sizeof *m->memory);
    if (!x || !m->memory) exit(1);
    m->memory[m->n_memory++] = x;
    return (Array){ rows, n, x, x + (size_t)rows * n };
}

static Weight weight(Transformer *m, int rows, int n)    // the next (rows, n) parameters
{
    const Weight W = { m->w + m->taken, m->dw + m->taken };
    m->taken += (size_t)rows * n;
    return W;
}

/* What stands at `at` of an encoding's table. One that is trained lies among the parameters
   itself, and its gradient in the same place among theirs. */
static Weight table(const Transformer *m, float *values, int at)
{
    if (!values) return m->none;
    const int trained = values >= m->w && values < m->w + m->n_params;
    return (Weight){ values + at, trained ? m->dw + (values + at - m->w) : m->none.d };
}

/* Linear: y = x W^T                                                torch: F.linear(x, W)
       dx += dy W,  dW += dy^T x
   With a residual r: y = r + x W^T. Then dr += dy, so r and y share one gradient. */
static Array linear(Transformer *m, Array x, Weight W, int n_out, const Array *r)
{
    Array y = array(m, x.rows, n_out);
    if (r) y.d = r->d;
    for (int i = 0; r && i < y.rows * y.n; i++) y.v[i] = r->v[i];
    for (int t = 0; t < y.rows; t++)
        for (int o = 0; o < y.n; o++)
            for (int i = 0; i < x.n; i++)
                y.v[t * y.n + o] += x.v[t * x.n + i] * W.w[o * x.n + i];
    return y;
}

static void linear_grad(Array y, Array x, Weight W)
{
    for (int t = 0; t < y.rows; t++)
        for (int o = 0; o < y.n; o++)
            for (int i = 0; i < x.n; i++) {
                x.d[t * x.n + i] += y.d[t * y.n + o] * W.w[o * x.n + i];
                W.d[o * x.n + i] += y.d[t * y.n + o] * x.v[t * x.n + i];
            }
}

/* RMSNorm of every row (Zhang & Sennrich 2019)         torch: F.rms_norm(x, (n,), g, 1e-5)
       y_i = g_i h_i,  h_i = x_i / rms,  rms = sqrt(mean(x^2) + 1e-5)
       dg_i += dy_i h_i,  dh_i = dy_i g_i,  dx_i += (dh_i - h_i mean(dh h)) / rms
   The mean is there because x_i changes the rms, which divides all of the row. */
static Array rmsnorm(Transformer *m, Array x, Weight g)
{
    const Array y = array(m, x.rows, x.n);
    for (int t = 0; t < x.rows; t++) {
        double squares = 0;
        for (int i = 0; i < x.n; i++) squares += x.v[t * x.n + i] * x.v[t * x.n + i];
        const double rms = sqrt(squares / x.n + 1e-5);
        for (int i = 0; i < x.n; i++) y.v[t * x.n + i] = g.w[i] * x.v[t * x.n + i] / rms;
    }
    return y;
}

static void rmsnorm_grad(Array y, Array x, Weight g)
{
    for (int t = 0; t < x.rows; t++) {
        const double *dy = y.d + t * x.n, *xt = x.v + t * x.n;
        double squares = 0, mean = 0;
        for (int i = 0; i < x.n; i++) squares += xt[i] * xt[i];
        const double rms = sqrt(squares / x.n + 1e-5);
        for (int i = 0; i < x.n; i++) mean += dy[i] * g.w[i] * xt[i] / rms / x.n;
        for (int i = 0; i < x.n; i++) {
            g.d[i] += dy[i] * xt[i] / rms;
            x.d[t * x.n + i] += (dy[i] * g.w[i] - xt[i] / rms * mean) / rms;
        }
    }
}

/* SwiGLU (Shazeer 2020): h = silu(a) b,  silu(a) = a s,  s = 1 / (1 + e^-a)
       da += dh b (s + a s (1 - s)),  db += dh silu(a)              torch: F.silu(a) * b */
static Array swiglu(Transformer *m, Array a, Array b)
{
    const Array h = array(m, a.rows, a.n);
    for (int i = 0; i < a.rows * a.n; i++) h.v[i] = a.v[i] / (1 + exp(-a.v[i])) * b.v[i];
    return h;
}

static void swiglu_grad(Array h, Array a, Array b)
{
    for (int i = 0; i < a.rows * a.n; i++) {
        const double s = 1 / (1 + exp(-a.v[i]));
        a.d[i] += h.d[i] * b.v[i] * (s + a.v[i] * s * (1 - s));
        b.d[i] += h.d[i] * a.v[i] * s;
    }
}

/* Embedding, and the place `embed`:  x_t = E[token_t] + scale embed[p_t]  at position p_t
       dE[token_t] += dx_t,  dembed[p_t] += scale dx_t              torch: F.embedding(token, E) */
static Array embedding(Transformer *m, Weight E)
{
    const Array x = array(m, m->T, m->c->dim);
    for (int t = 0; t < m->T; t++) {
        const Weight place = table(m, m->pos.embed, m->positions[t] * x.n);
        for (int i = 0; i < x.n; i++)
            x.v[t * x.n + i] = E.w[m->tokens[t] * x.n + i] + m->pos.embed_scale * place.w[i];
    }
    return x;
}

static void embedding_grad(Transformer *m, Array x, Weight E)
{
    for (int t = 0; t < m->T; t++) {
        const Weight place = table(m, m->pos.embed, m->positions[t] * x.n);
        for (int i = 0; i < x.n; i++) {
            E.d[m->tokens[t] * x.n + i] += x.d[t * x.n + i];
            place.d[i] += m->pos.embed_scale * x.d[t * x.n + i];
        }
    }
}

/* The place `rotate`: (a, b) -> (a cos - b sin, a sin + b cos)  for the pairs (2i, 2i+1) of every
   head of q and of k; cos and sin are those of the position and of i. The backward is the
   transpose: it turns the gradients back, direction -1. */
static void rotate_pairs(const Transformer *m, double *q, double *k, int direction)
{
    const int H = m->c->n_heads, G = m->c->n_kv_heads, D = m->c->dim / H, half = m->pos.rotary / 2;
    for (int t = 0; t < m->T; t++)
        for (int h = 0; h < H + G; h++) {
            double *x = h < H ? q + (t * H + h) * D : k + (t * G + h - H) * D;
            for (int i = 0; i < half; i++) {
                const double cosine = m->pos.cos[m->positions[t] * half + i];
                const double sine = m->pos.sin[m->positions[t] * half + i] * direction;
                const double a = x[2 * i], b = x[2 * i + 1];
                x[2 * i] = a * cosine - b * sine;
                x[2 * i + 1] = a * sine + b * cosine;
            }
        }
}

/* Softmax: p_i = e^(x_i) / sum_j e^(x_j)                           torch: F.softmax(x, -1)
   A constant taken from all x changes nothing; the largest keeps e^x from overflowing. */
static void softmax(double *p, const double *x, int n)
{
    double largest = x[0], sum = 0;
    for (int i = 1; i < n; i++) largest = fmax(largest, x[i]);
    for (int i = 0; i < n; i++) sum += p[i] = exp(x[i] - largest);
    for (int i = 0; i < n; i++) p[i] /= sum;
}

/* Attention (Vaswani et al. 2017), and the places `bias`, `rel_k`, `rel_v`. The query of token i
   looks at the keys of tokens j <= i. With n = p_i - p_j, c = min(n, clip), for every head:
       s_ij = q_i.(k_j + rel_k[c]) / sqrt(D) + bias[n]
       A_ij = softmax over j <= i of s_ij
       o_i  = sum_j A_ij (v_j + rel_v[c])
   and back:
       dv_j += A_ij do_i,  drel_v[c] += A_ij do_i,  dA_ij = do_i.(v_j + rel_v[c])
       ds_ij = A_ij (dA_ij - sum_j' A_ij' dA_ij') = A_ij do_i.(v_j + rel_v[c] - o_i)
       dq_i += ds_ij (k_j + rel_k[c]) / sqrt(D),  dbias[n] += ds_ij
       dk_j += ds_ij q_i / sqrt(D),  drel_k[c] += ds_ij q_i / sqrt(D)
   H / G neighbouring heads share the keys and values of one (grouped-query attention, Ainslie et
   al. 2023).  torch, without rel_k and rel_v: F.scaled_dot_product_attention(q, k, v, bias) */
static Array attention(Transformer *m, double *A, Array q, Array k, Array v)
{
    const int H = m->c->n_heads, G = m->c->n_kv_heads, D = m->c->dim / H, *p = m->positions;
    const Array o = array(m, q.rows, q.n);
    for (int h = 0; h < H; h++)
        for (int i = 0; i < m->T; i++, A += m->T) {
            const int at = (i * H + h) * D;                  // of q_i and o_i
            for (int j = 0; j <= i; j++) {
                const int kv = (j * G + h / (H / G)) * D;    // of k_j and v_j
                const int n = p[i] - p[j], c = n < m->pos.clip ? n : m->pos.clip;
                const Weight rel_k = table(m, m->pos.rel_k, c * D);
                A[j] = m->pos.bias ? *pos_bias(&m->pos, h, n) : 0;
                for (int d = 0; d < D; d++)
                    A[j] += q.v[at + d] * (k.v[kv + d] + rel_k.w[d]) / sqrt(D);
            }
            softmax(A, A, i + 1);
            for (int j = 0; j <= i; j++) {
                const int kv = (j * G + h / (H / G)) * D;
                const int n = p[i] - p[j], c = n < m->pos.clip ? n : m->pos.clip;
                const Weight rel_v = table(m, m->pos.rel_v, c * D);
                for (int d = 0; d < D; d++) o.v[at + d] += A[j] * (v.v[kv + d] + rel_v.w[d]);
            }
        }
    return o;
}

static void attention_grad(Transformer *m, Array o, const double *A, Array q, Array k, Array v)
{
    const int H = m->c->n_heads, G = m->c->n_kv_heads, D = m->c->dim / H, *p = m->positions;
    for (int h = 0; h < H; h++)
        for (int i = 0; i < m->T; i++, A += m->T) {
            const int at = (i * H + h) * D;
            for (int j = 0; j <= i; j++) {
                const int kv = (j * G + h / (H / G)) * D;
                const int n = p[i] - p[j], c = n < m->pos.clip ? n : m->pos.clip;
                const Weight rel_k = table(m, m->pos.rel_k, c * D);
                const Weight rel_v = table(m, m->pos.rel_v, c * D);
                double ds = 0;
                for (int d = 0; d < D; d++)
                    ds += A[j] * o.d[at + d] * (v.v[kv + d] + rel_v.w[d] - o.v[at + d]);
                for (int d = 0; d < D; d++) {
                    v.d[kv + d] += A[j] * o.d[at + d];
                    rel_v.d[d] += A[j] * o.d[at + d];
                    q.d[at + d] += ds * (k.v[kv + d] + rel_k.w[d]) / sqrt(D);
                    k.d[kv + d] += ds * q.v[at + d] / sqrt(D);
                    rel_k.d[d] += ds * q.v[at + d] / sqrt(D);
                }
                if (m->pos.bias) m->dbias[pos_bias(&m->pos, h, n) - m->pos.bias] += ds;
            }
        }
}

/* Where the forward ends and the backward begins: logits and cross entropy, torch: F.cross_entropy
       loss = -log p[target],  p = softmax(logits),  dlogits = p - onehot(target) */
static void output(Transformer *m, Array x, Weight E)
{
    const int V = m->c->vocab_size;
    const Weight rms_final = weight(m, x.n, 1), wcls = m->c->untied ? weight(m, V, x.n) : E;
    const Array n = rmsnorm(m, x, rms_final);
    const Array logits = linear(m, n, wcls, V, NULL);
    for (int k = 0; k < m->T * V; k++) m->logits[k] = logits.v[k];
    for (int t = 0; t < m->T; t++) {
        double *d = logits.d + t * V;
        if (m->targets[t] < 0) continue;
        softmax(d, logits.v + t * V, V);
        m->losses[t] = -log(d[m->targets[t]]);
        d[m->targets[t]] -= 1;
    }
    linear_grad(logits, n, wcls);
    rmsnorm_grad(n, x, rms_final);
}

/* Layer l; then what follows it, which leaves the gradient of y; then the backward of layer l, the
   same lines from the last to the first. */
static void layers_from(Transformer *m, int l, Array x, Weight E)
{
    const Config *c = m->c;
    const int dim = c->dim, kv = dim / c->n_heads * c->n_kv_heads, ffn = c->hidden_dim;
    if (l == c->n_layers) { output(m, x, E); return; }
    const Weight rms_att = weight(m, dim, 1);
    const Weight wq = weight(m, dim, dim), wk = weight(m, kv, dim), wv = weight(m, kv, dim);
    const Weight wo = weight(m, dim, dim), rms_ffn = weight(m, dim, 1);
    const Weight w1 = weight(m, ffn, dim), w3 = weight(m, ffn, dim), w2 = weight(m, dim, ffn);
    const Weight pos = weight(m, c->pos->layer_params ? (int)c->pos->layer_params(c) : 0, 1);
    double *A = m->A + (size_t)l * c->n_heads * m->T * m->T;

    if (c->pos->layer) c->pos->layer(&m->pos, pos.w, c);
    const Array n1 = rmsnorm(m, x, rms_att);
    const Array q = linear(m, n1, wq, dim, NULL);         // what a token asks of those before it,
    const Array k = linear(m, n1, wk, kv, NULL);          // what it answers to,
    const Array v = linear(m, n1, wv, kv, NULL);          // and what it then hands over
    rotate_pairs(m, q.v, k.v, 1);
    const Array o = attention(m, A, q, k, v);
    const Array mid = linear(m, o, wo, dim, &x);
    const Array n2 = rmsnorm(m, mid, rms_ffn);            // from here on every token by itself
    const Array a = linear(m, n2, w1, ffn, NULL);
    const Array b = linear(m, n2, w3, ffn, NULL);
    const Array h = swiglu(m, a, b);
    const Array y = linear(m, h, w2, dim, &mid);

    layers_from(m, l + 1, y, E);

    linear_grad(y, h, w2);
    swiglu_grad(h, a, b);
    linear_grad(b, n2, w3);
    linear_grad(a, n2, w1);
    rmsnorm_grad(n2, mid, rms_ffn);
    linear_grad(mid, o, wo);
    if (c->pos->layer) c->pos->layer(&m->pos, pos.w, c);    // the layers above set their own
    attention_grad(m, o, A, q, k, v);
    rotate_pairs(m, q.d, k.d, -1);
    linear_grad(v, n1, wv);
    linear_grad(k, n1, wk);
    linear_grad(q, n1, wq);
    rmsnorm_grad(n1, x, rms_att);
}

/* One sequence forward and backward. Of a batch, every sequence has a run of its own. */
static void transformer_run(Transformer *m)
{
    const Config *c = m->c;
    const size_t shared = c->pos->shared_params ? c->pos->shared_params(c) : 0;
    float *block = shared ? m->w + m->n_params - shared : NULL;    // the encoding's, for all layers
    m->pos = (PosTables){ .len = m->len, .embed_scale = 1 };
    const size_t biases = (size_t)c->n_heads * m->len;
    if (c->pos->build) c->pos->build(&m->pos, block, c);
    if (c->pos->forward) c->pos->forward(&m->pos, block, c);
    m->dbias = calloc(biases, sizeof *m->dbias);
    m->none = (Weight){ calloc(c->dim, sizeof(float)), calloc(c->dim, sizeof(double)) };

    m->taken = 0, m->memory = NULL;
    const Weight E = weight(m, c->vocab_size, c->dim);
    const Array x = embedding(m, E);
    layers_from(m, 0, x, E);
    embedding_grad(m, x, E);

    if (c->pos->backward && shared && m->pos.bias) {    // reads a gradient in the place of the bias
        float *dblock = calloc(shared, sizeof *dblock);
        for (size_t k = 0; k < biases; k++) m->pos.bias[k] = (float)m->dbias[k];
        c->pos->backward(dblock, &m->pos, block, c);
        for (size_t k = 0; k < shared; k++) m->dw[m->n_params - shared + k] += dblock[k];
        free(dblock);
    }
    while (m->n_memory) free(m->memory[--m->n_memory]);
    free(m->memory), free(m->dbias), free(m->none.w), free(m->none.d);
    free(m->pos.owned[0]), free(m->pos.owned[1]);
}
