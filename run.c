/* run.c - uses a model:   ./run model.bin -p "Once"
   Options, the prompt, generation, evaluation on a text, a look inside. What a model is stands in
   model.h. */
#define MODEL_IMPLEMENTATION
#include "model.h"

/* ---- Options: the defaults are here, --help prints them -------------------------------------- */

enum { STOPS = 8, CONTEXTS = 32 };
enum { TOKENS = 2 };    // its place in the table

static const char *prompt, *prompt_file, *stops[STOPS], *tokenizer_file, *ctx_list;
static const char *eval_file, *inspect_file, *answers;
static int tokens = 256, top_k, threads, quiet, encode, by_position, stride, int8, first_position;
static double temperature = 0.8, top_p = 0.95;
static uint64_t seed;

static Option options[] = {
    { "prompt", 'p', "TEXT", "text to go on from", .s = &prompt },
    { "prompt-file", 'f', "FILE", .s = &prompt_file,
      .help = "the same from a file, less one newline at its end; - is standard input" },
    [TOKENS] = { "tokens", 'n', "N", .i = &tokens, .min = 0, .max = 1 << 30,
      .help = "tokens to generate, as far as the context reaches" },
    { "temp", 't', "X", .f = &temperature, .min = 0, .max = 1e30,
      .help = "temperature; 0: always the likeliest token" },
    { "top-k", 'k', "N", .i = &top_k, .min = 0, .max = 1 << 30,
      .help = "draw from the N likeliest tokens; 0: from all" },
    { "top-p", 0, "X", .f = &top_p, .min = 0, .max = 1,
      .help = "draw from the likeliest tokens that have this probability together; 1: from all" },
    { "seed", 's', "N", "random seed; default: drawn, and printed", .u = &seed },
    { "stop", 0, "TEXT", .s = stops, .max = STOPS,
      .help = "stop before TEXT would be printed; may be given up to 8 times" },
    { "tokenizer", 'z', "FILE", "vocabulary, for checkpoints of llama2.c", .s = &tokenizer_file },
    { "ctx", 0, "N", .s = &ctx_list,
      .help = "context; more than was trained if the encoding can. With --eval a list: N,N,..." },
    { "threads", 0, "N", .i = &threads, .min = 0, .max = 4096,
      .help = "threads; 0: OMP_NUM_THREADS, else all processors" },
    { "int8", 0, NULL, .on = &int8,
      .help = "round the weights to int8: a quarter of the memory traffic, three times the speed" },
    { "encode", 0, NULL, "print the prompt's token ids, nothing else", .on = &encode },
    { "eval", 0, "FILE", .s = &eval_file,
      .help = "print the loss on a text: ctx tokens loss ppl bits_per_byte" },
    { "by-position", 0, NULL, .on = &by_position,
      .help = "with --eval: by position in the window: ctx from to tokens loss" },
    { "stride", 0, "N", .i = &stride, .min = 0, .max = 1 << 24,
      .help = "with --eval: windows of ctx that overlap and score their last N; 0: no overlap" },
    { "first-position", 0, "N", .i = &first_position, .min = 0, .max = 1 << 24,
      .help = "with --eval: the position of a window's first token" },
    { "answers", 0, "MARK", .s = &answers,
      .help = "with --eval: lines of question, MARK, answer: length lines exact tokens loss" },
    { "inspect", 0, "FILE", .s = &inspect_file,
      .help = "print the encoding and the attention on a text: what layer head row column value" },
    { "quiet", 'q', NULL, "print errors and warnings only", .on = &quiet },
    { 0 },
};

static const char *const usage =
    "run [options] MODEL\n"
    "Generates text with a model that ./train wrote, "
    "or with a checkpoint of llama2.c and its -z tokenizer.bin.\n"
    "    ./run model.bin -p \"Once upon a time\"\n";

// A line on stderr, unless --quiet.
#define note(format, ...) (quiet ? 0 : fprintf(stderr, "run: " format "\n", __VA_ARGS__))

/* The numbers of "64,128,256". */
static int parse_contexts(int *list)
{
    int n = 0;
    for (const char *s = ctx_list; s;) {
        char *end;
        const long value = strtol(s, &end, 10);
        if (end == s || (*end && *end != ',') || value < 1 || value > 1 << 24 || n == CONTEXTS)
            die(2, "--ctx: \"%s\" is not a list of up to %d numbers from 1 to %d",
                ctx_list, CONTEXTS, 1 << 24);
        list[n++] = (int)value;
        s = *end ? end + 1 : NULL;
    }
    return n;
}

/* ---- Evaluation ------------------------------------------------------------------------------ */

static int *encode_text(const Model *m, const char *text, size_t size, size_t *n)
{
    size_t unknown;
    int *ids = tokenizer_encode(&m->tokenizer, text, size, n, &unknown);
    if (unknown)
        fprintf(stderr, "run: %zu characters of the text are not in the vocabulary\n", unknown);
    return ids;
}

static int *encode_file(const Model *m, const char *path, size_t *n)
{
    Text text = {0};
    const size_t converted = text_append(&text, path);
    if (converted) note("%s: %zu carriage returns were read as newlines", path, converted);
    int *ids = encode_text(m, text.data, text.n, n);
    free(text.data);
    return ids;
}

/* Windows over a text of n tokens in which every one but the first is a target once: window w reads
   `context` tokens from w * step on and scores its last `step` targets, the first window all; the
   last one is shorter. */
static Example *windows(size_t n, size_t context, size_t step, size_t *count)
{
    *count = n - 1 > context ? 1 + div_up(n - 1 - context, step) : 1;
    Example *window = xmalloc(*count * sizeof *window);
    for (size_t w = 0, at = 0; w < *count; w++, at += step) {
        const size_t read_only = w ? context - step : 0;
        window[w] = (Example){ at, at + read_only + 1, min_size(at + context + 1, n) };
    }
    return window;
}

/* Mean losses over the targets at positions 0, 1, 2-3, 4-7, ... of their windows. */
static void print_by_position(const float *loss, const Example *window, size_t n, int ctx)
{
    const size_t positions = example_inputs(window[0]);
    for (size_t from = 0, to; from < positions; from = to) {
        size_t count = 0;
        double sum = 0;
        to = min_size(positions, from ? 2 * from : 1);
        for (const Example *w = window; w < window + n; w++)
            for (size_t k = w->answer; k < w->end; k++) {
                const size_t at = k - 1 - w->at;
                if (at >= from && at < to) sum += (double)loss[k], count++;
            }
        printf("%d\t%zu\t%zu\t%zu\t%.6f\n", ctx, from, to - 1, count, sum / (double)count);
    }
}

#define NOT_FINITE "the loss at length %d is %g: the model computes values that are not numbers"

static void evaluate(Model *m, const int *contexts, int n_contexts)
{
    size_t n, n_windows, bytes = 0;
    int length, *ids = encode_file(m, eval_file, &n);
    if (n < 2)
        die(1, "%s: nothing to score: %zu tokens, and the first has no context", eval_file, n);
    for (size_t i = 1; i < n; i++) {
        tokenizer_decode(&m->tokenizer, ids[i], 0, &length);
        bytes += (size_t)length;
    }
    float *losses = xmalloc(n * sizeof *losses);
    printf(by_position ? "ctx\tfrom\tto\ttokens\tloss\n"
                       : "ctx\ttokens\tloss\tppl\tbits_per_byte\n");
    for (int i = 0; i < n_contexts; i++) {
        const int ctx = contexts[i], step = stride ? stride : ctx;
        if (step > ctx) die(2, "--stride %d exceeds the context of %d", step, ctx);
        model_tables(m, first_position + ctx);
        Example *window = windows(n, (size_t)ctx, (size_t)step, &n_windows);
        const double loss = examples_loss(m, losses, ids, window, n_windows, first_position);
        if (!isfinite(loss)) die(1, NOT_FINITE, ctx, loss);
        if (by_position) print_by_position(losses, window, n_windows, ctx);
        else printf("%d\t%zu\t%.6f\t%.4f\t%.6f\n", ctx, n - 1, loss, exp(loss),
                    loss * (double)(n - 1) / log(2) / (double)bytes);
        output_check();
        free(window);
    }
    free(ids), free(losses);
}

typedef struct { size_t lines, exact, tokens; double loss; } Answers;    // loss: the sum

/* Adds the first of n lines, and those behind it that are as long, to a[length of the question];
   returns how many. A line is exact if every token of its answer and its newline is the likeliest
   after the true ones before it, which by induction is that greedy generation gives them. */
static size_t judge(Model *m, Answers *a, const int *ids, const Example *line, size_t n)
{
    enum { LOGITS = 1 << 18 };    // floats of logits at a time, or those of one line
    const size_t V = (size_t)m->config.vocab_size, T = example_inputs(*line);
    const size_t most = min_size(n, LOGITS / (T * V) + 1);
    int *x = xmalloc(most * T * sizeof *x);
    float *logits = xmalloc(most * T * V * sizeof *logits), *row = logits;
    size_t B = 0;
    for (; B < most && example_inputs(line[B]) == T; B++)
        memcpy(x + B * T, ids + line[B].at, T * sizeof *x);
    model_logits(m, logits, x, NULL, (int)B, (int)T);
    for (const Example *e = line; e < line + B; e++) {
        Answers *of = &a[e->answer - 1 - e->at];
        size_t right = 0;
        for (size_t k = e->at + 1; k < e->end; k++, row += V) {
            if (k < e->answer) continue;
            right += sample(row, (int)V, 0, 0, 1, 0) == ids[k];
            float loss;
            cross_entropy(&loss, row, &ids[k], 1, V, 0);
            of->loss += (double)loss;
        }
        of->lines++;
        of->tokens += e->end - e->answer;
        of->exact += right == e->end - e->answer;
    }
    free(x), free(logits);
    return B;
}

static void evaluate_answers(Model *m, int ctx)
{
    size_t n, lines;
    int *ids = encode_file(m, eval_file, &n);
    if (!n) die(1, "%s: nothing to score: no line", eval_file);
    Example *line = examples_find(&m->tokenizer, answers, ids, n, ctx, eval_file, &lines);
    Answers *by_length = xmalloc(((size_t)ctx + 1) * sizeof *by_length);
    examples_sort(line, lines);
    for (size_t i = 0; i < lines;) i += judge(m, by_length, ids, line + i, lines - i);
    printf("length\tlines\texact\ttokens\tloss\n");
    for (int length = 0; length <= ctx; length++) {
        const Answers a = by_length[length];
        if (!isfinite(a.loss)) die(1, NOT_FINITE, length, a.loss);
        if (a.lines)
            printf("%d\t%zu\t%.6f\t%zu\t%.6f\n", length, a.lines,
                   (double)a.exact / (double)a.lines, a.tokens, a.loss / (double)a.tokens);
    }
    free(ids), free(line), free(by_length);
}

/* ---- Inspection ------------------------------------------------------------------------------ */

static void print_row(const char *what, int layer, int head, int row, int column, double value)
{
    const int field[] = { layer, head, row, column };
    fputs(what, stdout);
    for (int i = 0; i < 4; i++)
        if (field[i] < 0) fputs("\t-", stdout);
        else printf("\t%d", field[i]);
    printf("\t%.6g\n", value);
}

static double cosine(const float *a, const float *b, size_t n)
{
    return (double)dot(a, b, n) / sqrt((double)dot(a, a, n) * (double)dot(b, b, n));
}

/* What stands in the places of PosTables, up to position or distance SHOWN, a bias up to the
   context. Angles are read off position 1, where no pair has come further than one radian. */
static void inspect_encoding(Model *m, int ctx)
{
    enum { SHOWN = 128 };
    const Config *c = &m->config;
    PosTables *t = &m->pos;
    const int n = ctx < SHOWN ? ctx : SHOWN, half = ctx > 1 ? t->rotary / 2 : 0;
    const size_t dim = (size_t)c->dim, D = dim / (size_t)c->n_heads;
    int turned = 0;
    for (int p = 0; t->embed && p < n; p++) {
        const float *P = t->embed + (size_t)p * dim;
        for (int i = 0; i < c->dim; i++)
            print_row("embed", -1, -1, p, i, (double)t->embed_scale * (double)P[i]);
        for (int q = 0; q < n; q++)
            print_row("similarity", -1, -1, p, q, cosine(P, t->embed + (size_t)q * dim, dim));
    }
    for (int i = 0; i < half; i++) {
        const double w = atan2((double)t->sin[half + i], (double)t->cos[half + i]);
        print_row("wavelength", -1, -1, i, -1, 2 * M_PI / w);
        turned += w * c->seq_len >= 2 * M_PI;
        for (int p = 0; p < n; p++) print_row("angle", -1, -1, p, i, p * w);
    }
    if (half) print_row("turned", -1, -1, -1, -1, turned);
    if (c->pos->forward) c->pos->forward(t, m->params.pos, c);
    for (int h = 0; t->bias && h < c->n_heads; h++)
        for (int d = 0; d < ctx; d++) print_row("bias", -1, h, d, -1, (double)*pos_bias(t, h, d));
    for (int l = 0; c->pos->layer && l < c->n_layers; l++) {
        c->pos->layer(t, m->params.layers[l].pos, c);
        const size_t rows = min_size(t->rel_k ? (size_t)t->clip + 1 : 0, SHOWN);
        for (size_t i = 0; i < rows * rows; i++)
            print_row("relative", l, -1, (int)(i / rows), (int)(i % rows),
                      cosine(t->rel_k + i / rows * D, t->rel_k + i % rows * D, D));
    }
}

/* One layer over all windows of T tokens, which follow each other: the mean weight of the key at a
   distance, over the queries that have one there, and the mean entropy, - sum_j A_ij ln A_ij, of
   the query at a position. */
static void inspect_attention(Model *m, int layer, const int *text, size_t n, size_t T)
{
    const size_t H = (size_t)m->config.n_heads, full = n / T, rest = n % T;
    float *A = xmalloc(H * T * T * sizeof *A);
    double *weight = xmalloc(H * T * sizeof *weight), *entropy = xmalloc(H * T * sizeof *entropy);
    for (size_t at = 0; at < n; at += T) {
        const size_t length = min_size(T, n - at);
        model_attention(m, A, layer, text + at, (int)length);
        for (size_t h = 0; h < H; h++)
            for (size_t i = 0; i < length; i++)
                for (size_t j = 0; j <= i; j++) {
                    const double a = (double)A[(h * length + i) * length + j];
                    weight[h * T + i - j] += a;
                    if (a > 0) entropy[h * T + i] -= a * log(a);
                }
    }
    for (size_t h = 0; h < H; h++)
        for (size_t i = 0; i < (full ? T : rest); i++) {
            const size_t last = rest > i, pairs = full * (T - i) + last * (rest - i);
            print_row("weight", layer, (int)h, (int)i, -1, weight[h * T + i] / (double)pairs);
            print_row("entropy", layer, (int)h, (int)i, -1,
                      entropy[h * T + i] / (double)(full + last));
        }
    free(A), free(weight), free(entropy);
}

static void inspect(Model *m, int ctx)
{
    size_t n;
    int *ids = encode_file(m, inspect_file, &n);
    puts("what\tlayer\thead\trow\tcolumn\tvalue");
    inspect_encoding(m, ctx);
    for (int l = 0; l < m->config.n_layers; l++) inspect_attention(m, l, ids, n, (size_t)ctx);
    free(ids);
}

/* ---- Generation ------------------------------------------------------------------------------ */

/* Bytes at the end that begin a UTF-8 character and do not end it. */
static size_t unfinished(const char *s, size_t n)
{
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        const uint8_t c = (uint8_t)s[n - back];
        if (c >= 0xC0) return (c >= 0xF0 ? 4u : c >= 0xE0 ? 3u : 2u) > back ? back : 0;
        if (c < 0x80) return 0;
    }
    return 0;
}

/* Appends to o, the text on its way out, and prints what is safe to print: what may be the
   beginning of a stop text, or an unfinished character, waits for what follows. Returns 1 when a
   stop text came, and prints what stands before it. */
static int output(Text *o, const char *text, size_t length, int last)
{
    o->data = grow(o->data, &o->room, o->n + length + 1, 1);
    memcpy(o->data + o->n, text, length);
    o->n += length;
    size_t safe = o->n, stopped = 0;
    for (size_t at = 0; at < o->n && !stopped; at++)
        for (int i = 0; i < STOPS && stops[i]; i++) {
            const size_t stop = strlen(stops[i]), here = min_size(stop, o->n - at);
            if (!stop || memcmp(o->data + at, stops[i], here)) continue;
            if (here == stop) stopped = 1;
            if ((stopped || !last) && at < safe) safe = at;
        }
    if (!stopped && !last && safe == o->n) safe -= unfinished(o->data, o->n);
    fwrite(o->data, 1, safe, stdout);
    output_check();
    memmove(o->data, o->data + safe, o->n -= safe);
    return (int)stopped;
}

static void generate(Model *m, int *ids, size_t n, int implied, int ctx)
{
    const Tokenizer *t = &m->tokenizer;
    Text out = {0};
    Cache kv;
    int length, made = 0, room = ctx - (int)n + 1;
    if (tokens > room && options[TOKENS].given)
        fprintf(stderr, "run: with a context of %d, a prompt of %zu tokens leaves %d to generate\n",
                ctx, n, room);
    const int want = tokens < room ? tokens : room;
    cache_create(&kv, m, (int)n + (want ? want - 1 : 0));    // the last is not fed back
    for (size_t i = (size_t)implied; i < n; i++) {
        const char *s = tokenizer_decode(t, ids[i], i == (size_t)implied, &length);
        fwrite(s, 1, (size_t)length, stdout);
    }
    output_check();

    const double t0 = seconds();
    const float *logits = model_decode(m, &kv, ids, (int)n);
    const double t1 = seconds();
    for (; made < want; made++) {
        if (made) logits = model_decode(m, &kv, &ids[n + (size_t)made - 1], 1);
        const double u = rng_uniform(seed, RNG_SAMPLE, (uint64_t)made);
        const int token = sample(logits, m->config.vocab_size, (float)temperature, top_k,
                                 (float)top_p, u);
        if (token < 0) die(1, "the model computes values that are not numbers (token %d)", made);
        if (!t->bytes && (token == 1 || token == 2)) break;    // begin or end of a text
        ids[n + (size_t)made] = token;
        const int first = !made && n == 1 && m->config.start_token >= 0;
        const char *s = tokenizer_decode(t, token, first, &length);
        if (output(&out, s, (size_t)length, 0)) { made++; break; }
    }
    const double t2 = seconds();
    output(&out, "", 0, 1);
    putchar('\n');
    output_check();
    char rate[64] = "";
    if (made > 1)
        snprintf(rate, sizeof rate, ", generated %d in %.2f s (%.1f tok/s)", made, t2 - t1,
                 (made - 1) / (t2 - t1));
    note("prompt %zu tokens in %.1f ms (%.0f tok/s)%s, peak memory %.0f MiB, seed %llu", n,
         1e3 * (t1 - t0), (double)n / (t1 - t0), rate, peak_mib(), (unsigned long long)seed);
    free(out.data);
    cache_free(&kv);
}

/* The model sees its start token if it has one, then the prompt. With neither, a newline: the
   beginning of a line. */
static void from_prompt(Model *m, int ctx)
{
    Text text = {0};
    if (prompt_file) text_append(&text, prompt_file);
    else text = (Text){ .data = strdup(prompt ? prompt : ""), .n = prompt ? strlen(prompt) : 0 };
    if (prompt_file && text.n && text.data[text.n - 1] == '\n') text.n--;    // editors put it there
    const int start = m->config.start_token >= 0, newline = !start && !text.n;
    size_t n;
    int *body = encode_text(m, newline ? "\n" : text.data, newline ? 1 : text.n, &n);
    const size_t from = newline ? n - 1 : 0, in_prompt = n - from + (size_t)start;
    if (!encode && in_prompt > (size_t)ctx)
        die(1, "the prompt has %zu tokens, the context %d%s", in_prompt, ctx,
            m->config.pos->bounded ? "" : " (--ctx N goes beyond the trained length)");
    // the prompt, and room for what is generated
    int *ids = xmalloc((in_prompt + (size_t)ctx + 1) * sizeof *ids);
    if (start) ids[0] = m->config.start_token;
    memcpy(ids + start, body + from, (n - from) * sizeof *ids);
    for (size_t i = 0; encode && i < in_prompt; i++) printf("%s%d", i ? " " : "", ids[i]);
    if (encode) putchar('\n');
    else generate(m, ids, in_prompt, start || newline, ctx);
    free(body), free(ids), free(text.data);
}

static void check_exclusions(void)
{
    const char *windowed = by_position ? "by-position" : stride ? "stride"
                           : first_position ? "first-position" : NULL;
    if (prompt && prompt_file) die(2, "--prompt and --prompt-file exclude each other");
    if (eval_file && inspect_file) die(2, "--eval and --inspect exclude each other");
    if ((eval_file || inspect_file) && (encode || prompt || prompt_file))
        die(2, "--%s excludes --encode, --prompt and --prompt-file",
            eval_file ? "eval" : "inspect");
    if (windowed && !eval_file) die(2, "--%s needs --eval", windowed);
    if (answers && (!eval_file || windowed))
        die(2, "--answers needs --eval, and excludes --by-position, --stride and --first-position");
}

int main(int argc, char **argv)
{
    program_begin("run", argv);
    const int n_args = options_parse(usage, options, 1, argc, argv);
    if (n_args != 1)
        die(2, n_args ? "more than one model was given: %s and %s (a prompt goes behind -p)"
                      : "no model was given (--help shows how)", argv[0], argv[1]);
    check_exclusions();
    int contexts[CONTEXTS] = {0}, longest = 0, n_contexts = parse_contexts(contexts);
    if (n_contexts > 1 && (!eval_file || answers))
        die(2, "--ctx takes one number here; a list needs --eval without --answers");
    for (int i = 0; i < n_contexts; i++) longest = contexts[i] > longest ? contexts[i] : longest;
    threads = threads_set(threads);

    Model m;
    model_load(&m, argv[0], tokenizer_file, NULL);
    Config *c = &m.config;
    const int changed = options_apply_pos(c);
    if (int8) model_quantize(&m);
    if (!m.tokenizer.size)
        die(1, "%s: has no vocabulary inside; name it with -z tokenizer.bin", argv[0]);
    if (!n_contexts) longest = contexts[n_contexts++] = c->seq_len;
    longest += first_position;
    if (longest > c->seq_len && c->pos->bounded)
        die(1, "%s: %d positions were asked for, but %s has a row for each of the %d trained ones "
            "and none beyond", argv[0], longest, c->pos->name, c->seq_len);
    if (encode) quiet = 1;
    note("%s: %.2fM parameters, encoding %s, trained length %d; %s weights; %d thread%s (%s), "
         "vectors of %d floats", argv[0], (double)m.params.count / 1e6, c->pos->name, c->seq_len,
         int8 ? "int8" : "fp32", threads, threads > 1 ? "s" : "", threads_kind, vector_width);
    if (longest > c->seq_len) note("positions from %d on were not trained", c->seq_len);

    const int by_context = eval_file && !answers;    // which makes its tables itself
    if (!by_context && (changed || m.pos.len != contexts[0])) model_tables(&m, contexts[0]);
    if (by_context) evaluate(&m, contexts, n_contexts);
    else if (answers) evaluate_answers(&m, contexts[0]);
    else if (inspect_file) inspect(&m, contexts[0]);
    else from_prompt(&m, contexts[0]);
    output_check();
    model_free(&m);
    return 0;
}
