/* run.c - uses a model:   ./run model.bin -p "Once"
   Options, the prompt, generation, evaluation on a text. What a model is stands in model.h. */
#define MODEL_IMPLEMENTATION
#include "model.h"

/* ---- Options: the defaults are here, --help prints them -------------------------------------- */

enum { STOPS = 8, CONTEXTS = 32 };

static const char *prompt, *prompt_file, *stops[STOPS], *tokenizer_file, *ctx_list, *eval_file;
static int tokens = 256, top_k, threads, quiet, encode, by_position, int8;
static double temperature = 0.8, top_p = 0.95;
static uint64_t seed;

static Option options[] = {
    { "prompt", 'p', "TEXT", "text to go on from", .s = &prompt },
    { "prompt-file", 'f', "FILE", .s = &prompt_file,
      .help = "the same from a file, less one newline at its end; - is standard input" },
    { "tokens", 'n', "N", .i = &tokens, .min = 0, .max = 1 << 30,
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
    { "quiet", 'q', NULL, "print errors and warnings only", .on = &quiet },
    { .name = NULL }
};

static void help(void)
{
    printf("usage: run [options] MODEL\n"
           "Generates text with a model that ./train wrote, "
           "or with a checkpoint of llama2.c and its -z tokenizer.bin.\n"
           "    ./run model.bin -p \"Once upon a time\"\n\n");
    options_help(options, (int)(sizeof options / sizeof *options));
}

static int given(const char *name)
{
    const Option *o = options;
    while (strcmp(o->name, name)) o++;
    return o->given;
}

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

/* Every token of the text but the first is a target once, whatever the context: windows of ctx
   targets follow each other, and the last is shorter. loss[i] is the loss of token i + 1. */
static void score(Model *m, float *loss, const int *text, size_t n, int ctx)
{
    const size_t T = (size_t)ctx, at_once = (PIECE_TOKENS + T - 1) / T;
    for (size_t at = 0; at < n;) {
        const size_t length = min_size(T, n - at);
        const size_t sequences = length < T ? 1 : min_size(at_once, (n - at) / T);
        model_loss(m, loss + at, text + at, text + at + 1, NULL, (int)sequences, (int)length);
        at += sequences * length;
    }
}

/* Over positions [from, to). */
static double mean(const float *loss, size_t n, size_t *count, size_t ctx, size_t from, size_t to)
{
    double sum = 0;
    *count = 0;
    for (size_t i = 0; i < n; i++)
        if (i % ctx >= from && i % ctx < to) sum += (double)loss[i], ++*count;
    return sum / (double)*count;
}

static void evaluate(Model *m, const int *contexts, int n_contexts)
{
    Text text = {0};
    size_t n, unknown, count, bytes = 0;
    const size_t converted = text_append(&text, eval_file);
    if (converted && !quiet)
        fprintf(stderr, "run: %s: %zu carriage returns were read as newlines\n", eval_file,
                converted);
    int *ids = tokenizer_encode(&m->tokenizer, text.data, text.n, &n, &unknown);
    free(text.data);
    if (n < 2)
        die(1, "%s: nothing to score: %zu tokens, and the first has no context", eval_file, n);
    for (size_t i = 1; i < n; i++) {
        int length;
        tokenizer_decode(&m->tokenizer, ids[i], 0, &length);
        bytes += (size_t)length;
    }
    if (unknown)
        fprintf(stderr, "run: %zu characters of the text are not in the vocabulary\n", unknown);
    n--;    // targets from here on
    float *loss = xmalloc(n * sizeof *loss);
    printf(by_position ? "ctx\tfrom\tto\ttokens\tloss\n"
                       : "ctx\ttokens\tloss\tppl\tbits_per_byte\n");
    for (int i = 0; i < n_contexts; i++) {
        const size_t ctx = (size_t)contexts[i];
        score(m, loss, ids, n, contexts[i]);
        const double all = mean(loss, n, &count, ctx, 0, ctx);
        if (!isfinite(all))
            die(1, "the loss at context %zu is %g: the model computes values that are not numbers",
                ctx, all);
        if (!by_position)
            printf("%zu\t%zu\t%.6f\t%.4f\t%.6f\n", ctx, n, all, exp(all),
                   all * (double)n / log(2) / (double)bytes);
        // 0, 1, 2-3, 4-7, ...
        for (size_t from = 0, to; by_position && from < min_size(ctx, n); from = to) {
            to = min_size(min_size(ctx, n), from ? 2 * from : 1);
            const double part = mean(loss, n, &count, ctx, from, to);
            printf("%zu\t%zu\t%zu\t%zu\t%.6f\n", ctx, from, to - 1, count, part);
        }
        output_check();
    }
    free(ids), free(loss);
}

/* ---- Generation ------------------------------------------------------------------------------ */

/* Text on its way out. What may be the beginning of a stop text, or an unfinished character, waits
   for what follows. */
typedef struct { char *text; size_t n, room; } Output;

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

/* Appends and prints what is safe to print; returns 1 when a stop text came, and prints what stands
   before it. */
static int output(Output *o, const char *text, size_t length, int last)
{
    o->text = grow(o->text, &o->room, o->n + length + 1, 1);
    memcpy(o->text + o->n, text, length);
    o->n += length;
    size_t safe = o->n, stopped = 0;
    for (size_t at = 0; at < o->n && !stopped; at++)
        for (int i = 0; i < STOPS && stops[i]; i++) {
            const size_t stop = strlen(stops[i]), here = min_size(stop, o->n - at);
            if (!stop || memcmp(o->text + at, stops[i], here)) continue;
            if (here == stop) stopped = 1;
            if ((stopped || !last) && at < safe) safe = at;
        }
    if (!stopped && !last && safe == o->n) safe -= unfinished(o->text, o->n);
    fwrite(o->text, 1, safe, stdout);
    output_check();
    memmove(o->text, o->text + safe, o->n -= safe);
    return (int)stopped;
}

static void generate(Model *m, int *ids, size_t n, int implied, int ctx)
{
    const Tokenizer *t = &m->tokenizer;
    Output out = {0};
    Cache kv;
    int length, made = 0, room = ctx - (int)n + 1;
    if (tokens > room && given("tokens"))
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
    if (!quiet) {
        fprintf(stderr, "run: prompt %zu tokens in %.1f ms (%.0f tok/s)", n, 1e3 * (t1 - t0),
                (double)n / (t1 - t0));
        if (made > 1)
            fprintf(stderr, ", generated %d in %.2f s (%.1f tok/s)", made, t2 - t1,
                    (made - 1) / (t2 - t1));
        fprintf(stderr, ", peak memory %.0f MiB, seed %llu\n", peak_mib(),
                (unsigned long long)seed);
    }
    free(out.text);
    cache_free(&kv);
}

int main(int argc, char **argv)
{
    program_begin("run", argv);
    const int n_args = options_parse(options, argc, argv, help);
    if (n_args != 1)
        die(2, n_args ? "more than one model was given: %s and %s (a prompt goes behind -p)"
                      : "no model was given (--help shows how)", argv[0], argv[1]);
    if (prompt && prompt_file) die(2, "--prompt and --prompt-file exclude each other");
    if (eval_file && (encode || prompt || prompt_file))
        die(2, "--eval excludes --encode, --prompt and --prompt-file");
    if (by_position && !eval_file) die(2, "--by-position needs --eval");
    int contexts[CONTEXTS] = {0}, longest = 0, n_contexts = parse_contexts(contexts);
    if (n_contexts > 1 && !eval_file) die(2, "--ctx takes one number here; a list needs --eval");
    for (int i = 0; i < n_contexts; i++) longest = contexts[i] > longest ? contexts[i] : longest;
    if (!given("seed")) seed = (uint64_t)time(NULL) * 1000 + (uint64_t)getpid() % 1000;
    threads = threads_set(threads);

    Model m;
    model_load(&m, argv[0], tokenizer_file, longest, NULL);
    const Config *c = &m.config;
    if (int8) model_quantize(&m);
    if (!m.tokenizer.size)
        die(1, "%s: has no vocabulary inside; name it with -z tokenizer.bin", argv[0]);
    if (!n_contexts) contexts[n_contexts++] = c->seq_len;
    if (!quiet && !encode) {
        fprintf(stderr, "run: %s: %.2fM parameters, encoding %s, trained length %d; "
                "%s weights; %d thread%s (%s), vectors of %d floats\n",
                argv[0], (double)m.params.count / 1e6, c->pos->name, c->seq_len,
                int8 ? "int8" : "fp32", threads, threads > 1 ? "s" : "", threads_kind,
                vector_width);
        if (longest > c->seq_len)
            fprintf(stderr, "run: positions from %d on were not trained\n", c->seq_len);
    }
    if (eval_file) {
        evaluate(&m, contexts, n_contexts);
        model_free(&m);
        return 0;
    }

    Text file = {0};
    if (prompt_file) text_append(&file, prompt_file);
    if (file.n && file.data[file.n - 1] == '\n') file.n--;    // editors put it there
    const char *text = prompt_file ? file.data : prompt ? prompt : "";
    size_t size = prompt_file ? file.n : strlen(text), n, unknown;
    // The model sees: its start token if it has one, then the prompt. With neither, a newline: the
    // beginning of a line.
    int *body = tokenizer_encode(&m.tokenizer, size ? text : "\n", size ? size : 1, &n,
                                 &unknown);
    if (unknown)
        fprintf(stderr, "run: %zu characters of the prompt are not in the vocabulary\n", unknown);
    const int start = c->start_token >= 0, implied = start || !size;
    const size_t from = size ? 0 : start ? n : n - 1, in_prompt = n - from + (size_t)start;
    if (!encode && in_prompt > (size_t)contexts[0])
        die(1, "the prompt has %zu tokens, the context %d%s", in_prompt, contexts[0],
            c->pos->bounded ? "" : " (--ctx N goes beyond the trained length)");
    // the prompt, and room for what is generated
    int *ids = xmalloc((in_prompt + (size_t)contexts[0] + 1) * sizeof *ids);
    if (start) ids[0] = c->start_token;
    memcpy(ids + start, body + from, (n - from) * sizeof *ids);
    if (encode) {
        for (size_t i = 0; i < in_prompt; i++) printf("%s%d", i ? " " : "", ids[i]);
        putchar('\n');
        output_check();
    } else {
        generate(&m, ids, in_prompt, implied, contexts[0]);
    }
    free(body), free(ids), free(file.data);
    model_free(&m);
    return 0;
}
