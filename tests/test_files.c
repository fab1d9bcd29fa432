/* Vocabularies and model files: round trips, llama2.c's rules and files, and every truncation and
   flipped byte of a small file. */
#include "test.h"

#include <signal.h>
#include <sys/wait.h>

/* A child that refuses a file exits without freeing what it read; that is no leak to report. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "detect_leaks=0"; }

static char folder[] = "/tmp/posenc-test-XXXXXX";

static const char *path_of(const char *name)
{
    static char path[4][128];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, sizeof path[0], "%s/%s", folder, name);
    return p;
}

static void write_file(const char *path, const void *data, size_t size)
{
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(data, 1, size, f) == size && !fclose(f));
}

/* ---- tokenizer ------------------------------------------------------------------------------- */

/* llama2.c's rule, word for word and quadratic: look up characters, then merge the best pair,
   leftmost first, until there is none. */
static size_t naive_encode(const Tokenizer *t, const char *text, size_t length, int *out)
{
    char *s = xmalloc(length + 1), **start = xmalloc((length + 1) * sizeof *start);
    size_t *bytes = xmalloc((length + 1) * sizeof *bytes), n = 0;
    s[0] = ' ';
    memcpy(s + 1, text, length);
    for (size_t at = 0; at < length + 1;) {
        const size_t k = character_length(s + at, length + 1 - at);
        const int id = piece_find(t, s + at, k);
        for (size_t i = 0; id < 0 && i < k; i++)
            start[n] = NULL, bytes[n] = 0, out[n++] = t->byte_id[(uint8_t)s[at + i]];
        if (id >= 0) start[n] = s + at, bytes[n] = k, out[n++] = id;
        at += k;
    }
    for (;;) {
        size_t best = n;
        int best_id = -1;
        for (size_t i = 0; i + 1 < n; i++) {
            if (!start[i] || !start[i + 1]) continue;
            const int id = piece_find(t, start[i], bytes[i] + bytes[i + 1]);
            if (id >= 0 && (best_id < 0 || t->piece[id].score > t->piece[best_id].score))
                best = i, best_id = id;
        }
        if (best_id < 0) break;
        out[best] = best_id;
        bytes[best] += bytes[best + 1];
        n--;
        for (size_t i = best + 1; i < n; i++)
            out[i] = out[i + 1], start[i] = start[i + 1], bytes[i] = bytes[i + 1];
    }
    free(s), free(start), free(bytes);
    return n;
}

/* decode(encode(x)) = x; returns the tokens. */
static int *round_trip_tokens(const Tokenizer *t, const char *text, size_t length, size_t *n)
{
    size_t at = 0, unknown;
    int *ids = tokenizer_encode(t, text, length, n, &unknown), same = 1;
    for (size_t i = 0; i < *n; i++) {
        int k;
        const char *s = tokenizer_decode(t, ids[i], !i, &k);
        same = same && ids[i] >= 0 && ids[i] < t->size && at + (size_t)k <= length
               && !memcmp(text + at, s, (size_t)k);
        at += (size_t)k;
    }
    CHECK(same && at == length && unknown == 0);
    return ids;
}

static void round_trip(const Tokenizer *t, const char *text, size_t length)
{
    size_t n;
    free(round_trip_tokens(t, text, length, &n));
}

static void check_text(const Tokenizer *t, const char *text, size_t length)
{
    size_t n;
    int *ids = round_trip_tokens(t, text, length, &n);
    if (!t->bytes && length) {
        int *want = xmalloc((length + 1) * sizeof *want);
        CHECK(naive_encode(t, text, length, want) == n && !memcmp(want, ids, n * sizeof *ids));
        free(want);
    }
    // neither disturbs the other, wherever it stands
    Encoder e = { .t = t, .text = text, .left = length }, ahead = e;
    size_t same = 0;
    for (size_t i = 0; i < n; i++) {
        same += encoder_next(&e) == ids[i];
        for (size_t k = 2 * i; k < 2 * i + 2; k++)
            same += encoder_next(&ahead) == (k < n ? ids[k] : -1);
    }
    CHECK(same == 3 * n && encoder_next(&e) < 0 && encoder_next(&ahead) < 0);
    free(ids);
}

static void test_tokenizer(void)
{
    static const char *const odd[] = {
        "", " ", "  ", "a", " a", "a ", "the cat", " the cat", "  the   cat  ", "\n", "\n\n",
        "\r\n", "\t x", "don't stop", "1234 56.7", "\xc3\xb6l", "\xe4\xbd\xa0\xe5\xa5\xbd",
        "\xf0\x9f\xa6\x99", "\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x92\xbb", "e\xcc\x81",
        "<s>", "</s>", "\n<s>\n", "<unk>", "<0x41>", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "\xff\xfe\x80\x80", "\xc3", "\x80\x80\x80\x80\x80\x80", "x\xe4" };
    Tokenizer t[2];
    size_t size;
    tokenizer_load(&t[0], "tokenizer.bin");
    tokenizer_bytes(&t[1]);
    char *stories = file_read("tests/data/stories.txt", &size);
    for (int k = 0; k < 2; k++) {
        for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
            context = odd[i], check_text(&t[k], odd[i], strlen(odd[i]));
        for (size_t i = 0; i < 300; i++) {    // pieces of text, and of noise
            char noise[64];
            const size_t length = 1 + rng(1, RNG_TEST, i) % 60;
            const char *piece = stories + rng(1, RNG_TEST + 1, i) % (size - 100);
            context = "stories", check_text(&t[k], piece, length);
            for (size_t b = 0; b < length; b++) noise[b] = (char)rng(1, RNG_TEST + 2, i * 64 + b);
            context = "noise", check_text(&t[k], noise, length);
        }
        context = "";
    }
    CHECK(t[0].size == 4096 && t[0].byte_id['\n'] == 13);
    // a long text that is one run, as any two of these letters stand in some piece
    char letters[2000];
    for (size_t i = 0; i < sizeof letters; i++) letters[i] = "elst"[rng(1, RNG_TEST + 3, i) % 4];
    Encoder e = { .t = &t[0], .text = letters, .left = sizeof letters };
    CHECK(encoder_next(&e) >= 0 && !e.left);
    while (encoder_next(&e) >= 0) {}
    context = "letters", check_text(&t[0], letters, sizeof letters);
    // Whole texts, the second one a single run: quadratic would take hours.
    for (int kind = 0; kind < 2; kind++) {
        if (kind) memset(stories, 'e', size);
        context = kind ? "one letter" : "the whole text", round_trip(&t[0], stories, size);
    }
    context = "";
    tokenizer_free(&t[0]), free(stories);
}

static void append(char **at, const void *data, size_t n) { memcpy(*at, data, n), *at += n; }

/* A vocabulary that has one byte only: what it lacks becomes the unknown token, one for a
   character. */
static void test_tokenizer_without_bytes(void)
{
    static const char *const pieces[] = {
        "<unk>", "\n<s>\n", "\n</s>\n", " ", "a", "b", "ab", " a", "", "aa", "<0xFF>",
        "\xff\x61" };
    char file[256], *at = file;
    int32_t length = 8;
    append(&at, &length, 4);
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        const float score = -(float)i;
        length = (int32_t)strlen(pieces[i]);
        append(&at, &score, 4), append(&at, &length, 4), append(&at, pieces[i], (size_t)length);
    }
    write_file(path_of("t.bin"), file, (size_t)(at - file));
    Tokenizer t;
    size_t n, unknown;
    tokenizer_load(&t, path_of("t.bin"));
    CHECK(t.size == 12);
    int *ids = tokenizer_encode(&t, "ab\xe4\xbd\xa0 a\xc3", 8, &n, &unknown);
    const int want[] = { 3, 6, 0, 7, 0 };
    CHECK(n == 5 && !memcmp(ids, want, sizeof want) && unknown == 2);
    free(ids);
    // of equal pairs the leftmost: aa a, not a aa
    ids = tokenizer_encode(&t, "baaa", 4, &n, &unknown);
    const int leftmost[] = { 3, 5, 9, 4 };
    CHECK(n == 4 && !memcmp(ids, leftmost, sizeof leftmost) && unknown == 0);
    free(ids);
    // a byte that is no piece merges with nothing
    ids = tokenizer_encode(&t, "\xff\x61", 2, &n, &unknown);
    const int apart[] = { 3, 10, 4 };
    CHECK(n == 3 && !memcmp(ids, apart, sizeof apart) && unknown == 0);
    free(ids), tokenizer_free(&t);
}

/* Every file is converted by itself: a \r at an end and a \n at a beginning are two newlines. */
static void test_texts(void)
{
    static const struct { const char *file; size_t converted; } part[] = {
        { "\xef\xbb\xbfone\r", 1 }, { "\ntwo\r\n\r", 2 }, { "", 0 }, { "\xef\xbb\xbf\n\xef", 0 } };
    static const char want[] = "one\n\ntwo\n\n\n\xef";
    Text text = {0};
    for (size_t i = 0; i < sizeof part / sizeof *part; i++) {
        write_file(path_of("text"), part[i].file, strlen(part[i].file));
        CHECK(text_append(&text, path_of("text")) == part[i].converted);
    }
    CHECK(text.n == strlen(want) && !strcmp(text.data, want));
    free(text.data);
}

/* ---- model files ----------------------------------------------------------------------------- */

static void test_round_trip(void)
{
    for (const PosEnc *e = posencs; e->name; e++)
        for (int variant = 0; variant < 2; variant++) {
            Model a, b;
            TrainState state = { .step = 7, .seed = 9, .lr = 0.5, .best_val = 1.5 }, back = {0};
            context = e->name;
            Config c = { .dim = 24, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2,
                         .vocab_size = 4096, .seq_len = 16, .untied = variant, .start_token = -1,
                         .pos = e };
            config_defaults(&c);
            CHECK(!config_check(&c));
            model_create(&a, &c, 16);
            tokenizer_load(&a.tokenizer, "tokenizer.bin");
            model_init(&a, 3);
            stir(&a);
            model_train_begin(&a);
            fill(a.m, a.params.count, 5), fill(a.v, a.params.count, 6);
            model_save(&a, path_of("m.bin"), &state);
            CHECK(model_load(&b, path_of("m.bin"), NULL, &back) == 1);
            CHECK(!memcmp(&state, &back, sizeof state));
            CHECK(a.config.pos == b.config.pos && a.config.untied == b.config.untied);
            CHECK(!memcmp(a.config.pos_opt, b.config.pos_opt, sizeof c.pos_opt));
            CHECK(a.config.hidden_dim == b.config.hidden_dim);
            CHECK(!memcmp(a.params.data, b.params.data, a.params.count * 4));
            CHECK(!memcmp(a.m, b.m, a.params.count * 4) && !memcmp(a.v, b.v, a.params.count * 4));
            CHECK(a.tokenizer.file_size == b.tokenizer.file_size
                  && !memcmp(a.tokenizer.file, b.tokenizer.file, a.tokenizer.file_size));
            model_free(&b);
            model_save(&a, path_of("m.bin"), NULL);
            CHECK(model_load(&b, path_of("m.bin"), NULL, NULL) == 0);
            model_free(&a), model_free(&b);
        }
    context = "";
}

/* Loads in a child process, since a refusal exits: status 1 and one line on stderr, or status 0. */
static int try_load(const char *path, int *lines)
{
    int ends[2], status;
    CHECK(!pipe(ends));
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        dup2(ends[1], STDERR_FILENO);
        Model m;
        TrainState state;
        model_load(&m, path, NULL, &state);
        _exit(0);
    }
    close(ends[1]);
    char text[1024];
    ssize_t n, total = 0;
    while ((n = read(ends[0], text + total, sizeof text - (size_t)total)) > 0) total += n;
    close(ends[0]);
    waitpid(child, &status, 0);
    *lines = 0;
    for (ssize_t i = 0; i < total; i++) *lines += text[i] == '\n';
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

/* Every byte flipped and every length: a message and exit 1, never a crash and never a silent load.
   For llama2.c's files, which have no checksum, every length only. */
static void test_damage(void)
{
    threads_set(1);
    for (const PosEnc *e = posencs; e->name; e++) {
        Config c = { .dim = 4, .n_layers = 1, .n_heads = 2, .hidden_dim = 1, .vocab_size = 4,
                     .seq_len = 2, .start_token = -1, .pos = e };
        config_defaults(&c);
        if (!strcmp(e->name, "rpe")) c.pos_opt[0] = 1;
        if (!strcmp(e->name, "t5")) c.pos_opt[0] = 2, c.pos_opt[1] = 0;
        Model m;
        CHECK(!config_check(&c));
        model_create(&m, &c, 2);
        model_init(&m, 1);
        model_train_begin(&m);
        static const char vocabulary[] = "\1\0\0\0" "\0\0\0\0\1\0\0\0a" "\0\0\0\0\1\0\0\0b"
                                         "\0\0\0\0\1\0\0\0c" "\0\0\0\0\1\0\0\0d";
        tokenizer_parse(&m.tokenizer, vocabulary, sizeof vocabulary - 1, "inside");
        TrainState state = { .step = 1 };
        const char *good = path_of("good.bin"), *bad = path_of("bad.bin");
        // one with a training state and all truncations; the loader is the same
        const int whole = !strcmp(e->name, "rope");
        model_save(&m, good, whole ? &state : NULL);
        model_free(&m);
        size_t size;
        int lines, silent = 0, crashed = 0, mute = 0;
        char *file = file_read(good, &size);
        context = e->name;
        CHECK(try_load(good, &lines) == 0 && lines == 0);
        for (size_t i = 0; i < (whole ? 2 : 1) * size; i++) {    // flips, then truncations
            const char flip = (char)(1 << rng(1, RNG_TEST, i) % 8);
            if (i < size) file[i] ^= flip;
            write_file(bad, file, i < size ? size : i - size);
            if (i < size) file[i] ^= flip;
            const int status = try_load(bad, &lines);
            silent += status == 0, crashed += status > 2, mute += status == 1 && lines != 1;
        }
        CHECK(silent == 0), CHECK(crashed == 0), CHECK(mute == 0);
        free(file);
    }
    context = "";
    threads_set(0);
}

/* A checkpoint of llama2.c in both layouts has the logits of the same weights in ours; cut off, it
   is refused. */
static void test_llama2c(void)
{
    for (int untied = 0; untied < 2; untied++) {
        Model m, got[2];
        Config c = { .dim = 24, .hidden_dim = 40, .n_layers = 3, .n_heads = 4, .n_kv_heads = 2,
                     .vocab_size = 50, .seq_len = 32, .untied = untied, .start_token = 1,
                     .pos = posenc_find("rope") };
        config_defaults(&c);
        CHECK(!config_check(&c));
        model_create(&m, &c, 32);
        model_init(&m, 1);
        stir(&m);
        for (int version = 0; version < 2; version++) {
            const char *const name = version ? "llama1.bin" : "llama0.bin";    // it stays mapped
            FILE *f = fopen(path_of(name), "wb");
            const int32_t signed_vocab = version || !untied ? 50 : -50, one = 1;
            const int32_t header[] = { 24, 40, 3, 4, 2, signed_vocab, 32 };
            const Params *p = &m.params;
            char pad[256] = {0};
            if (version) fwrite("24ka", 1, 4, f), fwrite(&one, 4, 1, f);
            fwrite(header, 4, 7, f);
            if (version) pad[0] = !untied, fwrite(pad, 1, 256 - 36, f);
            #define ALL(tensor, n) for (int i = 0; i < 3; i++) fwrite(p->layers[i].tensor, 4, n, f)
            if (version) { ALL(rms_att, 24); ALL(rms_ffn, 24); fwrite(p->rms_final, 4, 24, f); }
            fwrite(p->token_embedding, 4, 50 * 24, f);
            if (!version) ALL(rms_att, 24);
            ALL(wq, 24 * 24); ALL(wk, 12 * 24); ALL(wv, 12 * 24); ALL(wo, 24 * 24);
            if (!version) ALL(rms_ffn, 24);
            ALL(w1, 40 * 24); ALL(w2, 24 * 40); ALL(w3, 40 * 24);
            if (!version) {
                fwrite(p->rms_final, 4, 24, f);
                for (int i = 0; i < 32 * 6 / 2 * 2; i++) fwrite(pad, 4, 1, f);
            }
            if (untied) fwrite(p->wcls, 4, 50 * 24, f);
            fclose(f);
            model_load(&got[version], path_of(name), NULL, NULL);
            size_t size;
            int lines;
            char *file = file_read(path_of(name), &size);
            for (size_t n = 0; n < size; n += n < 300 ? 1 : 997) {
                write_file(path_of("cut.bin"), file, n);
                CHECK(try_load(path_of("cut.bin"), &lines) == 1 && lines == 1);
            }
            write_file(path_of("cut.bin"), file, size - 4);
            CHECK(try_load(path_of("cut.bin"), &lines) == 1 && lines == 1);
            for (size_t field = 0; version == 0 && field < 7; field++)    // absurd header fields
                for (int k = 0; k < 4; k++) {
                    const int32_t value = (int32_t[]){ INT32_MAX, 0, -5, 3 }[k];
                    char keep[4];
                    memcpy(keep, file + 4 * field, 4), memcpy(file + 4 * field, &value, 4);
                    write_file(path_of("cut.bin"), file, size);
                    if (memcmp(keep, &value, 4))
                        CHECK(try_load(path_of("cut.bin"), &lines) == 1 && lines == 1);
                    memcpy(file + 4 * field, keep, 4);
                }
            free(file);
        }
        int *x = random_tokens(32, 50, 1);
        float *a = xmalloc(32 * 50 * 4), *b = xmalloc(32 * 50 * 4);
        model_logits(&m, a, x, NULL, 1, 32);
        for (int version = 0; version < 2; version++) {
            model_logits(&got[version], b, x, NULL, 1, 32);
            CHECK(!memcmp(a, b, 32 * 50 * 4));
            model_free(&got[version]);
        }
        model_free(&m), free(x), free(a), free(b);
    }
}

/* A save that is killed at any moment leaves the old file or the new one. */
static void test_crash(void)
{
    Model m;
    TrainState state = { .step = 1 };
    int lines, damaged = 0;
    Config c = { .dim = 24, .n_layers = 2, .n_heads = 4, .vocab_size = 256, .seq_len = 16,
                 .start_token = -1, .pos = posenc_find("none") };
    CHECK(!config_check(&c));
    model_create(&m, &c, 16);
    model_init(&m, 1);
    tokenizer_bytes(&m.tokenizer);
    model_train_begin(&m);
    model_save(&m, path_of("c.bin"), &state);
    for (int i = 0; i < 40; i++) {
        fflush(stdout);
        const pid_t child = fork();
        if (!child) for (;;) state.step++, model_save(&m, path_of("c.bin"), &state);
        usleep((useconds_t)(500 + 150 * i));
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        damaged += try_load(path_of("c.bin"), &lines) != 0 || lines != 0;
    }
    CHECK(damaged == 0);
    model_free(&m);
}

int main(int argc, char **argv)
{
    (void)argc;
    program_begin("test_files", argv);
    if (!mkdtemp(folder)) die(1, "%s: %s", folder, strerror(errno));
    RUN(test_tokenizer);
    RUN(test_tokenizer_without_bytes);
    RUN(test_texts);
    RUN(test_round_trip);
    RUN(test_damage);
    RUN(test_llama2c);
    RUN(test_crash);
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK(system(command) == 0);
    return report();
}
