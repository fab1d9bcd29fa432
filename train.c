/* train.c - trains a Transformer on a text:   ./train --pos rope data.txt
   Options, data, learning rate, log, starting and resuming, the loop. How the network works is in
   model.h, how positions are encoded in posenc.c. */
#define MODEL_IMPLEMENTATION
#include "model.h"

#include <signal.h>

/* ---- Options: the defaults are here, --help prints them -------------------------------------- */

static const char *pos = "rope", *out = "model.bin", *resume_file, *init_file;
static const char *tokenizer_file = "tokenizer.bin", *val_file, *log_file, *answers;
static int dim = 128, layers = 4, heads = 4, kv_heads, hidden, ctx = 256, untied;
static int batch = 8, accum = 1, steps = 1200, warmup = -1, threads;
static int eval_every, sample_every, save_every, stop_after, quiet, profiled, bf16;
static double lr = 3e-3, min_lr = NAN, weight_decay = 0.1, clip = 1, val_frac = 0.1;
static uint64_t seed;

// Places in the table: the shape of the model, and what decides the bits of a run. The compiler
// warns of one that is taken twice.
enum { POS = 0, OUT = 1, TOKENIZER = 4, SHAPE = 5, CTX = 11, RUN = 12, VAL_FRAC = 20, SEED = 22 };

static Option options[] = {
    [POS] = { "pos", 0, "NAME", "positional encoding, see below", .s = &pos },
    [OUT] = { "out", 'o', "FILE", "where the model goes", .s = &out },
    { "resume", 0, "FILE", .s = &resume_file,
      .help = "go on where FILE stopped: same text, same bits as without the stop" },
    { "init", 0, "FILE", .s = &init_file,
      .help = "start from FILE's weights with a fresh optimizer "
              "(another --pos or --ctx is allowed)" },
    [TOKENIZER] = { "tokenizer", 'z', "FILE", .s = &tokenizer_file,
                    .help = "vocabulary, or the word \"bytes\"" },
    [SHAPE] = { "dim", 0, "N", "width", .i = &dim, .min = 1, .max = 1 << 16 },
    { "layers", 0, "N", "layers", .i = &layers, .min = 1, .max = 1000 },
    { "heads", 0, "N", "attention heads", .i = &heads, .min = 1, .max = 1 << 12 },
    { "kv-heads", 0, "N", .i = &kv_heads, .min = 0, .max = 1 << 12,
      .help = "key and value heads; 0: as many as heads" },
    { "hidden", 0, "N", .i = &hidden, .min = 0, .max = 1 << 20,
      .help = "width of the feed-forward layer; 0: 8/3 dim, a multiple of 32" },
    { "untied", 0, NULL, "an output matrix of its own", .on = &untied },
    [CTX] = { "ctx", 0, "N", "trained length, in tokens", .i = &ctx, .min = 1, .max = 1 << 20 },
    [RUN] = { "batch", 0, "N", "sequences per pass", .i = &batch, .min = 1, .max = 1 << 16 },
    { "accum", 0, "N", .i = &accum, .min = 1, .max = 1 << 16,
      .help = "passes per step; their gradients are averaged" },
    { "steps", 0, "N", .i = &steps, .min = 0, .max = 1e9,
      .help = "steps of the whole schedule; 0 writes the initial model" },
    { "lr", 0, "X", "peak learning rate", .f = &lr, .min = 0, .max = 1e9 },
    { "min-lr", 0, "X", .f = &min_lr, .min = 0, .max = 1e9,
      .help = "learning rate at the last step; default: a tenth of lr" },
    { "warmup", 0, "N", .i = &warmup, .min = 0, .max = 1e9,
      .help = "steps up to the peak; default: a tenth of steps, 100 at most" },
    { "weight-decay", 0, "X", .f = &weight_decay, .min = 0, .max = 1e3,
      .help = "AdamW's decay of matrices and embeddings" },
    { "clip", 0, "X", "largest norm of the gradient; 0: any", .f = &clip, .min = 0, .max = 1e9 },
    [VAL_FRAC] = { "val-frac", 0, "X", .f = &val_frac, .min = 0, .max = 0.9,
      .help = "share of the text, at its end, that is kept for validation" },
    { "val", 0, "FILE", "validate on FILE instead", .s = &val_file },
    [SEED] = { "seed", 's', "N", "random seed; default: drawn, and printed", .u = &seed },
    { "threads", 0, "N", .i = &threads, .min = 0, .max = 4096,
      .help = "threads; 0: OMP_NUM_THREADS, else all processors" },
    { "eval-every", 0, "N", .i = &eval_every, .min = 0, .max = 1e9,
      .help = "validate every N steps; 0: ten times in all" },
    { "sample-every", 0, "N", .i = &sample_every, .min = 0, .max = 1e9,
      .help = "print a sample every N steps; 0: never" },
    { "save-every", 0, "N", .i = &save_every, .min = 0, .max = 1e9,
      .help = "also save every N steps; 0: at the end only" },
    { "stop-after", 0, "N", .i = &stop_after, .min = 0, .max = 1e9,
      .help = "save and stop after step N of the schedule, to be resumed" },
    { "log", 0, "FILE", "a row per step, tab separated", .s = &log_file },
    { "answers", 0, "MARK", .s = &answers,
      .help = "every line is an example, a question, MARK and an answer; only answers count" },
    { "bf16", 0, NULL, .on = &bf16,
      .help = "round the inputs of matrix products to bf16; faster where the processor has it" },
    { "profile", 0, NULL, "say at the end where the time of the steps went", .on = &profiled },
    { "quiet", 'q', NULL, "print errors and warnings only", .on = &quiet },
    { 0 },
};

static const char *const usage =
    "train [options] TEXT...\n"
    "Trains a small Transformer on text files (- is standard input), as one text, "
    "and writes a model for ./run.\n"
    "    ./train --pos rope data.txt && ./run model.bin -p \"Once\"\n";

static const char *const hint =
    "; --resume goes on with the run as it was (--init starts a new one from its weights)";

/* Option i is kept from the file that the model comes from: `has`. */
static void keep(int i, double has)
{
    Option *o = &options[i];
    const double asked = o->i ? *o->i : o->on ? *o->on : *o->f;
    // 0 of a shape: automatic, as the file has it
    if (o->given && asked != has && (asked != 0 || i >= CTX))
        die(2, "--%s %.10g differs from the %.10g of %s%s", o->name, asked, has,
            resume_file ? resume_file : init_file, resume_file ? hint : ", whose shape is kept");
    if (resume_file && !(has >= o->min && has <= o->max))
        die(1, "%s: its %s, %g, is out of range", resume_file, o->name, has);
    if (o->i) *o->i = (int)has;
    if (o->on) *o->on = (int)has;
    if (o->f) *o->f = has;
}

/* The shape that the command line asks for: the defaults, or the shape of a file, of which --ctx,
   --pos and the options of the encoding may be changed. */
static Config requested(const Config *file)
{
    // no start token: windows start anywhere, so a prompt needs nothing in front
    Config c = file ? *file : (Config){
        .dim = dim, .n_layers = layers, .n_heads = heads, .n_kv_heads = kv_heads, .seq_len = ctx,
        .hidden_dim = hidden, .untied = untied, .start_token = -1, .vocab_size = 1 };
    const int shape[] = { c.dim, c.n_layers, c.n_heads, c.n_kv_heads, c.hidden_dim, c.untied };
    for (int i = SHAPE; file && i < CTX; i++) keep(i, shape[i - SHAPE]);
    if (options[CTX].given) c.seq_len = ctx;
    if (!file || options[POS].given) c.pos = posenc_find(pos);
    if (!c.pos)
        die(2, "--pos %s is not an encoding; there are %s", pos,
            joined(&posencs->name, sizeof *posencs));
    if (!file || c.pos != file->pos) config_defaults(&c);
    options_apply_pos(&c);
    return c;
}

// A line on stderr, unless --quiet.
#define note(format, ...) (quiet ? 0 : fprintf(stderr, "train: " format "\n", __VA_ARGS__))

/* ---- Data ------------------------------------------------------------------------------------ */

typedef struct {
    uint16_t *token; size_t from, n;    // n tokens from token[from] on
    Example *line; size_t lines;        // with --answers; their places count from token[0]
} Tokens;

typedef struct {    // what is validated on
    int *token;
    Example *example; size_t n;
} Validation;

static Text read_texts(char **paths, int n)    // all as one text
{
    Text all = {0};
    for (int i = 0; i < n; i++) {
        const size_t before = all.n, converted = text_append(&all, paths[i]);
        if (converted) note("%s: %zu carriage returns were read as newlines", paths[i], converted);
        if (all.n == before) die(1, "%s: the file is empty", paths[i]);
    }
    return all;
}

/* Encodes and frees a text; with --answers finds its lines. */
static Tokens encode(const Tokenizer *t, Text text, const char *path)
{
    Encoder e = { .t = t, .text = text.data, .left = text.n };
    Tokens tokens = { .token = xrealloc(NULL, (text.n + 1) * sizeof *tokens.token) };
    for (int id; (id = encoder_next(&e)) >= 0;) tokens.token[tokens.n++] = (uint16_t)id;
    free(text.data);
    if (e.unknown)
        fprintf(stderr, "train: %zu characters of the text are not in the vocabulary\n", e.unknown);
    tokens.token = xrealloc(tokens.token, tokens.n * sizeof *tokens.token);
    if (answers) {
        int *ids = xmalloc(tokens.n * sizeof *ids);
        for (size_t i = 0; i < tokens.n; i++) ids[i] = tokens.token[i];
        tokens.line = examples_find(t, answers, ids, tokens.n, ctx, path, &tokens.lines);
        free(ids);
    }
    return tokens;
}

/* One cut, with --answers between two lines: the text before it is trained on, the text behind it,
   which is returned, never. */
static Tokens split(Tokens *text)
{
    size_t at = text->n - (size_t)((double)text->n * val_frac), line = 0;
    while (line < text->lines && text->line[line].at < at) line++;
    if (answers) at = line < text->lines ? text->line[line].at : text->n;
    const Tokens behind = { .token = text->token, .from = at, .n = text->n - at,
                            .line = text->line + line, .lines = text->lines - line };
    text->n = at;
    text->lines = line;
    return behind;
}

/* What represents a part of the text: its lines, or windows of ctx that follow each other, the last
   one shorter, so that every token but the first is a target once. Of a part that is longer than
   EVAL_TOKENS some of them, spread evenly over it. */
static Validation validation(Tokens part)
{
    enum { EVAL_TOKENS = 1 << 18 };
    const size_t T = (size_t)ctx, windows = part.n > 1 ? div_up(part.n - 1, T) : 0;
    const size_t all = answers ? part.lines : windows, take = min_size(all, EVAL_TOKENS / T + 1);
    Validation v = { .token = xmalloc(take * (T + 1) * sizeof *v.token),
                     .example = xmalloc(take * sizeof *v.example), .n = take };
    for (size_t i = 0, n = 0; i < take; i++) {
        const size_t k = all * i / take, at = part.from + k * T;
        const Example window = { at, at + 1, min_size(at + T + 1, part.from + part.n) };
        const Example e = answers ? part.line[k] : window;
        v.example[i] = (Example){ n, n + e.answer - e.at, n + e.end - e.at };
        for (size_t j = e.at; j < e.end; j++) v.token[n++] = part.token[j];
    }
    if (answers) examples_sort(v.example, take);
    return v;
}

/* Sequence w of the run, a random line or ctx + 1 tokens from a random place: a function of the
   seed and w alone. */
static Example draw(Tokens data, uint64_t w)
{
    const uint64_t r = rng(seed, RNG_DATA, w);
    if (answers) return data.line[r % data.lines];
    const size_t at = (size_t)(r % (data.n - (size_t)ctx));
    return (Example){ at, at + 1, at + (size_t)ctx + 1 };
}

/* T inputs and targets, of which the answer's count. What is read behind the end is any token: no
   target that counts follows it. */
static void fill(int *x, int *y, Tokens data, Example e, size_t T)
{
    for (size_t t = 0, k = e.at; t < T; t++, k++) {
        x[t] = k + 1 < e.end ? data.token[k] : 0;
        y[t] = k + 1 >= e.answer && k + 1 < e.end ? data.token[k + 1] : -1;
    }
}

/* As ./run begins without a prompt: with a newline, the beginning of a line. */
static void print_sample(Model *m, int64_t step)
{
    Cache kv;
    int token = tokenizer_byte(&m->tokenizer, '\n');
    cache_create(&kv, m, ctx);
    fprintf(stderr, "--- sample at step %lld ---\n", (long long)step);
    while (token >= 0 && kv.used < ctx - 1) {
        const float *logits = model_decode(m, &kv, &token, 1);
        const double u = rng_uniform(seed, RNG_SAMPLE, (uint64_t)step << 32 | (uint64_t)kv.used);
        int length;
        token = sample(logits, m->config.vocab_size, 0.8f, 0, 0.95f, u);
        if (token < 0) break;
        const char *s = tokenizer_decode(&m->tokenizer, token, 0, &length);
        fwrite(s, 1, (size_t)length, stderr);
    }
    fprintf(stderr, "\n---\n");
    cache_free(&kv);
}

/* ---- The log --------------------------------------------------------------------------------- */

static const char *human(double n)    // 1234567 -> 1.23M
{
    static char text[4][16];
    static int next;
    char *s = text[next++ % 4];
    if (n >= 1e6) snprintf(s, 16, "%.2fM", n / 1e6);
    else if (n >= 1e3) snprintf(s, 16, "%.1fk", n / 1e3);
    else snprintf(s, 16, "%.0f", n);
    return s;
}

static const char *minutes(double s)
{
    static char text[32];
    if (s >= 3600) snprintf(text, sizeof text, "%dh%02dm", (int)(s / 3600), (int)(s / 60) % 60);
    else snprintf(text, sizeof text, "%dm%02ds", (int)(s / 60), (int)s % 60);
    return text;
}

/* Opens the log; after a resume the rows up to `step` are kept and none later. */
static FILE *log_open(int64_t step)
{
    size_t size;
    char *old = step && !access(log_file, F_OK) ? file_read(log_file, &size) : NULL;
    FILE *f = fopen(log_file, "w");
    if (!f) die(1, "%s: %s", log_file, strerror(errno));
    fputs("step\ttokens\ttrain_loss\tval_loss\tlr\tgrad_norm\tms\ttok_s\n", f);
    for (char *row = old, *end; row && (end = strchr(row, '\n')); row = end + 1)
        if (atoll(row) >= 1 && atoll(row) <= step) fwrite(row, 1, (size_t)(end - row + 1), f);
    free(old);
    return f;
}

/* ---- Starting: a new model, or one that goes on ---------------------------------------------- */

static void resume(Model *m, TrainState *s)
{
    if (!model_load(m, resume_file, options[TOKENIZER].given ? tokenizer_file : NULL, s))
        die(1, "%s: has no training state to resume from; --init %s starts from its weights",
            resume_file, resume_file);
    const Config *c = &m->config, asked = requested(c);
    const double value[] = { c->seq_len, (double)s->batch, (double)s->accum, (double)s->steps,
                             s->lr, s->min_lr, (double)s->warmup, s->weight_decay, s->clip,
                             s->val_frac };
    if (asked.pos != c->pos)
        die(2, "--pos %s differs from the %s of %s%s", pos, c->pos->name, resume_file, hint);
    for (int i = CTX; i <= VAL_FRAC; i++) keep(i, value[i - CTX]);
    for (int i = 0; i < POS_OPTIONS; i++) {
        const PosOption *p = &c->pos->options[i];
        if (asked.pos_opt[i] != c->pos_opt[i])
            die(2, "--%s %s differs from the %s of %s%s", p->name,
                pos_option_text(p, asked.pos_opt[i]), pos_option_text(p, c->pos_opt[i]),
                resume_file, hint);
    }
    if (s->step < 0 || s->step > s->steps)
        die(1, "%s: its step, %lld, is out of range", resume_file, (long long)s->step);
    if (options[SEED].given && seed != s->seed)
        die(2, "--seed %llu differs from the %llu of %s%s", (unsigned long long)seed,
            (unsigned long long)s->seed, resume_file, hint);
    if (bf16 && !s->bf16) die(2, "--bf16 was not given when %s was begun%s", resume_file, hint);
    bf16 = s->bf16 != 0;
    seed = s->seed;
}

/* A new model with the weights of `from` wherever a tensor of the same name and size is in both. */
static void take_weights(Model *m, const Model *from)
{
    for (int i = 0; i < m->params.n_tensors; i++) {
        const Tensor *t = &m->params.tensors[i];
        const Tensor *f = from->params.tensors, *end = f + from->params.n_tensors;
        while (f < end && strcmp(f->name, t->name)) f++;
        const int same_encoding = t->kind != POSITION || from->config.pos == m->config.pos;
        if (f < end && f->count == t->count && same_encoding)
            memcpy(m->params.data + t->offset, from->params.data + f->offset,
                   t->count * sizeof(float));
        else note("%s is not in %s with this size: initialised", t->name, init_file);
    }
}

static void start(Model *m)
{
    Model from = {0};    // its vocabulary, and with --init its weights
    const int named = options[TOKENIZER].given;
    if (init_file) {
        model_load(&from, init_file, named ? tokenizer_file : NULL, NULL);
        if (!from.tokenizer.size)
            die(1, "%s: has no vocabulary inside; name it with --tokenizer", init_file);
    } else {
        const int absent = !named && access(tokenizer_file, F_OK);
        if (absent)
            fprintf(stderr, "train: there is no %s here: training on bytes\n", tokenizer_file);
        tokenizer_load(&from.tokenizer, absent ? "bytes" : tokenizer_file);
    }
    Config c = requested(init_file ? &from.config : NULL);
    c.vocab_size = from.tokenizer.size;
    ctx = c.seq_len;
    const double floats = (double)(4 * config_params(&c) + model_scratch_floats(&c, batch, ctx));
    note("%.0f MiB of parameters, gradients, moments and activations", floats / (1 << 18));
    model_create(m, &c, ctx);
    model_init(m, seed);
    if (init_file) take_weights(m, &from);
    m->tokenizer = from.tokenizer;
    from.tokenizer = (Tokenizer){0};
    model_free(&from);
}

static int same_file(const char *a, const char *b)    // b: "-" is standard input
{
    struct stat x, y;
    return a && b && !stat(a, &x) && !(strcmp(b, "-") ? stat(b, &y) : fstat(STDIN_FILENO, &y))
           && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* What is written must be writable, and must not be one of n files that are read: found now, not
   after the training. */
static void check_output(const char *option, const char *path, const char *const *files, int n)
{
    file_check_writable(path);
    for (int i = 0; i < n; i++)
        if (same_file(path, files[i]))
            die(2, "--%s %s would overwrite %s", option, path, files[i]);
}

/* ---- The run --------------------------------------------------------------------------------- */

static volatile sig_atomic_t interrupted;
static void on_signal(int number)    // the third kills; `timeout` sends two
{
    static volatile sig_atomic_t times;
    if (++times > 2) _exit(128 + number);
    interrupted = number;
}

/* Linear to lr over the warm-up, then half a cosine to min_lr at the last step (SGDR, Loshchilov &
   Hutter 2017). Steps count from 1. */
static double learning_rate(int64_t step)
{
    if (step <= warmup) return lr * (double)step / warmup;
    const double progress = (double)(step - warmup) / (steps > warmup ? steps - warmup : 1);
    return min_lr + 0.5 * (1 + cos(M_PI * progress)) * (lr - min_lr);
}

/* The step of that number. Returns the mean loss of its sequences, batch * accum, and the norm of
   its gradient. */
static double train_step(Model *m, Tokens data, int64_t step, double rate, double *norm)
{
    const size_t B = (size_t)batch, n = B * (size_t)accum, room = B * (size_t)ctx;
    int *x = xmalloc(room * sizeof *x), *y = xmalloc(room * sizeof *y);
    Example *drawn = xmalloc(n * sizeof *drawn);
    size_t of_step = 0;    // targets that count
    double loss = 0;
    for (size_t i = 0; i < n; i++) {
        drawn[i] = draw(data, (uint64_t)(step - 1) * n + i);
        of_step += drawn[i].end - drawn[i].answer;
    }
    // Lines of like length share a pass, which is as long as its last.
    if (answers) examples_sort(drawn, n);
    for (const Example *e = drawn; e < drawn + n; e += B) {
        const size_t T = example_inputs(e[B - 1]);
        size_t of_pass = 0;
        for (size_t b = 0; b < B; b++) {
            fill(x + b * T, y + b * T, data, e[b], T);
            of_pass += e[b].end - e[b].answer;
        }
        const double passes = (double)of_step / (double)of_pass;    // accum for windows
        loss += model_backward(m, x, y, NULL, batch, (int)T, 1.0f / (float)passes) / passes;
    }
    const AdamW adamw = { 0.9f, 0.95f, 1e-8f, (float)weight_decay, (float)clip };
    *norm = model_update(m, step, &adamw, (float)rate);
    free(x), free(y), free(drawn);
    return loss;
}

static void print_profile(const Profile *p, double in_steps)
{
    static const char *const name[SECTIONS] = { "matrix products", "attention",
        "norms, SwiGLU, embedding, rotation", "loss", "optimizer" };
    const double percent = 100 / in_steps;
    double rest = in_steps;
    fprintf(stderr, "train: of %.2f s in steps: ", in_steps);
    for (int i = 0; i < SECTIONS; i++) {
        fprintf(stderr, "%s %.1f %%, ", name[i], percent * p->spent[i]);
        rest -= p->spent[i];
    }
    fprintf(stderr, "the rest %.1f %%; threads waited for each other for %.1f %% of their time\n",
            percent * rest, percent * p->waited / threads);
}

static void train(Model *m, TrainState *state, Tokens data, Tokens part)
{
    const int64_t last = stop_after, first = state->step;
    const int tty = isatty(STDERR_FILENO) && !quiet;
    const int every = eval_every ? eval_every : steps > 10 ? steps / 10 : 1;
    const double step_tokens = (double)batch * ctx * accum, began = seconds();
    double shown = began, ms = 0, in_steps = 0;
    char val_shown[32] = "n/a";
    FILE *log = log_file ? log_open(first) : NULL;
    Profile spent = {0};
    const Validation val = validation(part);
    model_train_begin(m);

    for (int64_t step = first + 1; step <= last && !interrupted; step++) {
        const double t0 = seconds(), rate = learning_rate(step);
        double norm;
        profile = profiled ? &spent : NULL;
        const double loss = train_step(m, data, step, rate, &norm);
        profile = NULL;
        const double took = 1e3 * (seconds() - t0);
        in_steps += took / 1e3;
        if (!isfinite(loss) || !isfinite(norm))    // fabs: a NaN may have a sign
            die(1, "step %lld: the loss is %.4f and the norm of the gradient %.4f; "
                "this step was not saved (a lower --lr helps)", (long long)step, fabs(loss),
                fabs(norm));
        state->step = step;
        ms = step - first <= 2 ? took : 0.95 * ms + 0.05 * took;    // the first step is not typical

        const int at_eval = step % every == 0 || step == steps;
        char val_logged[32] = "";
        const double of_val = at_eval ? examples_loss(m, NULL, val.token, val.example, val.n, 0)
                                      : NAN;
        if (!isnan(of_val)) {
            snprintf(val_logged, sizeof val_logged, "%.6f", of_val);
            snprintf(val_shown, sizeof val_shown, "%.4f", of_val);
            if (of_val < state->best_val || !state->best_step)
                state->best_val = of_val, state->best_step = step;
        }
        if (log) {
            fprintf(log, "%lld\t%.0f\t%.6f\t%s\t%.6e\t%.6f\t%.3f\t%.0f\n", (long long)step,
                    (double)step * step_tokens, loss, val_logged, rate, norm, took,
                    step_tokens / took * 1e3);
            if (fflush(log)) die(1, "%s: %s", log_file, strerror(errno));
        }
        if (!quiet && (at_eval || seconds() - shown > (tty ? 1.0 / 6 : 30))) {
            // On a terminal the line is rewritten, so it must not wrap (ESC[?7l).
            const double left = (seconds() - began) / (double)(step - first)
                                * (double)(last - step);
            fprintf(stderr, "%sstep %5lld/%d | loss %.4f | val %s | norm %.2f | lr %.2e | %.1f ms"
                    " | %s tok/s | eta %s%s", tty ? "\r\033[?7l" : "", (long long)step, steps,
                    loss, val_shown, norm, rate, ms, human(step_tokens / ms * 1e3), minutes(left),
                    !tty ? "\n" : at_eval ? "\033[K\033[?7h\n" : "\033[K\033[?7h");
            shown = seconds();
        }
        if (sample_every && step % sample_every == 0) print_sample(m, step);
        if (save_every && step % save_every == 0 && step < last) model_save(m, out, state);
    }
    free(val.token), free(val.example);
    if (tty && state->step < last) fputc('\n', stderr);
    model_save(m, out, state);
    if (log && fclose(log)) die(1, "%s: %s", log_file, strerror(errno));
    const double elapsed = seconds() - began;
    char best[64] = "no validation";
    if (state->best_step)
        snprintf(best, sizeof best, "best val %.4f at step %lld", state->best_val,
                 (long long)state->best_step);
    note("%s after step %lld in %s, %s tok/s, %s, peak memory %.0f MiB, saved %s",
         interrupted && state->step < steps ? "interrupted" : "done", (long long)state->step,
         minutes(elapsed), human((double)(state->step - first) * step_tokens / elapsed), best,
         peak_mib(), out);
    if (profiled) print_profile(&spent, in_steps);
    if (state->step < steps) note("go on with --resume %s and the same text", out);
}

static double root_mean_square(const float *x, size_t n)
{
    return sqrt((double)dot(x, x, n) / (double)n);
}

static void describe(const Model *m, Tokens data, Tokens val, size_t bytes)
{
    const Config *c = &m->config;
    note("%s parameters (%d layers, %d heads, %d wide, %d hidden, %d tokens), "
         "encoding %s, context %d, seed %llu",
         human((double)m->params.count), c->n_layers, c->n_heads, c->dim, c->hidden_dim,
         c->vocab_size, c->pos->name, c->seq_len, (unsigned long long)seed);
    note("%s tokens to train on, %s to validate, %.2f bytes each; "
         "%d thread%s (%s), vectors of %d floats", human((double)data.n), human((double)val.n),
         (double)bytes / (double)(data.n + val.n), threads, threads > 1 ? "s" : "", threads_kind,
         vector_width);
    if (answers)
        note("%zu lines to train on, %zu to validate, whose answers behind \"%s\" count",
             data.lines, val.lines, answers);
    if (resume_file) return;
    if (m->pos.embed)
        note("the embedding has a standard deviation (around 0) of %.4f, "
             "the encoding that is added to it %.4f",
             root_mean_square(m->params.token_embedding, (size_t)c->vocab_size * (size_t)c->dim),
             (double)m->pos.embed_scale
             * root_mean_square(m->pos.embed, (size_t)c->seq_len * (size_t)c->dim));
    note("a guess among all tokens has a loss of ln %d = %.4f", c->vocab_size,
         log(c->vocab_size));
}

int main(int argc, char **argv)
{
    program_begin("train", argv);
    signal(SIGPIPE, SIG_IGN);    // a reader of the messages that goes away is no reason to stop
    const int n = options_parse(usage, options, 0, argc, argv);
    if (!n) die(2, "no text file was given (--help shows how)");
    if (resume_file && init_file) die(2, "--resume and --init exclude each other");
    if (val_file && options[VAL_FRAC].given) die(2, "--val and --val-frac exclude each other");
    if (val_file) val_frac = 0;
    if (resume_file && !options[OUT].given) out = resume_file;
    threads = threads_set(threads);
    // only a model may be replaced by the one that goes on from it
    const char *const others[] = { val_file, tokenizer_file, resume_file, init_file, out };
    check_output("out", out, (const char **)argv, n);
    check_output("out", out, others, 2);
    if (log_file) {
        check_output("log", log_file, (const char **)argv, n);
        check_output("log", log_file, others, 5);
        if (!strcmp(log_file, out)) die(2, "--log and --out name the same file");
    }

    Text text = read_texts(argv, n), val_text = {0};
    if (val_file) val_text = read_texts((char **)&val_file, 1);
    Model m = {0};
    TrainState state = {0};
    if (resume_file) resume(&m, &state);
    else start(&m);
    if (bf16 && !bf16_set(1))
        die(2, "--bf16: this program was built for a processor without products of bf16 "
            "(AVX512-BF16)");
    if (!stop_after || stop_after > steps) stop_after = steps;
    if (isnan(min_lr)) min_lr = lr / 10;
    if (warmup < 0) warmup = steps / 10 < 100 ? steps / 10 : 100;
    if (m.config.vocab_size > 1 << 16)
        die(1, "a vocabulary of %d entries; training takes at most %d", m.config.vocab_size,
            1 << 16);

    Tokens data = encode(&m.tokenizer, text, argv[0]);
    const Tokens val = val_file ? encode(&m.tokenizer, val_text, val_file) : split(&data);
    if (!answers && data.n < (size_t)ctx + 1)
        die(1, "%s: %zu tokens to train on%s, but one window takes ctx + 1 = %d (--ctx)", argv[0],
            data.n, val.n && !val_file ? " without the validation part" : "", ctx + 1);
    const uint64_t sum = checksum(data.token, data.n * sizeof *data.token)
                         ^ mix(checksum(val.token + val.from, val.n * sizeof *val.token))
                         ^ (answers ? mix((uint64_t)*answers) : 0);
    if (resume_file && sum != state.data_sum)
        die(1, "%s: not the text (or not the %s) that %s was trained on", argv[0],
            val_frac == 0 ? "--val file or --answers" : "--answers", resume_file);
    state = (TrainState){ .step = state.step, .steps = steps, .batch = batch, .accum = accum,
                          .warmup = warmup, .seed = seed, .data_sum = sum, .lr = lr,
                          .min_lr = min_lr, .weight_decay = weight_decay, .clip = clip,
                          .val_frac = val_frac, .best_val = state.best_val,
                          .best_step = state.best_step, .bf16 = bf16 };
    describe(&m, data, val, text.n + val_text.n);

    const int stops[] = { SIGINT, SIGTERM, SIGHUP };
    for (int i = 0; i < 3; i++)    // what was ignored at the start (nohup) stays so
        if (signal(stops[i], on_signal) == SIG_IGN) signal(stops[i], SIG_IGN);
    if (resume_file && state.step >= stop_after) {
        const int saved = options[OUT].given > 0;
        if (saved) model_save(&m, out, &state);
        note("%s is at step %lld of %d: nothing to do%s%s", resume_file, (long long)state.step,
             steps, saved ? "; saved " : "", saved ? out : "");
    } else {
        train(&m, &state, data, val);
    }
    free(data.token), free(data.line);
    if (val_file) free(val.token), free(val.line);
    model_free(&m);
    return interrupted && state.step < steps ? 130 : 0;
}
