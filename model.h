/* model.h - a small decoder-only Transformer in one file: train it, save it, generate from it.

   One source file of a program says
       #define MODEL_IMPLEMENTATION
       #include "model.h"
   the others include it without the define, and posenc.c is compiled beside them. To train:
       config_check(&config);
       Model m;  model_create(&m, &config, config.seq_len);  model_init(&m, seed);
       model_train_begin(&m);
       for (step = 1; ...; step++) {
           loss = model_backward(&m, tokens, targets, NULL, B, T, 1);    // adds to m.grads
           norm = model_update(&m, step, &adamw, lr);                    // and zeroes them
       }
   To generate:
       Cache kv;  cache_create(&kv, &m, length);
       logits = model_decode(&m, &kv, tokens, n);     // n = a whole prompt, then 1 again and again

   The network is Llama's: RMSNorm, no biases, grouped-query attention, SwiGLU, tied embeddings by
   default; names are llama2.c's. What tells one position from another is in posenc.c, which is
   below this file and knows nothing of it: this file includes its interface. An encoding fills the
   places of PosTables, and attention works on what stands there and never asks which encoding it
   was. tests/plain.h is the same network in plain loops; read that first.

   Sections of the implementation, in this order:
       errors, memory, threads, time, random numbers  -  vectors and matrix products  -  layers,
       each forward with its backward  -  attention  -  attention of one query  -  the model  -
       AdamW  -  generation and sampling  -  tokenizer  -  evaluation  -  files  -  command-line
       options

   Conventions. B sequences of T tokens; V = vocab_size; H query heads and G key heads of D numbers;
   n = the position of a query - that of a key; matrices are row-major, weights are (out, in).
   Everything is fp32 but angles, the sum of the losses and the norm of the gradient, which are
   double. Outputs come first in argument lists, then inputs, then sizes. A backward ADDS to
   gradients of parameters; the caller zeroes them. Nothing depends on the number of threads: the
   same seed gives the same bits. Functions that can fail because of a file, an option or memory do
   not return an error: they print one line and exit (1 a file or memory, 2 an option). Shapes,
   tokens in [0, V) and positions below pos.len are the caller's promise. Scratch memory is static:
   one call at a time. */
#ifndef MODEL_H
#define MODEL_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define POSENC_INTERFACE
#include "posenc.c"
#undef POSENC_INTERFACE

/* ---- The model ------------------------------------------------------------------------------- */

typedef struct {                  // one layer's tensors, (out, in)
    float *rms_att;               // (dim)
    float *wq, *wk, *wv;          // (dim, dim) (kv_dim, dim) (kv_dim, dim)
    float *wo;                    // (dim, dim)
    float *rms_ffn;               // (dim)
    float *w1, *w3;               // (hidden_dim, dim) each
    float *w2;                    // (dim, hidden_dim)
    float *pos;                   // the encoding's block
} Layer;

/* Decides initialisation and decay. */
enum TensorKind { GAIN, EMBEDDING, MATRIX, RESIDUAL, POSITION };

typedef struct {
    char name[32];                // "token_embedding", "layers.0.wq", ...
    enum TensorKind kind;
    size_t offset, count;         // floats
} Tensor;

typedef struct {                  // an arena: the layout of parameters, gradients and both moments
    size_t count;
    float *data;
    float *token_embedding;       // (V, dim)
    Layer *layers;                // (n_layers)
    float *rms_final;             // (dim)
    float *wcls;                  // (V, dim); token_embedding itself when tied
    float *pos;                   // the encoding's shared block
    Tensor *tensors;              // the list of all, in file order
    int n_tensors;
    const size_t *first;          // during layout alone: where a llama2.c file has each kind
} Params;

typedef struct {
    const char *text; int length; // not terminated
    float score;                  // of two merges, the higher comes first
    int byte;                     // the one that a piece such as <0x41> stands for, else -1
} Piece;
typedef struct {                  // a vocabulary with llama2.c's rules, or the 256 bytes themselves
    int size;                     // entries; 256 for bytes
    int bytes;                    // 1: a token is a byte, and the rest is unused
    char *file; size_t file_size; // the tokenizer.bin, zero padded to a multiple of 64
    Piece *piece;                 // (size) whose texts lie in `file`
    int byte_id[256];             // token of a single byte, -1 where there is none
    int *slots; size_t n_slots;   // hash table piece -> id, -1 empty
    uint8_t joined[256][256];     // 1: some piece holds the first byte followed by the second
} Tokenizer;

typedef struct Activations Activations;

typedef struct {                  // a matrix as int8, see model_quantize; (out, groups of 64)
    float *scale;
    uint8_t *q;                   // q + 128; NULL: not quantised
} Quantized;
typedef struct { Quantized qkv, wo, w13, w2; } LayerInt8;

typedef struct {
    Config config;
    Tokenizer tokenizer;
    Params params, grads;
    float *m, *v;                 // AdamW's moments, layout of params; NULL when not trained
    PosTables pos, dpos;
    Activations *acts;
    LayerInt8 *int8;              // (n_layers), and the output matrix; NULL unless quantised
    Quantized wcls_int8;
    void *map; size_t map_size;   // the file that params.data lies in, if it is mapped
} Model;

/* Checks a shape and fills what is automatic in it (hidden_dim 0, n_kv_heads 0, options of the
   encoding); c->pos must be set. Returns NULL, or a text that says what is wrong, valid until the
   next call. */
const char *config_check(Config *c);
size_t config_params(const Config *c);    // number of parameters

/* Allocates the parameters (zero) and builds the tables of the encoding for positions
   0 .. max_len-1, max_len >= seq_len. The config must have passed config_check. The tokenizer is
   left empty: whoever saves the model gives it one. */
void model_create(Model *m, const Config *c, int max_len);
/* N(0, 0.02); residual outputs (wo, w2) divided by sqrt(2 n_layers) (GPT-2, Radford et al.
   2019): scripts/README.md compares it with none; gains 1. */
void model_init(Model *m, uint64_t seed);
/* Builds the tables of the encoding again, for positions 0 .. len-1 and for the options that
   m->config has now; they must have passed config_check, with the same parameters. Not while the
   model is trained or a cache is in use. */
void model_tables(Model *m, int len);
/* Once, before model_backward: allocates gradients, gradient tables, and moments (zero) unless
   model_load brought them. Not for a model that model_load read from a checkpoint of llama2.c, whose
   matrices stand in another order: copy its weights into one of model_create. */
void model_train_begin(Model *m);
void model_free(Model *m);        // all that it holds, the tokenizer and the mapped file included

/* Mean cross entropy in nats of targets (B, T) after tokens (B, T), every sequence by itself. A
   negative target does not count: its loss is 0, and the mean is over the others, NaN if there are
   none. positions (B, T) must not decrease along a sequence; NULL means 0 .. T-1.
   losses (B, T): receives the loss of each target, or NULL. */
double model_loss(Model *m, float *losses, const int *tokens, const int *targets,
                  const int *positions, int B, int T);
/* Returns the same, and adds `weight` times its gradient to m->grads; one target must count. The
   batch is worked off in fixed pieces, so memory depends on T, not on B. */
double model_backward(Model *m, const int *tokens, const int *targets, const int *positions,
                      int B, int T, float weight);
/* logits (B, T, V), for tests and inspection. */
void model_logits(Model *m, float *logits, const int *tokens, const int *positions, int B, int T);
/* The weights A (n_heads, T, T) with which one layer attends in one sequence, 0 for keys that are
   not seen; for inspection, a plain loop over the definition. */
void model_attention(Model *m, float *A, int layer, const int *tokens, int T);
/* Floats of activations that model_backward keeps, those of one piece of a batch (B, T). The scratch
   of products and attention, a few MiB, comes on top. */
size_t model_scratch_floats(const Config *c, int B, int T);

/* From here on the matrices are read as int8, in groups of 64 that share a scale: 1.06 bytes a
   weight. Embeddings are looked up in fp32. For models that are not trained any more. */
void model_quantize(Model *m);

typedef struct { float beta1, beta2, eps, weight_decay, clip; } AdamW;    // clip 0: no clipping
/* One step of AdamW (Loshchilov & Hutter 2019) on m->grads, which is zeroed. step counts from 1.
   Matrices and embeddings decay; gains and encodings do not. Gradients whose norm exceeds clip are
   scaled to it. Returns the norm before clipping; if it is not finite, nothing is changed but
   the gradients. */
double model_update(Model *m, int64_t step, const AdamW *o, float lr);

/* ---- Generation ------------------------------------------------------------------------------ */

typedef struct {                  // keys (turned) and values of the tokens seen so far
    int len, used;                // capacity and tokens in it
    float *data;                  // (n_layers, 2, key heads, len, D) in blocks, see cache_store
    float *logits;                // (V) of the last token
} Cache;

void cache_create(Cache *kv, const Model *m, int len);    // empty; len <= m->pos.len
void cache_free(Cache *kv);
/* Appends n >= 1 tokens, used + n <= len; returns the logits (V) that follow the last, valid until
   the next call. Into an empty cache they go together, through matrix products; later ones go one
   by one, through matrix-vector products. The parameters must not change while a cache is in use;
   used = 0 starts anew. */
const float *model_decode(Model *m, Cache *kv, const int *tokens, int n);

/* Draws a token. temperature 0: the largest logit, lowest index on ties. top_k 0 and top_p 1 are
   off. u in [0, 1) is the random number used. Returns -1 when a logit is not a number. */
int sample(const float *logits, int V, float temperature, int top_k, float top_p, double u);

/* ---- Tokenizer ------------------------------------------------------------------------------- */

void tokenizer_load(Tokenizer *t, const char *path);    // a tokenizer.bin, checked, or "bytes"
void tokenizer_bytes(Tokenizer *t);                     // every byte is a token
void tokenizer_free(Tokenizer *t);

typedef struct { char *data; size_t n, room; } Text;    // n bytes and a NUL; {0} is empty

/* Text of any bytes -> tokens, one after the other. As llama2.c and SentencePiece: a blank in front
   of a text that is not empty, merges by best score, leftmost first (BPE, Sennrich et al. 2016);
   what is no piece becomes bytes. O(n log n). Begins as { .t, .text, .left }. */
typedef struct {
    const Tokenizer *t;
    const char *text; size_t left;    // what was not read yet; it must stay until the end
    size_t unknown;                   // unknown characters so far
    Text run;                         // what is merged at a time, see encoder_run,
    struct Symbol *symbols; size_t room;
    size_t at;                        //   and the place in it of the next token
} Encoder;
/* The next token, at most length + 1 in all; -1 at the end, where the memory of *e is freed. */
int encoder_next(Encoder *e);
/* All of them, *count, which the caller frees; unknown may be NULL. */
int *tokenizer_encode(const Tokenizer *t, const char *text, size_t length, size_t *count,
                      size_t *unknown);
/* The text of one token, *length bytes, not terminated, valid as long as the tokenizer. `first`
   drops the blank that encode put in front; tokens 1 and 2, begin and end of text, are empty. */
const char *tokenizer_decode(const Tokenizer *t, int token, int first, int *length);

/* ---- Evaluation ------------------------------------------------------------------------------ */

/* A part of a text, tokens at .. end-1: a window, or a line of question, mark, answer, newline. Its
   targets are tokens answer .. end-1; what it reads is all but its last token. */
typedef struct { size_t at, answer, end; } Example;
static inline size_t example_inputs(Example e) { return e.end - 1 - e.at; }
/* By the number of tokens that they read, then by place. */
void examples_sort(Example *e, size_t n);
/* Mean loss in nats over all targets of n examples, NaN if there are none. losses[k] receives the
   loss of token k, unless it is NULL. Every example begins at position first_position. */
double examples_loss(Model *m, float *losses, const int *tokens, const Example *e, size_t n,
                     int first_position);
/* The lines of a text in order, *count, which the caller frees; the first mark of a line ends its
   question. Exits 2 if the mark is not one byte that is a token of its own, and 1, naming `path`
   and the line, if a line lacks its mark or its newline, or reads more than ctx tokens. */
Example *examples_find(const Tokenizer *t, const char *mark, const int *tokens, size_t n, int ctx,
                       const char *path, size_t *count);

/* ---- Files ----------------------------------------------------------------------------------- */

typedef struct {                  // what a training run needs to go on; all that decides its bits
    int64_t step, steps;          // done, and of the whole schedule
    int64_t batch, accum, warmup; // sequences per pass, passes per step, steps up to lr
    uint64_t seed, data_sum;      // data_sum: checksum of the tokens of both parts, and the mark
    double lr, min_lr, weight_decay, clip, val_frac;
    double best_val;              // lowest validation loss so far, in nats per token,
    int64_t best_step;            //   and where; 0: none yet
    int64_t bf16;                 // 1: products of bf16
} TrainState;

/* Replaces the file: there is always the old one or the new one. With a state the moments go too. */
void model_save(const Model *m, const char *path, const TrainState *state);
/* Loads a model.bin, or a checkpoint of llama2.c (legacy or version 1), with the encoding's tables
   for the trained length. `tokenizer` names a vocabulary ("bytes", a file, NULL for none):
   llama2.c's files need one, a model.bin carries its own and accepts no other. Returns whether the
   file holds a training state; with `state` not NULL that fills *state and the moments. */
int model_load(Model *m, const char *path, const char *tokenizer, TrainState *state);
/* 64 bits that any change of a single word changes; no defence against intent. */
uint64_t checksum(const void *data, size_t bytes);

/* The whole of a file, or of standard input for "-", NUL-terminated; the caller frees it. */
char *file_read(const char *path, size_t *size);
/* Appends the same as a text: a UTF-8 byte-order mark is dropped, \r\n and \r become \n. Returns
   how often they did. UTF-16 is refused. */
size_t text_append(Text *text, const char *path);
/* Exits if path cannot be written, or is something else than a regular file. */
void file_check_writable(const char *path);

/* ---- Options, errors, threads, time, random numbers ------------------------------------------ */

typedef struct {
    const char *name; char letter;
    const char *arg, *help;       // arg: what the value is called in --help, NULL for a switch
    int *i; double *f; uint64_t *u; const char **s; int *on;    // one of them: where the value
                                  //   goes, now the default; NaN and what is below min say none
    double min, max;              // limits of a number; max > 1 of an .s: so many may be given
    int given;                    // how often it was on the command line
} Option;

/* Parses --name value, --name=value and -x value, where a row with a NULL name ends the table, and
   the encodings' own options; with `trained` only those that leave a model's parameters alone.
   Moves the other arguments, and all after "--", to argv[0] and on, and returns their number. A .u
   that is not given is drawn. Exits 2 with a line that names the option when something is wrong;
   --help prints `usage`, all options with their defaults, and exits 0. */
int options_parse(const char *usage, Option *options, int trained, int argc, char **argv);
/* Writes the encodings' options that were given into c and checks it; returns whether there are any.
   Exits 2 if c->pos has no such one, or with what is wrong. */
int options_apply_pos(Config *c);
/* A word or a number, as one writes it; valid until the fourth call from here. */
const char *pos_option_text(const PosOption *o, double value);

/* First thing in main: the name that stands before every message. May start the program again, with
   a limit on how long threads spin (see there). */
void program_begin(const char *name, char **argv);
/* Prints "program: message" and exits with the code, after what is on its way to stdout. */
_Noreturn void die(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
void output_check(void);          // flushes standard output; exits 1 if it could not be written
void *xmalloc(size_t bytes);      // zeroed up to the next multiple of 64 bytes, and aligned to 64;
                                  //   exits 1 if there is no memory

int threads_set(int n);           // 0: OMP_NUM_THREADS, else all processors. Returns the number.
extern const char *const threads_kind;    // "OpenMP" or why there is one thread
extern const int vector_width;    // floats in a register
double seconds(void);             // monotonic, from some start
double peak_mib(void);            // largest resident size of this process so far

/* Where time goes. While `profile` is not NULL, kernels add their seconds to it. */
enum Section { PRODUCTS, ATTENTION, LAYERS, LOSS, OPTIMIZER, SECTIONS };
typedef struct {
    double spent[SECTIONS];       // by the first thread; LAYERS: norms, SwiGLU, embedding, rotation
    double waited;                // by all threads together, for others in products and attention
} Profile;
extern Profile *profile;

/* Randomness is a function of what it is for: nothing is stored, and no use disturbs another. A
   purpose is one of these, plus an index below 256 or hashed with a name. */
enum { RNG_INIT = 1 << 8, RNG_DATA = 2 << 8, RNG_SAMPLE = 3 << 8, RNG_TEST = 4 << 8 };
uint64_t rng(uint64_t seed, uint64_t purpose, uint64_t counter);
double rng_uniform(uint64_t seed, uint64_t purpose, uint64_t counter);    // [0, 1)
float rng_normal(uint64_t seed, uint64_t purpose, uint64_t counter);      // N(0, 1)

/* C (M, N; rows ldc apart) = A.B, plus `plus`, which is stored like C and may be C, unless it is
   NULL. A(i, k) = a[i*a_row + k*a_k] and B(k, j) = b[k*b_k + j*b_col], so a transpose is a choice
   of strides. K >= 1, and C overlaps neither A nor B. */
void gemm(float *c, size_t ldc, const float *a, size_t a_row, size_t a_k,
          const float *b, size_t b_k, size_t b_col,
          size_t M, size_t N, size_t K, const float *plus);
/* From here on gemm rounds the elements of A and B to bf16 and multiplies them in pairs, with sums
   in fp32; 0: no longer. Returns whether it does: not every target can. */
int bf16_set(int on);

#endif

/* =================================================================================================
   Implementation
   ============================================================================================== */
#ifdef MODEL_IMPLEMENTATION

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

/* ---- Errors, memory, threads, time, random numbers ----------------------------------------------
   What every other section stands on. Both programs are short-lived commands with nothing to
   unwind, so a failure is a line and an exit. */

static const char *program = "posenc";

/* A thread that waits for another one spins, with GNU's OpenMP for milliseconds. When another
   program runs beside this one, the thread that is waited for may wait for the very processor that
   spins, and a step takes ten times longer. The limit is read from the environment before main,
   hence the second start. */
void program_begin(const char *name, char **argv)
{
    int fd;
    program = name;
    // A closed stdin, stdout or stderr must not become the model file.
    do fd = open("/dev/null", O_RDONLY); while (fd >= 0 && fd <= STDERR_FILENO);
    close(fd);
#if defined(_OPENMP) && defined(__linux__) && !defined(__clang__)
    char self[4096] = "";
    if (!getenv("OMP_WAIT_POLICY") && !getenv("GOMP_SPINCOUNT")
        && !setenv("GOMP_SPINCOUNT", "2000", 0)
        && readlink("/proc/self/exe", self, sizeof self - 1) > 0) execv(self, argv);
#else
    (void)argv;
#endif
}

_Noreturn void die(int code, const char *format, ...)
{
    va_list args;
    fflush(stdout);
    fprintf(stderr, "%s: ", program);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(code);
}

void output_check(void)
{
    if (fflush(stdout) || ferror(stdout)) die(1, "standard output: %s", strerror(errno));
}

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
static size_t div_up(size_t n, size_t by) { return (n + by - 1) / by; }
static size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

static void *allocated(void *p, size_t bytes)
{
    if (!p) die(1, "out of memory: %.1f MiB were asked for", (double)bytes / (1 << 20));
    return p;
}

void *xmalloc(size_t bytes)
{
    const size_t room = round_up(bytes + !bytes, 64);
    return memset(allocated(room < bytes ? NULL : aligned_alloc(64, room), bytes), 0, room);
}

/* Big blocks of malloc are not in memory before they are written, unlike xmalloc's. */
static void *xrealloc(void *p, size_t bytes)
{
    return allocated(realloc(p, bytes + !bytes), bytes);
}

/* Makes room for `need` items of an array that is appended to. */
static void *grow(void *p, size_t *room, size_t need, size_t item)
{
    if (need <= *room) return p;
    *room = need < 32 ? 64 : need * 2;
    return xrealloc(p, *room * item);
}

/* Scratch of the kernels: one block that grows to the largest request and is never used by two of
   them at once. Kernels ask for it before their parallel region. */
static float *workspace(size_t floats)
{
    static float *block;
    static size_t size;
    if (floats > size) {
        free(block);
        block = xmalloc((size = floats) * sizeof *block);
    }
    return block;
}

/* The next n floats of a block, or, with base NULL, only their number. */
static float *reserve(float *base, size_t *floats, size_t n)
{
    float *at = base ? base + *floats : NULL;
    *floats += round_up(n, 16);
    return at;
}

#ifdef _OPENMP
const char *const threads_kind = "OpenMP";
#else
const char *const threads_kind = "built without OpenMP";
static int omp_get_max_threads(void) { return 1; }
static int omp_get_num_threads(void) { return 1; }
static int omp_get_thread_num(void) { return 0; }
static void omp_set_num_threads(int n) { (void)n; }
#endif

int threads_set(int n)
{
    if (n > 0) omp_set_num_threads(n);
    return omp_get_max_threads();
}

/* Loops over rows have static shares: from one function to the next a thread meets about the same
   rows, which its cache still holds; the cache of another processor may be farther than memory.
   Sums over many numbers are split into this many pieces, whatever the number of threads, and the
   pieces are added in order. */
enum { PIECES = 64 };
static size_t piece_start(size_t n, int piece) { return n * (size_t)piece / PIECES; }

double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double peak_mib(void)
{
    struct rusage r;
    getrusage(RUSAGE_SELF, &r);
#ifdef __APPLE__
    return (double)r.ru_maxrss / (1 << 20);    // bytes there, KiB elsewhere
#else
    return (double)r.ru_maxrss / (1 << 10);
#endif
}

Profile *profile;

/* SECTION(what); at the top of a block: its time, however it is left, is spent on `what`. */
typedef struct { enum Section what; double began; } Timer;
static double profile_time(void) { return profile ? seconds() : 0; }
static void timer_end(const Timer *t)
{
    if (profile) profile->spent[t->what] += seconds() - t->began;
}
#define SECTION(what) \
    __attribute__((cleanup(timer_end))) const Timer timer_ = { what, profile_time() }; (void)timer_

static void barrier(void)    // of the parallel region that it is called in
{
    const double began = profile_time();
    #pragma omp barrier
    if (!profile) return;
    const double waited = seconds() - began;
    #pragma omp atomic
    profile->waited += waited;
}

/* The finaliser of splitmix64 (Steele, Lea & Flood 2014), once per word of the key. */
static uint64_t mix(uint64_t z)
{
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint64_t rng(uint64_t seed, uint64_t purpose, uint64_t counter)
{
    return mix(mix(mix(seed) ^ purpose) ^ counter);
}

double rng_uniform(uint64_t seed, uint64_t purpose, uint64_t counter)
{
    return (double)(rng(seed, purpose, counter) >> 11) * 0x1p-53;
}

float rng_normal(uint64_t seed, uint64_t purpose, uint64_t counter)    // Box & Muller 1958
{
    double u = 1 - rng_uniform(seed, purpose, 2 * counter);
    double v = rng_uniform(seed, purpose, 2 * counter + 1);
    return (float)(sqrt(-2 * log(u)) * cos(2 * M_PI * v));
}

/* ---- Vectors and matrix products ----------------------------------------------------------------
   The only place that knows about instruction sets. A vec is as wide as the target's registers; the
   compiler turns plain arithmetic on it into instructions, and a loop with constant bounds over an
   array of them into registers. Each target has MR x NV accumulators: 24 of 32 registers with
   AVX-512, 12 of 16 else, which leaves NV for a row of B and one for the broadcast element of A. */

#if defined(__AVX512F__)
enum { VL = 16, MR = 12, NV = 2 };
#elif defined(__AVX__)
enum { VL = 8, MR = 6, NV = 2 };
#else
enum { VL = 4, MR = 6, NV = 2 };
#endif
enum { NR = VL * NV };

typedef float vec __attribute__((vector_size(VL * 4)));
typedef int32_t ivec __attribute__((vector_size(VL * 4)));
typedef uint32_t uvec __attribute__((vector_size(VL * 4)));
typedef vec vec_at __attribute__((aligned(4), may_alias));    // one in memory, at any float
const int vector_width = VL;

#define INLINE static inline __attribute__((always_inline))

/* acc + a b of bf16 numbers, two of them in the place of a float: both products are added. */
#ifdef __AVX512BF16__
#include <immintrin.h>
enum { HAS_BF16 = 1 };
INLINE vec multiply_pairs(vec acc, float a, vec b)
{
    return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_ps(a), (__m512bh)b);
}
#else
enum { HAS_BF16 = 0 };
INLINE vec multiply_pairs(vec acc, float a, vec b) { (void)a, (void)b; return acc; }
#endif

INLINE vec load(const float *p) { return *(const vec_at *)p; }
INLINE void store(float *p, vec v) { *(vec_at *)p = v; }
INLINE vec splat(float x) { return (vec){0} + x; }
INLINE vec choose(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }
INLINE vec vmax(vec a, vec b) { return choose(a > b, a, b); }
INLINE float vsum(vec v)
{
    for (int i = 0; i < VL / 2; i++) v[i] += v[i + VL / 2];    // bounds that are constants: no loop
    for (int i = 0; i < VL / 4; i++) v[i] += v[i + VL / 4];
    for (int i = 0; i < VL / 8; i++) v[i] += v[i + VL / 8];
    for (int i = 0; i < VL / 16; i++) v[i] += v[i + VL / 16];
    return v[0];
}

/* e^x within 2 ulp for -87 < x < 88; 0 below, inf above, NaN stays NaN. x = n ln2 + r with
   |r| <= ln2/2, and e^r by its Taylor series to r^7 (remainder < 6e-9 relative). Adding 1.5 * 2^23
   leaves n in the low bits of a float. */
INLINE vec vexp(vec x)
{
    const vec magic = splat(12582912.0f);
    vec shifted = x * 1.44269504f + magic, n = shifted - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;    // ln2 in two parts (Cody & Waite 1980)
    vec p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    vec y = (vec)((uvec)p + (((uvec)shifted - (uvec)magic) << 23));
    y = choose(x < splat(-87.0f), splat(0), y);
    return choose(x > splat(88.0f), splat(INFINITY), y);
}

/* `a` is asked for so many bytes ahead; 0: not at all. Four sums: none waits for another. */
INLINE float dot_ahead(const float *a, const float *b, size_t n, const size_t ahead)
{
    vec s[4] = {0};
    size_t i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL) {
        for (size_t line = 0; ahead && line < 16 * VL; line += 64)
            __builtin_prefetch((const char *)(a + i) + line + ahead);
        for (int k = 0; k < 4; k++) s[k] += load(a + i + k * VL) * load(b + i + k * VL);
    }
    for (; i + VL <= n; i += VL) s[0] += load(a + i) * load(b + i);
    float sum = vsum(s[0] + s[1] + s[2] + s[3]);
    for (; i < n; i++) sum += a[i] * b[i];
    return sum;
}

INLINE float dot(const float *a, const float *b, size_t n) { return dot_ahead(a, b, n, 0); }

INLINE void axpy(float *y, float a, const float *x, size_t n)    // y += a x
{
    for (size_t i = 0; i < n; i++) y[i] += a * x[i];
}

static float sum_of(const float *x, size_t n)
{
    vec sums = {0};
    float sum = 0;
    size_t i = 0;
    for (; i + VL <= n; i += VL) sums += load(x + i);
    for (; i < n; i++) sum += x[i];
    return sum + vsum(sums);
}

static void scale_row(float *x, float factor, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i] *= factor;
}

static void zero(float *x, size_t n) { memset(x, 0, n * sizeof *x); }

/* y_i = e^(sign x_i - shift); returns their sum. y may be x. */
static float exp_row(float *y, const float *x, size_t n, float sign, float shift)
{
    vec sums = {0};
    float sum = 0;
    size_t i = 0;
    for (; i + VL <= n; i += VL) {
        const vec e = vexp(sign * load(x + i) - shift);
        store(y + i, e);
        sums += e;
    }
    for (; i < n; i++) sum += y[i] = expf(sign * x[i] - shift);
    return sum + vsum(sums);
}

static float row_max(const float *x, size_t n)
{
    vec v[4];
    size_t i = 0;
    for (int k = 0; k < 4; k++) v[k] = splat(-INFINITY);
    for (; i + 4 * VL <= n; i += 4 * VL)
        for (int k = 0; k < 4; k++) v[k] = vmax(v[k], load(x + i + k * VL));
    for (; i + VL <= n; i += VL) v[0] = vmax(v[0], load(x + i));
    v[0] = vmax(vmax(v[0], v[1]), vmax(v[2], v[3]));
    float m = v[0][0];
    for (int k = 1; k < VL; k++) m = v[0][k] > m ? v[0][k] : m;
    for (; i < n; i++) m = x[i] > m ? x[i] : m;
    return m;
}

/* The micro-kernel, on which all products rest: an MR x (nv VL) tile of C from K steps of rank one,
   plus a tile of `plus`, which is stored like C and may be C, unless it is NULL. With `pairs`, the
   elements of A and B are pairs of bf16. nv and pairs are constants where it is called. Always a
   full tile: callers pad by zeros. */
INLINE void tile(float *c, size_t ldc, const float *a, size_t a_row, size_t a_k,
                 const float *b, size_t ldb, size_t K, const float *plus,
                 const int nv, const int pairs)
{
    vec acc[MR][NV] = {0};
    for (size_t k = 0; k < K; k++, a += a_k, b += ldb) {
        vec row[NV];
        for (int j = 0; j < nv; j++) row[j] = load(b + j * VL);
        for (int i = 0; i < MR; i++)
            for (int j = 0; j < nv; j++)
                acc[i][j] = pairs ? multiply_pairs(acc[i][j], a[i * a_row], row[j])
                                  : acc[i][j] + a[i * a_row] * row[j];
    }
    for (int i = 0; i < MR; i++)
        for (int j = 0; j < nv; j++) {
            const size_t at = i * ldc + j * VL;
            store(c + at, plus ? load(plus + at) + acc[i][j] : acc[i][j]);
        }
}

/* C (m, n) = A.B, plus `plus` as above, on scratch that is padded to whole tiles: m rounded up to
   MR, n to VL. */
INLINE void tiles(float *c, size_t ldc, const float *a, size_t a_row, size_t a_k, const float *b,
                  size_t ldb, size_t m, size_t n, size_t K, const float *plus, const int pairs)
{
    for (size_t i = 0; i < m; i += MR) {
        const float *a_i = a + i * a_row;
        for (size_t j = 0; j < n; j += NR) {
            const size_t at = i * ldc + j;
            const float *add = plus ? plus + at : NULL;
            if (n - j > VL) tile(c + at, ldc, a_i, a_row, a_k, b + j, ldb, K, add, NV, pairs);
            else tile(c + at, ldc, a_i, a_row, a_k, b + j, ldb, K, add, 1, pairs);
        }
    }
}

/* Not inlined, so that there are not thirty micro-kernels. */
static __attribute__((noinline)) void product(float *c, size_t ldc, const float *a, size_t a_row,
                                              size_t a_k, const float *b, size_t ldb, size_t m,
                                              size_t n, size_t K, const float *plus)
{
    tiles(c, ldc, a, a_row, a_k, b, ldb, m, n, K, plus, 0);
}

/* gemm works through blocks that stay in a cache while they are used (Goto & van de Geijn 2008):

             kc                  nc                        nc
          +------+       +----+----+----+          +----+----+----+
          |      | MR    |    |    |    |          |tile|tile|tile|
      mc  +------+    kc |    |    |    |      mc  +----+----+----+
          |      | MR    |    |    |    |          |tile|tile|tile|
          +------+       +----+----+----+          +----+----+----+
        A: slices of     B: panels of NR           C: a tile is read and written
        MR rows, in the  columns, in the           once in kc; hence the large kc
        second cache     third cache

   Both are packed: copied into the order in which the micro-kernel reads them, filled up with zeros
   to whole slices and panels. Transposes end here, and elements become bf16. Only an A whose rows
   are contiguous is read where it lies, if B has no more than FEW columns to pay for its copy. */
enum { KC = 768, MC = 192, NC = 768, FEW = 256 };

static int bf16_products;
int bf16_set(int on) { return bf16_products = on && HAS_BF16; }

/* In place: elements k and k + 1 of a packed lane become a pair of bf16, each rounded to the
   nearest, ties to even; the last of an odd K goes with a zero, for which there is room. */
INLINE void pair_up(float *packed, const size_t lanes, size_t K)
{
    typedef uint32_t bits __attribute__((may_alias));
    bits *p = (bits *)packed;
    if (K % 2) memset(p + K * lanes, 0, lanes * sizeof *p);
    for (size_t k = 0; k < K; k += 2)
        for (size_t i = 0; i < lanes; i++) {
            const uint32_t low = p[k * lanes + i], high = p[(k + 1) * lanes + i];
            p[k / 2 * lanes + i] = (low + 0x7fff + (low >> 16 & 1)) >> 16
                                   | ((high + 0x7fff + (high >> 16 & 1)) & 0xffff0000);
        }
}

/* dst[k * lanes + i] = src[i * lane + k * step], element k of lane i, a row of A or a column of B;
   0 for lanes past `valid`. A transpose goes by blocks of 4 x 4. */
INLINE void pack(float *restrict dst, const float *src, size_t lane, size_t step, size_t valid,
                 const size_t lanes, size_t K)
{
    typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
    size_t k = 0;
    if (valid < lanes) {
        memset(dst, 0, K * lanes * sizeof *dst);
    } else if (lane == 1) {
        for (; k < K; k++) memcpy(dst + k * lanes, src + k * step, lanes * sizeof *dst);
    } else if (step == 1 && lanes % 4 == 0) {
        for (; k + 4 <= K; k += 4)
            for (size_t i = 0; i < lanes; i += 4) {
                const float *s = src + i * lane + k;
                four a = *(const four *)s, b = *(const four *)(s + lane);
                four c = *(const four *)(s + 2 * lane), d = *(const four *)(s + 3 * lane);
                for (size_t x = 0; x < 4; x++)
                    *(four *)(dst + (k + x) * lanes + i) = (four){a[x], b[x], c[x], d[x]};
            }
    }
    for (; k < K; k++)
        for (size_t i = 0; i < valid; i++) dst[k * lanes + i] = src[i * lane + k * step];
    if (bf16_products) pair_up(dst, lanes, K);
}

/* A slice of A times a panel of B, plus `plus`. A whole tile of C is written in place, one at an
   edge by way of scratch. */
static void gemm_tile(float *c, size_t ldc, const float *plus, size_t rows, size_t cols,
                      const float *a, size_t a_row, size_t a_k, const float *b, size_t K)
{
    const int whole = rows == MR && cols == NR;
    float scratch[MR * NR], *tile = whole ? c : scratch;
    const float *add = whole ? plus : NULL;
    const size_t ld = whole ? ldc : NR;
    // C is in no cache, or in that of another thread: asked for in time
    for (size_t y = 0; y < rows; y++)
        for (size_t x = 0; x < cols; x += 16) __builtin_prefetch(c + y * ldc + x, 1);
    if (bf16_products) tiles(tile, ld, a, a_row, a_k, b, NR, MR, cols, div_up(K, 2), add, 1);
    else product(tile, ld, a, a_row, a_k, b, NR, MR, cols, K, add);
    for (size_t y = 0; !whole && y < rows; y++)
        for (size_t x = 0; x < cols; x++)
            c[y * ldc + x] = scratch[y * NR + x] + (plus ? plus[y * ldc + x] : 0);
}

/* The size of equal pieces of n that are no larger than `most`. */
static size_t even(size_t n, size_t most) { return div_up(n, div_up(n, most)); }

void gemm(float *c, size_t ldc, const float *a, size_t a_row, size_t a_k,
          const float *b, size_t b_k, size_t b_col,
          size_t M, size_t N, size_t K, const float *plus)
{
    if (!M || !N) return;
    SECTION(PRODUCTS);
    // Which thread computes an element, and in which block, changes no bit of it: only kc splits a
    // sum, and it depends on K alone.
    const size_t kc = even(K, bf16_products ? 2 * KC : KC), room = round_up(kc, 2);
    const size_t nc = round_up(even(N, NC), NR), slices = div_up(M, MR);
    const size_t direct = a_k == 1 && N <= FEW && !bf16_products ? M / MR : 0;    // slices that are
    const size_t mc = direct ? 1 : even(slices, MC / MR);
    float *packed_b = workspace((nc + (size_t)omp_get_max_threads() * mc * MR) * room);

    #pragma omp parallel if (M * N * K > 1 << 18)
    {
        const size_t thread = (size_t)omp_get_thread_num(), team = (size_t)omp_get_num_threads();
        float *packed_a = packed_b + (nc + thread * mc * MR) * room;
        for (size_t n0 = 0; n0 < N; n0 += nc)
            for (size_t k0 = 0; k0 < K; k0 += kc) {
                const size_t kn = min_size(kc, K - k0), panels = div_up(min_size(nc, N - n0), NR);
                #pragma omp for schedule(static) nowait
                for (size_t p = 0; p < panels; p++)
                    pack(packed_b + p * NR * room, b + (n0 + p * NR) * b_col + k0 * b_k, b_col, b_k,
                         min_size(NR, N - n0 - p * NR), NR, kn);
                barrier();
                // Threads share the tiles, counted slice by slice.
                const size_t from = slices * panels * thread / team;
                const size_t to = slices * panels * (thread + 1) / team;
                for (size_t s0 = from / panels; s0 * panels < to; s0 += mc) {
                    const size_t s1 = min_size(s0 + mc, div_up(to, panels));
                    for (size_t s = direct > s0 ? direct : s0; s < s1; s++)
                        pack(packed_a + (s - s0) * MR * room, a + s * MR * a_row + k0 * a_k, a_row,
                             a_k, min_size(MR, M - s * MR), MR, kn);
                    for (size_t p = 0; p < panels; p++)
                        for (size_t s = s0; s < s1; s++) {
                            if (s * panels + p < from || s * panels + p >= to) continue;
                            const size_t i = s * MR, j = n0 + p * NR, at = i * ldc + j;
                            const float *slice = packed_a + (s - s0) * MR * room;
                            gemm_tile(c + at, ldc, k0 ? c + at : plus ? plus + at : NULL,
                                      min_size(MR, M - i), min_size(NR, N - j),
                                      s < direct ? a + i * a_row + k0 : slice,
                                      s < direct ? a_row : 1, s < direct ? 1 : MR,
                                      packed_b + p * NR * room, kn);
                        }
                }
                barrier();
            }
    }
}

/* A loop over rows that threads share if they have more elements than MIN_PARALLEL. What generation
   does for every token goes around the parallel region: one that if() makes serial still costs as
   much as a small product. */
enum { MIN_PARALLEL = 1 << 14 };
#define FOR_ROWS(r, rows, elements, ...)                        \
    if ((elements) > MIN_PARALLEL) {                            \
        _Pragma("omp parallel for schedule(static)")            \
        for (size_t r = 0; r < (rows); r++) __VA_ARGS__         \
    } else {                                                    \
        for (size_t r = 0; r < (rows); r++) __VA_ARGS__         \
    }

/* int8 weights for generation: groups of 64 neighbours in a row share a scale, w = scale q,
   q = round(127 w / max |w|); the last group of a row is filled up with zeros. Four vectors of a
   group share one of 32-bit words, a byte q + 128 each: masks take them apart. */
enum { GROUP = 64 };
static size_t int8_place(size_t i) { return (i / (4 * VL) * VL + i % VL) * 4 + i / VL % 4; }

/* A group: GROUP / VL vectors, without the scale. The first byte of a word in the fraction of 2^23,
   or its second in that of 2^15, makes that power of two plus the byte; less 128 too, exactly q. */
INLINE void unpack(vec *w, const uint8_t *q)
{
    for (int a = 0; a < GROUP / VL; a += 4, q += 4 * VL) {
        uvec words;
        memcpy(&words, q, sizeof words);
        for (int k = 0; k < 4; k += 2, words >>= 16) {
            w[a + k] = (vec)((words & 0xff) | 0x4b000000) - (0x1p23f + 128);
            w[a + k + 1] = (vec)((words & 0xff00) | 0x47000000) - (0x1p15f + 128);
        }
    }
}

/* Row `row` of W times x, which is followed by zeros to the end of its last group. */
INLINE float dot_int8(Quantized w, size_t row, const float *x, size_t groups)
{
    const uint8_t *q = w.q + row * groups * GROUP;
    const float *scale = w.scale + row * groups;
    vec sum = {0};
    for (size_t g = 0; g < groups; g++, q += GROUP) {
        vec part = {0}, weight[GROUP / VL];
        __builtin_prefetch(q + 4096);
        unpack(weight, q);
        for (size_t i = 0; i < GROUP / VL; i++) part += weight[i] * load(x + g * GROUP + i * VL);
        sum += scale[g] * part;
    }
    return vsum(sum);
}

/* n rows of W from row `first` on as fp32, valid until the next call. */
static const float *dequantized(Quantized w, size_t first, size_t n, size_t n_in)
{
    static float *out;
    static size_t room;
    const size_t groups = div_up(n_in, GROUP);
    out = grow(out, &room, n * n_in, sizeof *out);
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n * groups; i++) {
        const size_t at = first * groups + i, row = i / groups, column = i % groups * GROUP;
        vec weight[GROUP / VL];
        unpack(weight, w.q + at * GROUP);
        for (int k = 0; k < GROUP / VL; k++) weight[k] *= w.scale[at];
        memcpy(out + row * n_in + column, weight, min_size(GROUP, n_in - column) * sizeof *out);
    }
    return out;
}

/* y (n_out) = W (n_out, n_in) x, plus `plus` unless it is NULL; W is w, or int8 if that is there.
   Reads W once, from the first byte to the last, and asks for it a page ahead: it runs at the speed
   of memory. */
static void matvec(float *y, const float *x, const float *w, Quantized int8, size_t n_in,
                   size_t n_out, const float *plus)
{
    if (!int8.q) {
        FOR_ROWS(o, n_out, n_in * n_out, {
            const float sum = dot_ahead(w + o * n_in, x, n_in, 4096);
            y[o] = plus ? plus[o] + sum : sum;
        })
        return;
    }
    const size_t padded = round_up(n_in, GROUP);
    float *xp = memcpy(workspace(padded), x, n_in * sizeof *x);
    memset(xp + n_in, 0, (padded - n_in) * sizeof *x);
    FOR_ROWS(o, n_out, n_in * n_out, {
        const float sum = dot_int8(int8, o, xp, padded / GROUP);
        y[o] = plus ? plus[o] + sum : sum;
    })
}

/* ---- Layers: forward and backward side by side ----------------------------------------------- */

/* One matrix, or several that are multiplied by the same x: (n_out, n_in) altogether. */
typedef struct {
    const float *w[3];
    size_t n_out[3];              // rows of each, 0 for those that are not there
    Quantized int8;               // all of them, read instead, if they are there
} Matrices;

static Quantized quantized(Matrices m, size_t n_in)
{
    const size_t groups = div_up(n_in, GROUP), n = (m.n_out[0] + m.n_out[1] + m.n_out[2]) * groups;
    const Quantized out = { xmalloc(n * sizeof *out.scale), xmalloc(n * GROUP) };
    for (size_t k = 0, first = 0; k < 3; first += m.n_out[k++] * groups) {
        #pragma omp parallel for schedule(static)
        for (size_t i = 0; i < m.n_out[k] * groups; i++) {
            const size_t row = i / groups, column = i % groups * GROUP;
            const size_t count = min_size(GROUP, n_in - column);
            const float *w = m.w[k] + row * n_in + column;
            uint8_t *q = out.q + (first + i) * GROUP;
            float most = 0;
            for (size_t x = 0; x < count; x++) most = fabsf(w[x]) > most ? fabsf(w[x]) : most;
            const float inverse = most > 0 ? 127 / most : 0;
            out.scale[first + i] = most / 127;
            for (size_t x = 0; x < GROUP; x++)
                q[int8_place(x)] = (uint8_t)(128 + (x < count ? lrintf(w[x] * inverse) : 0));
        }
    }
    return out;
}

/* y (rows, n_out) = x (rows, n_in) W^T, plus `plus` (rows, n_out) unless it is NULL. Matrices that
   stand behind each other in memory are multiplied as one; int8 becomes fp32 again for several
   rows, a piece that fits into the second cache at a time.
   torch: y = F.linear(x, w) */
static void linear_forward(float *y, const float *x, Matrices m, size_t rows, size_t n_in,
                           const float *plus)
{
    const size_t n_out = m.n_out[0] + m.n_out[1] + m.n_out[2];
    for (size_t at = 0, k = 0, n; at < n_out; at += n) {
        const float *w = m.w[k], *add = plus ? plus + at : NULL;
        if (m.int8.q) n = rows == 1 ? n_out : min_size(n_out - at, div_up(1 << 18, n_in));
        else for (n = m.n_out[k++]; k < 3 && m.w[k] == w + n * n_in; k++) n += m.n_out[k];
        if (rows == 1) {
            matvec(y + at, x, w, m.int8, n_in, n, add);
        } else {
            if (m.int8.q) w = dequantized(m.int8, at, n, n_in);
            gemm(y + at, n_out, x, n_in, 1, w, 1, n_in, rows, n, n_in, add);
        }
    }
}

/* dW += dy^T x;  dx = dy W, which may take the place of x */
static void linear_backward(float *dx, float *dw, const float *dy, const float *x, const float *w,
                            size_t rows, size_t n_in, size_t n_out)
{
    gemm(dw, n_in, dy, 1, n_out, x, n_in, 1, n_out, n_in, rows, dw);
    gemm(dx, n_in, dy, n_out, 1, w, n_in, 1, rows, n_in, n_out, NULL);
}

/* RMSNorm (Zhang & Sennrich 2019): y = g x / rms, rms = sqrt(mean(x^2) + 1e-5)
   torch: y = F.rms_norm(x, (n,), g, 1e-5) */
static float rms_inverse(const float *x, size_t n)
{
    return 1 / sqrtf(dot(x, x, n) / (float)n + 1e-5f);
}

static void rmsnorm_forward(float *y, const float *x, const float *gain, size_t rows, size_t n)
{
    SECTION(LAYERS);
    FOR_ROWS(r, rows, rows * n, {
        const float *xr = x + r * n, inverse = rms_inverse(xr, n);
        for (size_t i = 0; i < n; i++) y[r * n + i] = gain[i] * (xr[i] * inverse);
    })
}

/* With h = x / rms and w = g dy:  dx += (w - h mean(w h)) / rms;  dg += sum over rows of dy h */
static void rmsnorm_backward(float *dx, float *dgain, const float *dy, const float *x,
                             const float *gain, size_t rows, size_t n)
{
    SECTION(LAYERS);
    float *partial = workspace(PIECES * n);
    #pragma omp parallel for schedule(static) if (rows * n > MIN_PARALLEL)
    for (int piece = 0; piece < PIECES; piece++) {
        float *dg = memset(partial + (size_t)piece * n, 0, n * sizeof *dg);
        for (size_t r = piece_start(rows, piece); r < piece_start(rows, piece + 1); r++) {
            const float *xr = x + r * n, *dyr = dy + r * n, inverse = rms_inverse(xr, n);
            vec sums = {0};
            float sum = 0;
            size_t i = 0;
            for (; i + VL <= n; i += VL) sums += load(gain + i) * load(dyr + i) * load(xr + i);
            for (; i < n; i++) sum += gain[i] * dyr[i] * xr[i];
            const float mean = (sum + vsum(sums)) * inverse / (float)n;
            for (i = 0; i < n; i++) {
                const float h = xr[i] * inverse;
                dx[r * n + i] += (gain[i] * dyr[i] - h * mean) * inverse;
                dg[i] += dyr[i] * h;
            }
        }
    }
    for (int piece = 0; piece < PIECES; piece++) axpy(dgain, 1, partial + (size_t)piece * n, n);
}

/* SwiGLU (Shazeer 2020): h = silu(a) b, silu(a) = a s, s = 1 / (1 + e^-a); a and b are the halves
   of ab (rows, 2n)
   torch: h = F.silu(a) * b */
static void swiglu_forward(float *h, const float *ab, size_t rows, size_t n)
{
    SECTION(LAYERS);
    FOR_ROWS(r, rows, rows * n, {
        const float *a = ab + r * 2 * n, *b = a + n;
        float *hr = h + r * n;
        exp_row(hr, a, n, -1, 0);
        for (size_t i = 0; i < n; i++) hr[i] = a[i] / (1 + hr[i]) * b[i];
    })
}

/* da = dh b (s + a s (1 - s));  db = dh silu(a), in the places of a and b */
static void swiglu_backward(float *ab, const float *dh, size_t rows, size_t n)
{
    SECTION(LAYERS);
    float *scratch = workspace((size_t)omp_get_max_threads() * n);
    FOR_ROWS(r, rows, rows * n, {
        float *a = ab + r * 2 * n, *b = a + n, *e = scratch + (size_t)omp_get_thread_num() * n;
        const float *d = dh + r * n;
        exp_row(e, a, n, -1, 0);
        for (size_t i = 0; i < n; i++) {
            const float s = 1 / (1 + e[i]), silu = a[i] * s;
            a[i] = d[i] * b[i] * (s + silu * (1 - s));
            b[i] = d[i] * silu;
        }
    })
}

/* The position of row r of sequences of T tokens. */
INLINE size_t position_of(const int *positions, size_t r, int start, int T)
{
    return positions ? (size_t)positions[r] : (size_t)start + r % (size_t)T;
}

/* x_t = E[token_t] + c table[pos_t]: the place `embed` of an encoding */
static void embedding_forward(float *x, const float *E, const PosTables *pos,
                              const int *tokens, const int *positions, int start, int T,
                              size_t rows, size_t n)
{
    SECTION(LAYERS);
    FOR_ROWS(r, rows, rows * n, {
        float *xr = memcpy(x + r * n, E + (size_t)tokens[r] * n, n * sizeof *x);
        const size_t p = position_of(positions, r, start, T);
        if (pos->embed) axpy(xr, pos->embed_scale, pos->embed + p * n, n);
    })
}

/* dE[token_t] += dx_t;  dtable[pos_t] += c dx_t. Threads share the columns, so every sum has the
   order of the tokens. */
static void embedding_backward(float *dE, const PosTables *dpos, const float *dx, const int *tokens,
                               const int *positions, int T, size_t rows, size_t n)
{
    SECTION(LAYERS);
    #pragma omp parallel for schedule(static) if (rows * n > MIN_PARALLEL)
    for (size_t i = 0; i < n; i += 16) {
        const size_t width = min_size(16, n - i);
        for (size_t r = 0; r < rows; r++) {
            const size_t p = position_of(positions, r, 0, T);
            const float *dxr = dx + r * n + i;
            axpy(dE + (size_t)tokens[r] * n + i, 1, dxr, width);
            if (dpos->embed) axpy(dpos->embed + p * n + i, dpos->embed_scale, dxr, width);
        }
    }
}

/* The place `rotate`: turns the pairs (2i, 2i+1) of every head of q and k, which lie at the front
   of the rows of qkv, by the angle of the row's position; direction -1 is the transpose, hence the
   backward: it turns back, and a factor in cos and sin stays one. */
static void rotate(float *qkv, const PosTables *pos, const Config *c, const int *positions,
                   int start, int T, size_t rows, int direction)
{
    SECTION(LAYERS);
    if (!pos->cos) return;
    const int D = c->dim / c->n_heads, heads = c->n_heads + c->n_kv_heads, half = pos->rotary / 2;
    const size_t width = (size_t)(c->n_heads + 2 * c->n_kv_heads) * (size_t)D;
    FOR_ROWS(r, rows, rows * width, {
        const size_t p = position_of(positions, r, start, T) * (size_t)half;
        const float *cosine = pos->cos + p, *sine = pos->sin + p;
        float *x = qkv + r * width;
        for (int h = 0; h < heads; h++, x += D)
            for (int i = 0; i < half; i++) {
                const float a = x[2 * i], b = x[2 * i + 1], s = (float)direction * sine[i];
                x[2 * i] = a * cosine[i] - b * s;
                x[2 * i + 1] = a * s + b * cosine[i];
            }
    })
}

/* Softmax and cross entropy of every row x: its loss is log(sum e^x) - x[target]. The rows are
   overwritten, with scale * (softmax(x) - onehot(target)) if scale is not 0. A target that does not
   count has neither loss nor gradient.
   torch: F.cross_entropy(x, target) */
static void cross_entropy(float *losses, float *logits, const int *targets, size_t rows, size_t n,
                          float scale)
{
    SECTION(LOSS);
    FOR_ROWS(r, rows, rows * n, {
        float *x = logits + r * n;
        losses[r] = 0;
        if (targets[r] < 0) {
            zero(x, n);
            continue;
        }
        const float m = row_max(x, n), at_target = x[targets[r]];
        const float sum = exp_row(x, x, n, 1, m);
        losses[r] = logf(sum) + m - at_target;
        if (scale == 0) continue;
        scale_row(x, scale / sum, n);
        x[targets[r]] -= scale;
    })
}

/* ---- Attention ----------------------------------------------------------------------------------
   tests/plain.h has the same in plain loops. With c = min(n, clip), for j <= i:
       s_ij = q_i.(k_j + rel_k[c]) / sqrt(D) + bias[n],  A_ij = softmax over j of s_ij,
       o_i = sum_j A_ij (v_j + rel_v[c]).
   A T x T matrix is never kept. Tiles of TQ queries walk over tiles of TK keys, those left of the
   diagonal and on it:

                    keys    0     TK    2 TK
         queries 0       +-----+
                         |*\   |          A row sees the keys up to its own, `seen` of a tile;
              TQ         +-----+          the rest of a tile is 0.
                         |***\ |
            2 TQ         +-----+-----+
                         |*****|*\   |

   with an online softmax (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022): with the
   running maximum m, sum l and output o of the keys so far, a tile turns them into
       m' = max(m, max_j s_j),  p_j = e^(s_j - m'),
       l' = l e^(m - m') + sum_j p_j,  o' = o e^(m - m') + sum_j p_j v_j.
   What is kept is o / l and the log-sum-exp, lse = m + log l. The backward computes again
   p_ij = e^(s_ij - lse_i); with delta_i = do_i.o_i:
       dv_j = sum_i p_ij do_i,  ds_ij = p_ij (do_i.(v_j + rel_v[c]) - delta_i),  dbias[n] += ds_ij,
       dq_i = sum_j ds_ij (k_j + rel_k[c]) / sqrt(D),  dk_j = sum_i ds_ij q_i / sqrt(D),
       drel_k[c] += ds_ij q_i / sqrt(D),  drel_v[c] += p_ij do_i.

   All that an encoding adds is a vector by distance: bias itself, one for a head, and the products
   q_i.rel_k[c] and do_i.rel_v[c], one for a query. Two functions serve them all: add_by_distance
   adds such a vector to a row of scores, sum_by_distance is its transpose. */

enum { TQ = 48, TK = 96 };
_Static_assert(TQ % MR == 0 && TK % MR == 0 && TK % NR == 0, "whole tiles");

typedef struct {
    int B, T, H, G, D;            // sequences, tokens, query heads, key heads, head size
    size_t width;                 // floats in a row of qkv: H heads of q, G of k, G of v
    const PosTables *pos, *dpos;
    const int *positions;         // (B, T), or NULL: 0 .. T-1
    float *qkv;                   // (B, T, width); the backward leaves the gradients there
    float *out, *lse;             // (B, T, H, D) (B, T, H)
    const float *dout;            // (B, T, H, D)
    float *parts;                 // (B, H, see part_size) gradients of the encoding by head
} Attention;

typedef struct {                  // queries i0 .. i0+rows-1 and at most `keys` keys from j0 on
    int i0, rows, j0, keys;
    const int *positions;
} Tile;

static int seen_keys(Tile t, int r)    // by query r of the tile
{
    const int n = t.i0 + r + 1 - t.j0;
    return n < 0 ? 0 : n < t.keys ? n : t.keys;
}

/* A vector by distance is stored backwards, the element of distance n at v[clip - min(n, clip)]:
   what query i takes of it for the keys from j0 on lies in the order of the keys.

       key        j0   ...  i - clip | i - clip + 1  ...  i
       element   v[0]  ...    v[0]   |     v[1]      ...  v[clip]

   far_keys: how many of the keys that query r sees are left of that line. */
static int far_keys(Tile t, int r, int clip)
{
    const int i = t.i0 + r, seen = seen_keys(t, r), *p = t.positions;
    int far = i - clip - t.j0 + 1;
    if (p) for (far = 0; far < seen && p[i] - p[t.j0 + far] >= clip;) far++;
    return far < 0 ? 0 : far < seen ? far : seen;
}

static void add_by_distance(float *restrict s, const float *restrict v, int clip, Tile t, int r)
{
    const int far = far_keys(t, r, clip), seen = seen_keys(t, r), i = t.i0 + r;
    const int *p = t.positions;
    for (int j = 0; j < far; j++) s[j] += v[0];
    if (!p) for (int j = far; j < seen; j++) s[j] += v[clip - i + t.j0 + j];
    else for (int j = far; j < seen; j++) s[j] += v[clip - p[i] + p[t.j0 + j]];
}

static void sum_by_distance(float *restrict v, const float *restrict s, int clip, Tile t, int r)
{
    const int far = far_keys(t, r, clip), seen = seen_keys(t, r), i = t.i0 + r;
    const int *p = t.positions;
    v[0] += sum_of(s, (size_t)far);
    if (!p) for (int j = far; j < seen; j++) v[clip - i + t.j0 + j] += s[j];
    else for (int j = far; j < seen; j++) v[clip - p[i] + p[t.j0 + j]] += s[j];
}

static size_t rel_rows(const PosTables *pos)    // of rel_k and rel_v
{
    return pos->rel_k || pos->rel_v ? (size_t)pos->clip + 1 : 0;
}

static const float *head_bias(const PosTables *pos, int h) { return pos_bias(pos, h, pos->len - 1); }

/* Copies (rows, D), `stride` floats apart, as rows of Dp floats, or as D columns of ld. */
static void copy_rows(float *dst, size_t Dp, const float *src, ptrdiff_t stride, size_t rows,
                      size_t D, float scale)
{
    for (size_t r = 0; r < rows; r++, src += stride, dst += Dp)
        for (size_t d = 0; d < D; d++) dst[d] = scale * src[d];
}

static void copy_columns(float *dst, size_t ld, const float *src, ptrdiff_t stride, size_t rows,
                         size_t D)
{
    for (size_t r0 = 0; r0 < rows; r0 += 16)    // 16 rows at a time: a cache line of dst
        for (size_t d = 0; d < D; d++)
            for (size_t r = r0; r < min_size(r0 + 16, rows); r++)
                dst[d * ld + r] = src[(ptrdiff_t)r * stride + (ptrdiff_t)d];
}

/* Keys and values play the same two parts. In the forward, queries are multiplied by keys and
   values are summed by weights p; in the backward, gradients of the output are multiplied by values
   and keys are summed by ds. So a side is: y, the keys (or values) of a head; rel, their vectors by
   distance; x, the tile that they are multiplied by, q / sqrt(D) (or dout). Sizes are rounded up to
   what the micro-kernel reads and writes; what stands in the padding is never used. */
typedef struct {
    const float *rel;                // (R, D)    rel_k or rel_v; NULL: there are none
    float *y, *y_columns, *dy;       // (Tp, Dp)  (D, Tp)  (Tp, Dp)
    float *rel_y, *rel_columns;      // (Rp, Dp)  (D, Rp)  backwards
    float *x, *x_rel;                // (TQ, Dp)  (TQ, Rp) x.rel
    float *by_distance;              // (TQ, Rp)  sums of weights, p or ds
} Side;

typedef struct {                     // a thread's scratch for one head
    size_t T, D, R;                  // tokens, head size, rows of rel
    size_t Dp, Tp, Rm, Rp;           // D to whole vectors, T to TK, R to MR and to vectors too
    Side k, v;
    float *sum;                      // (TQ, Dp)  the output, or dq
    float *p, *ds;                   // (TQ, TK)  scores, then weights; their gradients
} Scratch;

static size_t scratch_layout(Scratch *s, const Attention *a, float *base)    // returns its floats
{
    size_t n = 0;
    Side *const sides[] = { &s->k, &s->v };
    s->T = (size_t)a->T, s->D = (size_t)a->D, s->R = rel_rows(a->pos);
    s->Dp = round_up(s->D, VL), s->Tp = round_up(s->T, TK);
    s->Rm = round_up(s->R, MR), s->Rp = round_up(s->Rm, VL);
    for (int i = 0; i < 2; i++) {
        Side *side = sides[i];
        side->rel = i ? a->pos->rel_v : a->pos->rel_k;
        side->y = reserve(base, &n, s->Tp * s->Dp);
        side->y_columns = reserve(base, &n, s->D * s->Tp);
        side->dy = reserve(base, &n, s->Tp * s->Dp);
        side->rel_y = reserve(base, &n, s->Rp * s->Dp);
        side->rel_columns = reserve(base, &n, s->D * s->Rp);
        side->x = reserve(base, &n, TQ * s->Dp);
        side->x_rel = reserve(base, &n, TQ * s->Rp);
        side->by_distance = reserve(base, &n, TQ * s->Rp);
    }
    s->sum = reserve(base, &n, TQ * s->Dp);
    s->p = reserve(base, &n, TQ * TK);
    s->ds = reserve(base, &n, TQ * TK);
    return n;
}

static void load_rel(const Scratch *s, const Side *side)
{
    if (!side->rel) return;
    const ptrdiff_t D = (ptrdiff_t)s->D;
    const float *last = side->rel + (ptrdiff_t)(s->R - 1) * D;
    copy_rows(side->rel_y, s->Dp, last, -D, s->R, s->D, 1);
    copy_columns(side->rel_columns, s->Rp, last, -D, s->R, s->D);
}

/* Before the keys of a tile of queries. */
static void load_x(const Scratch *s, const Side *side, const float *x, size_t stride, Tile t,
                   float scale)
{
    copy_rows(side->x, s->Dp, x, (ptrdiff_t)stride, (size_t)t.rows, s->D, scale);
    zero(side->by_distance, TQ * s->Rp);
    if (!side->rel) return;
    product(side->x_rel, s->Rp, side->x, s->Dp, 1, side->rel_columns, s->Rp, (size_t)t.rows, s->Rp,
            s->D, NULL);
}

/* tile (TQ, TK) = x.(y + rel) */
static void dots(float *tile, const Scratch *s, const Side *side, Tile t)
{
    product(tile, TK, side->x, s->Dp, 1, side->y_columns + t.j0, s->Tp, (size_t)t.rows,
            (size_t)seen_keys(t, t.rows - 1), s->D, NULL);
    for (int r = 0; side->rel && r < t.rows; r++)
        add_by_distance(tile + r * TK, side->x_rel + (size_t)r * s->Rp, (int)s->R - 1, t, r);
}

static void scores(const Scratch *s, const PosTables *pos, Tile t, int h)
{
    dots(s->p, s, &s->k, t);
    for (int r = 0; pos->bias && r < t.rows; r++)
        add_by_distance(s->p + r * TK, head_bias(pos, h), pos->len - 1, t, r);
}

/* sum (TQ, Dp) += weights (y + rel), those of rel by distance: see add_rel. */
static void add_weighted(const Scratch *s, const Side *side, const float *weights, Tile t)
{
    product(s->sum, s->Dp, weights, TK, 1, side->y + (size_t)t.j0 * s->Dp, s->Dp, (size_t)t.rows,
            s->Dp, (size_t)seen_keys(t, t.rows - 1), s->sum);
    for (int r = 0; side->rel && r < t.rows; r++)
        sum_by_distance(side->by_distance + (size_t)r * s->Rp, weights + r * TK, (int)s->R - 1, t,
                        r);
}

static void add_rel(const Scratch *s, const Side *side, Tile t)    // after the last tile of keys
{
    if (!side->rel) return;
    product(s->sum, s->Dp, side->by_distance, s->Rp, 1, side->rel_y, s->Dp, (size_t)t.rows, s->Dp,
            s->R, s->sum);
}

/* dy += weights^T x, for weights ds or p */
static void add_dy(const Scratch *s, const Side *side, const float *weights, Tile t)
{
    float *dy = side->dy + (size_t)t.j0 * s->Dp;
    product(dy, s->Dp, weights, 1, TK, side->x, s->Dp, (size_t)seen_keys(t, t.rows - 1), s->Dp,
            (size_t)t.rows, dy);
}

/* drel += by_distance^T x */
static void add_drel(float *drel, const Scratch *s, const Side *side, Tile t)
{
    if (!side->rel) return;
    product(drel, s->Dp, side->by_distance, 1, s->Rp, side->x, s->Dp, s->R, s->Dp, (size_t)t.rows,
            drel);
}

/* A row of scores becomes e^(s - top), and 0 for keys that are not seen. Returns the sum. */
static float exponentials(float *s, int seen, float top)
{
    const size_t n = round_up((size_t)seen, VL);
    vec sums = {0};
    for (size_t j = (size_t)seen; j < n; j++) s[j] = -INFINITY;
    for (size_t j = 0; j < n; j += VL) {
        const vec e = vexp(load(s + j) - top);
        store(s + j, e);
        sums += e;
    }
    zero(s + n, TK - n);
    return vsum(sums);
}

static Tile first_tile(const Attention *a, int b, int i0)
{
    return (Tile){ i0, a->T - i0 < TQ ? a->T - i0 : TQ, 0, TK,
                   a->positions ? a->positions + (size_t)b * (size_t)a->T : NULL };
}

static void head_forward(const Scratch *s, const Attention *a, int b, int h)
{
    const size_t D = s->D, H = (size_t)a->H, width = a->width, first = (size_t)b * s->T;
    const float *q = a->qkv + first * width + (size_t)h * D;
    const float *k = a->qkv + first * width + (H + (size_t)(h / (a->H / a->G))) * D;
    copy_columns(s->k.y_columns, s->Tp, k, (ptrdiff_t)width, s->T, D);
    copy_rows(s->v.y, s->Dp, k + (size_t)a->G * D, (ptrdiff_t)width, s->T, D, 1);
    load_rel(s, &s->k), load_rel(s, &s->v);
    for (int i0 = 0; i0 < a->T; i0 += TQ) {
        Tile t = first_tile(a, b, i0);
        float m[TQ], l[TQ] = {0};
        for (int r = 0; r < TQ; r++) m[r] = -INFINITY;
        load_x(s, &s->k, q + (size_t)i0 * width, width, t, 1 / sqrtf((float)D));
        zero(s->sum, TQ * s->Dp), zero(s->v.by_distance, TQ * s->Rp);
        for (; t.j0 < i0 + t.rows; t.j0 += TK) {
            scores(s, a->pos, t, h);
            for (int r = 0; r < t.rows; r++) {
                float *row = s->p + r * TK;
                const float top = row_max(row, (size_t)seen_keys(t, r));
                if (top > m[r]) {
                    const float shrink = expf(m[r] - top);
                    m[r] = top;
                    l[r] *= shrink;
                    scale_row(s->sum + (size_t)r * s->Dp, shrink, s->Dp);
                    scale_row(s->v.by_distance + (size_t)r * s->Rp, shrink, s->Rp);
                }
                l[r] += exponentials(row, seen_keys(t, r), m[r]);
            }
            add_weighted(s, &s->v, s->p, t);
        }
        add_rel(s, &s->v, t);
        for (int r = 0; r < t.rows; r++) {
            const size_t at = (first + (size_t)(i0 + r)) * H + (size_t)h;
            for (size_t d = 0; d < D; d++)
                a->out[at * D + d] = s->sum[(size_t)r * s->Dp + d] / l[r];
            a->lse[at] = m[r] + logf(l[r]);
        }
    }
}

typedef struct { size_t bias, rel, all; } PartSize;    // floats: bias, rel_k and rel_v
static PartSize part_size(const Scratch *s, const PosTables *dpos)
{
    const size_t bias = dpos->bias ? (size_t)dpos->len : 0, rel = s->Rm * s->Dp;
    return (PartSize){ bias, rel, bias + 2 * rel };
}

/* A key head with the query heads that share it. q, k and v are copied before their gradients take
   their places. */
static void head_backward(const Scratch *s, const Attention *a, int b, int g)
{
    const size_t D = s->D, H = (size_t)a->H, width = a->width, first = (size_t)b * s->T;
    const ptrdiff_t stride = (ptrdiff_t)width;
    const float scale = 1 / sqrtf((float)D);
    const int group = a->H / a->G;
    const PartSize part = part_size(s, a->dpos);
    float *k = a->qkv + first * width + (H + (size_t)g) * D, *v = k + (size_t)a->G * D;
    copy_columns(s->k.y_columns, s->Tp, k, stride, s->T, D);
    copy_columns(s->v.y_columns, s->Tp, v, stride, s->T, D);
    copy_rows(s->k.y, s->Dp, k, stride, s->T, D, 1);
    load_rel(s, &s->k), load_rel(s, &s->v);
    zero(s->k.dy, s->Tp * s->Dp), zero(s->v.dy, s->Tp * s->Dp);
    for (int h = g * group; h < (g + 1) * group; h++) {
        float *dbias = a->parts + ((size_t)b * H + (size_t)h) * part.all;
        for (int i0 = 0; i0 < a->T; i0 += TQ) {
            Tile t = first_tile(a, b, i0);
            const size_t row = first + (size_t)i0, at = row * H + (size_t)h;
            float *q = a->qkv + row * width + (size_t)h * D, delta[TQ];
            const float *dout = a->dout + at * D, *out = a->out + at * D;
            load_x(s, &s->k, q, width, t, scale);
            load_x(s, &s->v, dout, H * D, t, 1);
            zero(s->sum, TQ * s->Dp);
            for (size_t r = 0; r < (size_t)t.rows; r++)
                delta[r] = dot(dout + r * H * D, out + r * H * D, D);
            for (; t.j0 < i0 + t.rows; t.j0 += TK) {
                scores(s, a->pos, t, h);
                dots(s->ds, s, &s->v, t);
                for (int r = 0; r < t.rows; r++) {
                    const size_t n = round_up((size_t)seen_keys(t, r), VL);
                    float *p = s->p + r * TK, *ds = s->ds + r * TK;
                    exponentials(p, seen_keys(t, r), a->lse[at + (size_t)r * H]);
                    for (size_t j = 0; j < n; j += VL)
                        store(ds + j, load(p + j) * (load(ds + j) - delta[r]));
                    zero(ds + n, TK - n);
                    if (part.bias) sum_by_distance(dbias, ds, a->pos->len - 1, t, r);
                }
                add_weighted(s, &s->k, s->ds, t);
                add_dy(s, &s->k, s->ds, t);
                add_dy(s, &s->v, s->p, t);
                for (int r = 0; s->v.rel && r < t.rows; r++)
                    sum_by_distance(s->v.by_distance + (size_t)r * s->Rp, s->p + r * TK,
                                    (int)s->R - 1, t, r);
            }
            add_rel(s, &s->k, t);
            add_drel(dbias + part.bias, s, &s->k, t);
            add_drel(dbias + part.bias + part.rel, s, &s->v, t);
            copy_rows(q, width, s->sum, (ptrdiff_t)s->Dp, (size_t)t.rows, D, scale);
        }
    }
    copy_rows(k, width, s->k.dy, (ptrdiff_t)s->Dp, s->T, D, 1);
    copy_rows(v, width, s->v.dy, (ptrdiff_t)s->Dp, s->T, D, 1);
}

/* Static shares: a thread takes neighbouring heads, mostly those whose rows it computed. */
static void for_heads(const Attention *a, int heads, float *scratch,
                      void (*work)(const Scratch *, const Attention *, int b, int h))
{
    #pragma omp parallel if ((size_t)(a->B * a->T) * a->width > MIN_PARALLEL)
    {
        Scratch s;
        const size_t floats = scratch_layout(&s, a, NULL);
        scratch_layout(&s, a, scratch + (size_t)omp_get_thread_num() * floats);
        #pragma omp for schedule(static) nowait
        for (long task = 0; task < (long)a->B * heads; task++)
            work(&s, a, (int)(task / heads), (int)(task % heads));
        barrier();
    }
}

static void attention_forward(const Attention *a)
{
    SECTION(ATTENTION);
    Scratch s;
    float *scratch = workspace((size_t)omp_get_max_threads() * scratch_layout(&s, a, NULL));
    for_heads(a, a->H, scratch, head_forward);
}

/* The parts of the heads are added to dpos in order, so that no bit depends on the threads. */
static void attention_backward(Attention *a)
{
    SECTION(ATTENTION);
    Scratch s;
    const size_t per_thread = scratch_layout(&s, a, NULL);
    const PartSize part = part_size(&s, a->dpos);
    const size_t heads = (size_t)(a->B * a->H), parts = heads * part.all;
    a->parts = workspace(parts + (size_t)omp_get_max_threads() * per_thread);
    zero(a->parts, parts);
    for_heads(a, a->G, a->parts + parts, head_backward);
    for (size_t head = 0; head < heads; head++) {
        const float *bias = a->parts + head * part.all, *rel_k = bias + part.bias;
        const float *rel_v = rel_k + part.rel;
        if (part.bias)
            axpy(a->dpos->bias + head % (size_t)a->H * part.bias, 1, bias, part.bias);
        for (size_t c = 0; c < s.R; c++) {
            const size_t to = (s.R - 1 - c) * s.D;    // they are backwards
            if (s.k.rel) axpy(a->dpos->rel_k + to, 1, rel_k + c * s.Dp, s.D);
            if (s.v.rel) axpy(a->dpos->rel_v + to, 1, rel_v + c * s.Dp, s.D);
        }
    }
}

/* ---- Attention of one query: generation and inspection ------------------------------------------
   The cache of a layer is 2 G arrays, one for every key head and then one for every value head. An
   array is blocks of LANES tokens, transposed, so that a vector holds one element of neighbouring
   tokens and no sum runs across a vector, however small a head. */
enum { LANES = 16 };
static size_t cache_head(int len, size_t D) { return round_up((size_t)len, LANES) * D; }   // floats
static size_t cache_layer(int len, const Config *c)
{
    return 2 * (size_t)c->n_kv_heads * cache_head(len, (size_t)(c->dim / c->n_heads));
}

/* Copies head h, of k or v, from n rows of qkv to the tokens from `start` on. */
static void cache_store_head(float *cache, int len, const Attention *a, int start, int n, int h)
{
    const size_t D = (size_t)a->D;
    const float *row = a->qkv + (size_t)(a->H + h) * D;
    for (size_t t = (size_t)start; t < (size_t)(start + n); t++, row += a->width) {
        float *block = cache + (size_t)h * cache_head(len, D) + t / LANES * LANES * D;
        for (size_t d = 0; d < D; d++) block[d * LANES + t % LANES] = row[d];
    }
}

static void cache_store(float *cache, int len, const Attention *a, int start, int n)
{
    if (n == 1) {
        for (int h = 0; h < 2 * a->G; h++) cache_store_head(cache, len, a, start, n, h);
        return;
    }
    #pragma omp parallel for schedule(static)
    for (int h = 0; h < 2 * a->G; h++) cache_store_head(cache, len, a, start, n, h);
}

/* What the encoding adds to the scores of query i for all keys up to it. rel (clip+1): scratch. */
static void add_biases(float *s, float *rel, const float *q, const Attention *a, int h, int i)
{
    const PosTables *pos = a->pos;
    const size_t D = (size_t)a->D;
    const Tile t = { .i0 = i, .rows = 1, .keys = i + 1 };
    if (pos->bias) add_by_distance(s, head_bias(pos, h), pos->len - 1, t, 0);
    if (!pos->rel_k) return;
    for (int c = 0; c <= pos->clip && c <= i; c++)
        rel[pos->clip - c] = dot(q, pos->rel_k + (size_t)c * D, D) / sqrtf((float)D);
    add_by_distance(s, rel, pos->clip, t, 0);
}

/* The query of the last of S tokens. Keys and values are read once, and the block after the next is
   prefetched. scratch: see attention_step. */
static void attention_step_head(float *scratch, const float *cache, int len, int S,
                                const Attention *a, int h)
{
    const PosTables *pos = a->pos;
    const size_t D = (size_t)a->D, n = (size_t)S, np = round_up(n, LANES);
    const float *q = a->qkv + (size_t)h * D, scale = 1 / sqrtf((float)D);
    const float *k = cache + (size_t)(h / (a->H / a->G)) * cache_head(len, D);
    const float *v = k + (size_t)a->G * cache_head(len, D);
    float *s = scratch, *rel = scratch + np + D * LANES, *o = a->out + (size_t)h * D;
    float *sums = scratch + np;    // (D, LANES) of s_j v_j, by j % LANES
    for (size_t j = 0; j < n; j += LANES) {
        const float *block = k + j * D;
        vec score[LANES / VL] = {0};
        for (size_t d = 0; d < D; d++) {
            __builtin_prefetch(block + (2 * D + d) * LANES);
            for (int x = 0; x < LANES / VL; x++)
                score[x] += scale * q[d] * load(block + d * LANES + x * VL);
        }
        for (int x = 0; x < LANES / VL; x++) store(s + j + x * VL, score[x]);
    }
    add_biases(s, rel, q, a, h, S - 1);
    for (size_t j = n; j < np; j++) s[j] = -INFINITY;
    const float top = row_max(s, n);
    for (size_t j = 0; j < np; j += VL) store(s + j, vexp(load(s + j) - top));
    zero(sums, D * LANES);
    for (size_t j = 0; j < n; j += LANES) {
        const float *block = v + j * D;
        for (size_t d = 0; d < D; d++) {
            __builtin_prefetch(block + (2 * D + d) * LANES);
            for (size_t x = d * LANES; x < (d + 1) * LANES; x += VL)
                store(sums + x, load(sums + x) + load(s + j + x % LANES) * load(block + x));
        }
    }
    for (size_t d = 0; d < D; d++) o[d] = sum_of(sums + d * LANES, LANES);
    if (pos->rel_v) {
        zero(rel, rel_rows(pos));
        sum_by_distance(rel, s, pos->clip, (Tile){ .i0 = S - 1, .rows = 1, .keys = S }, 0);
        for (int c = 0; c <= pos->clip; c++)
            axpy(o, rel[pos->clip - c], pos->rel_v + (size_t)c * D, D);
    }
    scale_row(o, 1 / sum_of(s, np), D);
}

/* out (H, D) of one row of qkv, whose k and v are in the cache as the last of S tokens. */
static void attention_step(const float *cache, int len, int S, const Attention *a)
{
    const size_t D = (size_t)a->D, H = (size_t)a->H;
    const size_t per_head = round_up((size_t)S, LANES) + D * LANES + round_up(rel_rows(a->pos), 16);
    float *s = workspace(H * per_head);
    if ((size_t)S * D * H <= MIN_PARALLEL) {
        for (int h = 0; h < a->H; h++) attention_step_head(s, cache, len, S, a, h);
        return;
    }
    #pragma omp parallel for schedule(static)
    for (int h = 0; h < a->H; h++)
        attention_step_head(s + (size_t)h * per_head, cache, len, S, a, h);
}

/* ---- The model ------------------------------------------------------------------------------- */

const char *config_check(Config *c)
{
    static char why[200];
    why[0] = 0;
    if (!c->n_kv_heads) c->n_kv_heads = c->n_heads;
    if (!c->hidden_dim && c->dim > 0)    // Llama: three matrices of 8/3 dim cost what two of 4 dim do
        c->hidden_dim = (int)round_up((size_t)c->dim * 8 / 3, 32);
    const struct { const char *name; int value; } sizes[] = {
        { "dim", c->dim }, { "layers", c->n_layers }, { "heads", c->n_heads },
        { "kv-heads", c->n_kv_heads }, { "hidden", c->hidden_dim },
        { "vocabulary", c->vocab_size }, { "context", c->seq_len } };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i].value < 1 || sizes[i].value > 1 << 24) {
            snprintf(why, sizeof why, "%s %d is not between 1 and %d",
                     sizes[i].name, sizes[i].value, 1 << 24);
            return why;
        }
    const double dim = (double)c->dim, floats = (double)c->vocab_size * dim * (1 + !!c->untied)
        + (double)c->n_layers * dim * (4 * dim + 3 * (double)c->hidden_dim);
    if (c->dim % c->n_heads)
        snprintf(why, sizeof why, "dim %d is not a multiple of heads %d", c->dim, c->n_heads);
    else if (c->n_heads % c->n_kv_heads)
        snprintf(why, sizeof why, "heads %d is not a multiple of kv-heads %d", c->n_heads,
                 c->n_kv_heads);
    else if (floats > 1e12)
        snprintf(why, sizeof why, "a model of this shape has more than 10^12 parameters");
    else
        pos_check(c, why, sizeof why);
    return why[0] ? why : NULL;
}

static size_t kv_dim(const Config *c)    // floats in a row of keys, or of values
{
    return (size_t)(c->dim / c->n_heads * c->n_kv_heads);
}

/* The layout of an arena is written down here and nowhere else. It is also the order of the tensors
   in model.bin. A file of another order says at which float the tensors of each slot begin, layer
   behind layer. */
enum { EMB, RMS_ATT, WQ, WK, WV, WO, RMS_FFN, W1, W3, W2, LAYER_POS, RMS_FINAL, CLS, SHARED_POS,
            SLOTS };
static const struct { const char *name; enum TensorKind kind; } SLOT[SLOTS] = {
    [EMB] = { "token_embedding", EMBEDDING }, [RMS_ATT] = { "rms_att", GAIN },
    [WQ] = { "wq", MATRIX }, [WK] = { "wk", MATRIX }, [WV] = { "wv", MATRIX },
    [WO] = { "wo", RESIDUAL }, [RMS_FFN] = { "rms_ffn", GAIN }, [W1] = { "w1", MATRIX },
    [W3] = { "w3", MATRIX }, [W2] = { "w2", RESIDUAL }, [LAYER_POS] = { "pos", POSITION },
    [RMS_FINAL] = { "rms_final", GAIN }, [CLS] = { "wcls", EMBEDDING },
    [SHARED_POS] = { "pos", POSITION } };

static float *take(Params *p, int slot, int layer, size_t count)
{
    const size_t later = layer > 0 ? (size_t)layer * count : 0;
    const size_t offset = p->first ? p->first[slot] + later : p->count;
    if (!count) return NULL;
    if (p->tensors) {
        Tensor *t = &p->tensors[p->n_tensors];
        *t = (Tensor){ .kind = SLOT[slot].kind, .offset = offset, .count = count };
        if (layer < 0) snprintf(t->name, sizeof t->name, "%s", SLOT[slot].name);
        else snprintf(t->name, sizeof t->name, "layers.%d.%s", layer, SLOT[slot].name);
    }
    p->n_tensors++;
    p->count += count;
    return p->data ? p->data + offset : NULL;
}

static size_t slot_floats(const Config *c, int slot)    // of one layer
{
    const size_t dim = (size_t)c->dim;
    const size_t hidden = (size_t)c->hidden_dim, V = (size_t)c->vocab_size;
    switch (slot) {
        case EMB: return V * dim;
        case RMS_ATT: case RMS_FFN: case RMS_FINAL: return dim;
        case WQ: case WO: return dim * dim;
        case WK: case WV: return kv_dim(c) * dim;
        case W1: case W3: case W2: return hidden * dim;
        case LAYER_POS: return c->pos->layer_params ? c->pos->layer_params(c) : 0;
        case CLS: return c->untied ? V * dim : 0;
        default: return c->pos->shared_params ? c->pos->shared_params(c) : 0;
    }
}

static void params_layout(Params *p, const Config *c)
{
    Layer unused, *l;
    p->count = 0;
    p->n_tensors = 0;
    p->token_embedding = take(p, EMB, -1, slot_floats(c, EMB));
    for (int i = 0; i < c->n_layers; i++) {
        l = p->layers ? &p->layers[i] : &unused;
        float **const field[] = { &l->rms_att, &l->wq, &l->wk, &l->wv, &l->wo, &l->rms_ffn,
                                  &l->w1, &l->w3, &l->w2, &l->pos };
        for (int k = RMS_ATT; k <= LAYER_POS; k++)
            *field[k - RMS_ATT] = take(p, k, i, slot_floats(c, k));
    }
    p->rms_final = take(p, RMS_FINAL, -1, slot_floats(c, RMS_FINAL));
    p->wcls = take(p, CLS, -1, slot_floats(c, CLS));
    if (!c->untied) p->wcls = p->token_embedding;
    p->pos = take(p, SHARED_POS, -1, slot_floats(c, SHARED_POS));
}

size_t config_params(const Config *c)
{
    Params p = {0};
    params_layout(&p, c);
    return p.count;
}

/* Points an arena into data, or into memory of its own when data is NULL. */
static void params_create(Params *p, const Config *c, float *data, const size_t *first)
{
    *p = (Params){ .first = first };
    params_layout(p, c);
    p->data = data ? data : xmalloc(p->count * sizeof *data);
    p->layers = xmalloc((size_t)c->n_layers * sizeof *p->layers);
    p->tensors = xmalloc((size_t)p->n_tensors * sizeof *p->tensors);
    params_layout(p, c);
    p->first = NULL;
}

static void tables_create(PosTables *t, const Config *c, float *shared, int len)
{
    *t = (PosTables){ .len = len, .embed_scale = 1 };
    if (c->pos->build) c->pos->build(t, shared, c);
}

/* data NULL: parameters in memory of their own. first NULL: in our own order. */
static void model_place(Model *m, const Config *c, int max_len, float *data, const size_t *first)
{
    m->config = *c;
    params_create(&m->params, c, data, first);
    tables_create(&m->pos, c, m->params.pos, max_len);
}

void model_create(Model *m, const Config *c, int max_len)
{
    *m = (Model){0};
    model_place(m, c, max_len, NULL, NULL);
}

void model_tables(Model *m, int len)
{
    for (int i = 0; i < 2; i++) free(m->pos.owned[i]);
    tables_create(&m->pos, &m->config, m->params.pos, len);
}

void model_init(Model *m, uint64_t seed)
{
    const Params *p = &m->params;
    for (int i = 0; i < p->n_tensors; i++) {
        const Tensor *t = &p->tensors[i];
        float std = 0.02f, *w = p->data + t->offset;
        if (t->kind == RESIDUAL) std /= sqrtf(2 * (float)m->config.n_layers);
        if (t->kind == POSITION) std = m->config.pos->init_std;
        // From the name: a tensor starts the same whatever encoding stands beside it.
        uint64_t purpose = RNG_INIT;
        for (const char *s = t->name; *s; s++) purpose = mix(purpose ^ (uint64_t)*s);
        #pragma omp parallel for schedule(static)
        for (long k = 0; k < (long)t->count; k++)
            w[k] = t->kind == GAIN ? 1 : std > 0 ? std * rng_normal(seed, purpose, (uint64_t)k) : 0;
    }
}

void model_train_begin(Model *m)
{
    params_create(&m->grads, &m->config, NULL, NULL);
    if (!m->m) {
        m->m = xmalloc(m->params.count * sizeof(float));
        m->v = xmalloc(m->params.count * sizeof(float));
    }
    if (m->params.pos) tables_create(&m->dpos, &m->config, m->grads.pos, m->pos.len);
}

typedef struct {                  // what a forward leaves for the backward, of one layer
    float *x;                     // (rows, dim) its input
    float *qkv;                   // (rows, dim + 2 kv_dim) turned
    float *att, *lse;             // (rows, dim) (rows, H) output of attention
    float *mid;                   // (rows, dim) input of the second norm
    float *ab;                    // (rows, 2 hidden) w1 x and w3 x
} LayerActs;

struct Activations {
    size_t rows;                  // B * T it has room for
    int training;                 // 0: the layers share their memory
    float *block;
    LayerActs *layers;            // (n_layers+1), of the last only x
    float *norm, *hidden;         // (rows, dim) (rows, hidden) output of a norm, of SwiGLU; in the
                                  // backward also their gradients, and norm that of att
    float *dx;                    // (rows, dim) gradient of the residual stream
    float *logits, *losses;       // (HEAD_ROWS, V) (rows)
};

enum { HEAD_ROWS = 128 };         // rows whose logits exist at the same time

/* Called twice: with base NULL to count the floats, then to point into a block of that size. */
static size_t activations_layout(Activations *a, const Config *c, float *base)
{
    const size_t n = a->rows, dim = (size_t)c->dim, hidden = (size_t)c->hidden_dim;
    size_t floats = 0;
    LayerActs l = {0};
    for (int i = 0; i <= c->n_layers; i++) {
        const size_t rows = i < c->n_layers ? n : 0;    // of the last only x
        if (!i || a->training) {
            l.x = reserve(base, &floats, n * dim);
            l.qkv = reserve(base, &floats, rows * (dim + 2 * kv_dim(c)));
            l.att = reserve(base, &floats, rows * dim);
            l.lse = reserve(base, &floats, rows * (size_t)c->n_heads);
            l.mid = reserve(base, &floats, rows * dim);
            l.ab = reserve(base, &floats, rows * 2 * hidden);
        }
        if (base) a->layers[i] = l;
    }
    a->norm = reserve(base, &floats, n * dim);
    a->hidden = reserve(base, &floats, n * hidden);
    a->logits = reserve(base, &floats, min_size(n, HEAD_ROWS) * (size_t)c->vocab_size);
    a->losses = reserve(base, &floats, n);
    if (a->training) a->dx = reserve(base, &floats, n * dim);
    return floats;
}

static void activations_free(Activations *a)
{
    if (a) free(a->block), free(a->layers);
    free(a);
}

/* Room for `rows` tokens; keeps what is there when it is enough. */
static Activations *activations_for(Model *m, size_t rows, int training)
{
    Activations *a = m->acts;
    if (a && a->rows >= rows && a->training >= training) return a;
    Activations need = { .rows = rows, .training = training };
    if (a && a->rows > rows) need.rows = a->rows;
    if (a && a->training) need.training = 1;
    activations_free(a);
    need.block = xmalloc(activations_layout(&need, &m->config, NULL) * sizeof(float));
    need.layers = xmalloc((size_t)(m->config.n_layers + 1) * sizeof *need.layers);
    activations_layout(&need, &m->config, need.block);
    a = m->acts = xmalloc(sizeof *a);
    *a = need;
    return a;
}

/* A batch is worked off in pieces of whole sequences, about this many tokens: enough for the matrix
   products, few enough for the caches and for the memory of a laptop. */
enum { PIECE_TOKENS = 1024 };
static int piece_sequences(int B, int T)
{
    const int pieces = (int)div_up((size_t)B * (size_t)T, PIECE_TOKENS);
    const int most = pieces < B ? pieces : B;
    return (int)div_up((size_t)B, (size_t)most);
}

size_t model_scratch_floats(const Config *c, int B, int T)
{
    Activations a = { .rows = (size_t)piece_sequences(B, T) * (size_t)T, .training = 1 };
    return activations_layout(&a, c, NULL);
}

void model_free(Model *m)
{
    Params *arenas[] = { &m->params, &m->grads };
    for (int i = 0; i < 2; i++) {
        if (i || !m->map) free(arenas[i]->data);
        free(arenas[i]->layers);
        free(arenas[i]->tensors);
    }
    free(m->m), free(m->v);
    for (int i = 0; m->int8 && i < m->config.n_layers; i++) {
        const LayerInt8 *l = &m->int8[i];
        const Quantized all[] = { l->qkv, l->wo, l->w13, l->w2 };
        for (int k = 0; k < 4; k++) free(all[k].scale), free(all[k].q);
    }
    free(m->int8), free(m->wcls_int8.scale), free(m->wcls_int8.q);
    for (int i = 0; i < 2; i++) free(m->pos.owned[i]), free(m->dpos.owned[i]);
    activations_free(m->acts);
    tokenizer_free(&m->tokenizer);
    if (m->map) munmap(m->map, m->map_size);
    *m = (Model){0};
}

void model_quantize(Model *m)
{
    const Config *c = &m->config;
    const size_t dim = (size_t)c->dim, kv = kv_dim(c), hidden = (size_t)c->hidden_dim;
    m->int8 = xmalloc((size_t)c->n_layers * sizeof *m->int8);
    for (int i = 0; i < c->n_layers; i++) {
        const Layer *l = &m->params.layers[i];
        m->int8[i] = (LayerInt8){
            quantized((Matrices){ { l->wq, l->wk, l->wv }, { dim, kv, kv }, {0} }, dim),
            quantized((Matrices){ { l->wo }, { dim }, {0} }, dim),
            quantized((Matrices){ { l->w1, l->w3 }, { hidden, hidden }, {0} }, dim),
            quantized((Matrices){ { l->w2 }, { dim }, {0} }, hidden) };
    }
    m->wcls_int8 = quantized((Matrices){ { m->params.wcls }, { (size_t)c->vocab_size }, {0} }, dim);
}

static Attention attention_of(const Model *m, int layer, const int *positions, int B, int T)
{
    const Config *c = &m->config;
    const LayerActs *l = &m->acts->layers[layer];
    return (Attention){ .B = B, .T = T, .H = c->n_heads, .G = c->n_kv_heads,
                        .D = c->dim / c->n_heads, .width = (size_t)c->dim + 2 * kv_dim(c),
                        .pos = &m->pos, .dpos = &m->dpos, .positions = positions,
                        .qkv = l->qkv, .out = l->att, .lse = l->lse, .dout = m->acts->norm };
}

/* The whole network up to the last norm, whose output is left in acts->norm. With a cache the
   tokens (B = 1) are appended to it: the first ones together, then one by one. */
static void model_forward(Model *m, Cache *kv, const int *tokens, const int *positions,
                          int B, int T)
{
    const Config *c = &m->config;
    const Params *p = &m->params;
    const Activations *a = m->acts;
    const int start = kv ? kv->used : 0;
    const size_t rows = (size_t)B * (size_t)T, dim = (size_t)c->dim, hidden = (size_t)c->hidden_dim;

    embedding_forward(a->layers[0].x, p->token_embedding, &m->pos, tokens, positions, start, T,
                      rows, dim);
    for (int i = 0; i < c->n_layers; i++) {
        const Layer *w = &p->layers[i];
        const LayerActs *l = &a->layers[i];
        const Attention attention = attention_of(m, i, positions, B, T);
        LayerInt8 int8 = {0};
        if (m->int8) int8 = m->int8[i];
        if (c->pos->layer) c->pos->layer(&m->pos, w->pos, c);

        rmsnorm_forward(a->norm, l->x, w->rms_att, rows, dim);
        linear_forward(l->qkv, a->norm, (Matrices){ { w->wq, w->wk, w->wv },
                                                    { dim, kv_dim(c), kv_dim(c) }, int8.qkv },
                       rows, dim, NULL);
        rotate(l->qkv, &m->pos, c, positions, start, T, rows, 1);
        float *cache = kv ? kv->data + (size_t)i * cache_layer(kv->len, c) : NULL;
        if (kv) cache_store(cache, kv->len, &attention, start, T);
        if (start) attention_step(cache, kv->len, start + 1, &attention);
        else attention_forward(&attention);
        linear_forward(l->mid, l->att, (Matrices){ { w->wo }, { dim }, int8.wo }, rows, dim, l->x);

        rmsnorm_forward(a->norm, l->mid, w->rms_ffn, rows, dim);
        linear_forward(l->ab, a->norm, (Matrices){ { w->w1, w->w3 }, { hidden, hidden },
                                                   int8.w13 }, rows, dim, NULL);
        swiglu_forward(a->hidden, l->ab, rows, hidden);
        linear_forward(a->layers[i + 1].x, a->hidden, (Matrices){ { w->w2 }, { dim }, int8.w2 },
                       rows, hidden, l->mid);
    }
    rmsnorm_forward(a->norm, a->layers[c->n_layers].x, p->rms_final, rows, dim);
}

static void output_forward(float *logits, const float *x, const Model *m, size_t rows)
{
    const size_t V = (size_t)m->config.vocab_size;
    linear_forward(logits, x, (Matrices){ { m->params.wcls }, { V }, m->wcls_int8 }, rows,
                   (size_t)m->config.dim, NULL);
}

/* Loss of every row into acts->losses; when scale is not 0 also the gradient of the output matrix,
   and acts->norm becomes its own gradient. */
static void loss_head(Model *m, const int *targets, size_t rows, float scale)
{
    const size_t dim = (size_t)m->config.dim, V = (size_t)m->config.vocab_size;
    Activations *a = m->acts;
    for (size_t r0 = 0; r0 < rows; r0 += HEAD_ROWS) {
        const size_t n = min_size(HEAD_ROWS, rows - r0);
        float *x = a->norm + r0 * dim;
        output_forward(a->logits, x, m, n);
        cross_entropy(a->losses + r0, a->logits, targets + r0, n, V, scale);
        if (scale != 0)
            linear_backward(x, m->grads.wcls, a->logits, x, m->params.wcls, n, dim, V);
    }
}

/* From the gradient in acts->norm down to the embedding, in the reverse order of model_forward.
   What is cheap is computed again, not kept, and a gradient takes the place of its activation when
   that has served. */
static void layers_backward(Model *m, const int *tokens, const int *positions, int B, int T)
{
    const Config *c = &m->config;
    const Params *p = &m->params, *g = &m->grads;
    const Activations *a = m->acts;
    const size_t rows = (size_t)B * (size_t)T, dim = (size_t)c->dim, hidden = (size_t)c->hidden_dim;

    zero(a->dx, rows * dim);
    rmsnorm_backward(a->dx, g->rms_final, a->norm, a->layers[c->n_layers].x, p->rms_final, rows,
                     dim);
    for (int i = c->n_layers - 1; i >= 0; i--) {
        const Layer *w = &p->layers[i], *d = &g->layers[i];
        const LayerActs *l = &a->layers[i];
        Attention attention = attention_of(m, i, positions, B, T);
        if (c->pos->layer) {
            c->pos->layer(&m->pos, w->pos, c);
            c->pos->layer(&m->dpos, d->pos, c);
        }

        swiglu_forward(a->hidden, l->ab, rows, hidden);
        linear_backward(a->hidden, d->w2, a->dx, a->hidden, w->w2, rows, hidden, dim);
        swiglu_backward(l->ab, a->hidden, rows, hidden);
        rmsnorm_forward(a->norm, l->mid, w->rms_ffn, rows, dim);
        // w1 and w3 lie behind each other and are one matrix here, and so do wq, wk and wv
        linear_backward(a->norm, d->w1, l->ab, a->norm, w->w1, rows, dim, 2 * hidden);
        rmsnorm_backward(a->dx, d->rms_ffn, a->norm, l->mid, w->rms_ffn, rows, dim);

        linear_backward(a->norm, d->wo, a->dx, l->att, w->wo, rows, dim, dim);
        attention_backward(&attention);
        rotate(l->qkv, &m->pos, c, positions, 0, T, rows, -1);
        rmsnorm_forward(a->norm, l->x, w->rms_att, rows, dim);
        linear_backward(a->norm, d->wq, l->qkv, a->norm, w->wq, rows, dim, attention.width);
        rmsnorm_backward(a->dx, d->rms_att, a->norm, l->x, w->rms_att, rows, dim);
    }
    embedding_backward(g->token_embedding, &m->dpos, a->dx, tokens, positions, T, rows, dim);
}

/* Runs the batch piece by piece, with a backward when weight is not 0; returns the mean loss. */
static double run_batch(Model *m, float *losses, const int *tokens, const int *targets,
                        const int *positions, int B, int T, float weight)
{
    const Config *c = &m->config;
    const int step = piece_sequences(B, T);
    size_t counted = 0;
    for (size_t i = 0; i < (size_t)B * (size_t)T; i++) counted += targets[i] >= 0;
    double sum = 0;
    Activations *a = activations_for(m, (size_t)step * (size_t)T, weight != 0);
    if (c->pos->forward) c->pos->forward(&m->pos, m->params.pos, c);
    if (weight != 0 && m->dpos.bias)
        zero(m->dpos.bias, (size_t)c->n_heads * (size_t)m->dpos.len);
    for (int b = 0; b < B; b += step) {
        const int n = B - b < step ? B - b : step;
        const size_t at = (size_t)b * (size_t)T, rows = (size_t)n * (size_t)T;
        const int *piece_positions = positions ? positions + at : NULL;
        model_forward(m, NULL, tokens + at, piece_positions, n, T);
        loss_head(m, targets + at, rows, weight / (float)counted);
        for (size_t r = 0; r < rows; r++) sum += a->losses[r];
        if (losses) memcpy(losses + at, a->losses, rows * sizeof *losses);
        if (weight != 0) layers_backward(m, tokens + at, piece_positions, n, T);
    }
    if (weight != 0 && c->pos->backward) c->pos->backward(m->grads.pos, &m->dpos, m->params.pos, c);
    return sum / (double)counted;
}

double model_loss(Model *m, float *losses, const int *tokens, const int *targets,
                  const int *positions, int B, int T)
{
    return run_batch(m, losses, tokens, targets, positions, B, T, 0);
}

double model_backward(Model *m, const int *tokens, const int *targets, const int *positions,
                      int B, int T, float weight)
{
    return run_batch(m, NULL, tokens, targets, positions, B, T, weight);
}

void model_logits(Model *m, float *logits, const int *tokens, const int *positions, int B, int T)
{
    const Config *c = &m->config;
    const size_t rows = (size_t)B * (size_t)T;
    Activations *a = activations_for(m, rows, 0);
    if (c->pos->forward) c->pos->forward(&m->pos, m->params.pos, c);
    model_forward(m, NULL, tokens, positions, B, T);
    output_forward(logits, a->norm, m, rows);
}

void model_attention(Model *m, float *A, int layer, const int *tokens, int T)
{
    const Config *c = &m->config;
    activations_for(m, (size_t)T, 1);    // q and k of every layer are kept
    if (c->pos->forward) c->pos->forward(&m->pos, m->params.pos, c);
    model_forward(m, NULL, tokens, NULL, 1, T);
    if (c->pos->layer) c->pos->layer(&m->pos, m->params.layers[layer].pos, c);
    const Attention a = attention_of(m, layer, NULL, 1, T);
    const size_t D = (size_t)a.D, n = (size_t)T, rel = rel_rows(&m->pos);
    float *scratch = xmalloc((size_t)a.H * rel * sizeof *scratch);
    zero(A, (size_t)a.H * n * n);
    #pragma omp parallel for schedule(static)
    for (int h = 0; h < a.H; h++) {
        const float *q = a.qkv + (size_t)h * D, *k = a.qkv + (size_t)(a.H + h / (a.H / a.G)) * D;
        float *s = A + (size_t)h * n * n;
        for (size_t i = 0; i < n; i++, q += a.width, s += n) {
            for (size_t j = 0; j <= i; j++) s[j] = dot(q, k + j * a.width, D) / sqrtf((float)D);
            add_biases(s, scratch + (size_t)h * rel, q, &a, h, (int)i);
            const float top = row_max(s, i + 1);
            float sum = 0;
            for (size_t j = 0; j <= i; j++) sum += s[j] = expf(s[j] - top);
            scale_row(s, 1 / sum, i + 1);
        }
    }
    free(scratch);
}

/* ---- AdamW ----------------------------------------------------------------------------------- */

double model_update(Model *m, int64_t step, const AdamW *o, float lr)
{
    SECTION(OPTIMIZER);
    const Params *p = &m->params;
    float *restrict w = p->data, *restrict g = m->grads.data;
    float *restrict m1 = m->m, *restrict m2 = m->v;
    double squares[PIECES], sum = 0;
    #pragma omp parallel for schedule(static) if (p->count > MIN_PARALLEL)
    for (int piece = 0; piece < PIECES; piece++) {
        const size_t end = piece_start(p->count, piece + 1);
        squares[piece] = 0;
        for (size_t i = piece_start(p->count, piece); i < end; i += 4096)    // fp32 within a block
            squares[piece] += (double)dot(g + i, g + i, min_size(4096, end - i));
    }
    for (int piece = 0; piece < PIECES; piece++) sum += squares[piece];
    const double norm = sqrt(sum);
    if (!isfinite(norm)) {
        zero(g, p->count);
        return norm;
    }
    const float scale = o->clip > 0 && norm > (double)o->clip ? o->clip / (float)norm : 1;
    const float correct1 = 1 / (float)(1 - pow((double)o->beta1, (double)step));
    const float correct2 = 1 / (float)(1 - pow((double)o->beta2, (double)step));
    for (const Tensor *t = p->tensors; t < p->tensors + p->n_tensors; t++) {
        const float decay = t->kind == GAIN || t->kind == POSITION ? 0 : o->weight_decay;
        #pragma omp parallel for schedule(static) if (t->count > MIN_PARALLEL)
        for (size_t i = t->offset; i < t->offset + t->count; i++) {
            const float d = g[i] * scale;
            m1[i] = o->beta1 * m1[i] + (1 - o->beta1) * d;
            m2[i] = o->beta2 * m2[i] + (1 - o->beta2) * d * d;
            w[i] -= lr * (m1[i] * correct1 / (sqrtf(m2[i] * correct2) + o->eps) + decay * w[i]);
            g[i] = 0;
        }
    }
    return norm;
}

/* ---- Generation and sampling ----------------------------------------------------------------- */

void cache_create(Cache *kv, const Model *m, int len)
{
    const Config *c = &m->config;
    const size_t floats = (size_t)c->n_layers * cache_layer(len, c);
    *kv = (Cache){ .len = len, .data = xmalloc(floats * sizeof *kv->data),
                   .logits = xmalloc((size_t)c->vocab_size * sizeof *kv->logits) };
}

void cache_free(Cache *kv)
{
    free(kv->data), free(kv->logits);
    *kv = (Cache){0};
}

const float *model_decode(Model *m, Cache *kv, const int *tokens, int n)
{
    const Config *c = &m->config;
    if (!kv->used && c->pos->forward) c->pos->forward(&m->pos, m->params.pos, c);
    for (int at = 0, together; at < n; at += together) {
        together = kv->used ? 1 : n;
        const float *x = activations_for(m, (size_t)together, 0)->norm;
        model_forward(m, kv, tokens + at, NULL, 1, together);
        kv->used += together;
        if (at + together == n)
            output_forward(kv->logits, x + (size_t)(together - 1) * (size_t)c->dim, m, 1);
    }
    return kv->logits;
}

/* Sum of the weights w_i >= t, each counted as 1 when `count`; n is a multiple of VL. In fp32 only
   within a block. */
static double sum_from(const float *w, size_t n, float t, int count)
{
    enum { SUM_BLOCK = 64 * VL };
    double sum = 0;
    for (size_t i = 0; i < n; i += SUM_BLOCK) {
        vec s = {0};
        for (size_t j = i; j < min_size(n, i + SUM_BLOCK); j += VL) {
            const vec x = load(w + j);
            s += choose(x >= t, count ? splat(1) : x, splat(0));
        }
        sum += (double)vsum(s);
    }
    return sum;
}

/* Keeps the heaviest weights, as few as sum up to `enough` (or, when `count`, are so many), and
   sets the others to 0; of equal ones the first are kept. Their threshold is found by bisection:
   floats that are not negative are ordered like their bits, and 30 passes over vectors are faster
   than a sort. */
static void keep_heaviest(float *w, size_t n, double enough, int count)
{
    uint32_t low = 0, high = 0x3f800001;    // the largest weight is 1
    double surplus = 0;
    float t = 0;
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        memcpy(&t, &middle, sizeof t);
        const double sum = sum_from(w, n, t, count);
        if (sum >= enough) low = middle, surplus = sum - enough;
        else high = middle;
    }
    memcpy(&t, &low, sizeof t);
    for (size_t i = 0; i < n; i++) w[i] = w[i] >= t ? w[i] : 0;
    for (size_t i = n; i-- > 0 && surplus >= (count ? 1 : (double)t); )    // the last of equals
        if (w[i] == t) w[i] = 0, surplus -= count ? 1 : (double)t;
}

int sample(const float *logits, int V, float temperature, int top_k, float top_p, double u)
{
    const size_t n = (size_t)V, padded = round_up(n, VL);
    const float most = row_max(logits, n);
    int finite = 1, best = 0;
    for (size_t i = 0; i < n; i++) finite &= fabsf(logits[i]) <= 3.4028235e38f;
    if (!finite) return -1;
    while (logits[best] != most) best++;
    if (temperature == 0 || top_k == 1 || top_p == 0) return best;
    // Probabilities up to a factor, e^((x - x_best) / temperature): the largest is 1.
    float *w = memcpy(workspace(padded), logits, n * sizeof *w);
    for (size_t i = n; i < padded; i++) w[i] = -INFINITY;
    for (size_t i = 0; i < padded; i += VL) store(w + i, vexp((load(w + i) - most) / temperature));
    if (top_k > 0 && top_k < V) keep_heaviest(w, padded, top_k, 1);
    // The nucleus: the smallest set of at least top_p (Holtzman et al. 2020).
    if (top_p < 1) keep_heaviest(w, padded, (double)top_p * sum_from(w, padded, 0, 0), 0);
    double left = u * sum_from(w, padded, 0, 0);
    for (size_t i = 0; i < n; i++) if ((left -= (double)w[i]) < 0) return (int)i;
    return best;
}

/* ---- Tokenizer ----------------------------------------------------------------------------------
   First a vocabulary is read. Then text becomes tokens: it is cut into runs (encoder_run), and the
   pairs of a run are merged, best first (merge_run). Last, tokens become text. tokenizer.bin:
       offset  size  meaning
       0       4     length of the longest entry, int32
       then for every entry, up to the end of the file:
       0       4     score, float32: the higher, the earlier its two parts are merged
       4       4     length in bytes, int32
       8       ...   the bytes; <0x41> stands for the single byte 0x41
   Entry 0 stands for what is unknown, 1 begins and 2 ends a text. */

/* The slot of the hash table that holds the id of a piece, or -1 where it would stand. */
static inline int *piece_slot(const Tokenizer *t, const char *s, size_t n)
{
    uint64_t hash = n;
    for (size_t i = 0; i < n; i++) hash = (hash ^ (uint8_t)s[i]) * 0x9e3779b97f4a7c15u;
    for (size_t k = hash ^ hash >> 32;; k++) {
        int *slot = &t->slots[k & (t->n_slots - 1)];
        if (*slot < 0) return slot;
        const Piece *p = &t->piece[*slot];
        if ((size_t)p->length == n && !memcmp(p->text, s, n)) return slot;
    }
}

static int piece_find(const Tokenizer *t, const char *s, size_t n) { return *piece_slot(t, s, n); }

static void tokenizer_parse(Tokenizer *t, const char *file, size_t size, const char *path)
{
    size_t room = 0;
    *t = (Tokenizer){ .file = memcpy(xmalloc(size), file, size), .file_size = size };
    for (size_t at = 4; at < size;) {
        Piece p = { .length = -1, .byte = -1 };
        if (size - at >= 8) {
            memcpy(&p.score, t->file + at, 4);
            memcpy(&p.length, t->file + at + 4, 4);
        }
        if (p.length < 0 || (size_t)p.length > size - at - 8)
            die(1, "%s: not a tokenizer: entry %d at byte %zu is cut off or damaged",
                path, t->size, at);
        p.text = t->file + at + 8;
        at += 8 + (size_t)p.length;
        t->piece = grow(t->piece, &room, (size_t)t->size + 1, sizeof p);
        t->piece[t->size++] = p;
    }
    if (!t->size || t->size > 1 << 24)
        die(1, "%s: not a tokenizer: %d entries", path, t->size);
    for (t->n_slots = 64; t->n_slots < 2 * (size_t)t->size; t->n_slots *= 2) {}
    t->slots = xmalloc(t->n_slots * sizeof *t->slots);
    memset(t->slots, -1, t->n_slots * sizeof *t->slots);
    for (int id = 0; id < t->size; id++) {
        const Piece *p = &t->piece[id];
        int *slot = piece_slot(t, p->text, (size_t)p->length);
        if (*slot < 0) *slot = id;    // of equal pieces the first counts
        for (int i = 0; i + 1 < p->length; i++)
            t->joined[(uint8_t)p->text[i]][(uint8_t)p->text[i + 1]] = 1;
    }
    for (int byte = 0; byte < 256; byte++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", byte);
        const int id = t->byte_id[byte] = piece_find(t, name, 6);
        if (id >= 0) t->piece[id].byte = byte;
    }
}

void tokenizer_bytes(Tokenizer *t) { *t = (Tokenizer){ .size = 256, .bytes = 1 }; }

void tokenizer_load(Tokenizer *t, const char *path)
{
    size_t size;
    if (!strcmp(path, "bytes")) return tokenizer_bytes(t);
    char *file = file_read(path, &size);
    tokenizer_parse(t, file, size, path);
    free(file);
}

void tokenizer_free(Tokenizer *t)
{
    free(t->file), free(t->piece), free(t->slots);
    *t = (Tokenizer){0};
}

/* A character of the run, then what was merged. Symbol i begins at byte i. */
typedef struct Symbol {
    size_t length, before;        // bytes of this one and of the one before it
    int id;                       // its token; ~token: of no piece, it merges with nothing
    int merged; float score;      // the piece that it and the next one make (-1: none), its score
    size_t winner;                // of match i, see play
} Symbol;

static void pair_find(Encoder *e, size_t i)    // what symbol i and the next one make
{
    Symbol *a = &e->symbols[i], *b = a + a->length;
    a->merged = a->id < 0 || b->id < 0 ? -1
              : piece_find(e->t, e->run.data + i, a->length + b->length);
    if (a->merged >= 0) a->score = e->t->piece[a->merged].score;
}

/* Which pair merges next is decided by a tournament of the n bytes of the run, each for the symbol
   that begins there. Match k, for 0 < k < n, is between the winners of matches 2k and 2k + 1, where
   n + i is byte i itself; with n = 4:

            match 1
           /       \
       match 2   match 3
        /  \      /  \
       0    1    2    3

   The better score wins, of equals the leftmost. So the winner of match 1 is the best of all, and
   when a symbol changes, only the matches above it, log2(n) of them, are played again. */
static void play(Symbol *s, size_t k)
{
    const size_t i = s[2 * k].winner, j = s[2 * k + 1].winner;
    const Symbol *a = &s[i], *b = &s[j];
    int first = i < j;
    if (a->merged < 0 || b->merged < 0) first = a->merged >= 0;
    else if (a->score != b->score) first = a->score > b->score;
    s[k].winner = first ? i : j;
}

static void merge_run(Encoder *e)
{
    const size_t n = e->run.n;
    Symbol *s = e->symbols;
    s[n].id = ~0;    // the end merges with nothing
    for (size_t i = 0; i < n; i++) s[i].merged = -1, s[n + i].winner = i;
    for (size_t i = s[0].before = 0; i < n; i += s[i].length) {
        s[i + s[i].length].before = s[i].length;
        pair_find(e, i);
    }
    for (size_t k = n - 1; k > 0; k--) play(s, k);
    for (size_t left; s[left = s[1].winner].merged >= 0;) {
        const size_t right = left + s[left].length, before = left - s[left].before;
        s[left].id = s[left].merged;
        s[left].length += s[right].length;
        s[left + s[left].length].before = s[left].length;
        pair_find(e, left);
        pair_find(e, before);
        s[right].merged = -1;
        const size_t changed[] = { left, before, right };
        for (int i = 0; i < 3; i++)
            for (size_t k = (n + changed[i]) / 2; k > 0; k /= 2) play(s, k);
    }
}

/* Bytes of the character at s: UTF-8's leading byte and the continuation bytes behind it, four in
   all at most. What is not UTF-8 is a character a byte. */
static size_t character_length(const char *s, size_t left)
{
    size_t n = 1;
    while ((uint8_t)s[0] >= 0xC0 && n < left && n < 4 && ((uint8_t)s[n] & 0xC0) == 0x80) n++;
    return n;
}

/* Appends a character to the run: one symbol, or one for each byte if it is no piece; the unknown
   token if a byte is none either. */
static void character_add(Encoder *e, const char *text, size_t n)
{
    const int id = piece_find(e->t, text, n);
    int bytes = id < 0;
    for (size_t i = 0; i < n; i++) bytes = bytes && e->t->byte_id[(uint8_t)text[i]] >= 0;
    e->unknown += id < 0 && !bytes;
    e->symbols = grow(e->symbols, &e->room, 2 * (e->run.n + n), sizeof *e->symbols);
    e->run.data = grow(e->run.data, &e->run.room, e->run.n + n, 1);
    for (size_t i = 0; i < n; i += bytes ? 1 : n) {
        Symbol *s = &e->symbols[e->run.n + i];
        s->length = bytes ? 1 : n;
        s->id = bytes ? ~e->t->byte_id[(uint8_t)text[i]] : id < 0 ? ~0 : id;
    }
    memcpy(e->run.data + e->run.n, text, n);
    e->run.n += n;
}

/* The next run, merged. It ends where no piece holds the two bytes that meet: no merge can cross
   that. Memory grows with the longest one, which has 11 bytes in the sample text. */
static void encoder_run(Encoder *e)
{
    e->at = e->run.n = 0;
    if (!e->run.data) character_add(e, " ", 1);    // the first run
    while (e->left) {
        if (e->run.n && !e->t->joined[(uint8_t)e->run.data[e->run.n - 1]][(uint8_t)*e->text]) break;
        const size_t n = character_length(e->text, e->left);
        character_add(e, e->text, n);
        e->text += n;
        e->left -= n;
    }
    merge_run(e);
}

int encoder_next(Encoder *e)
{
    if (e->t->bytes && e->left) {
        e->left--;
        return (uint8_t)*e->text++;
    }
    if (e->at == e->run.n && e->left) encoder_run(e);
    if (e->at == e->run.n) {
        free(e->run.data), free(e->symbols);
        *e = (Encoder){ .t = e->t, .unknown = e->unknown };
        return -1;
    }
    const Symbol *s = &e->symbols[e->at];
    e->at += s->length;
    return s->id < 0 ? ~s->id : s->id;
}

int *tokenizer_encode(const Tokenizer *t, const char *text, size_t length, size_t *count,
                      size_t *unknown)
{
    Encoder e = { .t = t, .text = text, .left = length };
    int *out = xrealloc(NULL, (length + 1) * sizeof *out);
    *count = 0;
    for (int token; (token = encoder_next(&e)) >= 0;) out[(*count)++] = token;
    if (unknown) *unknown = e.unknown;
    return xrealloc(out, *count * sizeof *out);
}

const char *tokenizer_decode(const Tokenizer *t, int token, int first, int *length)
{
    static char byte[256];
    const int value = t->bytes ? token : t->piece[token].byte;
    if (value >= 0) {
        byte[value] = (char)value;
        *length = !(first && !t->bytes && value == ' ');
        return &byte[value];
    }
    const char *s = t->piece[token].text;
    *length = t->piece[token].length;
    if (token == 1 || token == 2) *length = 0;    // begin and end of text are not text
    if (first && *length && *s == ' ') s++, --*length;
    return s;
}

/* The token of a text that is one byte of ASCII, -1 if there is none. */
static int tokenizer_byte(const Tokenizer *t, char c)
{
    const int piece = t->bytes ? (uint8_t)c : piece_find(t, &c, 1);
    return piece >= 0 ? piece : t->byte_id[(uint8_t)c];
}

/* ---- Evaluation ------------------------------------------------------------------------------ */

static int example_compare(const void *a, const void *b)
{
    const Example *p = a, *q = b;
    const size_t n = example_inputs(*p), k = example_inputs(*q);
    return n != k ? (n < k ? -1 : 1) : p->at < q->at ? -1 : p->at > q->at;
}
void examples_sort(Example *e, size_t n) { qsort(e, n, sizeof *e, example_compare); }

double examples_loss(Model *m, float *losses, const int *tokens, const Example *e, size_t n,
                     int first_position)
{
    double sum = 0;
    size_t counted = 0;
    for (size_t B; n; e += B, n -= B) {
        const size_t T = example_inputs(*e), most = div_up(PIECE_TOKENS, T);
        int *x = xmalloc(3 * most * T * sizeof *x), *y = x + most * T, *position = y + most * T;
        float *loss = xmalloc(most * T * sizeof *loss);
        size_t targets = 0;
        for (B = 0; B < most && B < n && example_inputs(e[B]) == T; B++) {
            for (size_t t = 0, r = B * T, k = e[B].at; t < T; t++, r++, k++) {
                x[r] = tokens[k];
                y[r] = k + 1 < e[B].answer ? -1 : tokens[k + 1];
                position[r] = first_position + (int)t;
            }
            targets += e[B].end - e[B].answer;
        }
        sum += (double)targets * model_loss(m, loss, x, y, first_position ? position : NULL,
                                            (int)B, (int)T);
        counted += targets;
        for (size_t r = 0; losses && r < B * T; r++)
            if (y[r] >= 0) losses[e[r / T].at + r % T + 1] = loss[r];
        free(x), free(loss);
    }
    return sum / (double)counted;
}

Example *examples_find(const Tokenizer *t, const char *mark, const int *tokens, size_t n, int ctx,
                       const char *path, size_t *count)
{
    const int newline = tokenizer_byte(t, '\n'), usable = strlen(mark) == 1 && *mark != '\n';
    const int ends = usable ? tokenizer_byte(t, *mark) : -1;
    if (newline < 0 || ends < 0)
        die(2, "--answers: \"%s\" is not one byte of ASCII that is a token of its own", mark);
    Example *line = NULL, e = {0};
    size_t room = 0, number = 1;
    for (size_t i = 0; i < n; i++) {
        if (tokens[i] == ends && e.answer == e.at) e.answer = i + 1;
        if (tokens[i] != newline) continue;
        e.end = i + 1;
        if (e.answer == e.at) die(1, "%s: line %zu has no \"%s\"", path, number, mark);
        if (example_inputs(e) > (size_t)ctx)
            die(1, "%s: line %zu has %zu tokens before its newline, the context %d (--ctx)", path,
                number, example_inputs(e), ctx);
        line = grow(line, &room, number, sizeof *line);
        line[number++ - 1] = e;
        e.at = e.answer = e.end;
    }
    if (e.at < n) die(1, "%s: line %zu has no newline at its end", path, number);
    *count = number - 1;
    return line;
}

/* ---- Files --------------------------------------------------------------------------------------
   Checksums, reading files, saving a model, loading one (ours or llama2.c's). Every size is checked
   before it is used. Files are little endian. A model.bin is the Header below and, behind it,
       v      the vocabulary, a tokenizer.bin, zero padded to a multiple of 64
       4 n    the parameters, float32, in the order of params_layout: token_embedding; for every
              layer rms_att wq wk wv wo rms_ffn w1 w3 w2 and the block of the encoding; rms_final;
              wcls if untied; the shared block of the encoding
       s      TrainState, then both moments, float32, in the order of the parameters */

typedef struct {                  // offset
    char magic[8];                //   0  "POSENC", 0x1a, 0x0a
    int32_t version;              //   8  2
    int32_t shape[9];             //  12  dim hidden_dim n_layers n_heads n_kv_heads vocab_size
                                  //      seq_len untied start_token
    char pos[16];                 //  48  name of the encoding, zero padded
    struct { char name[24]; double value; }
        option[POS_OPTIONS];      //  64  its options; an empty name is none
    uint64_t vocab_bytes;         // 320  v; 0: the 256 bytes are the tokens
    uint64_t n_params;            // 328  n
    uint64_t state_bytes;         // 336  s; 0: no training state
    uint64_t vocab_sum;           // 344  checksums of the three parts
    uint64_t params_sum;          // 352
    uint64_t state_sum;           // 360
    uint64_t zero;                // 368
    uint64_t sum;                 // 376  checksum of all bytes before it
} Header;

enum { VERSION = 2, SHAPE_BYTES = 9 * sizeof(int32_t) };
static const char MAGIC[8] = { 'P', 'O', 'S', 'E', 'N', 'C', 0x1a, '\n' };
_Static_assert(sizeof(Header) == 384 && sizeof(TrainState) == 15 * 8, "they have no holes");
_Static_assert(offsetof(Config, start_token) + sizeof(int) == SHAPE_BYTES, "so begins a Config");

/* Eight lanes of h = (h ^ word) * odd, each step a bijection: no single changed word is missed. */
static uint64_t checksum_block(const uint8_t *p, size_t bytes)
{
    uint64_t lane[8], word[8], h = bytes;
    for (int i = 0; i < 8; i++) lane[i] = mix((uint64_t)i);
    for (size_t at = 0; at < bytes; at += 64) {
        if (bytes - at < 64) memset(word, 0, sizeof word);
        memcpy(word, p + at, min_size(64, bytes - at));
        for (int i = 0; i < 8; i++) lane[i] = (lane[i] ^ word[i]) * 0x9e3779b97f4a7c15u;
    }
    for (int i = 0; i < 8; i++) h = mix(h ^ lane[i]);
    return h;
}

uint64_t checksum(const void *data, size_t bytes)
{
    enum { BLOCK = 1 << 20 };
    const size_t blocks = div_up(bytes, BLOCK);
    if (blocks == 1) return checksum_block(data, bytes);
    uint64_t *sums = xmalloc(blocks * sizeof *sums);    // whose sum is that of the whole
    #pragma omp parallel for schedule(static)
    for (long b = 0; b < (long)blocks; b++) {
        const size_t at = (size_t)b * BLOCK;
        sums[b] = checksum_block((const uint8_t *)data + at, min_size(BLOCK, bytes - at));
    }
    const uint64_t sum = checksum_block((uint8_t *)sums, blocks * sizeof *sums);
    free(sums);
    return sum;
}

static int file_open(const char *path, struct stat *info)    // to read; "-" is standard input
{
    const int fd = strcmp(path, "-") ? open(path, O_RDONLY) : STDIN_FILENO;
    if (fd < 0 || fstat(fd, info)) die(1, "%s: %s", path, strerror(errno));
    if (S_ISDIR(info->st_mode)) die(1, "%s: is a directory, expected a file", path);
    return fd;
}

static void file_append(Text *text, const char *path)
{
    struct stat info;
    const int fd = file_open(path, &info);
    for (ssize_t n = 1; n > 0; text->n += (size_t)n) {
        text->data = grow(text->data, &text->room, text->n + 2, 1);
        n = read(fd, text->data + text->n, min_size(text->room - text->n - 1, 1 << 30));
        if (n < 0) die(1, "%s: %s", path, strerror(errno));
    }
    if (fd != STDIN_FILENO) close(fd);
    text->data[text->n] = 0;
}

char *file_read(const char *path, size_t *size)
{
    Text text = {0};
    file_append(&text, path);
    *size = text.n;
    return text.data;
}

size_t text_append(Text *text, const char *path)
{
    const size_t start = text->n;
    file_append(text, path);
    const char *from = text->data + start, *end = text->data + text->n;
    char *to = text->data + start;
    size_t converted = 0;
    if (!strncmp(from, "\xFF\xFE", 2) || !strncmp(from, "\xFE\xFF", 2))
        die(1, "%s: the text is UTF-16; save it as UTF-8", path);
    if (!strncmp(from, "\xEF\xBB\xBF", 3)) from += 3;
    for (; from < end; from++) {
        converted += *from == '\r';
        if (*from == '\r' && from[1] == '\n') continue;
        *to++ = *from == '\r' ? '\n' : *from;
    }
    *to = 0;
    text->n = (size_t)(to - text->data);
    return converted;
}

typedef struct { const void *data; size_t bytes; } Part;

/* Writes a file beside `path`, since a rename must not cross file systems, and puts it in its
   place; a link stays, and what it leads to is replaced. Without parts it only tries. */
static void file_replace(const char *path, const Part *part, int parts)
{
    char *resolved = realpath(path, NULL);
    const char *target = resolved ? resolved : path;
    const size_t room = strlen(target) + 32;
    char *temporary = xmalloc(room);
    snprintf(temporary, room, "%s.%ld.tmp", target, (long)getpid());
    FILE *f = fopen(temporary, "wb");
    if (!f) die(1, "%s: %s", path, strerror(errno));
    int good = 1;
    for (int i = 0; i < parts && good; i++)
        if (part[i].bytes) good = fwrite(part[i].data, part[i].bytes, 1, f) == 1;
    good = good && !fflush(f) && !fsync(fileno(f));
    good = !fclose(f) && good && (!parts || !rename(temporary, target));
    const int reason = errno;
    if (!good || !parts) unlink(temporary);
    if (!good) die(1, "%s: %s; nothing was saved", path, strerror(reason));
    free(temporary), free(resolved);
}

void file_check_writable(const char *path)
{
    struct stat info;
    if (!*path) die(2, "the name of a file to write is empty");
    if (!stat(path, &info) && !S_ISREG(info.st_mode))
        die(1, "%s: is %s and will not be replaced", path,
            S_ISDIR(info.st_mode) ? "a directory" : "not a regular file");
    sigset_t all, before;    // a signal in between would leave the file behind
    sigfillset(&all), sigprocmask(SIG_BLOCK, &all, &before);
    file_replace(path, NULL, 0);
    sigprocmask(SIG_SETMASK, &before, NULL);
}

static uint64_t state_checksum(const void *state, const void *m, const void *v, size_t bytes)
{
    return checksum(state, sizeof(TrainState)) ^ mix(checksum(m, bytes))
           ^ mix(mix(checksum(v, bytes)));
}

void model_save(const Model *m, const char *path, const TrainState *state)
{
    const Config *c = &m->config;
    const Tokenizer *t = &m->tokenizer;
    const size_t vocab_room = round_up(t->file_size, 64), floats = m->params.count * sizeof(float);
    Header h = { .version = VERSION, .vocab_bytes = t->file_size, .n_params = m->params.count };
    memcpy(h.magic, MAGIC, sizeof MAGIC);
    memcpy(h.shape, c, SHAPE_BYTES);
    snprintf(h.pos, sizeof h.pos, "%s", c->pos->name);
    for (int i = 0; i < POS_OPTIONS && c->pos->options[i].name; i++) {
        snprintf(h.option[i].name, sizeof h.option[i].name, "%s", c->pos->options[i].name);
        h.option[i].value = c->pos_opt[i];
    }
    h.vocab_sum = checksum(t->file, vocab_room);
    h.params_sum = checksum(m->params.data, floats);
    if (state) {
        h.state_bytes = sizeof *state + 2 * floats;
        h.state_sum = state_checksum(state, m->m, m->v, floats);
    }
    h.sum = checksum(&h, offsetof(Header, sum));

    const Part part[] = { { &h, sizeof h }, { t->file, vocab_room }, { m->params.data, floats },
                          { state, sizeof *state }, { m->m, floats }, { m->v, floats } };
    file_replace(path, part, state ? 6 : 3);
}

/* The parameters are used where they lie in the file. Its pages are private: what is written to
   them stays in this process. */
static void file_map(Model *m, const char *path)
{
    struct stat info;
    const int fd = file_open(path, &info);
    if (!S_ISREG(info.st_mode)) die(1, "%s: is not a regular file, a model must be one", path);
    m->map_size = (size_t)info.st_size;
    if (m->map_size < 40) die(1, "%s: not a model file: %zu bytes", path, m->map_size);
    m->map = mmap(NULL, m->map_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    if (m->map == MAP_FAILED) die(1, "%s: %s", path, strerror(errno));
    close(fd);
}

/* The shape must be possible, and the file must have the size of so many arenas of such a model and
   of `others` bytes. */
static void check_shape(const Model *m, const char *path, Config *c, int arenas, double others)
{
    const char *wrong = config_check(c);
    if (wrong) die(1, "%s: not a model file, or a damaged one: %s", path, wrong);
    const double expected = others + 4.0 * arenas * (double)config_params(c);
    if (expected != (double)m->map_size)
        die(1, "%s: expected %.0f bytes for a model of this shape, found %zu%s", path, expected,
            m->map_size, (double)m->map_size < expected ? " (cut off?)" : "");
}

static void check_sum(const char *path, const char *what, uint64_t expected, uint64_t found)
{
    if (expected != found)
        die(1, "%s: the %s is damaged: its checksum does not match", path, what);
}

/* A checkpoint of llama2.c: its tensors stand by kind, all layers of one behind each other. */
static int load_llama2c(Model *m, const char *path)
{
    char *file = m->map;
    const int versioned = !memcmp(file, "24ka", 4);
    const size_t header = versioned ? 256 : 28;
    int32_t version = 0;
    if (versioned) memcpy(&version, file + 4, sizeof version);
    if (version != versioned)
        die(1, "%s: a llama2.c checkpoint of version %d; versions 0 and 1 (fp32) can be read",
            path, version);
    Config c = { .pos = posenc_find("rope") };
    memcpy(&c, file + (versioned ? 8 : 0), 7 * sizeof(int32_t));    // dim .. seq_len
    c.untied = versioned ? !file[36] : c.vocab_size < 0;
    c.vocab_size = (int)llabs(c.vocab_size);
    c.start_token = c.vocab_size > 1 ? 1 : -1;
    config_defaults(&c);
    // The legacy version holds tables of angles, which nobody reads.
    const double angles = versioned ? 0 : (double)c.seq_len * c.dim / c.n_heads;
    check_shape(m, path, &c, 1, (double)header + 4 * angles);

    static const int order[2][12] = {
        { EMB, RMS_ATT, WQ, WK, WV, WO, RMS_FFN, W1, W2, W3, RMS_FINAL, CLS },
        { RMS_ATT, RMS_FFN, RMS_FINAL, EMB, WQ, WK, WV, WO, W1, W2, W3, CLS } };
    size_t first[SLOTS] = {0}, at = 0;
    for (int k = 0; k < 12; k++) {
        const int slot = order[versioned][k];
        const int once = slot == EMB || slot == RMS_FINAL || slot == CLS;
        first[slot] = at += slot == CLS ? (size_t)angles : 0;
        at += slot_floats(&c, slot) * (once ? 1 : (size_t)c.n_layers);
    }
    model_place(m, &c, c.seq_len, (float *)(void *)(file + header), first);
    return 0;
}

static int load_posenc(Model *m, const char *path, TrainState *state)
{
    Header h = {0};
    memcpy(&h, m->map, min_size(m->map_size, sizeof h));
    if (h.version != VERSION)
        die(1, "%s: a model of version %d, expected %d", path, h.version, VERSION);
    check_sum(path, "header", h.sum, checksum(&h, offsetof(Header, sum)));
    h.pos[sizeof h.pos - 1] = 0;
    Config c = { .pos = posenc_find(h.pos) };
    if (!c.pos) die(1, "%s: the encoding \"%s\" is not known to this program", path, h.pos);
    memcpy(&c, h.shape, SHAPE_BYTES);
    config_defaults(&c);
    for (int i = 0; i < POS_OPTIONS && h.option[i].name[0]; i++) {
        h.option[i].name[sizeof h.option[i].name - 1] = 0;
        const int k = pos_option(c.pos, h.option[i].name);
        if (k < 0) die(1, "%s: %s has no option \"%s\"", path, c.pos->name, h.option[i].name);
        c.pos_opt[k] = h.option[i].value;
    }
    const int has_state = h.state_bytes > 0;
    const size_t vocab_room = round_up(min_size(h.vocab_bytes, m->map_size), 64);
    check_shape(m, path, &c, has_state ? 3 : 1,
                (double)(sizeof h + vocab_room + (has_state ? sizeof *state : 0)));
    const size_t floats = config_params(&c) * sizeof(float);
    if (c.start_token < -1 || c.start_token >= c.vocab_size || h.n_params != floats / sizeof(float)
        || (has_state && h.state_bytes != sizeof *state + 2 * floats))
        die(1, "%s: not a usable model: its header contradicts itself", path);

    char *vocabulary = (char *)m->map + sizeof h, *params = vocabulary + vocab_room;
    const char *saved = params + floats, *moments = saved + sizeof *state;
    check_sum(path, "vocabulary", h.vocab_sum, checksum(vocabulary, vocab_room));
    check_sum(path, "block of parameters", h.params_sum, checksum(params, floats));
    if (state && has_state) {
        check_sum(path, "training state", h.state_sum,
                  state_checksum(saved, moments, moments + floats, floats));
        memcpy(state, saved, sizeof *state);
        m->m = memcpy(xmalloc(floats), moments, floats);
        m->v = memcpy(xmalloc(floats), moments + floats, floats);
    }
    if (h.vocab_bytes) tokenizer_parse(&m->tokenizer, vocabulary, (size_t)h.vocab_bytes, path);
    else tokenizer_bytes(&m->tokenizer);
    model_place(m, &c, c.seq_len, (float *)(void *)params, NULL);
    return has_state;
}

int model_load(Model *m, const char *path, const char *tokenizer, TrainState *state)
{
    *m = (Model){0};
    file_map(m, path);
    const int ours = !memcmp(m->map, MAGIC, sizeof MAGIC);
    const int has_state = ours ? load_posenc(m, path, state) : load_llama2c(m, path);
    Tokenizer own = m->tokenizer, *t = &m->tokenizer;
    if (tokenizer) tokenizer_load(t, tokenizer);
    if (t->size && t->size != m->config.vocab_size)
        die(1, "%s: the model has %d tokens, its vocabulary %s has %d",
            path, m->config.vocab_size, tokenizer ? tokenizer : "inside", t->size);
    if (tokenizer && own.size && (own.file_size != t->file_size
                                  || (own.file && memcmp(own.file, t->file, own.file_size))))
        die(1, "%s: carries its own vocabulary, and %s is another one", path, tokenizer);
    if (tokenizer) tokenizer_free(&own);
    return has_state;
}

/* ---- Command-line options -----------------------------------------------------------------------
   Those of a program are a table, those of an encoding stand with it in posenc.c. */

/* "none linear ntk": names that stand `stride` bytes apart, up to a NULL. */
static const char *joined(const char *const *name, size_t stride)
{
    static char text[256];
    text[0] = 0;
    for (size_t n = 0; *name; name = (const void *)((const char *)name + stride), n = strlen(text))
        snprintf(text + n, sizeof text - n, "%s%s", n ? " " : "", *name);
    return text;
}

const char *pos_option_text(const PosOption *o, double value)
{
    static char text[4][24];
    static int next;
    if (o->words) return o->words[(int)value];
    char *s = text[next++ % 4];
    snprintf(s, sizeof text[0], "%g", value);
    return s;
}

static void options_help(const char *usage, const Option *o, int trained)
{
    printf("usage: %s\n", usage);
    for (; o->name; o++) {
        char left[64], value[64] = "";
        const char letter[] = { '-', o->letter, ' ', 0 };
        snprintf(left, sizeof left, "%s--%s%s%s", o->letter ? letter : "   ", o->name,
                 o->arg ? " " : "", o->arg ? o->arg : "");
        if (o->i && *o->i >= o->min) snprintf(value, sizeof value, " [%d]", *o->i);
        if (o->f && !isnan(*o->f)) snprintf(value, sizeof value, " [%g]", *o->f);
        if (o->s && *o->s) snprintf(value, sizeof value, " [%s]", *o->s);
        printf("  %-26s %s%s\n", left, o->help, value);
    }
    puts(trained ? "\noptions of the encodings, in place of those that the model was trained with:"
                 : "\nencodings (--pos) and the options of their own:");
    for (const PosEnc *e = posencs; e->name; e++) {
        printf("  %-26s %s\n", e->name, e->help);
        for (const PosOption *p = e->options; p < e->options + POS_OPTIONS && p->name; p++)
            if (!trained || !p->shape)
                printf("      --%-20s %s%s%s [%s]\n", p->name, p->help, p->words ? ": " : "",
                       p->words ? joined(p->words, sizeof *p->words) : "",
                       pos_option_text(p, p->value));
    }
    output_check();
    exit(0);
}

/* The number that `text` says, for the option that was written as `shown`. */
static double option_number(const char *shown, const char *text, int whole, double min, double max)
{
    char *end;
    const double value = whole ? (double)strtoll(text, &end, 10) : strtod(text, &end);
    if (*end || strchr(" \t\n", *text))    // which finds the end of an empty text too
        die(2, "%s: \"%s\" is not a %snumber", shown, text, whole ? "whole " : "");
    if (!(value >= min && value <= max))
        die(2, "%s: %s is not between %.10g and %.10g", shown, text, min, max);
    return value;
}

static void option_set(Option *o, const char *shown, const char *text)
{
    o->given++;
    if (o->on) *o->on = 1;
    if (o->i) *o->i = (int)option_number(shown, text, 1, o->min, o->max);
    if (o->f) *o->f = option_number(shown, text, 0, o->min, o->max);
    if (o->s && o->max > 1 && o->given > o->max) die(2, "%s can be given %g times", shown, o->max);
    if (o->s) o->s[o->max > 1 ? o->given - 1 : 0] = text;
    if (!o->u) return;
    char *end;
    errno = 0;
    *o->u = strtoull(text, &end, 10);
    if (*end || errno || strchr(" \t\n", *text) || strchr(text, '-'))
        die(2, "%s: \"%s\" is not a whole number from 0 to %llu", shown, text, ULLONG_MAX);
}

static double pos_option_value(const PosOption *p, const char *shown, const char *text)
{
    if (!p->words) return option_number(shown, text, 0, p->min, p->max);
    for (int k = 0; p->words[k]; k++)
        if (!strcasecmp(p->words[k], text)) return k;
    die(2, "%s: \"%s\" is not one of %s", shown, text, joined(p->words, sizeof *p->words));
}

static const PosOption *pos_option_find(const char *name, int trained)
{
    for (const PosEnc *e = posencs; e->name; e++) {
        const int i = pos_option(e, name);
        if (i >= 0 && (!trained || !e->options[i].shape)) return &e->options[i];
    }
    return NULL;
}

// What was given for encodings, in the order of the command line.
static struct { const char *name; double value; } *pos_given;
static size_t n_pos_given;

int options_parse(const char *usage, Option *options, int trained, int argc, char **argv)
{
    int n = 0, plain = 0;
    size_t room = 0;
    for (int i = 1; i < argc; i++) {
        char *arg = argv[i], shown[64];
        if (plain || arg[0] != '-' || !arg[1]) { argv[n++] = arg; continue; }
        if (!strcmp(arg, "--")) { plain = 1; continue; }
        if (!strcmp(arg, "--help") || !strcmp(arg, "-h")) options_help(usage, options, trained);
        const int is_long = arg[1] == '-';
        const size_t length = is_long ? strcspn(arg, "=") : strlen(arg);
        snprintf(shown, sizeof shown, "%.*s", (int)length, arg);
        Option *o = options;
        while (o->name && (is_long ? strcmp(o->name, shown + 2)
                                   : length != 2 || o->letter != arg[1])) o++;
        const PosOption *p = is_long && !o->name ? pos_option_find(shown + 2, trained) : NULL;
        if (!o->name && !p) die(2, "unknown option %s (--help lists them)", arg);
        const char *needs = p ? p->words ? "WORD" : "X" : o->arg;
        const char *value = arg[length] ? arg + length + 1 : needs ? argv[++i] : NULL;
        if (!needs && value) die(2, "%s takes no value", shown);
        if (needs && !value) die(2, "%s needs a value (%s)", shown, needs);
        if (!p) { option_set(o, shown, value); continue; }
        pos_given = grow(pos_given, &room, n_pos_given + 1, sizeof *pos_given);
        pos_given[n_pos_given].name = p->name;
        pos_given[n_pos_given++].value = pos_option_value(p, shown, value);
    }
    for (Option *o = options; o->name; o++)
        if (o->u && !o->given) *o->u = (uint64_t)time(NULL) * 1000 + (uint64_t)getpid() % 1000;
    return n;
}

int options_apply_pos(Config *c)
{
    for (size_t k = 0; k < n_pos_given; k++) {
        const char *name = pos_given[k].name;
        const int i = pos_option(c->pos, name);
        if (i < 0) die(2, "--%s is not an option of the encoding %s", name, c->pos->name);
        c->pos_opt[i] = pos_given[k].value;
    }
    const char *wrong = config_check(c);
    if (wrong) die(2, "%s", wrong);
    return n_pos_given > 0;
}

#endif
