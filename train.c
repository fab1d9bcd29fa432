/* train.c - trains a Transformer on a text:   ./train --pos rope data.txt
   Options, data, learning rate, evaluation, log, the loop. How the network works is in model.h, how positions are encoded in posenc.c. */
#define MODEL_IMPLEMENTATION
#include "model.h"

#include <signal.h>

/* ---- Options: the defaults are here, --help prints them --------------------------------------------------- */

static const char *pos = "rope", *out = "model.bin", *resume_file, *init_file, *tokenizer_file = "tokenizer.bin", *val_file, *log_file;
static int dim = 192, layers = 4, heads = 6, kv_heads, hidden, ctx = 128, untied;
static int batch = 16, accum = 1, steps = 1500, warmup = -1, threads, eval_every, sample_every, save_every, stop_after, quiet;
static double lr = 2e-3, min_lr = NAN, weight_decay = 0.1, clip = 1, val_frac = 0.1;
static uint64_t seed;

enum { SHAPE_FIRST = 5, SHAPE_LAST = 11, TRAIN_FIRST = 12, TRAIN_LAST = 20, OWN_OPTIONS = 30, MAX_OPTIONS = 80 };

static Option options[MAX_OPTIONS] = {
    { "pos", 0, "NAME", "positional encoding, see below", .s = &pos },
    { "out", 'o', "FILE", "where the model goes", .s = &out },
    { "resume", 0, "FILE", "go on where FILE stopped: same text, same bits as without the stop", .s = &resume_file },
    { "init", 0, "FILE", "start from FILE's weights with a fresh optimizer (another --pos or --ctx is allowed)", .s = &init_file },
    { "tokenizer", 'z', "FILE", "vocabulary, or the word \"bytes\"", .s = &tokenizer_file },
    { "dim", 0, "N", "width", .i = &dim, .min = 1, .max = 1 << 16 },
    { "layers", 0, "N", "layers", .i = &layers, .min = 1, .max = 1000 },
    { "heads", 0, "N", "attention heads", .i = &heads, .min = 1, .max = 1 << 12 },
    { "kv-heads", 0, "N", "key and value heads; 0: as many as heads", .i = &kv_heads, .min = 0, .max = 1 << 12 },
    { "hidden", 0, "N", "width of the feed-forward layer; 0: 8/3 dim, a multiple of 32", .i = &hidden, .min = 0, .max = 1 << 20 },
    { "untied", 0, NULL, "an output matrix of its own", .on = &untied },
    { "ctx", 0, "N", "trained length, in tokens", .i = &ctx, .min = 1, .max = 1 << 20 },
    { "batch", 0, "N", "sequences per pass", .i = &batch, .min = 1, .max = 1 << 16 },
    { "accum", 0, "N", "passes per step; their gradients are averaged", .i = &accum, .min = 1, .max = 1 << 16 },
    { "steps", 0, "N", "steps of the whole schedule; 0 writes the initial model", .i = &steps, .min = 0, .max = 1e9 },
    { "lr", 0, "X", "peak learning rate", .f = &lr, .min = 0, .max = 1e9 },
    { "min-lr", 0, "X", "learning rate at the last step; default: a tenth of lr", .f = &min_lr, .min = 0, .max = 1e9 },
    { "warmup", 0, "N", "steps up to the peak; default: a tenth of steps, 100 at most", .i = &warmup, .min = 0, .max = 1e9 },
    { "weight-decay", 0, "X", "AdamW's decay of matrices and embeddings", .f = &weight_decay, .min = 0, .max = 1e3 },
    { "clip", 0, "X", "largest norm of the gradient; 0: any", .f = &clip, .min = 0, .max = 1e9 },
    { "val-frac", 0, "X", "share of the text, at its end, that is kept for validation", .f = &val_frac, .min = 0, .max = 0.9 },
    { "val", 0, "FILE", "validate on FILE instead", .s = &val_file },
    { "seed", 's', "N", "random seed; default: drawn, and printed", .u = &seed },
    { "threads", 0, "N", "threads; 0: OMP_NUM_THREADS, else all processors", .i = &threads, .min = 0, .max = 4096 },
    { "eval-every", 0, "N", "validate every N steps; 0: ten times in all", .i = &eval_every, .min = 0, .max = 1e9 },
    { "sample-every", 0, "N", "print a sample every N steps; 0: never", .i = &sample_every, .min = 0, .max = 1e9 },
    { "save-every", 0, "N", "also save every N steps; 0: at the end only", .i = &save_every, .min = 0, .max = 1e9 },
    { "stop-after", 0, "N", "save and stop after step N of the schedule, to be resumed", .i = &stop_after, .min = 0, .max = 1e9 },
    { "log", 0, "FILE", "a row per step, tab separated", .s = &log_file },
    { "quiet", 'q', NULL, "print errors and warnings only", .on = &quiet },
};

static double pos_value[MAX_OPTIONS];    // of the options that follow our own: those of the encodings

/* Appends the options of all encodings; two encodings may share a name. */
static void add_pos_options(void)
{
    int n = OWN_OPTIONS;
    for (const PosEnc *e = posencs; e->name; e++)
        for (const PosOption *p = e->options; p < e->options + POS_OPTIONS && p->name; p++) {
            int k = OWN_OPTIONS;
            while (k < n && strcmp(options[k].name, p->name)) k++;
            if (k < n || n == MAX_OPTIONS - 1) continue;
            pos_value[n] = NAN;
            options[n] = (Option){ p->name, 0, "X", p->help, .f = &pos_value[n], .min = p->min, .max = p->max };
            n++;
        }
}

static void help(void)
{
    printf("usage: train [options] TEXT...\n"
           "Trains a small Transformer on text files (- is standard input), as one text, and writes a model for ./run.\n"
           "    ./train --pos rope data.txt && ./run model.bin -p \"Once\"\n\n");
    options_help(options, OWN_OPTIONS);
    printf("\nencodings (--pos) and the options of their own:\n");
    for (const PosEnc *e = posencs; e->name; e++) {
        printf("  %-26s %s\n", e->name, e->help);
        for (const PosOption *p = e->options; p < e->options + POS_OPTIONS && p->name; p++)
            printf("      --%-20s %s [%g]\n", p->name, p->help, p->value);
    }
}

static const PosEnc *find_pos(const char *name)
{
    char known[400] = "";
    const PosEnc *found = posenc_find(name);
    for (const PosEnc *e = posencs; e->name; e++) snprintf(known + strlen(known), sizeof known - strlen(known), " %s", e->name);
    if (!found) die(2, "--pos %s is not an encoding; there are%s", name, known);
    return found;
}

/* Gives the options of the chosen encoding their values, and refuses those of another. */
static void take_pos_options(Config *c)
{
    for (int i = 0; i < POS_OPTIONS; i++) c->pos_opt[i] = c->pos->options[i].value;
    for (Option *o = options + OWN_OPTIONS; o->name; o++) {
        if (!o->given) continue;
        int i = 0;
        while (i < POS_OPTIONS && c->pos->options[i].name && strcmp(c->pos->options[i].name, o->name)) i++;
        if (i == POS_OPTIONS || !c->pos->options[i].name) die(2, "--%s is not an option of --pos %s", o->name, c->pos->name);
        if (c->pos->options[i].whole && *o->f != floor(*o->f)) die(2, "--%s: %g is not a whole number", o->name, *o->f);
        c->pos_opt[i] = *o->f;
    }
}

/* ---- Data -------------------------------------------------------------------------------------------------- */

typedef struct { uint16_t *token; size_t n; } Tokens;

static void note(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void note(const char *format, ...)
{
    va_list args;
    if (quiet) return;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
}

/* A text file with a byte-order mark dropped and line ends made \n, appended to *text. */
static void append_text(char **text, size_t *size, const char *path)
{
    size_t n, ends = 0, to = 0;
    char *data = file_read(path, &n);
    const uint8_t *b = (const uint8_t *)data;
    if (!n) die(1, "%s: the file is empty", path);
    if (n >= 2 && ((b[0] == 0xFF && b[1] == 0xFE) || (b[0] == 0xFE && b[1] == 0xFF)))
        die(1, "%s: the text is UTF-16; save it as UTF-8", path);
    for (size_t i = n >= 3 && !memcmp(b, "\xEF\xBB\xBF", 3) ? 3 : 0; i < n; i++) {
        const int end = data[i] == '\r';
        if (end && i + 1 < n && data[i + 1] == '\n') i++;
        data[to++] = end ? '\n' : data[i];
        ends += (size_t)end;
    }
    if (ends) note("train: %s: %zu line ends with a carriage return were read as newlines", path, ends);
    if (!*text) {
        *text = data;
        *size = to;
        return;
    }
    if (!(*text = realloc(*text, *size + to))) die(1, "out of memory: %.1f MiB were asked for", (double)(*size + to) / (1 << 20));
    memcpy(*text + *size, data, to);
    *size += to;
    free(data);
}

static Tokens encode_files(const Tokenizer *t, char **paths, int n, size_t *bytes)
{
    char *text = NULL;
    Tokens tokens;
    *bytes = 0;
    for (int i = 0; i < n; i++) append_text(&text, bytes, paths[i]);
    int *ids = tokenizer_encode(t, text, *bytes, &tokens.n);
    free(text);
    tokens.token = xmalloc(tokens.n * sizeof *tokens.token);
    for (size_t i = 0; i < tokens.n; i++) tokens.token[i] = (uint16_t)ids[i];
    free(ids);
    return tokens;
}

/* Window w of the run, ctx + 1 tokens from a random place: a function of the seed and w alone. */
static void window(int *x, int *y, Tokens data, int64_t w)
{
    const size_t at = (size_t)(rng(seed, RNG_DATA, (uint64_t)w) % (data.n - (size_t)ctx));
    for (int t = 0; t < ctx; t++) {
        x[t] = data.token[at + (size_t)t];
        y[t] = data.token[at + (size_t)t + 1];
    }
}

/* Mean loss over the validation text: every target once, in windows that follow each other. A text longer than EVAL_TOKENS is
   represented by windows spread evenly over it. NaN when there is none. */
enum { EVAL_TOKENS = 1 << 18 };
static double evaluate(Model *m, Tokens val, int *x, int *y)
{
    if (val.n < 2) return NAN;
    const size_t T = (size_t)ctx, windows = (val.n - 1 + T - 1) / T;
    const size_t take = min_size(windows, EVAL_TOKENS / T + 1);
    double sum = 0;
    size_t scored = 0;
    for (size_t i = 0, n = 0, length = 0; i < take; i++) {
        const size_t at = (windows * i / take) * T, left = min_size(T, val.n - 1 - at);
        if (n && left != length) {    // the last window may be shorter
            sum += model_loss(m, NULL, x, y, NULL, (int)n, (int)length) * (double)(n * length);
            n = 0;
        }
        length = left;
        for (size_t t = 0; t < left; t++) {
            x[n * left + t] = val.token[at + t];
            y[n * left + t] = val.token[at + t + 1];
        }
        scored += left;
        if (++n == (size_t)batch || i + 1 == take) {
            sum += model_loss(m, NULL, x, y, NULL, (int)n, (int)length) * (double)(n * length);
            n = 0;
        }
    }
    return sum / (double)scored;
}

/* Linear to lr over the warm-up, then half a cosine to min_lr at the last step (SGDR, Loshchilov & Hutter 2017). Steps count from 1. */
static double learning_rate(int64_t step)
{
    if (step <= warmup) return lr * (double)step / warmup;
    const double progress = (double)(step - warmup) / (steps > warmup ? steps - warmup : 1);
    return min_lr + 0.5 * (1 + cos(M_PI * progress)) * (lr - min_lr);
}

static void print_sample(Model *m, int64_t step)
{
    Cache kv;
    size_t n;
    int *first = tokenizer_encode(&m->tokenizer, "\n", 1, &n), length;
    cache_create(&kv, m, ctx + (int)n);
    fprintf(stderr, "--- sample at step %lld ---\n", (long long)step);
    const float *logits = model_decode(m, &kv, first, (int)n < ctx ? (int)n : ctx);
    while (kv.used < ctx) {
        const int token = sample(logits, m->config.vocab_size, 0.8f, 0, 0.95f,
                                 rng_uniform(seed, RNG_SAMPLE + (uint64_t)step, (uint64_t)kv.used));
        if (token < 0) break;
        const char *s = tokenizer_decode(&m->tokenizer, token, 0, &length);
        fwrite(s, 1, (size_t)length, stderr);
        logits = model_decode(m, &kv, &token, 1);
    }
    fprintf(stderr, "\n---\n");
    free(first);
    cache_free(&kv);
}

/* ---- The log ------------------------------------------------------------------------------------------------ */

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

static const char *number(double x)
{
    static char text[4][24];
    static int next;
    char *s = text[next++ % 4];
    if (isnan(x)) return "n/a";
    snprintf(s, 24, "%.4f", x);
    return s;
}

/* Opens the log; after a resume the rows up to `step` are kept and none later. */
static FILE *log_open(int64_t step)
{
    static const char *const TITLE = "step\ttokens\ttrain_loss\tval_loss\tlr\tgrad_norm\tms\ttok_s\n";
    char *old = NULL;
    size_t size;
    if (step && !access(log_file, F_OK)) old = file_read(log_file, &size);
    FILE *f = fopen(log_file, "w");
    if (!f) die(1, "%s: %s", log_file, strerror(errno));
    fputs(TITLE, f);
    for (char *line = old; line && *line;) {
        char *end = strchr(line, '\n');
        const long long at = atoll(line);
        if (!end) break;    // a row that was cut off
        if (at >= 1 && at <= step) fwrite(line, 1, (size_t)(end - line + 1), f);
        line = end + 1;
    }
    free(old);
    fflush(f);
    return f;
}

/* ---- Starting: a new model, or one that goes on -------------------------------------------------------------- */

static void differs(const char *name, double given, double file, const char *path)
{
    die(2, "--%s %g differs from the %g of %s; --resume repeats the run that was stopped (--init starts a new one from its weights)",
        name, given, file, path);
}

/* An option that the file decides: takes its value, and refuses another one that was given. */
static void from_file(int option, double value, const char *path)
{
    Option *o = &options[option];
    const double now = o->i ? *o->i : o->f ? *o->f : *o->on;
    if (o->given && now != value) differs(o->name, now, value, path);
    if (o->i) *o->i = (int)value;
    else if (o->f) *o->f = value;
    else *o->on = (int)value;
}

static void shape_from_file(const Config *c, const char *path, int last)
{
    const double value[] = { c->dim, c->n_layers, c->n_heads, c->n_kv_heads, c->hidden_dim, c->untied, c->seq_len };
    for (int i = SHAPE_FIRST; i <= last; i++) from_file(i, value[i - SHAPE_FIRST], path);
}

static void resume(Model *m, TrainState *s)
{
    if (!model_load(m, resume_file, NULL, 0, s))
        die(1, "%s: has no training state to resume from; --init %s starts from its weights", resume_file, resume_file);
    const Config *c = &m->config;
    if (options[0].given && find_pos(pos) != c->pos)
        die(2, "--pos %s differs from the %s of %s", pos, c->pos->name, resume_file);
    for (Option *o = options + OWN_OPTIONS; o->name; o++) {
        if (!o->given) continue;
        int i = 0;
        while (i < POS_OPTIONS && c->pos->options[i].name && strcmp(c->pos->options[i].name, o->name)) i++;
        if (i == POS_OPTIONS || !c->pos->options[i].name) die(2, "--%s is not an option of the %s of %s", o->name, c->pos->name, resume_file);
        if (*o->f != c->pos_opt[i]) differs(o->name, *o->f, c->pos_opt[i], resume_file);
    }
    shape_from_file(c, resume_file, SHAPE_LAST);
    const double value[] = { (double)s->batch, (double)s->accum, (double)s->steps, s->lr, s->min_lr, (double)s->warmup,
                             s->weight_decay, s->clip, s->val_frac };
    for (int i = TRAIN_FIRST; i <= TRAIN_LAST; i++) from_file(i, value[i - TRAIN_FIRST], resume_file);
    const Option *o = options;
    while (o->u != &seed) o++;
    if (o->given && seed != s->seed) die(2, "--seed differs from the %llu of %s", (unsigned long long)s->seed, resume_file);
    seed = s->seed;
}

/* A new model with the weights of `from` wherever a tensor of the same name and size is in both. */
static void take_weights(Model *m, const Model *from)
{
    for (int i = 0; i < m->params.n_tensors; i++) {
        const Tensor *t = &m->params.tensors[i], *f = from->params.tensors, *end = f + from->params.n_tensors;
        while (f < end && strcmp(f->name, t->name)) f++;
        const int same_encoding = t->kind != POSITION || from->config.pos == m->config.pos;
        if (f < end && f->count == t->count && same_encoding)
            memcpy(m->params.data + t->offset, from->params.data + f->offset, t->count * sizeof(float));
        else note("train: %s is not in %s with this size: initialised", t->name, init_file);
    }
}

static void start(Model *m)
{
    Model from = {0};
    Config c = {0};
    c.start_token = -1;    // windows start anywhere in a text, so a prompt needs nothing in front
    if (init_file) {
        const int given = options[4].given;
        model_load(&from, init_file, given ? tokenizer_file : NULL, 0, NULL);
        if (!from.tokenizer.size) die(1, "%s: has no vocabulary inside; name it with --tokenizer", init_file);
        if (!options[SHAPE_LAST].given) ctx = from.config.seq_len;
        if (!options[0].given) pos = from.config.pos->name;
        shape_from_file(&from.config, init_file, SHAPE_LAST - 1);
        c.start_token = from.config.start_token;
    }
    c.pos = find_pos(pos);
    c.dim = dim, c.n_layers = layers, c.n_heads = heads, c.n_kv_heads = kv_heads, c.hidden_dim = hidden;
    c.untied = untied, c.seq_len = ctx;
    take_pos_options(&c);
    Tokenizer t;
    if (init_file) {
        t = from.tokenizer;
        from.tokenizer = (Tokenizer){0};
        if (from.config.pos == c.pos)
            for (int i = 0; i < POS_OPTIONS; i++) {    // what was not given stays as it was
                const Option *o = options + OWN_OPTIONS;
                while (c.pos->options[i].name && o->name && strcmp(o->name, c.pos->options[i].name)) o++;
                if (c.pos->options[i].name && !o->given) c.pos_opt[i] = from.config.pos_opt[i];
            }
    } else if (!strcmp(tokenizer_file, "bytes")) {
        tokenizer_bytes(&t);
    } else if (!options[4].given && access(tokenizer_file, F_OK)) {
        fprintf(stderr, "train: there is no %s here: training on bytes\n", tokenizer_file);
        tokenizer_bytes(&t);
    } else {
        tokenizer_load(&t, tokenizer_file);
    }
    c.vocab_size = t.size;
    const char *wrong = config_check(&c);
    if (wrong) die(2, "%s", wrong);
    note("train: %s parameters and %s floats of activations: %.0f MiB", human((double)config_params(&c)),
         human((double)model_scratch_floats(&c, batch, ctx)),
         (4 * (double)config_params(&c) + (double)model_scratch_floats(&c, batch, ctx)) * 4 / (1 << 20));
    model_create(m, &c, ctx);
    m->tokenizer = t;
    model_init(m, seed);
    if (init_file) {
        take_weights(m, &from);
        model_free(&from);
    }
}

/* Fails now rather than after the training. */
static void check_writable(const char *path)
{
    struct stat info;
    char *temporary = xmalloc(strlen(path) + 5);
    sprintf(temporary, "%s.tmp", path);
    if (!stat(path, &info) && S_ISDIR(info.st_mode)) die(1, "%s: is a directory, the model needs a file name", path);
    FILE *f = fopen(temporary, "wb");
    if (!f) die(1, "%s: %s", temporary, strerror(errno));
    fclose(f);
    unlink(temporary);
    free(temporary);
}

static double standard_deviation(const float *x, size_t n, double factor)
{
    double sum = 0, squares = 0;
    for (size_t i = 0; i < n; i++) sum += (double)x[i], squares += (double)x[i] * (double)x[i];
    return factor * sqrt(squares / (double)n - sum / (double)n * (sum / (double)n));
}

/* ---- The run ------------------------------------------------------------------------------------------------ */

static volatile sig_atomic_t interrupted;
static void on_signal(int signal_number) { interrupted = signal_number; }

static void train(Model *m, TrainState *state, Tokens data, Tokens val)
{
    const size_t window_tokens = (size_t)batch * (size_t)ctx;
    int *x = xmalloc(window_tokens * sizeof *x), *y = xmalloc(window_tokens * sizeof *y);
    const AdamW adamw = { 0.9f, 0.95f, 1e-8f, (float)weight_decay, (float)clip };
    const int64_t last = stop_after && stop_after < steps ? stop_after : steps, first = state->step;
    const int tty = isatty(STDERR_FILENO) && !quiet, every = eval_every ? eval_every : steps > 10 ? steps / 10 : 1;
    const double per_step = (double)window_tokens * accum, began = seconds();
    double shown = 0, ms = 0, val_loss = NAN;
    FILE *log = log_file ? log_open(first) : NULL;
    if (first < last) model_train_begin(m);

    for (int64_t step = first + 1; step <= last && !interrupted; step++) {
        const double t0 = seconds(), rate = learning_rate(step);
        double loss = 0;
        for (int pass = 0; pass < accum; pass++) {
            for (int b = 0; b < batch; b++)
                window(x + (size_t)b * (size_t)ctx, y + (size_t)b * (size_t)ctx, data, ((step - 1) * accum + pass) * batch + b);
            loss += model_backward(m, x, y, NULL, batch, ctx, 1.0f / (float)accum) / accum;
        }
        const double norm = model_update(m, step, &adamw, (float)rate), took = 1e3 * (seconds() - t0);
        if (!isfinite(loss) || !isfinite(norm))
            die(1, "step %lld: the loss is %g and the gradient norm %g; nothing was saved at this step (a lower --lr or --clip helps)",
                (long long)step, loss, norm);
        state->step = step;
        ms = step - first <= 2 ? took : 0.95 * ms + 0.05 * took;    // the first step is not typical

        const int at_eval = step % every == 0 || step == last;
        if (at_eval) {
            val_loss = evaluate(m, val, x, y);
            if (val_loss < state->best_val || !state->best_step) state->best_val = val_loss, state->best_step = step;
        }
        if (log) {
            fprintf(log, "%lld\t%.0f\t%.6f\t", (long long)step, (double)step * per_step, loss);
            if (at_eval && !isnan(val_loss)) fprintf(log, "%.6f", val_loss);
            fprintf(log, "\t%.6e\t%.6f\t%.3f\t%.0f\n", rate, norm, took, per_step / took * 1e3);
            if (fflush(log)) die(1, "%s: %s", log_file, strerror(errno));
        }
        if (!quiet && (at_eval || (tty && seconds() - shown > 1.0 / 6))) {
            const double left = (seconds() - began) / (double)(step - first) * (double)(last - step);
            fprintf(stderr, "%sstep %5lld/%d | loss %.4f | val %s | norm %.2f | lr %.2e | %.1f ms | %s tok/s | eta %s%s", tty ? "\r" : "",
                    (long long)step, steps, loss, number(val_loss), norm, rate, ms, human(per_step / ms * 1e3), minutes(left),
                    at_eval ? "\n" : tty ? "\033[K" : "");
            shown = seconds();
        }
        if (sample_every && step % sample_every == 0) print_sample(m, step);
        if (save_every && step % save_every == 0 && step < last) model_save(m, out, state);
    }
    if (tty && state->step < last) fputc('\n', stderr);
    if (!m->m) model_train_begin(m);    // nothing was trained: the state is one of zero moments
    model_save(m, out, state);
    if (log && fclose(log)) die(1, "%s: %s", log_file, strerror(errno));
    const double elapsed = seconds() - began;
    char best[64] = "no validation";
    if (state->best_step && !isnan(state->best_val))
        snprintf(best, sizeof best, "best val %.4f at step %lld", state->best_val, (long long)state->best_step);
    note("train: %s after step %lld in %s, %s tok/s, %s, peak memory %.0f MiB, saved %s", interrupted ? "interrupted" : "done",
         (long long)state->step, minutes(elapsed), human((double)(state->step - first) * per_step / (elapsed > 0 ? elapsed : 1)), best, peak_mib(), out);
    if (state->step < steps) note("train: go on with --resume %s and the same text", out);
    free(x), free(y);
}

int main(int argc, char **argv)
{
    program_begin("train", argv);
    add_pos_options();
    const int n = options_parse(options, argc, argv, help);
    if (!n) die(2, "no text file was given (--help shows how)");
    if (resume_file && init_file) die(2, "--resume and --init exclude each other");
    if (val_file && options[TRAIN_LAST].given) die(2, "--val and --val-frac exclude each other");
    if (val_file) val_frac = 0;
    const Option *o = options;
    while (o->u != &seed) o++;
    if (!o->given) seed = (uint64_t)time(NULL) * 1000 + (uint64_t)getpid() % 1000;
    threads = threads_set(threads);

    Model m = {0};
    TrainState state = {0};
    if (resume_file) resume(&m, &state);
    else start(&m);
    if (isnan(min_lr)) min_lr = lr / 10;
    if (warmup < 0) warmup = steps / 10 < 100 ? steps / 10 : 100;
    if (m.config.vocab_size > 1 << 16) die(1, "a vocabulary of %d entries; training takes at most %d", m.config.vocab_size, 1 << 16);
    check_writable(out);

    size_t bytes, val_bytes = 0;
    Tokens data = encode_files(&m.tokenizer, argv, n, &bytes), val = {0};
    if (val_file) {
        char *path = (char *)val_file;
        val = encode_files(&m.tokenizer, &path, 1, &val_bytes);
    } else {    // one cut: the text before it is trained on, the text behind it never
        const size_t kept = (size_t)((double)data.n * val_frac);
        data.n -= kept;
        val = (Tokens){ data.token + data.n, kept };
    }
    if (data.n < (size_t)ctx + 1)
        die(1, "%s%s: %zu tokens to train on%s, but one window takes ctx + 1 = %d", argv[0], n > 1 ? " ..." : "", data.n,
            val.n && !val_file ? " without the validation part" : "", ctx + 1);
    const uint64_t sum = checksum(data.token, data.n * sizeof *data.token) ^ mix(checksum(val.token, val.n * sizeof *val.token));
    if (resume_file && sum != state.data_sum)
        die(1, "%s: not the text that %s was trained on", argv[0], resume_file);
    if (resume_file && state.step >= steps) {
        note("train: %s is finished, all %d steps: nothing to do", resume_file, steps);
        return 0;
    }
    state = (TrainState){ .step = state.step, .steps = steps, .batch = batch, .accum = accum, .warmup = warmup, .seed = seed,
                          .data_sum = sum, .lr = lr, .min_lr = min_lr, .weight_decay = weight_decay, .clip = clip,
                          .val_frac = val_frac, .best_val = state.best_val, .best_step = state.best_step };

    const Config *c = &m.config;
    note("train: %s parameters (%d layers, %d heads, %d wide, %d hidden, %d tokens), encoding %s, context %d, seed %llu",
         human((double)m.params.count), c->n_layers, c->n_heads, c->dim, c->hidden_dim, c->vocab_size, c->pos->name, c->seq_len,
         (unsigned long long)seed);
    note("train: %s tokens to train on, %s to validate, %.2f bytes each; %d thread%s (%s), vectors of %d floats", human((double)data.n),
         human((double)val.n), (double)(bytes + val_bytes) / (double)(data.n + val.n), threads, threads > 1 ? "s" : "", threads_kind, vector_width);
    if (m.pos.embed && !resume_file)
        note("train: standard deviation of the embedding %.4f, of the encoding that is added to it %.4f",
             standard_deviation(m.params.token_embedding, (size_t)c->vocab_size * (size_t)c->dim, 1),
             standard_deviation(m.pos.embed, (size_t)c->seq_len * (size_t)c->dim, (double)m.pos.embed_scale));
    if (!resume_file) note("train: a guess among all tokens has a loss of ln %d = %.4f", c->vocab_size, log(c->vocab_size));

    const struct sigaction action = { .sa_handler = on_signal };
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    train(&m, &state, data, val);
    free(data.token);
    if (val_file) free(val.token);
    model_free(&m);
    return interrupted ? 130 : 0;
}
