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
   default; names are llama2.c's. What tells one position from another is not in this file: an
   encoding (posenc.c) fills the places of PosTables below and attention never asks which one did.

   Sections of the implementation, in this order:
       errors, memory, threads, time, random numbers  -  vectors and matrix products  -  layers,
       each forward with its backward  -  attention  -  the model  -  AdamW  -  generation and
       sampling  -  tokenizer  -  files  -  command-line options

   Conventions. B sequences of T tokens; S keys; V = vocab_size; D = head size; matrices are
   row-major, weights are (out, in). Everything is fp32 but sums over many tokens and angles, which
   are double. Outputs come first in argument lists, then inputs, then sizes. A backward ADDS to
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

/* ---- Positional encodings: what posenc.c gives to the model ---------------------------------- */

enum { POS_OPTIONS = 8 };

typedef struct PosEnc PosEnc;

typedef struct {                  // the shape of a model; saved with it
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
    float *bias;                  // (n_heads, len)  row bias, one vector per head: added to the
                                  //                 score at distance n; layout: see pos_bias
    float *rel_k;                 // (clip+1, D)     row bias, one vector per query: adds
                                  //                 q.rel_k[min(n, clip)] / sqrt(D) to the score
    float *rel_v;                 // (clip+1, D)     value rows: adds rel_v[min(n, clip)] to v
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
    // Once: allocates (pos_alloc) and fills the tables for positions 0 .. t->len-1, or points
    // into `shared`.
    void (*build)(PosTables *t, float *shared, const Config *c);
    // Before every forward of a model that is trained: parameters -> tables, where they differ.
    void (*forward)(PosTables *t, const float *shared, const Config *c);
    // After every backward: gradients of the tables -> added to gradients of the parameters.
    void (*backward)(float *dshared, const PosTables *dt, const float *shared, const Config *c);
    // Before a layer: points the tables into that layer's block of parameters, or of gradients.
    void (*layer)(PosTables *t, float *layer, const Config *c);
};

extern const PosEnc posencs[];                  // posenc.c; ends with a row whose name is NULL
const PosEnc *posenc_find(const char *name);    // any letter case; NULL if there is none

/* The row bias is stored backwards, so that the addends of one query for keys in ascending order
   lie in ascending memory, and each row is followed by BIAS_PAD floats that a tile may read past
   the diagonal. */
enum { BIAS_PAD = 96 };
static inline size_t pos_bias_stride(const PosTables *t) { return (size_t)t->len + BIAS_PAD; }
static inline float *pos_bias(const PosTables *t, int head, int n)    // the place of distance n
{
    return t->bias + (size_t)head * pos_bias_stride(t) + (size_t)(t->len - 1 - n);
}
float *pos_alloc(PosTables *t, size_t floats);  // zeroed, freed with the tables

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
    const size_t *first;          // while it is laid out: places in a file of another order
} Params;

/* A vocabulary with llama2.c's rules, or the 256 bytes themselves. */
typedef struct {
    int size;                     // entries; 256 for bytes
    int bytes;                    // 1: a token is a byte, and the rest is unused
    char *file;                   // the tokenizer.bin itself, file_size bytes
    size_t file_size;
    const char **piece;           // (size) into `file`, not terminated
    int *length;
    float *score;
    int byte_id[256];             // token of a single byte, -1 where there is none
    int *slots;                   // hash table piece -> id, -1 empty
    size_t n_slots;
    uint32_t joined[256][8];      // bit b of joined[a]: some piece holds byte a followed by byte b
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

/* Gives the options of c->pos their default values. */
void config_defaults(Config *c);
int pos_option(const PosEnc *e, const char *name);    // index of an option, -1: no such one
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
   2019); gains 1. */
void model_init(Model *m, uint64_t seed);
/* Builds the tables of the encoding again, for positions 0 .. len-1 and for the options that
   m->config has now; they must have passed config_check, with the same parameters. Not while the
   model is trained or a cache is in use. */
void model_tables(Model *m, int len);
/* Once, before model_backward: allocates gradients, gradient tables, and moments (zero) unless
   model_load brought them. */
void model_train_begin(Model *m);
void model_free(Model *m);        // all that it holds, the tokenizer and the mapped file included

/* Mean cross entropy in nats of targets (B, T) after tokens (B, T), every sequence by itself. A
   negative target does not count: its loss is 0, and the mean is over the others, NaN if there are
   none. positions (B, T) must not decrease along a sequence; NULL means 0 .. T-1.
   losses (B, T): receives the loss of each target, or NULL. */
double model_loss(Model *m, float *losses, const int *tokens, const int *targets,
                  const int *positions, int B, int T);
/* Returns the same, of one target that counts or more, and adds `weight` times its gradient to
   m->grads. The batch is worked off in fixed pieces, so memory depends on T, not on B. */
double model_backward(Model *m, const int *tokens, const int *targets, const int *positions,
                      int B, int T, float weight);
/* logits (B, T, V), for tests and inspection. */
void model_logits(Model *m, float *logits, const int *tokens, const int *positions, int B, int T);
/* The weights A (n_heads, T, T) with which one layer attends in one sequence, 0 for keys that are
   not seen; for inspection, a plain loop over the definition. */
void model_attention(Model *m, float *A, int layer, const int *tokens, int T);
/* Floats of activations that model_backward keeps for B sequences of T; the scratch of products and
   attention, a few MiB, comes on top. */
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
    float *k, *v;                 // (n_layers, key heads, len, D) in blocks, see cache_copy
    float *rows;                  // (2, len, kv_dim) of one layer, for tokens that follow together
    float *logits;                // (V) of the last token
} Cache;

void cache_create(Cache *kv, const Model *m, int len);    // empty; len <= m->pos.len
void cache_free(Cache *kv);
/* Appends n >= 1 tokens, used + n <= len; returns the logits (V) that follow the last, valid until
   the next call. n > 1 goes through matrix products, n = 1 through matrix-vector products. The
   parameters must not change while a cache is in use; used = 0 starts anew. */
const float *model_decode(Model *m, Cache *kv, const int *tokens, int n);

/* Draws a token. temperature 0: the largest logit, lowest index on ties. top_k 0 and top_p 1 are
   off. u in [0, 1) is the random number used. Returns -1 when a logit is not a number. */
int sample(const float *logits, int V, float temperature, int top_k, float top_p, double u);

/* ---- Tokenizer ------------------------------------------------------------------------------- */

void tokenizer_bytes(Tokenizer *t);                     // every byte is a token
void tokenizer_load(Tokenizer *t, const char *path);    // llama2.c's tokenizer.bin, checked
void tokenizer_free(Tokenizer *t);
/* Text of any bytes -> tokens, one after the other. As llama2.c and SentencePiece: a blank in front
   of a text that is not empty, merges by best score, leftmost first (BPE, Sennrich et al. 2016);
   what is no piece becomes bytes. O(n log n). The text must stay until the end. */
typedef struct {
    const Tokenizer *t;
    const char *text; size_t left;  // what is not in a run yet, see encoder_run
    size_t unknown;                 // unknown characters so far; with single bytes there are none
    const char *run; char *front;   // the run; the first one's own memory, with the blank in front
    struct Symbol *symbols; size_t n, room; long at;
    struct Merge *heap; size_t n_heap, heap_room;
} Encoder;
void encoder_begin(Encoder *e, const Tokenizer *t, const char *text, size_t length);
/* The next token, at most length + 1 in all; -1 at the end, where the memory of *e is freed. */
int encoder_next(Encoder *e);
/* All of them, *count, which the caller frees; *unknown is Encoder's, unless it is NULL. */
int *tokenizer_encode(const Tokenizer *t, const char *text, size_t length, size_t *count,
                      size_t *unknown);
/* The text of one token, *length bytes, not terminated, valid as long as the tokenizer. `first`
   drops the blank that encode put in front; tokens 1 and 2, begin and end of text, are empty. */
const char *tokenizer_decode(const Tokenizer *t, int token, int first, int *length);

/* ---- Questions and answers: every line of a text is question, mark, answer, newline ---------- */

typedef struct { size_t at, answer, end; } Example;    // tokens of a line: its first, the first of
                                                       //   its answer, one past its newline
/* The lines of a text in order, *count, which the caller frees; the first mark of a line ends its
   question. Exits 2 if the mark is not one byte that is a token of its own, and 1, naming `path`
   and the line, whose number is one more than `before` at the first, if a line lacks its mark or
   its newline, or reads more than ctx tokens: all but the newline. */
Example *examples_find(const Tokenizer *t, const char *mark, const int *tokens, size_t n, int ctx,
                       const char *path, size_t before, size_t *count);

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

/* Writes a model to a temporary file beside `path` and renames it: there is always the old one or
   the new one. With a state the moments go with it. */
void model_save(const Model *m, const char *path, const TrainState *state);
/* Loads a model.bin, or a checkpoint of llama2.c (legacy or version 1). `tokenizer` names a
   vocabulary ("bytes", a file, NULL for none): llama2.c's files need one, a model.bin carries its
   own and accepts no other. Positions up to max_len are prepared, the trained length at least; a
   bounded encoding refuses more. Returns 1 when the file holds a training state, else 0; with
   `state` not NULL that fills *state and the moments. */
int model_load(Model *m, const char *path, const char *tokenizer, int max_len, TrainState *state);
/* 64 bits that any change of a single word changes; no defence against intent. */
uint64_t checksum(const void *data, size_t bytes);

/* The whole of a file, or of standard input for "-", NUL-terminated; the caller frees it. */
char *file_read(const char *path, size_t *size);
typedef struct { char *data; size_t n, room; } Text;    // n bytes and a NUL; {0} is empty
/* Appends the same as a text: a UTF-8 byte-order mark is dropped, \r\n and \r become \n. Returns
   how often they did. UTF-16 is refused. */
size_t text_append(Text *text, const char *path);
/* Exits now rather than after the work if path cannot be written, or is something else than a
   regular file (tries with a temporary file beside it). */
void file_check_writable(const char *path);

/* ---- Options, errors, threads, time, random numbers ------------------------------------------ */

typedef struct {                  // exactly one of the pointers is set; it holds the default, which
                                  //   --help shows unless it is NaN, below min, or a .u
    const char *name; char letter;
    const char *arg, *help;       // arg: what the value is called in --help, NULL for a switch
    int *i; double *f; uint64_t *u; const char **s; int *on;
    double min, max;              // limits of a number; max above 1 of an .s: so many may be given,
                                  //   s[0], s[1], ...
    int given;                    // not 0: it was on the command line; of an .s: how often
    const char *const *words;     // an .f that is given as a word: its place in this list
} Option;

/* Parses --name value, --name=value and -x value (options end with a NULL name); moves the other
   arguments, and all after "--", to argv[0] and on, and returns their number. Exits 2 with a line
   that names the option when something is wrong; --help calls `help` and exits 0. */
int options_parse(Option *options, int argc, char **argv, void (*help)(void));
/* A line for each of the first n, with its default, on stdout. */
void options_help(const Option *options, int n);

/* The encodings' own options, at the end of a table that has room for MOST_POS_OPTIONS and is zero
   from there on: adds them (encodings may share a name), lists them with their encodings for
   --help, and writes those that were given into a config; exits 2 if its encoding has no such one,
   else returns how many they were.
   `trained`: only those that leave the parameters of a model what they are. */
enum { MOST_POS_OPTIONS = 64 };
void options_add_pos(Option *end, int trained);
void options_help_pos(int trained);
int options_apply_pos(Config *c, const Option *added);
/* How the value of an option is written: a word or a number. Valid until the fourth call from
   here. */
const char *pos_option_text(const PosOption *o, double value);

/* First thing in main: sets the name that stands before every message. With GNU OpenMP on Linux it
   may start the program again, with a limit on how long threads spin (see there). */
void program_begin(const char *name, char **argv);
/* Prints "program: message" and exits with the code, after what is on its way to stdout. */
_Noreturn void die(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
void output_check(void);          // flushes standard output; exits 1 if it could not be written
void *xmalloc(size_t bytes);      // zeroed, 64-byte aligned; without memory exits 1 with the size

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
   Both programs are short-lived commands with nothing to unwind, so a failure is a line
   and an exit. */

static const char *program = "posenc";

/* A thread that waits for another one spins, with GNU's OpenMP for milliseconds. When another
   program runs beside this one, the thread that is waited for may wait for the very processor that
   spins, and a step takes ten times longer. The limit is read from the environment before main,
   hence the second start. */
void program_begin(const char *name, char **argv)
{
    program = name;
    // A closed stdin, stdout or stderr must not become the model file.
    int fd = open("/dev/null", O_RDONLY);
    while (fd >= 0 && fd <= STDERR_FILENO) fd = open("/dev/null", O_RDONLY);
    if (fd >= 0) close(fd);
#if defined(_OPENMP) && defined(__linux__) && !defined(__clang__)
    char self[4096] = "";
    if (!getenv("OMP_WAIT_POLICY") && !getenv("GOMP_SPINCOUNT")
        && !setenv("GOMP_SPINCOUNT", "2000", 0))
        if (readlink("/proc/self/exe", self, sizeof self - 1) > 0) execv(self, argv);
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

void *xmalloc(size_t bytes)
{
    size_t size = round_up(bytes + !bytes, 64);
    void *p = size < bytes ? NULL : aligned_alloc(64, size);
    if (!p) die(1, "out of memory: %.1f MiB were asked for", (double)bytes / (1 << 20));
    return memset(p, 0, size);
}

/* Big blocks of malloc are not in memory before they are written, unlike xmalloc's. */
static void *xrealloc(void *p, size_t bytes)
{
    if (!(p = realloc(p, bytes + !bytes)))
        die(1, "out of memory: %.1f MiB were asked for", (double)bytes / (1 << 20));
    return p;
}

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
        block = xmalloc(floats * sizeof *block);
        size = floats;
    }
    return block;
}

#ifdef _OPENMP
const char *const threads_kind = "OpenMP";
static int thread_count(void) { return omp_get_max_threads(); }
static int thread_number(void) { return omp_get_thread_num(); }
static int team_size(void) { return omp_get_num_threads(); }
int threads_set(int n)
{
    if (n > 0) omp_set_num_threads(n);
    else if (omp_get_max_threads() > omp_get_num_procs() && !getenv("OMP_NUM_THREADS"))
        omp_set_num_threads(omp_get_num_procs());
    return omp_get_max_threads();
}
#else
const char *const threads_kind = "built without OpenMP";
static int thread_count(void) { return 1; }
static int thread_number(void) { return 0; }
static int team_size(void) { return 1; }
int threads_set(int n) { (void)n; return 1; }
#endif

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
static Timer timer_begin(enum Section what) { return (Timer){ what, profile ? seconds() : 0 }; }
static void timer_end(const Timer *t)
{
    if (profile) profile->spent[t->what] += seconds() - t->began;
}
#define SECTION(what) \
    __attribute__((cleanup(timer_end))) const Timer timer_ = timer_begin(what); (void)timer_

/* The part of n things that falls to the calling thread of a parallel region. */
typedef struct { size_t from, to; } Share;
static Share share_of(size_t n)
{
    const size_t thread = (size_t)thread_number(), team = (size_t)team_size();
    return (Share){ n * thread / team, n * (thread + 1) / team };
}

static void barrier(void)    // of the parallel region that it is called in
{
    const double began = profile ? seconds() : 0;
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

/* Loops over rows have static shares: from one function to the next a thread meets about the same
   rows, which its cache still holds; the cache of another processor may be farther than memory.
   Sums over many numbers are split into this many pieces, whatever the number of threads, and the
   pieces are added in order. */
enum { PIECES = 64 };
static size_t piece_start(size_t n, int piece) { return n * (size_t)piece / PIECES; }

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
INLINE float vmaximum(vec v)
{
    float m = v[0];
    for (int i = 1; i < VL; i++) m = v[i] > m ? v[i] : m;
    return m;
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

/* `a` is asked for so many bytes ahead; 0: not at all. Four sums, so that none waits for another. */
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
    float m = vmaximum(vmax(vmax(v[0], v[1]), vmax(v[2], v[3])));
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

   packed: A and B are copied into the order in which the micro-kernel reads them, filled up with
       zeros to whole slices and panels. Transposes end here, and so do elements that become bf16.
   direct: an A whose rows are contiguous is read where it lies if B has no more than FEW columns.
   turned: few rows times a large transposed matrix (a short prompt, some logits) would mostly be
       packing of that matrix. C^T = B^T A^T makes it the A, read directly; the tiles of C are
       transposed at the end. */
enum { KC = 768, MC = 192, NC = 768, FEW = 256 };

/* An operand as lanes of K elements, the rows of A or the columns of B: element k of lane i is
   at[i * lane + k * step]. */
typedef struct { const float *at; size_t lane, step; } Lanes;
static Lanes lanes_from(Lanes l, size_t i, size_t k)
{
    l.at += i * l.lane + k * l.step;
    return l;
}

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

/* dst[k * lanes + i] = element k of lane i, 0 for lanes past `valid`. A transpose goes by blocks of
   4 x 4. */
INLINE void pack(float *restrict dst, Lanes src, size_t valid, const size_t lanes, size_t K)
{
    typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
    size_t k = 0;
    if (valid < lanes) {
        memset(dst, 0, K * lanes * sizeof *dst);
    } else if (src.lane == 1) {
        for (; k < K; k++) memcpy(dst + k * lanes, src.at + k * src.step, lanes * sizeof *dst);
    } else if (src.step == 1 && lanes % 4 == 0) {
        for (; k + 4 <= K; k += 4)
            for (size_t i = 0; i < lanes; i += 4) {
                const float *s = src.at + i * src.lane + k;
                four a = *(const four *)s, b = *(const four *)(s + src.lane);
                four c = *(const four *)(s + 2 * src.lane), d = *(const four *)(s + 3 * src.lane);
                for (size_t x = 0; x < 4; x++)
                    *(four *)(dst + (k + x) * lanes + i) = (four){a[x], b[x], c[x], d[x]};
            }
    }
    for (; k < K; k++)
        for (size_t i = 0; i < valid; i++) dst[k * lanes + i] = src.at[i * src.lane + k * src.step];
}

typedef struct {
    float *c; size_t ldc;
    const float *plus;
    Lanes a, b;
    size_t M, N, K, mc, nc, kc;
    int turned, pairs, direct;
    size_t room;                  // floats of a packed lane: kc, made even for pairs
    float *packed_b;
} Gemm;

/* Adds the products of k0 and on to the tile of C at (row, col), a slice `a` times a panel `b`. A
   whole tile is written in place, one at an edge or turned by way of scratch. */
INLINE void gemm_tile(const Gemm *g, size_t row, size_t col, size_t k0, Lanes a, const float *b)
{
    const size_t rows = min_size(MR, g->M - row), cols = min_size(NR, g->N - col);
    const size_t high = g->turned ? cols : rows, wide = g->turned ? rows : cols;
    const size_t at = g->turned ? col * g->ldc + row : row * g->ldc + col, ldc = g->ldc;
    const size_t kn = min_size(g->kc, g->K - k0), steps = g->pairs ? div_up(kn, 2) : kn;
    const int whole = rows == MR && cols == NR && !g->turned;
    float *c = g->c + at;
    const float *plus = k0 ? c : g->plus ? g->plus + at : NULL;
    // C is in no cache, or in that of another thread: asked for in time
    for (size_t y = 0; y < high; y++)
        for (size_t x = 0; x < wide; x += 16) __builtin_prefetch(c + y * ldc + x, 1);
    float scratch[MR * NR], *tile = whole ? c : scratch;
    const float *add = whole ? plus : NULL;
    const size_t ld = whole ? ldc : NR;
    if (g->pairs) tiles(tile, ld, a.at, a.lane, a.step, b, NR, MR, cols, steps, add, 1);
    else product(tile, ld, a.at, a.lane, a.step, b, NR, MR, cols, steps, add);
    if (whole) return;
    for (size_t y = 0; y < high; y++)
        for (size_t x = 0; x < wide; x++) {
            const float sum = scratch[g->turned ? x * NR + y : y * NR + x];
            c[y * ldc + x] = sum + (plus ? plus[y * ldc + x] : 0);
        }
}

/* Rows m0 to m1 of A, at most mc, times panels of the packed block of B that begins at (k0, n0). */
static void gemm_block(const Gemm *g, size_t m0, size_t m1, size_t n0, size_t k0, Share panels,
                       float *packed_a)
{
    const size_t kn = min_size(g->kc, g->K - k0);
    const int direct = g->direct && m1 - m0 == MR;
    for (size_t i = m0; !direct && i < m1; i += MR) {
        float *slice = packed_a + (i - m0) * g->room;
        pack(slice, lanes_from(g->a, i, k0), min_size(MR, m1 - i), MR, kn);
        if (g->pairs) pair_up(slice, MR, kn);
    }
    for (size_t p = panels.from; p < panels.to; p++)
        for (size_t i = m0; i < m1; i += MR) {
            const Lanes packed = { packed_a + (i - m0) * g->room, 1, MR };
            gemm_tile(g, i, n0 + p * NR, k0, direct ? lanes_from(g->a, i, k0) : packed,
                      g->packed_b + p * NR * g->room);
        }
}

/* The size of equal pieces of n that are no larger than `most`. */
static size_t even(size_t n, size_t most) { return div_up(n, div_up(n, most)); }

void gemm(float *c, size_t ldc, const float *a, size_t a_row, size_t a_k,
          const float *b, size_t b_k, size_t b_col,
          size_t M, size_t N, size_t K, const float *plus)
{
    if (!M || !N) return;
    SECTION(PRODUCTS);
    const Lanes la = { a, a_row, a_k }, lb = { b, b_col, b_k };
    Gemm g = { c, ldc, plus, la, lb, M, N, K, .pairs = bf16_products };
    if (b_k == 1 && M < N && M <= FEW) {
        g.turned = 1;
        g.a = lb, g.b = la;
        g.M = N, g.N = M;
    }
    g.direct = g.a.step == 1 && g.N <= FEW && !g.pairs;
    // Threads share the slices of A, if there are few the panels of B. Which thread computes an
    // element, and in which block, changes no bit of it: only kc splits a sum, and it depends on K
    // alone.
    const size_t threads = (size_t)thread_count(), slices = div_up(g.M, MR);
    const int by_rows = slices >= 2 * threads;
    const size_t most = (by_rows ? div_up(slices, threads) : slices) * MR;
    g.kc = even(K, g.pairs ? 2 * KC : KC);
    g.nc = round_up(even(g.N, NC), NR);
    g.mc = g.direct ? MR : round_up(even(most, MC), MR);
    g.room = round_up(g.kc, 2);
    g.packed_b = workspace((g.nc + threads * g.mc) * g.room);

    #pragma omp parallel if (M * N * K > 1 << 18)
    {
        const Share rows = by_rows ? share_of(slices) : (Share){ 0, slices };
        const size_t end = min_size(g.M, rows.to * MR);
        float *packed_a = g.packed_b + (g.nc + (size_t)thread_number() * g.mc) * g.room;
        for (size_t n0 = 0; n0 < g.N; n0 += g.nc)
            for (size_t k0 = 0; k0 < K; k0 += g.kc) {
                const size_t kn = min_size(g.kc, K - k0), left = g.N - n0;
                const size_t panels = div_up(min_size(g.nc, left), NR);
                #pragma omp for schedule(static) nowait
                for (size_t p = 0; p < panels; p++) {
                    float *panel = g.packed_b + p * NR * g.room;
                    pack(panel, lanes_from(g.b, n0 + p * NR, k0), min_size(NR, left - p * NR), NR, kn);
                    if (g.pairs) pair_up(panel, NR, kn);
                }
                barrier();
                const Share across = by_rows ? (Share){ 0, panels } : share_of(panels);
                for (size_t m0 = rows.from * MR; m0 < end && across.from < across.to; m0 += g.mc)
                    gemm_block(&g, m0, min_size(m0 + g.mc, end), n0, k0, across, packed_a);
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
    float *scratch = workspace((size_t)thread_count() * n);
    FOR_ROWS(r, rows, rows * n, {
        float *a = ab + r * 2 * n, *b = a + n, *e = scratch + (size_t)thread_number() * n;
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

/* Softmax and cross entropy of one row: returns log(sum e^x) - x[target]. The row is
   overwritten, with scale * (softmax(x) - onehot(target)) if scale is not 0. A target that does not
   count has neither loss nor gradient.
   torch: F.cross_entropy(x, target) */
static float cross_entropy(float *x, size_t n, int target, float scale)
{
    if (target < 0) {
        memset(x, 0, n * sizeof *x);
        return 0;
    }
    const float m = row_max(x, n), at_target = x[target], sum = exp_row(x, x, n, 1, m);
    if (scale != 0) {
        for (size_t i = 0; i < n; i++) x[i] *= scale / sum;
        x[target] -= scale;
    }
    return logf(sum) + m - at_target;
}

static void cross_entropy_rows(float *losses, float *logits, const int *targets, size_t rows,
                               size_t V, float scale)
{
    SECTION(LOSS);
    FOR_ROWS(r, rows, rows * V,
             losses[r] = cross_entropy(logits + r * V, V, targets[r], scale);)
}

/* ---- Attention ----------------------------------------------------------------------------------
       o_i = sum_j A_ij (v_j + rel_v[c]),  A_ij = softmax over j <= i of s_ij,
       s_ij = q_i.k_j / sqrt(D) + b_ij,  c = min(n, clip).
   A tile of TQ queries walks over tiles of TK keys with an online softmax (Milakov & Gimelshein
   2018; FlashAttention, Dao et al. 2022): with the running maximum m, sum l and output o of the
   keys so far,
       m' = max(m, max_j s_j),  p_j = e^(s_j - m'),
       l' = l e^(m - m') + sum_j p_j,  o' = o e^(m - m') + sum_j p_j v_j.
   Only o / l and the log-sum-exp, m + log l, are kept. The backward computes again
   p_ij = e^(s_ij - lse_i); with delta_i = do_i.o_i:
       dv_j = sum_i p_ij do_i,  ds_ij = p_ij (do_i.(v_j + rel_v[c]) - delta_i),  db_ij = ds_ij,
       dq_i = sum_j ds_ij (k_j + rel_k[c]) / sqrt(D),  dk_j = sum_i ds_ij q_i / sqrt(D),
       drel_k[c] = sum ds_ij q_i / sqrt(D),  drel_v[c] = sum p_ij do_i  over all i, j of that c.
   The places of an encoding: b_ij comes from `bias` (one vector per head) or from q_i.rel_k (one
   vector per query); both are added to a row of scores (add_bias) and, backwards, summed from a row
   of ds (add_by_distance). A thread takes neighbouring (batch, head), or backwards (batch, key
   head) with the query heads that share it: of several sequences, mostly rows that it computed. */

enum { TQ = 48, TK = 96 };
_Static_assert(TQ % MR == 0 && TK % MR == 0 && TK % NR == 0 && TK <= (int)BIAS_PAD, "whole tiles");

typedef struct {              // what one attention works on
    int B, T, S, start;       // T queries follow `start` keys; S = start + T keys
    int H, G, D;              // query heads, key heads, head size
    size_t q_stride, kv_stride;    // floats between rows of q, and of k and v
    size_t head_stride;       // floats between key heads in a cache, see cache_copy
    const PosTables *pos;
    const int *positions;     // (B, S), or NULL: 0 .. S-1
} Attention;

/* The row bias of query i: adds row[min(n, clip)] to its scores of n keys (a multiple of VL, at
   most TK) from j0 on. A vector that is stored backwards is read where it lies; else the addends
   are gathered first. */
typedef struct {
    const float *row;         // indexed by distance, or (reversed) by key: see pos_bias
    int reversed, clip;
} RowBias;

static RowBias head_bias(const PosTables *pos, int head)
{
    return (RowBias){ pos_bias(pos, head, pos->len - 1), 1, pos->len - 1 };
}

INLINE int distance(const int *positions, int i, int j)
{
    const int n = positions ? positions[i] - positions[j] : i - j;
    return n > 0 ? n : 0;
}

static void add_bias(float *score, size_t n, RowBias b, const int *positions, int i, int j0, int S)
{
    float gathered[TK];
    const float *add = gathered;
    if (b.reversed && !positions) {
        add = b.row + (b.clip - i + j0);
    } else if (!positions && i - (j0 + TK - 1) >= b.clip) {    // all farther than the clip
        for (size_t j = 0; j < n; j += VL) store(gathered + j, splat(b.row[b.clip]));
    } else {
        for (int j = 0; j < (int)n; j++) {
            const int d = j0 + j < S ? distance(positions, i, j0 + j) : 0;
            const int c = d < b.clip ? d : b.clip;
            gathered[j] = b.row[b.reversed ? b.clip - c : c];
        }
    }
    for (size_t j = 0; j < n; j += VL) store(score + j, load(score + j) + load(add + j));
}

/* The transpose of add_bias: row[min(n, clip)] += x_j for `count` keys from j0 on. */
static void add_by_distance(float *row, int reversed, int clip, const float *x,
                            const int *positions, int i, int j0, int count)
{
    if (reversed && !positions) {
        float *out = row + (clip - i + j0);
        for (int j = 0; j < count; j++) out[j] += x[j];
        return;
    }
    int j = 0;
    if (!reversed) {    // the keys at the clip and beyond come first and share an element
        int far = 0;
        if (positions) while (far < count && distance(positions, i, j0 + far) >= clip) far++;
        else far = i - clip - j0 + 1 < count ? i - clip - j0 + 1 : count;
        vec sums = {0};
        float sum = 0;
        for (; j + VL <= far; j += VL) sums += load(x + j);
        for (; j < far; j++) sum += x[j];
        row[clip] += sum + vsum(sums);
    }
    for (; j < count; j++) {
        int n = distance(positions, i, j0 + j);
        n = n < clip ? n : clip;
        row[reversed ? clip - n : n] += x[j];
    }
}

/* A matrix (rows, D), `stride` apart, copied to padded scratch: as it is, (rows, Dp), or
   transposed, (D, rows padded to `ld`). */
static void copy_padded(float *dst, size_t Dp, const float *src, size_t stride,
                        size_t rows, size_t D, float scale)
{
    for (size_t r = 0; r < rows; r++)
        for (size_t d = 0; d < Dp; d++) dst[r * Dp + d] = d < D ? scale * src[r * stride + d] : 0;
}

static void copy_transposed(float *dst, size_t ld, const float *src, size_t stride,
                            size_t rows, size_t D, float scale)
{
    for (size_t r0 = 0; r0 < ld; r0 += 16)    // 16 rows at a time: a cache line of the destination
        for (size_t d = 0; d < D; d++)
            for (size_t r = r0; r < min_size(r0 + 16, ld); r++)
                dst[d * ld + r] = r < rows ? scale * src[r * stride + d] : 0;
}

/* Sizes that forward and backward share, in floats. */
typedef struct { size_t Dp, Sp, Cp, Cm; } Padded;
static Padded attention_padded(const Attention *a)
{
    const size_t rows = a->pos->rel_k || a->pos->rel_v ? (size_t)a->pos->clip + 1 : 0;
    const size_t Cm = round_up(rows, MR);
    return (Padded){ round_up((size_t)a->D, VL), round_up((size_t)a->S, TK), round_up(Cm, VL), Cm };
}

/* Columns of a tile of keys that the queries up to index `last` see, rounded up for the
   micro-kernel. */
static size_t visible(int last, int j0, size_t to)
{
    return min_size(TK, round_up((size_t)(last + 1 - j0), to));
}

/* Cuts a thread's scratch into named pieces. */
static float *cut(float **scratch, size_t floats)
{
    float *p = *scratch;
    *scratch += round_up(floats, 16);
    return p;
}

static void attention_forward(float *out, size_t out_stride, float *lse,
                              const float *q, const float *k, const float *v, const Attention *a)
{
    SECTION(ATTENTION);
    const PosTables *pos = a->pos;
    const Padded p = attention_padded(a);
    const size_t D = (size_t)a->D, Dp = p.Dp, Sp = p.Sp, Cp = p.Cp;
    const float scale = 1 / sqrtf((float)a->D);
    const size_t per_thread = D * Sp + Sp * Dp + D * TQ + TQ * TK + TQ * Dp
                              + D * Cp + Cp * Dp + 2 * TQ * Cp + 256;
    float *all = workspace((size_t)thread_count() * per_thread);

    #pragma omp parallel if ((size_t)a->B * (size_t)a->S * a->q_stride > MIN_PARALLEL)
    {
        #pragma omp for schedule(static) nowait
        for (long task = 0; task < (long)a->B * a->H; task++) {
            const int b = (int)(task / a->H), h = (int)(task % a->H);
            float *s = all + (size_t)thread_number() * per_thread;
            float *kt = cut(&s, D * Sp), *vp = cut(&s, Sp * Dp), *qt = cut(&s, D * TQ);
            float *score = cut(&s, TQ * TK), *o = cut(&s, TQ * Dp);
            float *rt = cut(&s, D * Cp), *rv = cut(&s, Cp * Dp);
            float *row = cut(&s, TQ * Cp), *weight = cut(&s, TQ * Cp);
            const size_t g = (size_t)(h / (a->H / a->G));
            const float *qh = q + (size_t)b * (size_t)a->T * a->q_stride + (size_t)h * D;
            const size_t kv0 = (size_t)b * (size_t)a->S * a->kv_stride + g * D;
            const int *positions = a->positions ? a->positions + (size_t)b * (size_t)a->S : NULL;

            copy_transposed(kt, Sp, k + kv0, a->kv_stride, (size_t)a->S, D, 1);
            copy_padded(vp, Dp, v + kv0, a->kv_stride, (size_t)a->S, D, 1);
            memset(vp + (size_t)a->S * Dp, 0, (Sp - (size_t)a->S) * Dp * sizeof *vp);
            if (pos->rel_k) copy_transposed(rt, Cp, pos->rel_k, D, (size_t)pos->clip + 1, D, 1);
            if (pos->rel_v) {
                memset(rv, 0, Cp * Dp * sizeof *rv);
                copy_padded(rv, Dp, pos->rel_v, D, (size_t)pos->clip + 1, D, 1);
            }
            for (int t0 = 0; t0 < a->T; t0 += TQ) {
                const int nq = a->T - t0 < TQ ? a->T - t0 : TQ;
                const int i0 = a->start + t0, last = i0 + nq - 1;
                float m[TQ], l[TQ];
                for (int r = 0; r < TQ; r++) m[r] = -INFINITY, l[r] = 0;
                memset(o, 0, TQ * Dp * sizeof *o);
                if (pos->rel_v) memset(weight, 0, TQ * Cp * sizeof *weight);
                copy_transposed(qt, TQ, qh + (size_t)t0 * a->q_stride, a->q_stride,
                                (size_t)nq, D, scale);
                if (pos->rel_k) product(row, Cp, qt, 1, TQ, rt, Cp, (size_t)nq, Cp, D, NULL);

                for (int j0 = 0; j0 <= last; j0 += TK) {
                    product(score, TK, qt, 1, TQ, kt + j0, Sp, (size_t)nq, visible(last, j0, VL),
                            D, NULL);
                    for (int r = 0; r < nq; r++) {
                        const int i = i0 + r, seen = i + 1 - j0 < TK ? i + 1 - j0 : TK;
                        float *sr = score + (size_t)r * TK;
                        if (seen <= 0) { memset(sr, 0, TK * sizeof *sr); continue; }
                        const size_t n = round_up((size_t)seen, VL);
                        if (pos->bias) add_bias(sr, n, head_bias(pos, h), positions, i, j0, a->S);
                        if (pos->rel_k)
                            add_bias(sr, n, (RowBias){row + (size_t)r * Cp, 0, pos->clip},
                                     positions, i, j0, a->S);
                        for (size_t j = (size_t)seen; j < n; j++) sr[j] = -INFINITY;
                        vec top = load(sr), sums = {0};
                        for (size_t j = VL; j < n; j += VL) top = vmax(top, load(sr + j));
                        const float highest = vmaximum(top), old = m[r];
                        m[r] = highest > old ? highest : old;
                        for (size_t j = 0; j < n; j += VL) {
                            const vec e = vexp(load(sr + j) - m[r]);
                            store(sr + j, e);
                            sums += e;
                        }
                        for (size_t j = n; j < TK; j += VL) store(sr + j, splat(0));
                        if (m[r] != old) {
                            const float shrink = expf(old - m[r]);
                            l[r] *= shrink;
                            for (size_t d = 0; d < Dp; d += VL) {
                                float *at = o + (size_t)r * Dp + d;
                                store(at, load(at) * shrink);
                            }
                            for (size_t x = 0; pos->rel_v && x < Cp; x++)
                                weight[(size_t)r * Cp + x] *= shrink;
                        }
                        l[r] += vsum(sums);
                        if (pos->rel_v)
                            add_by_distance(weight + (size_t)r * Cp, 0, pos->clip, sr, positions,
                                            i, j0, seen);
                    }
                    product(o, Dp, score, TK, 1, vp + (size_t)j0 * Dp, Dp, (size_t)nq, Dp,
                            visible(last, j0, 1), o);
                }
                if (pos->rel_v)
                    product(o, Dp, weight, Cp, 1, rv, Dp, (size_t)nq, Dp, (size_t)pos->clip + 1, o);
                for (int r = 0; r < nq; r++) {
                    const size_t t = (size_t)b * (size_t)a->T + (size_t)(t0 + r);
                    for (size_t d = 0; d < D; d++)
                        out[t * out_stride + (size_t)h * D + d] = o[(size_t)r * Dp + d] / l[r];
                    if (lse) lse[t * (size_t)a->H + (size_t)h] = m[r] + logf(l[r]);
                }
            }
        }
        barrier();
    }
}

/* q, k and v of a row stand behind each other in qkv, and give way to their gradients: what is read
   is copied before something is written there. Adds to dpos; see above for the equations. */
static void attention_backward(float *qkv, const PosTables *dpos, const float *dout,
                               const float *out, const float *lse, const Attention *a)
{
    SECTION(ATTENTION);
    const PosTables *pos = a->pos;
    const Padded p = attention_padded(a);
    const size_t D = (size_t)a->D, Dp = p.Dp, Sp = p.Sp, Cp = p.Cp, Cm = p.Cm;
    const size_t T = (size_t)a->T, H = (size_t)a->H;
    const size_t width = a->q_stride, k_at = H * D, v_at = k_at + (size_t)a->G * D;
    const float scale = 1 / sqrtf((float)a->D);
    // Gradients of an encoding are sums over the batch (and, for rel_k and rel_v, heads): one part
    // per task, added in order.
    const size_t bias_part = dpos->bias ? pos_bias_stride(dpos) : 0, rel_part = Cm * Dp;
    const size_t parts = (size_t)a->B * H * (bias_part + 2 * rel_part);
    const size_t per_thread = 2 * D * Sp + 3 * Sp * Dp + 2 * D * TQ + 3 * TQ * Dp + 2 * TQ * TK
                              + 2 * (D * Cp + Cp * Dp) + 4 * TQ * Cp + 512;
    float *bias_parts = workspace(parts + (size_t)thread_count() * per_thread);
    float *rel_k_parts = bias_parts + (size_t)a->B * H * bias_part;
    float *rel_v_parts = rel_k_parts + (size_t)a->B * H * rel_part, *all = bias_parts + parts;

    #pragma omp parallel if ((size_t)a->B * T * width > MIN_PARALLEL)
    {
        #pragma omp for schedule(static) nowait
        for (long pair = 0; pair < (long)a->B * a->G; pair++) {
            // a key head and the query heads that share it
            const int b = (int)(pair / a->G), g = (int)(pair % a->G);
            float *s = all + (size_t)thread_number() * per_thread;
            float *kt = cut(&s, D * Sp), *vt = cut(&s, D * Sp), *kp = cut(&s, Sp * Dp);
            float *dk = cut(&s, Sp * Dp), *dv = cut(&s, Sp * Dp);
            float *qt = cut(&s, D * TQ), *dot_ = cut(&s, D * TQ);
            float *qp = cut(&s, TQ * Dp), *dop = cut(&s, TQ * Dp), *dq = cut(&s, TQ * Dp);
            float *prob = cut(&s, TQ * TK), *ds = cut(&s, TQ * TK);
            float *rkt = cut(&s, D * Cp), *rvt = cut(&s, D * Cp), *rk = cut(&s, Cp * Dp);
            float *row = cut(&s, TQ * Cp), *drow = cut(&s, TQ * Cp);
            float *vrow = cut(&s, TQ * Cp), *weight = cut(&s, TQ * Cp);
            const size_t base = (size_t)b * T * width, lane = (size_t)g * D;
            const int *positions = a->positions ? a->positions + (size_t)b * (size_t)a->S : NULL;

            copy_transposed(kt, Sp, qkv + base + k_at + lane, width, T, D, 1);
            copy_transposed(vt, Sp, qkv + base + v_at + lane, width, T, D, 1);
            copy_padded(kp, Dp, qkv + base + k_at + lane, width, T, D, 1);
            memset(kp + T * Dp, 0, (Sp - T) * Dp * sizeof *kp);
            memset(dk, 0, Sp * Dp * sizeof *dk);
            memset(dv, 0, Sp * Dp * sizeof *dv);
            if (pos->rel_k) {
                copy_transposed(rkt, Cp, pos->rel_k, D, (size_t)pos->clip + 1, D, 1);
                memset(rk, 0, Cp * Dp * sizeof *rk);
                copy_padded(rk, Dp, pos->rel_k, D, (size_t)pos->clip + 1, D, 1);
            }
            if (pos->rel_v) copy_transposed(rvt, Cp, pos->rel_v, D, (size_t)pos->clip + 1, D, 1);

            for (int h = g * (a->H / a->G); h < (g + 1) * (a->H / a->G); h++) {
                const size_t task = (size_t)b * H + (size_t)h, head = (size_t)h * D;
                float *dbias = memset(bias_parts + task * bias_part, 0, bias_part * sizeof(float));
                float *drel_k = memset(rel_k_parts + task * rel_part, 0, rel_part * sizeof(float));
                float *drel_v = memset(rel_v_parts + task * rel_part, 0, rel_part * sizeof(float));
                for (int t0 = 0; t0 < a->T; t0 += TQ) {
                    const int nq = a->T - t0 < TQ ? a->T - t0 : TQ, last = t0 + nq - 1;
                    const size_t t = (size_t)b * T + (size_t)t0, rows = (size_t)nq;
                    const float *qh = qkv + t * width + head;
                    const float *doh = dout + t * H * D + head, *oh = out + t * H * D + head;
                    copy_transposed(qt, TQ, qh, width, rows, D, scale);
                    copy_transposed(dot_, TQ, doh, H * D, rows, D, 1);
                    copy_padded(qp, Dp, qh, width, rows, D, scale);
                    copy_padded(dop, Dp, doh, H * D, rows, D, 1);
                    memset(dq, 0, TQ * Dp * sizeof *dq);
                    memset(drow, 0, TQ * Cp * sizeof *drow);
                    if (pos->rel_v) memset(weight, 0, TQ * Cp * sizeof *weight);
                    if (pos->rel_k) product(row, Cp, qt, 1, TQ, rkt, Cp, rows, Cp, D, NULL);
                    if (pos->rel_v) product(vrow, Cp, dot_, 1, TQ, rvt, Cp, rows, Cp, D, NULL);
                    float delta[TQ];
                    for (size_t r = 0; r < rows; r++)
                        delta[r] = dot(doh + r * H * D, oh + r * H * D, D);

                    for (int j0 = 0; j0 <= last; j0 += TK) {
                        const size_t cols = visible(last, j0, VL);
                        product(prob, TK, qt, 1, TQ, kt + j0, Sp, rows, cols, D, NULL);
                        product(ds, TK, dot_, 1, TQ, vt + j0, Sp, rows, cols, D, NULL);
                        for (size_t r = 0; r < rows; r++) {
                            const int i = t0 + (int)r, seen = i + 1 - j0 < TK ? i + 1 - j0 : TK;
                            const size_t n = seen > 0 ? round_up((size_t)seen, VL) : 0;
                            const float minus_lse = -lse[(t + r) * H + (size_t)h];
                            float *pr = prob + r * TK, *dr = ds + r * TK;
                            if (pos->bias)
                                add_bias(pr, n, head_bias(pos, h), positions, i, j0, a->S);
                            if (pos->rel_k)
                                add_bias(pr, n, (RowBias){row + r * Cp, 0, pos->clip}, positions,
                                         i, j0, a->S);
                            if (pos->rel_v)
                                add_bias(dr, n, (RowBias){vrow + r * Cp, 0, pos->clip}, positions,
                                         i, j0, a->S);
                            for (size_t j = n ? (size_t)seen : 0; j < n; j++)
                                pr[j] = -INFINITY, dr[j] = 0;
                            for (size_t j = 0; j < n; j += VL) {
                                const vec e = vexp(load(pr + j) + minus_lse);
                                store(pr + j, e);
                                store(dr + j, e * (load(dr + j) - delta[r]));
                            }
                            for (size_t j = n; j < TK; j += VL)
                                store(pr + j, splat(0)), store(dr + j, splat(0));
                            if (!n) continue;
                            if (bias_part)
                                add_by_distance(dbias, 1, pos->len - 1, dr, positions, i, j0, seen);
                            if (pos->rel_k)
                                add_by_distance(drow + r * Cp, 0, pos->clip, dr, positions,
                                                i, j0, seen);
                            if (pos->rel_v)
                                add_by_distance(weight + r * Cp, 0, pos->clip, pr, positions,
                                                i, j0, seen);
                        }
                        // dv += p^T do;  dk += ds^T q / sqrt(D);  dq += ds k
                        const size_t keys = visible(last, j0, 1), at = (size_t)j0 * Dp;
                        product(dv + at, Dp, prob, 1, TK, dop, Dp, keys, Dp, rows, dv + at);
                        product(dk + at, Dp, ds, 1, TK, qp, Dp, keys, Dp, rows, dk + at);
                        product(dq, Dp, ds, TK, 1, kp + at, Dp, rows, Dp, keys, dq);
                    }
                    if (pos->rel_k) {
                        product(dq, Dp, drow, Cp, 1, rk, Dp, rows, Dp, (size_t)pos->clip + 1, dq);
                        product(drel_k, Dp, drow, 1, Cp, qp, Dp, Cm, Dp, rows, drel_k);
                    }
                    if (pos->rel_v)
                        product(drel_v, Dp, weight, 1, Cp, dop, Dp, Cm, Dp, rows, drel_v);
                    for (size_t r = 0; r < rows; r++)
                        for (size_t d = 0; d < D; d++)
                            qkv[(t + r) * width + head + d] = scale * dq[r * Dp + d];
                }
            }
            for (size_t j = 0; j < T; j++)
                for (size_t d = 0; d < D; d++) {
                    qkv[base + j * width + k_at + lane + d] = dk[j * Dp + d];
                    qkv[base + j * width + v_at + lane + d] = dv[j * Dp + d];
                }
        }
        barrier();
    }

    for (int b = 0; b < a->B; b++)
        for (size_t h = 0; h < H; h++) {
            const size_t task = (size_t)b * H + h;
            if (bias_part)
                axpy(dpos->bias + h * bias_part, 1, bias_parts + task * bias_part, bias_part);
            for (size_t c = 0; c < (Cm ? (size_t)pos->clip + 1 : 0); c++) {
                if (dpos->rel_k)
                    axpy(dpos->rel_k + c * D, 1, rel_k_parts + task * rel_part + c * Dp, D);
                if (dpos->rel_v)
                    axpy(dpos->rel_v + c * D, 1, rel_v_parts + task * rel_part + c * Dp, D);
            }
        }
}

/* Keys (or values) in a cache: a head's stand together, since it is read as a whole, in blocks of
   LANES tokens, transposed, so that a vector holds one element of neighbouring tokens: no sum runs
   across a vector, however small a head. */
enum { LANES = 16 };
static size_t cache_floats(size_t len, size_t width) { return round_up(len, LANES) * width; }

/* Copies n rows of k (or v) to (or, back, from) tokens `start` and on of a cache. */
static void cache_copy_block(float *cache, float *rows, size_t stride, const Attention *a,
                             size_t start, size_t n, size_t block, int back)
{
    const size_t D = (size_t)a->D, first = block * LANES;
    const size_t from = first > start ? first : start, last = min_size(first + LANES, start + n);
    for (size_t g = 0; g < (size_t)a->G; g++)
        for (size_t d = 0; d < D; d++)
            for (size_t t = from; t < last; t++) {
                float *in_cache = cache + g * a->head_stride + first * D + d * LANES + t % LANES;
                float *in_row = rows + (t - start) * stride + g * D + d;
                if (back) *in_row = *in_cache;
                else *in_cache = *in_row;
            }
}

static void cache_copy(float *cache, float *rows, size_t stride, const Attention *a,
                       size_t start, size_t n, int back)
{
    const size_t block = start / LANES, end = div_up(start + n, LANES);
    if (n == 1) { cache_copy_block(cache, rows, stride, a, start, n, block, back); return; }
    #pragma omp parallel for schedule(static) if (n * (size_t)(a->G * a->D) > MIN_PARALLEL)
    for (long b = (long)block; b < (long)end; b++)
        cache_copy_block(cache, rows, stride, a, start, n, (size_t)b, back);
}

/* One query against a cache of S keys: generation. Reads k and v once. s: scratch. */
static void attention_step_head(float *o, float *s, const float *qh, const float *k,
                                const float *v, const Attention *a, int h)
{
    const PosTables *pos = a->pos;
    const size_t D = (size_t)a->D, S = (size_t)a->S, Sp = round_up(S, LANES);
    const size_t head = (size_t)(h / (a->H / a->G)) * a->head_stride;
    const int i = a->S - 1;
    const float scale = 1 / sqrtf((float)a->D);
    float *sums = memset(s + Sp, 0, D * LANES * sizeof *sums);    // of a[j] v[j], by j % LANES
    for (size_t j = 0; j < S; j += LANES) {
        const float *block = k + head + j * D;
        vec score[LANES / VL] = {0};
        for (size_t d = 0; d < D; d++) {
            __builtin_prefetch(block + (2 * D + d) * LANES);    // the block after the next
            for (int x = 0; x < LANES / VL; x++)
                score[x] += scale * qh[d] * load(block + d * LANES + x * VL);
        }
        for (int x = 0; x < LANES / VL; x++) store(s + j + x * VL, score[x]);
    }
    if (pos->bias) axpy(s, 1, pos_bias(pos, h, i), S);
    if (pos->rel_k)
        for (int c = 0; c <= pos->clip && c <= i; c++) {
            const float add = scale * dot(qh, pos->rel_k + (size_t)c * D, D);
            if (c < pos->clip) s[i - c] += add;
            else for (int j = 0; j <= i - c; j++) s[j] += add;
        }
    for (size_t j = S; j < Sp; j++) s[j] = -INFINITY;
    const float m = row_max(s, S);
    vec total = {0};
    for (size_t j = 0; j < Sp; j += VL) {
        const vec e = vexp(load(s + j) - m);
        store(s + j, e);
        total += e;
    }
    for (size_t j = 0; j < S; j += LANES) {
        const float *block = v + head + j * D;
        for (size_t d = 0; d < D; d++) {
            __builtin_prefetch(block + (2 * D + d) * LANES);
            for (size_t x = d * LANES; x < (d + 1) * LANES; x += VL)
                store(sums + x, load(sums + x) + load(s + j + x % LANES) * load(block + x));
        }
    }
    for (size_t d = 0; d < D; d++) {
        vec sum = {0};
        for (size_t x = d * LANES; x < (d + 1) * LANES; x += VL) sum += load(sums + x);
        o[d] = vsum(sum);
    }
    if (pos->rel_v)
        for (int c = 0; c <= pos->clip && c <= i; c++) {
            float weight = s[i - c];
            if (c == pos->clip) for (int j = 0; j < i - c; j++) weight += s[j];
            axpy(o, weight, pos->rel_v + (size_t)c * D, D);
        }
    const float inverse = 1 / vsum(total);
    for (size_t d = 0; d < D; d++) o[d] *= inverse;
}

static void attention_step(float *out, const float *q, const float *k, const float *v,
                           const Attention *a)
{
    const size_t D = (size_t)a->D, H = (size_t)a->H, S = (size_t)a->S;
    const size_t per_head = round_up(S, LANES) + D * LANES;
    float *s = workspace(H * per_head);
    if (S * D * H <= MIN_PARALLEL) {
        for (size_t h = 0; h < H; h++)
            attention_step_head(out + h * D, s, q + h * D, k, v, a, (int)h);
        return;
    }
    #pragma omp parallel for schedule(static)
    for (int h = 0; h < a->H; h++)
        attention_step_head(out + (size_t)h * D, s + (size_t)h * per_head, q + (size_t)h * D, k, v,
                            a, h);
}

/* ---- The model ------------------------------------------------------------------------------- */

float *pos_alloc(PosTables *t, size_t floats)
{
    float **slot = t->owned[0] ? &t->owned[1] : &t->owned[0];
    return *slot = xmalloc(floats * sizeof(float));
}

void config_defaults(Config *c)
{
    for (int i = 0; i < POS_OPTIONS; i++) c->pos_opt[i] = c->pos->options[i].value;
}

int pos_option(const PosEnc *e, const char *name)
{
    for (int i = 0; i < POS_OPTIONS && e->options[i].name; i++)
        if (!strcmp(e->options[i].name, name)) return i;
    return -1;
}

const char *config_check(Config *c)
{
    static char why[200];
    const struct { const char *name; int value; } sizes[] = {
        { "dim", c->dim }, { "layers", c->n_layers }, { "heads", c->n_heads },
        { "vocabulary", c->vocab_size }, { "context", c->seq_len } };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i].value < 1 || sizes[i].value > 1 << 24) {
            snprintf(why, sizeof why, "%s %d is not between 1 and %d",
                     sizes[i].name, sizes[i].value, 1 << 24);
            return why;
        }
    if (!c->n_kv_heads) c->n_kv_heads = c->n_heads;
    if (!c->hidden_dim)    // Llama's 8/3 keeps the cost of 4 dim
        c->hidden_dim = (int)round_up((size_t)c->dim * 8 / 3, 32);
    if (c->hidden_dim < 1 || c->hidden_dim > 1 << 24) return "the hidden size is out of range";
    if (c->dim % c->n_heads) {
        snprintf(why, sizeof why, "dim %d is not a multiple of heads %d", c->dim, c->n_heads);
        return why;
    }
    if (c->n_kv_heads < 1 || c->n_heads % c->n_kv_heads) {
        snprintf(why, sizeof why, "heads %d is not a multiple of kv-heads %d",
                 c->n_heads, c->n_kv_heads);
        return why;
    }
    const double dim = (double)c->dim, floats = (double)c->vocab_size * dim * (1 + !!c->untied)
        + (double)c->n_layers * dim * (4 * dim + 3 * (double)c->hidden_dim);
    if (floats > 1e12) return "a model of this shape has more than 10^12 parameters";
    for (int i = 0; i < POS_OPTIONS && c->pos->options[i].name; i++) {
        const PosOption *o = &c->pos->options[i];
        const double v = c->pos_opt[i];
        if (v >= o->min && v <= o->max && (!o->whole || v == floor(v))) continue;
        snprintf(why, sizeof why, "%s: %g is not a %snumber from %.10g to %.10g", o->name, v,
                 o->whole ? "whole " : "", o->min, o->max);
        return why;
    }
    why[0] = 0;
    if (c->pos->configure) c->pos->configure(c, why, sizeof why);
    return why[0] ? why : NULL;
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
    const size_t dim = (size_t)c->dim, kv_dim = dim / (size_t)c->n_heads * (size_t)c->n_kv_heads;
    const size_t hidden = (size_t)c->hidden_dim, V = (size_t)c->vocab_size;
    switch (slot) {
        case EMB: return V * dim;
        case RMS_ATT: case RMS_FFN: case RMS_FINAL: return dim;
        case WQ: case WO: return dim * dim;
        case WK: case WV: return kv_dim * dim;
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

/* What a forward leaves for the backward, of every layer (or of one, when there will be none),
   and scratch. */
struct Activations {
    size_t rows;                  // B * T it has room for
    int training;
    float *block;
    // Floats from one layer to the next, 0 without training.
    size_t x_layer, qkv_layer, lse_layer, ab_layer;
    float *x;                     // (layers+1, rows, dim) input of each layer, and of the last norm
    float *qkv;                   // (layers, rows, dim + 2 kv_dim) turned
    float *att, *lse;             // (layers, rows, dim) (layers, rows, H) output of attention
    float *mid;                   // (layers, rows, dim) input of the second norm
    float *ab;                    // (layers, rows, 2 hidden) w1 x and w3 x
    float *norm, *hidden;         // (rows, dim) (rows, hidden)
    float *dx;                    // (rows, dim) gradient of the residual stream
    float *logits, *losses;       // (HEAD_ROWS, V) (rows)
};

enum { HEAD_ROWS = 128 };         // rows whose logits exist at the same time

static float *reserve(float *base, size_t *floats, size_t n)
{
    float *at = base ? base + *floats : NULL;
    *floats += round_up(n, 16);
    return at;
}

/* Called twice: with base NULL to count the floats, then to point into a block of that size. */
static size_t activations_layout(Activations *a, const Config *c, float *base)
{
    const size_t n = a->rows, dim = (size_t)c->dim, hidden = (size_t)c->hidden_dim;
    const size_t kv_dim = dim / (size_t)c->n_heads * (size_t)c->n_kv_heads;
    const size_t L = a->training ? (size_t)c->n_layers : 1;
    size_t floats = 0;
    a->x_layer = a->training ? n * dim : 0;
    a->qkv_layer = a->training ? n * (dim + 2 * kv_dim) : 0;
    a->lse_layer = a->training ? n * (size_t)c->n_heads : 0;
    a->ab_layer = a->training ? n * 2 * hidden : 0;
    a->x = reserve(base, &floats, (L + 1) * n * dim);
    a->qkv = reserve(base, &floats, L * n * (dim + 2 * kv_dim));
    a->att = reserve(base, &floats, L * n * dim);
    a->lse = reserve(base, &floats, L * n * (size_t)c->n_heads);
    a->mid = reserve(base, &floats, L * n * dim);
    a->ab = reserve(base, &floats, L * n * 2 * hidden);
    a->norm = reserve(base, &floats, n * dim);
    a->hidden = reserve(base, &floats, n * hidden);
    a->logits = reserve(base, &floats, min_size(n, HEAD_ROWS) * (size_t)c->vocab_size);
    a->losses = reserve(base, &floats, n);
    if (a->training) a->dx = reserve(base, &floats, n * dim);
    return floats;
}

static void activations_free(Activations *a)
{
    if (a) free(a->block);
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
    const size_t floats = activations_layout(&need, &m->config, NULL);
    a = m->acts = xmalloc(sizeof *a);
    *a = need;
    a->block = xmalloc(floats * sizeof(float));
    activations_layout(a, &m->config, a->block);
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
    const size_t dim = (size_t)c->dim, kv_dim = dim / (size_t)c->n_heads * (size_t)c->n_kv_heads;
    const size_t hidden = (size_t)c->hidden_dim;
    m->int8 = xmalloc((size_t)c->n_layers * sizeof *m->int8);
    for (int i = 0; i < c->n_layers; i++) {
        const Layer *l = &m->params.layers[i];
        m->int8[i] = (LayerInt8){
            quantized((Matrices){ { l->wq, l->wk, l->wv }, { dim, kv_dim, kv_dim }, {0} }, dim),
            quantized((Matrices){ { l->wo }, { dim }, {0} }, dim),
            quantized((Matrices){ { l->w1, l->w3 }, { hidden, hidden }, {0} }, dim),
            quantized((Matrices){ { l->w2 }, { dim }, {0} }, hidden) };
    }
    m->wcls_int8 = quantized((Matrices){ { m->params.wcls }, { (size_t)c->vocab_size }, {0} }, dim);
}

static Attention attention_of(const Model *m, const int *positions, int B, int T, int start)
{
    const Config *c = &m->config;
    const int D = c->dim / c->n_heads;
    const size_t width = (size_t)(c->n_heads + 2 * c->n_kv_heads) * (size_t)D;
    return (Attention){ .B = B, .T = T, .S = start + T, .start = start,
                        .H = c->n_heads, .G = c->n_kv_heads, .D = D,
                        .q_stride = width, .kv_stride = width,
                        .pos = &m->pos, .positions = positions };
}

/* The whole network up to the last norm, whose output is left in acts->norm. With a cache the
   tokens (B = 1) are appended to it. */
static void model_forward(Model *m, Cache *kv, const int *tokens, const int *positions,
                          int B, int T)
{
    const Config *c = &m->config;
    const Params *p = &m->params;
    Activations *a = m->acts;
    const int start = kv ? kv->used : 0;
    const size_t rows = (size_t)B * (size_t)T, dim = (size_t)c->dim, hidden = (size_t)c->hidden_dim;
    Attention shape = attention_of(m, positions, B, T, start);
    const size_t width = shape.q_stride, kv_dim = (width - dim) / 2;

    embedding_forward(a->x, p->token_embedding, &m->pos, tokens, positions, start, T, rows, dim);
    for (int i = 0; i < c->n_layers; i++) {
        const Layer *l = &p->layers[i];
        LayerInt8 int8 = {0};
        if (m->int8) int8 = m->int8[i];
        float *x = a->x + (size_t)i * a->x_layer, *next = x + a->x_layer;
        float *mid = a->mid + (size_t)i * a->x_layer;
        float *qkv = a->qkv + (size_t)i * a->qkv_layer, *att = a->att + (size_t)i * a->x_layer;
        float *ab = a->ab + (size_t)i * a->ab_layer;
        if (c->pos->layer) c->pos->layer(&m->pos, l->pos, c);

        rmsnorm_forward(a->norm, x, l->rms_att, rows, dim);
        linear_forward(qkv, a->norm, (Matrices){ { l->wq, l->wk, l->wv }, { dim, kv_dim, kv_dim },
                                                 int8.qkv }, rows, dim, NULL);
        rotate(qkv, &m->pos, c, positions, start, T, rows, 1);
        if (!kv) {
            attention_forward(att, dim, a->lse + (size_t)i * a->lse_layer,
                              qkv, qkv + dim, qkv + dim + kv_dim, &shape);
        } else {
            const size_t layer = (size_t)i * cache_floats((size_t)kv->len, kv_dim);
            float *keys = kv->k + layer, *values = kv->v + layer, *k = qkv + dim, *v = k + kv_dim;
            shape.head_stride = cache_floats((size_t)kv->len, (size_t)shape.D);
            cache_copy(keys, k, width, &shape, (size_t)start, rows, 0);
            cache_copy(values, v, width, &shape, (size_t)start, rows, 0);
            if (T == 1) {
                attention_step(att, qkv, keys, values, &shape);
            } else {
                if (start) {    // what came before stands in the cache alone
                    shape.kv_stride = kv_dim;
                    k = kv->rows, v = k + (size_t)shape.S * kv_dim;
                    cache_copy(keys, k, kv_dim, &shape, 0, (size_t)shape.S, 1);
                    cache_copy(values, v, kv_dim, &shape, 0, (size_t)shape.S, 1);
                }
                attention_forward(att, dim, NULL, qkv, k, v, &shape);
            }
        }
        linear_forward(mid, att, (Matrices){ { l->wo }, { dim }, int8.wo },
                       rows, dim, x);

        rmsnorm_forward(a->norm, mid, l->rms_ffn, rows, dim);
        linear_forward(ab, a->norm, (Matrices){ { l->w1, l->w3 }, { hidden, hidden },
                                                int8.w13 }, rows, dim, NULL);
        swiglu_forward(a->hidden, ab, rows, hidden);
        linear_forward(next, a->hidden, (Matrices){ { l->w2 }, { dim }, int8.w2 },
                       rows, hidden, mid);
    }
    rmsnorm_forward(a->norm, a->x + (size_t)c->n_layers * a->x_layer, p->rms_final, rows, dim);
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
        cross_entropy_rows(a->losses + r0, a->logits, targets + r0, n, V, scale);
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
    Activations *a = m->acts;
    const size_t rows = (size_t)B * (size_t)T, dim = (size_t)c->dim, hidden = (size_t)c->hidden_dim;
    const Attention shape = attention_of(m, positions, B, T, 0);
    const size_t width = shape.q_stride;

    memset(a->dx, 0, rows * dim * sizeof *a->dx);
    rmsnorm_backward(a->dx, g->rms_final, a->norm, a->x + (size_t)c->n_layers * a->x_layer,
                     p->rms_final, rows, dim);
    for (int i = c->n_layers - 1; i >= 0; i--) {
        const Layer *l = &p->layers[i], *d = &g->layers[i];
        const float *x = a->x + (size_t)i * a->x_layer, *mid = a->mid + (size_t)i * a->x_layer;
        float *qkv = a->qkv + (size_t)i * a->qkv_layer;
        float *att = a->att + (size_t)i * a->x_layer, *ab = a->ab + (size_t)i * a->ab_layer;
        if (c->pos->layer) {
            c->pos->layer(&m->pos, l->pos, c);
            c->pos->layer(&m->dpos, d->pos, c);
        }

        swiglu_forward(a->hidden, ab, rows, hidden);
        linear_backward(a->hidden, d->w2, a->dx, a->hidden, l->w2, rows, hidden, dim);
        swiglu_backward(ab, a->hidden, rows, hidden);
        rmsnorm_forward(a->norm, mid, l->rms_ffn, rows, dim);
        linear_backward(a->norm, d->w1, ab, a->norm, l->w1, rows, dim, 2 * hidden);
        rmsnorm_backward(a->dx, d->rms_ffn, a->norm, mid, l->rms_ffn, rows, dim);

        linear_backward(a->norm, d->wo, a->dx, att, l->wo, rows, dim, dim);
        attention_backward(qkv, &m->dpos, a->norm, att, a->lse + (size_t)i * a->lse_layer, &shape);
        rotate(qkv, &m->pos, c, positions, 0, T, rows, -1);
        rmsnorm_forward(a->norm, x, l->rms_att, rows, dim);
        linear_backward(a->norm, d->wq, qkv, a->norm, l->wq, rows, dim, width);
        rmsnorm_backward(a->dx, d->rms_att, a->norm, x, l->rms_att, rows, dim);
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
        memset(m->dpos.bias, 0, (size_t)c->n_heads * pos_bias_stride(&m->dpos) * sizeof(float));
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
    const PosTables *pos = &m->pos;
    const size_t D = (size_t)(c->dim / c->n_heads), group = (size_t)(c->n_heads / c->n_kv_heads);
    const size_t width = (size_t)(c->n_heads + 2 * c->n_kv_heads) * D;
    const float scale = 1 / sqrtf((float)D);
    Activations *a = activations_for(m, (size_t)T, 1);    // q and k of every layer are kept
    if (c->pos->forward) c->pos->forward(&m->pos, m->params.pos, c);
    model_forward(m, NULL, tokens, NULL, 1, T);
    if (c->pos->layer) c->pos->layer(&m->pos, m->params.layers[layer].pos, c);
    memset(A, 0, (size_t)c->n_heads * (size_t)T * (size_t)T * sizeof *A);
    #pragma omp parallel for schedule(static)
    for (int h = 0; h < c->n_heads; h++)
        for (int i = 0; i < T; i++) {
            const float *q = a->qkv + (size_t)layer * a->qkv_layer + (size_t)i * width;
            const float *k = q + (size_t)c->dim + (size_t)h / group * D;    // of key i
            float *s = A + ((size_t)h * (size_t)T + (size_t)i) * (size_t)T, sum = 0;
            q += (size_t)h * D;
            for (int j = i; j >= 0; j--, k -= width) {
                const int n = i - j, clipped = n < pos->clip ? n : pos->clip;
                s[j] = scale * dot(q, k, D);
                if (pos->bias) s[j] += *pos_bias(pos, h, n);
                if (pos->rel_k) s[j] += scale * dot(q, pos->rel_k + (size_t)clipped * D, D);
            }
            const float most = row_max(s, (size_t)i + 1);
            for (int j = 0; j <= i; j++) sum += s[j] = expf(s[j] - most);
            for (int j = 0; j <= i; j++) s[j] /= sum;
        }
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
        memset(g, 0, p->count * sizeof *g);
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
    const size_t kv_dim = (size_t)(c->dim / c->n_heads * c->n_kv_heads);
    const size_t bytes = (size_t)c->n_layers * cache_floats((size_t)len, kv_dim) * sizeof(float);
    *kv = (Cache){ .len = len, .k = xmalloc(bytes), .v = xmalloc(bytes),
                   .logits = xmalloc((size_t)c->vocab_size * sizeof(float)) };
}

void cache_free(Cache *kv)
{
    free(kv->k), free(kv->v), free(kv->rows), free(kv->logits);
    *kv = (Cache){0};
}

const float *model_decode(Model *m, Cache *kv, const int *tokens, int n)
{
    const Config *c = &m->config;
    const size_t dim = (size_t)c->dim;
    Activations *a = activations_for(m, (size_t)n, 0);
    if (!kv->used && c->pos->forward) c->pos->forward(&m->pos, m->params.pos, c);
    if (kv->used && n > 1 && !kv->rows)
        kv->rows = xmalloc(2 * (size_t)kv->len * (dim / (size_t)c->n_heads * (size_t)c->n_kv_heads)
                           * sizeof *kv->rows);
    model_forward(m, kv, tokens, NULL, 1, n);
    kv->used += n;
    output_forward(kv->logits, a->norm + (size_t)(n - 1) * dim, m, 1);
    return kv->logits;
}

enum { SUM_BLOCK = 64 * VL };         // of weights that are summed in fp32

/* Sum of the weights w_i >= t, each counted as 1 when `count`; n is a multiple of VL. */
static double sum_from(const float *w, size_t n, float t, int count)
{
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
    int finite = isfinite(most), best = 0;
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
    size_t i = 0;
    for (; i < padded; i += SUM_BLOCK) {    // whole blocks first
        const double block = sum_from(w + i, min_size(SUM_BLOCK, padded - i), 0, 0);
        if (left < block) break;
        left -= block;
    }
    for (; i < padded; i++) if ((left -= (double)w[i]) < 0) return (int)i;
    return best;
}

/* ---- Tokenizer ----------------------------------------------------------------------------------
   tokenizer.bin, little endian:
       offset  size  meaning
       0       4     length of the longest entry, int32
       then for every entry, up to the end of the file:
       0       4     score, float32: the higher, the earlier its two parts are merged
       4       4     length in bytes, int32
       8       ...   the bytes; <0x41> stands for the single byte 0x41
   Entry 0 stands for what is unknown, 1 begins and 2 ends a text. */

static uint64_t hash_piece(const char *s, size_t n)
{
    uint64_t h = n, word;
    for (; n >= 8; n -= 8, s += 8) {
        memcpy(&word, s, 8);
        h = (h ^ word) * 0x9e3779b97f4a7c15u;
        h ^= h >> 32;
    }
    word = 0;
    memcpy(&word, s, n);
    return mix(h ^ word);
}

static inline int piece_find(const Tokenizer *t, const char *s, size_t n)    // -1: no such one
{
    for (size_t slot = hash_piece(s, n);; slot++) {
        const int id = t->slots[slot & (t->n_slots - 1)];
        if (id < 0 || ((size_t)t->length[id] == n && !memcmp(t->piece[id], s, n))) return id;
    }
}

/* The byte that a piece such as <0x41> stands for, or -1. */
static int piece_byte(const char *s, int n)
{
    int value = 0;
    if (n != 6 || memcmp(s, "<0x", 3) || s[5] != '>') return -1;
    for (int i = 3; i < 5; i++) {
        const char *digits = "0123456789ABCDEF", *d = memchr(digits, s[i], 16);
        if (!d) return -1;
        value = value * 16 + (int)(d - digits);
    }
    return value;
}

void tokenizer_bytes(Tokenizer *t) { *t = (Tokenizer){ .size = 256, .bytes = 1 }; }

/* Takes `file` over. */
static void tokenizer_parse(Tokenizer *t, char *file, size_t size, const char *path)
{
    *t = (Tokenizer){ .file = file, .file_size = size };
    if (size < 4) die(1, "%s: not a tokenizer: %zu bytes", path, size);
    for (int pass = 0; pass < 2; pass++) {    // count, then fill
        int n = 0;
        for (size_t at = 4; at < size; n++) {
            int32_t length;
            if (size - at < 8)
                die(1, "%s: not a tokenizer: entry %d is cut off at byte %zu", path, n, at);
            memcpy(&length, file + at + 4, 4);
            if (length < 0 || (size_t)length > size - at - 8)
                die(1, "%s: not a tokenizer: entry %d at byte %zu has length %d, "
                    "%zu bytes are left", path, n, at, length, size - at - 8);
            if (pass) {
                memcpy(&t->score[n], file + at, 4);
                t->piece[n] = file + at + 8;
                t->length[n] = length;
            }
            at += 8 + (size_t)length;
        }
        if (!n || n > 1 << 24) die(1, "%s: not a tokenizer: %d entries", path, n);
        if (pass) break;
        t->size = n;
        t->piece = xmalloc((size_t)n * sizeof *t->piece);
        t->length = xmalloc((size_t)n * sizeof *t->length);
        t->score = xmalloc((size_t)n * sizeof *t->score);
    }
    for (t->n_slots = 64; t->n_slots < 2 * (size_t)t->size; t->n_slots *= 2) {}
    t->slots = xmalloc(t->n_slots * sizeof *t->slots);
    memset(t->slots, -1, t->n_slots * sizeof *t->slots);
    memset(t->byte_id, -1, sizeof t->byte_id);
    for (int id = 0; id < t->size; id++) {
        const char *s = t->piece[id];
        const int n = t->length[id], byte = piece_byte(s, n);
        if (byte >= 0 && t->byte_id[byte] < 0) t->byte_id[byte] = id;
        for (int i = 0; i + 1 < n; i++) {
            const uint8_t a = (uint8_t)s[i], b = (uint8_t)s[i + 1];
            t->joined[a][b / 32] |= 1u << (b % 32);
        }
        if (piece_find(t, s, (size_t)n) >= 0) continue;    // of equal pieces the first counts
        size_t slot = hash_piece(s, (size_t)n);
        while (t->slots[slot & (t->n_slots - 1)] >= 0) slot++;
        t->slots[slot & (t->n_slots - 1)] = id;
    }
}

void tokenizer_load(Tokenizer *t, const char *path)
{
    size_t size;
    char *file = file_read(path, &size);
    tokenizer_parse(t, file, size, path);
}

void tokenizer_free(Tokenizer *t)
{
    free(t->file), free(t->piece), free(t->length), free(t->score), free(t->slots);
    *t = (Tokenizer){0};
}

/* A character, then what was merged; a node of a doubly linked list. A byte of a character that is
   no piece has the id ~token, and merges with nothing. */
typedef struct Symbol { size_t start, length; long prev, next; int id; } Symbol;
typedef struct Merge { float score; int id; long left; size_t length; } Merge;

static int sooner(const Merge *a, const Merge *b)
{
    return a->score > b->score || (a->score == b->score && a->left < b->left);
}

static void merge_push(Encoder *e, long left)
{
    const Symbol *a = &e->symbols[left], *b = a->next < 0 ? NULL : &e->symbols[a->next];
    if (!b || a->id < 0 || b->id < 0) return;
    const int id = piece_find(e->t, e->run + a->start, a->length + b->length);
    if (id < 0) return;
    e->heap = grow(e->heap, &e->heap_room, e->n_heap + 1, sizeof *e->heap);
    const Merge m = { e->t->score[id], id, left, a->length + b->length };
    size_t i = e->n_heap++;
    for (size_t up; i && sooner(&m, &e->heap[up = (i - 1) / 2]); i = up) e->heap[i] = e->heap[up];
    e->heap[i] = m;
}

static Merge merge_pop(Encoder *e)
{
    const Merge top = e->heap[0], last = e->heap[--e->n_heap];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < e->n_heap; i = child) {
        if (child + 1 < e->n_heap && sooner(&e->heap[child + 1], &e->heap[child])) child++;
        if (!sooner(&e->heap[child], &last)) break;
        e->heap[i] = e->heap[child];
    }
    e->heap[i] = last;
    return top;
}

/* Merges the symbols: always the pair with the best score, the leftmost of equals. A merge that was
   found earlier still stands when its left symbol is there and the two neighbours cover the same
   bytes. */
static void merge_symbols(Encoder *e)
{
    e->n_heap = 0;
    for (long i = 0; i + 1 < (long)e->n; i++) merge_push(e, i);
    while (e->n_heap) {
        const Merge m = merge_pop(e);
        Symbol *a = &e->symbols[m.left];
        if (!a->length || a->next < 0
            || a->length + e->symbols[a->next].length != m.length) continue;
        Symbol *b = &e->symbols[a->next];
        a->length = m.length;
        a->id = m.id;
        a->next = b->next;
        b->length = 0;
        if (a->next >= 0) e->symbols[a->next].prev = m.left;
        if (a->prev >= 0) merge_push(e, a->prev);
        merge_push(e, m.left);
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

static void symbol_add(Encoder *e, size_t start, size_t length, int id)
{
    e->symbols = grow(e->symbols, &e->room, e->n + 1, sizeof *e->symbols);
    const long i = (long)e->n++;
    e->symbols[i] = (Symbol){ start, length, i - 1, i + 1, id };
}

/* The next run, merged. It ends where no piece holds the two bytes that meet: no merge can cross
   that. Memory grows with the longest one, which has 11 bytes in the sample text. */
static void encoder_run(Encoder *e)
{
    const Tokenizer *t = e->t;
    const char *s = e->text;
    const int first = !e->front;
    size_t n = first ? 0 : character_length(s, e->left);
    while (n < e->left) {
        const uint8_t a = n ? (uint8_t)s[n - 1] : ' ', b = (uint8_t)s[n];
        if (!(t->joined[a][b / 32] >> (b % 32) & 1)) break;
        n += character_length(s + n, e->left - n);
    }
    e->text += n;
    e->left -= n;
    e->run = s;
    if (first) {
        e->front = xrealloc(NULL, n + 1);
        e->front[0] = ' ';
        memcpy(e->front + 1, s, n++);
        e->run = e->front;
    }
    e->n = 0;
    for (size_t at = 0, k; at < n; at += k) {
        k = character_length(e->run + at, n - at);
        const int id = piece_find(t, e->run + at, k);
        if (id >= 0) symbol_add(e, at, k, id);
        for (size_t i = 0; id < 0 && i < k; i++) {
            const int byte = t->byte_id[(uint8_t)e->run[at + i]];
            if (byte >= 0) symbol_add(e, at + i, 1, ~byte);
            else if (!i) symbol_add(e, at, k, ~0), e->unknown++;    // one for the character
        }
    }
    e->symbols[e->n - 1].next = -1;
    if (e->n > 1) merge_symbols(e);
    e->at = 0;
}

void encoder_begin(Encoder *e, const Tokenizer *t, const char *text, size_t length)
{
    *e = (Encoder){ .t = t, .text = text, .left = length, .at = -1 };
}

int encoder_next(Encoder *e)
{
    if (e->t->bytes && e->left) {
        e->left--;
        return (uint8_t)*e->text++;
    }
    if (e->at < 0 && e->left) encoder_run(e);
    if (e->at < 0) {
        free(e->front), free(e->symbols), free(e->heap);
        *e = (Encoder){ .t = e->t, .unknown = e->unknown, .at = -1 };
        return -1;
    }
    const Symbol *x = &e->symbols[e->at];
    e->at = x->next;
    return x->id < 0 ? ~x->id : x->id;
}

int *tokenizer_encode(const Tokenizer *t, const char *text, size_t length, size_t *count,
                      size_t *unknown)
{
    Encoder e;
    int *out = xrealloc(NULL, (length + 1) * sizeof *out);
    encoder_begin(&e, t, text, length);
    *count = 0;
    for (int token; (token = encoder_next(&e)) >= 0;) out[(*count)++] = token;
    if (unknown) *unknown = e.unknown;
    return xrealloc(out, *count * sizeof *out);
}

const char *tokenizer_decode(const Tokenizer *t, int token, int first, int *length)
{
    static char byte[256];
    const int value = t->bytes ? token : piece_byte(t->piece[token], t->length[token]);
    if (value >= 0) {
        byte[value] = (char)value;
        *length = !(first && !t->bytes && value == ' ');
        return &byte[value];
    }
    const char *s = t->piece[token];
    *length = t->length[token];
    if (token == 1 || token == 2) *length = 0;    // begin and end of text are not text
    if (first && *length && *s == ' ') s++, --*length;
    return s;
}

/* The token of a text that is one byte of ASCII, -1 if there is none. */
static int tokenizer_byte(const Tokenizer *t, char c)
{
    if (t->bytes) return (uint8_t)c;
    const int piece = piece_find(t, &c, 1);
    return piece >= 0 ? piece : t->byte_id[(uint8_t)c];
}

Example *examples_find(const Tokenizer *t, const char *mark, const int *tokens, size_t n, int ctx,
                       const char *path, size_t before, size_t *count)
{
    const int newline = tokenizer_byte(t, '\n'), usable = strlen(mark) == 1 && *mark != '\n';
    const int ends = usable ? tokenizer_byte(t, *mark) : -1;
    if (newline < 0 || ends < 0)
        die(2, "--answers: \"%s\" is not one byte of ASCII that is a token of its own", mark);
    Example *line = NULL, e = {0};
    size_t room = 0;
    *count = 0;
    for (size_t i = 0; i < n; i++) {
        const size_t number = before + *count + 1;
        if (tokens[i] == ends && e.answer == e.at) e.answer = i + 1;
        if (tokens[i] != newline) {
            if (i + 1 == n) die(1, "%s: line %zu has no newline at its end", path, number);
            continue;
        }
        e.end = i + 1;
        if (e.answer == e.at) die(1, "%s: line %zu has no \"%s\"", path, number, mark);
        if (i - e.at > (size_t)ctx)
            die(1, "%s: line %zu has %zu tokens before its newline, the context %d (--ctx)", path,
                number, i - e.at, ctx);
        line = grow(line, &room, *count + 1, sizeof *line);
        line[(*count)++] = e;
        e.at = e.answer = e.end;
    }
    return line;
}

/* ---- Files --------------------------------------------------------------------------------------
   model.bin, little endian:
       offset  size    meaning
       0       8       "POSENC", 0x1a, 0x0a
       8       4       version, 2
       12      36      int32: dim hidden_dim n_layers n_heads n_kv_heads vocab_size seq_len untied
                       start_token
       48      16      name of the encoding, zero padded
       64      256     its options: 8 x (24 bytes name, float64 value), an empty name is none
       320     8       v, bytes of the vocabulary (0: the 256 bytes)
       328     8       n, number of parameters
       336     8       s, bytes of the training state (0: none)
       344     24      checksums of vocabulary, parameters, training state
       368     8       0
       376     8       checksum of bytes 0 .. 375
       384     v       the vocabulary, a tokenizer.bin; zero padded to a multiple of 64
               4 n     the parameters, float32, in the order of params_layout: token_embedding; for
                       every layer rms_att wq wk wv wo rms_ffn w1 w3 w2 and the block of the
                       encoding; rms_final; wcls if untied; the shared block of the encoding
               s       TrainState, then both moments, float32, in the order of the parameters */

enum { HEADER = 384, VERSION = 2, NAME = 24 };
static const char MAGIC[8] = { 'P', 'O', 'S', 'E', 'N', 'C', 0x1a, '\n' };

typedef struct {
    char magic[8];
    int32_t version;
    int32_t shape[9];
    char pos[16];
    struct { char name[NAME]; double value; } option[POS_OPTIONS];
    uint64_t vocab_bytes, n_params, state_bytes, vocab_sum, params_sum, state_sum, zero, sum;
} Header;
_Static_assert(sizeof(Header) == HEADER && sizeof(TrainState) == 15 * 8, "they have no holes");

/* Eight lanes of h = (h ^ word) * odd, each step a bijection, so that no single changed word can
   go unnoticed. */
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
    uint64_t *sums = xmalloc((blocks + 1) * sizeof *sums);
    #pragma omp parallel for schedule(static) if (blocks > 1)
    for (long b = 0; b < (long)blocks; b++) {
        const size_t at = (size_t)b * BLOCK;
        sums[b] = checksum_block((const uint8_t *)data + at, min_size(BLOCK, bytes - at));
    }
    const uint64_t sum = blocks == 1 ? sums[0]
                                     : checksum_block((uint8_t *)sums, blocks * sizeof *sums);
    free(sums);
    return sum;
}

/* A file whose size is known gets no more room than that: the text may be most of the memory. */
static void file_append(Text *text, const char *path)
{
    struct stat info;
    const int standard = !strcmp(path, "-"), fd = standard ? STDIN_FILENO : open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &info)) die(1, "%s: %s", path, strerror(errno));
    if (S_ISDIR(info.st_mode)) die(1, "%s: is a directory, expected a file", path);
    const size_t guess = text->n + 2 + (S_ISREG(info.st_mode) ? (size_t)info.st_size : 1 << 16);
    if (guess > text->room) text->data = xrealloc(text->data, text->room = guess);
    for (;;) {
        const ssize_t n = read(fd, text->data + text->n,
                               min_size(text->room - text->n - 1, 1 << 30));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) die(1, "%s: %s", path, strerror(errno));
        if (!n) break;
        text->n += (size_t)n;
        if (text->n + 1 == text->room)
            text->data = grow(text->data, &text->room, text->room + 1, 1);
    }
    if (!standard) close(fd);
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
    char *data = text->data + start;
    const uint8_t *b = (const uint8_t *)data;
    const size_t n = text->n - start;
    size_t kept = 0, converted = 0;
    if (n >= 2 && ((b[0] == 0xFF && b[1] == 0xFE) || (b[0] == 0xFE && b[1] == 0xFF)))
        die(1, "%s: the text is UTF-16; save it as UTF-8", path);
    for (size_t i = n >= 3 && !memcmp(b, "\xEF\xBB\xBF", 3) ? 3 : 0; i < n; i++) {
        const int end = data[i] == '\r';
        if (end && i + 1 < n && data[i + 1] == '\n') i++;
        data[kept++] = end ? '\n' : data[i];
        converted += (size_t)end;
    }
    data[kept] = 0;
    text->n = start + kept;
    return converted;
}

/* The file that a link leads to, which is replaced, not the link; else `path`. To be freed. */
static char *file_behind(const char *path)
{
    char *end = realpath(path, NULL);
    if (!end) memcpy(end = xmalloc(strlen(path) + 1), path, strlen(path));
    return end;
}

/* Beside path: a rename must not cross file systems. */
static FILE *temporary_open(char **temporary, const char *path)
{
    const size_t size = strlen(path) + 32;
    *temporary = xmalloc(size);
    snprintf(*temporary, size, "%s.%ld.tmp", path, (long)getpid());
    FILE *f = fopen(*temporary, "wb");
    if (!f) die(1, "%s: %s", path, strerror(errno));
    return f;
}

void file_check_writable(const char *path)
{
    struct stat info;
    char *temporary;
    if (!*path) die(2, "the name of a file to write is empty");
    const int exists = !stat(path, &info);
    if (exists && S_ISDIR(info.st_mode))
        die(1, "%s: is a directory, expected the name of a file to write", path);
    if (exists && !S_ISREG(info.st_mode))
        die(1, "%s: is not a regular file and will not be replaced", path);
    char *target = file_behind(path);
    sigset_t all, before;    // a signal between the two would leave the file behind
    sigfillset(&all), sigprocmask(SIG_BLOCK, &all, &before);
    fclose(temporary_open(&temporary, target));
    unlink(temporary);
    sigprocmask(SIG_SETMASK, &before, NULL);
    free(temporary), free(target);
}

static uint64_t state_checksum(const TrainState *s, const float *m, const float *v, size_t bytes)
{
    return checksum(s, sizeof *s) ^ mix(checksum(m, bytes)) ^ mix(mix(checksum(v, bytes)));
}

void model_save(const Model *m, const char *path, const TrainState *state)
{
    const Config *c = &m->config;
    const Tokenizer *t = &m->tokenizer;
    const size_t vocab_room = round_up(t->file_size, 64), floats = m->params.count * sizeof(float);
    char *vocabulary = xmalloc(vocab_room), *temporary, *target = file_behind(path);
    if (t->file_size) memcpy(vocabulary, t->file, t->file_size);
    Header h = { .version = VERSION,
                 .shape = { c->dim, c->hidden_dim, c->n_layers, c->n_heads, c->n_kv_heads,
                            c->vocab_size, c->seq_len, c->untied, c->start_token } };
    memcpy(h.magic, MAGIC, sizeof MAGIC);
    snprintf(h.pos, sizeof h.pos, "%s", c->pos->name);
    for (int i = 0; i < POS_OPTIONS && c->pos->options[i].name; i++) {
        snprintf(h.option[i].name, NAME, "%s", c->pos->options[i].name);
        h.option[i].value = c->pos_opt[i];
    }
    h.vocab_bytes = t->file_size;
    h.n_params = m->params.count;
    h.vocab_sum = checksum(vocabulary, vocab_room);
    h.params_sum = checksum(m->params.data, floats);
    if (state) {
        h.state_bytes = sizeof *state + 2 * floats;
        h.state_sum = state_checksum(state, m->m, m->v, floats);
    }
    h.sum = checksum(&h, offsetof(Header, sum));

    const struct { const void *data; size_t bytes; } part[] = {
        { &h, sizeof h }, { vocabulary, vocab_room }, { m->params.data, floats },
        { state, state ? sizeof *state : 0 },
        { m->m, state ? floats : 0 }, { m->v, state ? floats : 0 } };
    FILE *f = temporary_open(&temporary, target);
    int good = 1;
    for (size_t i = 0; i < sizeof part / sizeof *part; i++)
        good = good && (!part[i].bytes
                        || fwrite(part[i].data, 1, part[i].bytes, f) == part[i].bytes);
    good = good && !fflush(f) && !fsync(fileno(f));
    if (fclose(f) || !good || rename(temporary, target)) {
        const int reason = errno;
        unlink(temporary);
        die(1, "%s: %s; nothing was saved", path, strerror(reason));
    }
    free(vocabulary), free(temporary), free(target);
}

/* A mapped file whose pages are private: what is written to them stays in this process. */
static char *file_map(const char *path, size_t *size)
{
    struct stat info;
    const int fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &info)) die(1, "%s: %s", path, strerror(errno));
    if (S_ISDIR(info.st_mode)) die(1, "%s: is a directory, expected a model file", path);
    if (!S_ISREG(info.st_mode)) die(1, "%s: is not a regular file, a model must be one", path);
    if (info.st_size < 28)
        die(1, "%s: not a model file: %lld bytes", path, (long long)info.st_size);
    *size = (size_t)info.st_size;
    char *map = mmap(NULL, *size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED) die(1, "%s: %s", path, strerror(errno));
    close(fd);
    return map;
}

static void require_config(Config *c, const char *path)
{
    const char *wrong = config_check(c);
    if (wrong) die(1, "%s: not a usable model: %s", path, wrong);
}

static void check_size(const char *path, double expected, size_t found)
{
    if (expected != (double)found)
        die(1, "%s: expected %.0f bytes for a model of this shape, found %zu%s",
            path, expected, found, (double)found < expected ? " (cut off?)" : "");
}

static int max_positions(const Config *c, int max_len, const char *path)
{
    if (max_len > c->seq_len && c->pos->bounded)
        die(1, "%s: %d positions were asked for, but %s has a row for each of the %d trained ones "
            "and none beyond", path, max_len, c->pos->name, c->seq_len);
    return max_len > c->seq_len ? max_len : c->seq_len;
}

/* A checkpoint of llama2.c: its tensors stand by kind, all layers of one behind each other. */
static void load_llama2c(Model *m, const char *path, char *file, size_t size, int max_len)
{
    int32_t n[7], version = 0;
    const int versioned = !memcmp(file, "24ka", 4);
    if (versioned && size < 256) die(1, "%s: expected 256 bytes of header, found %zu", path, size);
    if (versioned) memcpy(&version, file + 4, 4);
    if (versioned && version != 1)
        die(1, "%s: a llama2.c checkpoint of version %d; versions 0 and 1 (fp32) can be read",
            path, version);
    memcpy(n, file + (versioned ? 8 : 0), sizeof n);
    const int untied = versioned ? !file[36] : n[5] < 0;
    for (int i = 0; i < 7; i++)
        if ((n[i] < 1 && !(i == 5 && n[i] < 0 && n[i] > -(1 << 24))) || n[i] > 1 << 24)
            die(1, "%s: not a model file: field %d of the header is %d (%zu bytes)",
                path, i, n[i], size);
    Config c = { .dim = n[0], .hidden_dim = n[1], .n_layers = n[2], .n_heads = n[3],
                 .n_kv_heads = n[4], .vocab_size = abs(n[5]), .seq_len = n[6], .untied = untied,
                 .start_token = abs(n[5]) > 1 ? 1 : -1, .pos = posenc_find("rope") };
    config_defaults(&c);
    require_config(&c, path);
    // The legacy version holds tables of angles, unused.
    const double angles = versioned ? 0 : (double)c.seq_len * (c.dim / c.n_heads / 2) * 2;
    check_size(path, (versioned ? 256 : 28) + 4 * ((double)config_params(&c) + angles), size);

    // ANGLES stands for the tables, which nobody reads.
    enum { ANGLES = LAYER_POS };
    static const int order[2][13] = {
        { EMB, RMS_ATT, WQ, WK, WV, WO, RMS_FFN, W1, W2, W3, RMS_FINAL, ANGLES, CLS },
        { RMS_ATT, RMS_FFN, RMS_FINAL, EMB, WQ, WK, WV, WO, W1, W2, W3, CLS, ANGLES } };
    size_t first[SLOTS] = {0}, at = 0;
    for (int k = 0; k < 13; k++) {
        const int slot = order[versioned][k];
        const int once = slot == EMB || slot == RMS_FINAL || slot == CLS;
        first[slot] = at;
        at += slot == ANGLES ? (size_t)angles
                             : slot_floats(&c, slot) * (once ? 1 : (size_t)c.n_layers);
    }
    model_place(m, &c, max_positions(&c, max_len, path),
                (float *)(void *)(file + (versioned ? 256 : 28)), first);
}

static int load_posenc(Model *m, const char *path, char *file, size_t size, int max_len,
                       TrainState *state)
{
    Header h;
    if (size < HEADER)
        die(1, "%s: expected %d bytes of header, found %zu (cut off?)", path, HEADER, size);
    memcpy(&h, file, sizeof h);
    if (h.version != VERSION)
        die(1, "%s: a model of version %d, expected %d", path, h.version, VERSION);
    if (h.sum != checksum(&h, offsetof(Header, sum)))
        die(1, "%s: the header is damaged: its checksum does not match", path);
    h.pos[sizeof h.pos - 1] = 0;
    Config c = { .dim = h.shape[0], .hidden_dim = h.shape[1], .n_layers = h.shape[2],
                 .n_heads = h.shape[3], .n_kv_heads = h.shape[4], .vocab_size = h.shape[5],
                 .seq_len = h.shape[6], .untied = h.shape[7], .start_token = h.shape[8],
                 .pos = posenc_find(h.pos) };
    if (!c.pos) die(1, "%s: the encoding \"%s\" is not known to this program", path, h.pos);
    config_defaults(&c);
    for (int i = 0; i < POS_OPTIONS && h.option[i].name[0]; i++) {
        h.option[i].name[NAME - 1] = 0;
        const int k = pos_option(c.pos, h.option[i].name);
        if (k < 0) die(1, "%s: %s has no option \"%s\"", path, c.pos->name, h.option[i].name);
        c.pos_opt[k] = h.option[i].value;
    }
    require_config(&c, path);
    const size_t floats = config_params(&c) * sizeof(float);
    const size_t vocab_room = round_up((size_t)h.vocab_bytes, 64);
    if (h.vocab_bytes > size || c.start_token < -1 || c.start_token >= c.vocab_size
        || h.n_params != floats / sizeof(float)
        || (h.state_bytes && h.state_bytes != sizeof *state + 2 * floats))
        die(1, "%s: not a usable model: its header contradicts itself", path);
    check_size(path, (double)HEADER + (double)vocab_room + (double)floats + (double)h.state_bytes,
               size);
    if (h.vocab_sum != checksum(file + HEADER, vocab_room))
        die(1, "%s: the vocabulary is damaged: its checksum does not match", path);
    char *params = file + HEADER + vocab_room, *saved = params + floats;
    if (h.params_sum != checksum(params, floats))
        die(1, "%s: the parameters are damaged: their checksum does not match", path);
    if (state && h.state_bytes) {
        memcpy(state, saved, sizeof *state);
        saved += sizeof *state;
        m->m = memcpy(xmalloc(floats), saved, floats);
        m->v = memcpy(xmalloc(floats), saved + floats, floats);
        if (h.state_sum != state_checksum(state, m->m, m->v, floats))
            die(1, "%s: the training state is damaged: its checksum does not match", path);
    }
    if (h.vocab_bytes) {
        char *copy = memcpy(xmalloc((size_t)h.vocab_bytes), file + HEADER, (size_t)h.vocab_bytes);
        tokenizer_parse(&m->tokenizer, copy, (size_t)h.vocab_bytes, path);
    } else {
        tokenizer_bytes(&m->tokenizer);
    }
    model_place(m, &c, max_positions(&c, max_len, path), (float *)(void *)params, NULL);
    return h.state_bytes > 0;
}

int model_load(Model *m, const char *path, const char *tokenizer, int max_len, TrainState *state)
{
    size_t size;
    int has_state = 0;
    *m = (Model){0};
    char *file = file_map(path, &size);
    if (!memcmp(file, MAGIC, sizeof MAGIC)) {
        has_state = load_posenc(m, path, file, size, max_len, state);
    } else {
        load_llama2c(m, path, file, size, max_len);
    }
    m->map = file;
    m->map_size = size;
    Tokenizer own = m->tokenizer;
    if (tokenizer) {
        if (strcmp(tokenizer, "bytes")) tokenizer_load(&m->tokenizer, tokenizer);
        else tokenizer_bytes(&m->tokenizer);
    }
    const Tokenizer *t = &m->tokenizer;
    if (t->size && t->size != m->config.vocab_size)
        die(1, "%s: the model has %d tokens, its vocabulary %s has %d",
            path, m->config.vocab_size, tokenizer ? tokenizer : "inside", t->size);
    if (tokenizer && own.size
        && (own.file_size != t->file_size
            || (t->file_size && memcmp(own.file, t->file, t->file_size))))
        die(1, "%s: carries its own vocabulary, and %s is another one", path, tokenizer);
    if (tokenizer) tokenizer_free(&own);
    return has_state;
}

/* ---- Command-line options -------------------------------------------------------------------- */

void options_help(const Option *options, int n)
{
    for (const Option *o = options; o < options + n && o->name; o++) {
        char left[64], value[64] = "";
        const char letter[] = { '-', o->letter, ' ', 0 };
        snprintf(left, sizeof left, "%s--%s%s%s", o->letter ? letter : "   ", o->name,
                 o->arg ? " " : "", o->arg ? o->arg : "");
        if (o->i && *o->i >= o->min) snprintf(value, sizeof value, " [%d]", *o->i);
        if (o->f && !isnan(*o->f)) snprintf(value, sizeof value, " [%g]", *o->f);
        if (o->s && *o->s) snprintf(value, sizeof value, " [%s]", *o->s);
        printf("  %-26s %s%s\n", left, o->help, value);
    }
}

static const char *joined(const char *const *words)    // "none linear ntk"
{
    static char text[256];
    text[0] = 0;
    for (size_t n = 0; *words; words++, n = strlen(text))
        snprintf(text + n, sizeof text - n, "%s%s", n ? " " : "", *words);
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

void options_add_pos(Option *end, int trained)
{
    static double values[MOST_POS_OPTIONS];
    int n = 0;
    for (const PosEnc *e = posencs; e->name; e++)
        for (const PosOption *p = e->options; p < e->options + POS_OPTIONS && p->name; p++) {
            int k = 0;
            while (k < n && strcmp(end[k].name, p->name)) k++;
            if (k < n || (trained && p->shape)) continue;
            if (n == MOST_POS_OPTIONS - 1)
                die(1, "the encodings have more than %d options", MOST_POS_OPTIONS - 1);
            end[n] = (Option){ .name = p->name, .arg = p->words ? "WORD" : "X", .help = p->help,
                               .f = &values[n], .min = p->min, .max = p->max, .words = p->words };
            n++;
        }
}

void options_help_pos(int trained)
{
    for (const PosEnc *e = posencs; e->name; e++) {
        printf("  %-26s %s\n", e->name, e->help);
        for (const PosOption *p = e->options; p < e->options + POS_OPTIONS && p->name; p++)
            if (!trained || !p->shape)
                printf("      --%-20s %s%s%s [%s]\n", p->name, p->help, p->words ? ": " : "",
                       p->words ? joined(p->words) : "", pos_option_text(p, p->value));
    }
}

int options_apply_pos(Config *c, const Option *added)
{
    int applied = 0;
    for (const Option *o = added; o->name; o++) {
        if (!o->given) continue;
        const int i = pos_option(c->pos, o->name);
        if (i < 0) die(2, "--%s is not an option of the encoding %s", o->name, c->pos->name);
        c->pos_opt[i] = *o->f;
        applied++;
    }
    return applied;
}

static void option_value(Option *o, const char *shown, const char *text)
{
    char *end = NULL;
    if (o->s) {
        if (o->given && o->given >= o->max && o->max > 1)
            die(2, "%s can be given %g times", shown, o->max);
        o->s[o->max > 1 ? o->given : 0] = text;
        o->given++;
        return;
    }
    o->given = 1;
    if (o->words) {
        int k = 0;
        while (o->words[k] && strcasecmp(o->words[k], text)) k++;
        if (!o->words[k]) die(2, "%s: \"%s\" is not one of %s", shown, text, joined(o->words));
        *o->f = k;
        return;
    }
    errno = 0;
    double value = 0;
    if (o->f) *o->f = value = strtod(text, &end);
    if (o->i) value = (double)strtoll(text, &end, 10);
    if (o->u) *o->u = strtoull(text, &end, 10);
    if (!*text || *end || strchr(" \t\n", *text) || (o->u && (errno || strchr(text, '-'))))
        die(2, "%s: \"%s\" is not a %s", shown, text,
            o->f ? "number"
            : o->u ? "whole number from 0 to 18446744073709551615" : "whole number");
    if (!o->u && !(value >= o->min && value <= o->max))
        die(2, "%s: %s is not between %.10g and %.10g", shown, text, o->min, o->max);
    if (o->i) *o->i = (int)value;
}

int options_parse(Option *options, int argc, char **argv, void (*help)(void))
{
    int n = 0, plain = 0;
    for (int i = 1; i < argc; i++) {
        char *arg = argv[i], *equals = NULL;
        if (plain || arg[0] != '-' || !arg[1]) { argv[n++] = arg; continue; }
        if (!strcmp(arg, "--")) { plain = 1; continue; }
        if (!strcmp(arg, "--help") || !strcmp(arg, "-h")) {
            help();
            output_check();
            exit(0);
        }
        Option *o = options;
        if (arg[1] == '-') {
            equals = strchr(arg, '=');
            const size_t length = equals ? (size_t)(equals - arg - 2) : strlen(arg + 2);
            while (o->name && (strncmp(o->name, arg + 2, length) || o->name[length])) o++;
        } else {
            while (o->name && (arg[2] || o->letter != arg[1])) o++;
        }
        if (!o->name) die(2, "unknown option %s (--help lists them)", arg);
        char shown[64];
        const int is_long = arg[1] == '-';
        snprintf(shown, sizeof shown, "%s%.*s", is_long ? "--" : "-", is_long ? 40 : 1,
                 is_long ? o->name : arg + 1);
        if (!o->arg) {
            if (equals) die(2, "%s takes no value", shown);
            *o->on = o->given = 1;
        } else if (equals) {
            option_value(o, shown, equals + 1);
        } else if (i + 1 < argc) {
            option_value(o, shown, argv[++i]);
        } else {
            die(2, "%s needs a value (%s)", shown, o->arg);
        }
    }
    return n;
}

#endif
