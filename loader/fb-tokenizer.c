/* fb-tokenizer: trains a byte-level BPE tokenizer, and text ↔ ids with any tokenizer.json. */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/args.h"
#include "common/bpe_train.h"
#include "common/fs.h"
#include "common/mem.h"
#include "common/process.h"
#include "common/progress.h"
#include "common/tokenizer.h"
#include "common/version.h"
#include "loader/corpus.h"

#define INPUT_MAX_BYTES ((uint64_t)4 << 30)

static const char usage[] =
    "usage: fb-tokenizer train --vocab N --out FILE [options] INPUT...\n"
    "       fb-tokenizer encode --tokenizer FILE [--json] [TEXT|-]\n"
    "       fb-tokenizer decode --tokenizer FILE [IDS|-]\n"
    "       fb-tokenizer info --tokenizer FILE\n"
    "\n"
    "train   makes a byte-level BPE tokenizer.json (the format of Hugging Face tokenizers).\n"
    "        INPUT: text files, .jsonl files, or directories of them, searched recursively\n"
    "        (hidden names, links and binary files are passed over).\n"
    "encode  writes the ids of a text on one line. Special tokens never come from text.\n"
    "decode  writes the text of ids (numbers, or a JSON list of them).\n"
    "info    says what a tokenizer holds.\n"
    "\n"
    "  --vocab N         tokens wanted, 257 to 1048576: the bytes and <|endoftext|> count\n"
    "  --out FILE        where the tokenizer goes\n"
    "  --threads N       1 to 256 (default: one a core); the result is the same for any number\n"
    "  --min-count N     merge no pair rarer than this (default: 2)\n"
    "  --field NAME      the text of a .jsonl line (default: text)\n"
    "  --tokenizer FILE  the tokenizer.json to use\n"
    "  --json            write ids as a JSON list\n"
    "  --help, --version\n";

struct options {
    struct bpe_train_opts train;
    const char *out, *tokenizer, *field;
    int json;
    char **inputs;
    int n_inputs;
};

/* Progress: one bar for each phase of training. */
struct bar {
    struct progress progress;
    const char *phase;
};

static void draw(void *ctx, const char *phase, uint64_t done, uint64_t total)
{
    struct bar *b = ctx;
    int bytes = strcmp(phase, "bytes") == 0;
    if (b->phase && strcmp(b->phase, phase))
        progress_end(&b->progress);
    if (!b->phase || strcmp(b->phase, phase))
        progress_start(&b->progress, bytes ? "count" : "merge", total, bytes ? "MB" : "tokens",
            bytes ? 1e6 : 1);
    b->phase = phase;
    progress_at(&b->progress, done);
}

static int asked_to_stop(void *arg, const char *what, uint64_t done, uint64_t total)
{
    (void)arg, (void)what, (void)done, (void)total;
    return process_stopped();
}

/* Counts the documents of .jsonl files; `lines` holds those files alone. */
static int add_json_lines(
    struct bpe_trainer *t, const struct options *o, struct corpus *lines, struct err *e)
{
    const struct corpus_options read = {.field = o->field, .threads = o->train.threads};
    struct buf text = BUF_INIT;
    int rc = lines->file_count ? corpus_scan(lines, &read, asked_to_stop, NULL, e) : 0;
    for (size_t i = 0; rc == 0 && i < lines->count; i++) {
        buf_clear(&text);
        rc = corpus_text(lines, &lines->documents[i], o->field, &text, e);
        if (rc == 0)
            rc = bpe_trainer_add_text(t, text.data, text.len, e);
        if (rc == 0 && process_stopped())
            rc = err_set(e, ERR_STOPPED, "stopped while counting words");
    }
    buf_release(&text);
    return rc;
}

/* Counts the words of everything that was found: text files at once, .jsonl files by document. */
static int add_inputs(
    struct bpe_trainer *t, const struct options *o, struct corpus *found, struct err *e)
{
    char **paths = mem_array(found->file_count, sizeof *paths);
    struct corpus lines = {0};
    lines.files = mem_array(found->file_count, sizeof *lines.files);
    size_t n = 0;
    for (size_t i = 0; i < found->file_count; i++) {
        struct corpus_file *f = &found->files[i];
        if (f->jsonl) {
            lines.files[lines.file_count++] = *f;
            f->path = NULL; /* ownership moves */
        } else if (!corpus_is_binary(f)) {
            paths[n++] = f->path;
        }
    }
    int rc = bpe_trainer_add_files(t, paths, n, e);
    if (rc == 0)
        rc = add_json_lines(t, o, &lines, e);
    corpus_release(&lines);
    free(paths);
    return rc;
}

/* Publishes the file, once it has been read back as what it claims to be. */
static int publish(const char *path, const struct buf *json, struct err *e)
{
    struct tokenizer *t = NULL;
    int rc = tokenizer_parse(json->data, json->len, &t, e);
    tokenizer_free(&t);
    if (rc < 0)
        return err_prefix(e, "%s", path);
    return fs_write_atomic(path, json->data, json->len, e);
}

/* What would only fail, or destroy something, after all the work. */
static int check_out(const char *path, const struct corpus *found, struct err *e)
{
    struct stat out, in;
    char *dir = fs_dirname(path);
    int rc = fs_mkdir_p(dir, 0755, e);
    if (rc == 0 && access(dir, W_OK | X_OK) < 0)
        rc = err_errno(e, "--out %s: %s", path, dir);
    free(dir);
    if (rc < 0 || stat(path, &out) < 0)
        return rc;
    if (!S_ISREG(out.st_mode))
        return err_set(e, ERR_INPUT, "--out %s: exists and is not a file", path);
    for (size_t i = 0; i < found->file_count; i++)
        if (found->files[i].given && stat(found->files[i].path, &in) == 0 &&
            in.st_dev == out.st_dev && in.st_ino == out.st_ino)
            return err_set(e, ERR_INPUT, "--out %s: is one of the inputs", path);
    return 0;
}

static int run_train(struct options *o, struct err *e)
{
    struct bpe_trainer *t = NULL;
    struct corpus found = {0};
    struct buf json = BUF_INIT;
    struct bpe_train_stats stats = {0};
    struct bar bar = {.phase = NULL};
    o->train.progress = draw;
    o->train.progress_ctx = &bar;
    o->train.stopped = process_stopped;
    process_catch_stop();
    int rc = corpus_list((const char *const *)o->inputs, o->n_inputs, &found, e);
    if (rc == 0)
        rc = check_out(o->out, &found, e);
    if (rc == 0)
        rc = bpe_trainer_new(&o->train, &t, e);
    if (rc == 0)
        rc = add_inputs(t, o, &found, e);
    if (rc == 0)
        rc = bpe_trainer_finish(t, &json, &stats, e);
    if (bar.phase)
        progress_end(&bar.progress);
    if (rc == 0)
        rc = publish(o->out, &json, e);
    if (rc == 0)
        printf("%s: %u tokens from %.1f MB of text, %" PRIu64 " distinct words\n", o->out,
            stats.vocab, (double)stats.text_bytes / 1e6, stats.distinct_words);
    if (rc == 0 && stats.vocab < o->train.vocab)
        fprintf(stderr,
            "fb-tokenizer: no pair is left that occurs %" PRIu64
            " times: %u tokens instead of %u; more text would give more\n",
            o->train.min_count, stats.vocab, o->train.vocab);
    bpe_trainer_free(&t);
    corpus_release(&found);
    buf_release(&json);
    return rc;
}

/* All of a file or, for "-" or nothing, of standard input. */
static int read_input(const struct options *o, struct buf *out, struct err *e)
{
    const char *path = o->n_inputs ? o->inputs[0] : "-";
    if (strcmp(path, "-"))
        return fs_read(path, INPUT_MAX_BYTES, out, e);
    for (;;) {
        buf_reserve(out, 1 << 16);
        ssize_t n = read(STDIN_FILENO, out->data + out->len, 1 << 16);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return err_errno(e, "standard input");
        if (n == 0)
            return 0;
        out->len += (size_t)n;
        if (out->len > INPUT_MAX_BYTES)
            return err_set(
                e, ERR_INPUT, "standard input: larger than %" PRIu64 " bytes", INPUT_MAX_BYTES);
    }
}

static int write_ids(const struct ids *ids, int json)
{
    if (json)
        putchar('[');
    for (size_t i = 0; i < ids->len; i++)
        printf("%s%" PRIu32, i == 0 ? "" : json ? ", " : " ", ids->data[i]);
    puts(json ? "]" : "");
    return 0;
}

static int run_encode(struct options *o, struct err *e)
{
    struct tokenizer *t = NULL;
    struct tokenizer_scratch *s = NULL;
    struct buf text = BUF_INIT;
    struct ids ids = {0};
    int rc = tokenizer_load(o->tokenizer, &t, e);
    if (rc == 0)
        rc = read_input(o, &text, e);
    if (rc == 0) {
        s = tokenizer_scratch_new(t);
        rc = tokenizer_encode(t, s, text.data, text.len, &ids, e);
    }
    if (rc == 0)
        rc = write_ids(&ids, o->json);
    ids_release(&ids);
    buf_release(&text);
    tokenizer_scratch_free(&s);
    tokenizer_free(&t);
    return rc;
}

/* Reads decimal numbers set apart by blanks, or a JSON list of them. */
static int parse_ids(const struct buf *text, struct ids *out, struct err *e)
{
    int lists = 0, open = 0;
    static const char separators[] = " \t\r\n,[]";
    for (size_t i = 0; i < text->len;) {
        if (text->data[i] && strchr(separators, text->data[i])) {
            lists += text->data[i] == '[';
            open += (text->data[i] == '[') - (text->data[i] == ']');
            i++;
            continue;
        }
        uint64_t id = 0;
        size_t start = i;
        for (; i < text->len && text->data[i] >= '0' && text->data[i] <= '9'; i++)
            id = id > UINT32_MAX ? id : id * 10 + (uint64_t)(text->data[i] - '0');
        int ended = i == text->len || (text->data[i] && strchr(separators, text->data[i]));
        if (i == start || !ended || id > UINT32_MAX)
            return err_set(e, ERR_INPUT, "byte %zu: a token id is expected", start);
        ids_add(out, (uint32_t)id);
    }
    if (lists > 1 || open != 0)
        return err_set(e, ERR_INPUT, "one list of ids is expected, whole: \"[\" … \"]\"");
    return 0;
}

static int run_decode(struct options *o, struct err *e)
{
    struct tokenizer *t = NULL;
    struct buf input = BUF_INIT, text = BUF_INIT;
    struct ids ids = {0};
    int rc = tokenizer_load(o->tokenizer, &t, e);
    if (rc == 0)
        rc = read_input(o, &input, e);
    if (rc == 0)
        rc = parse_ids(&input, &ids, e);
    if (rc == 0)
        rc = tokenizer_decode(t, ids.data, ids.len, &text, e);
    if (rc == 0 && text.len)
        fwrite(text.data, 1, text.len, stdout);
    ids_release(&ids);
    buf_release(&input);
    buf_release(&text);
    tokenizer_free(&t);
    return rc;
}

static int run_info(struct options *o, struct err *e)
{
    struct tokenizer *t = NULL;
    int rc = tokenizer_load(o->tokenizer, &t, e);
    if (rc < 0)
        return rc;
    int vocab = tokenizer_vocab(t), longest = 0, special = 0;
    uint64_t bytes = 0;
    for (int id = 0; id < vocab; id++) {
        int n = tokenizer_bytes_of(t, (uint32_t)id);
        special += tokenizer_is_special(t, (uint32_t)id);
        bytes += (uint64_t)n;
        longest = n > longest ? n : longest;
    }
    printf("tokens      %d (ids 0 to %d)\n", vocab, vocab - 1);
    printf("special     %d\n", special);
    printf("%s id %d\n", TOKENIZER_EOT, tokenizer_eot(t));
    printf("bytes       %.2f a token on average, %d in the longest\n",
        (double)bytes / (double)(vocab - special), longest);
    printf("sha256      %s\n", tokenizer_sha256(t));
    tokenizer_free(&t);
    return 0;
}

enum { NEED_VOCAB = 1, NEED_OUT = 2, NEED_TOKENIZER = 4, NEED_INPUT = 8 };

static const struct command {
    const char *name;
    int (*run)(struct options *o, struct err *e);
    int needs, inputs_max; /* 0: any number */
} commands[] = {
    {"train", run_train, NEED_VOCAB | NEED_OUT | NEED_INPUT, 0},
    {"encode", run_encode, NEED_TOKENIZER, 1},
    {"decode", run_decode, NEED_TOKENIZER, 1},
    {"info", run_info, NEED_TOKENIZER, 0},
};

static int fail_usage(const char *what)
{
    fprintf(stderr, "fb-tokenizer: %s; see fb-tokenizer --help\n", what);
    return 2;
}

static int take_option(struct options *o, int opt, const char *value, struct err *e)
{
    uint64_t n = 0;
    int rc = 0;
    switch (opt) {
    case 'v':
        rc = arg_u64(value, BPE_TRAIN_VOCAB_MIN, BPE_TRAIN_VOCAB_MAX, &n, e);
        o->train.vocab = (uint32_t)n;
        break;
    case 'n':
        rc = arg_int(value, 1, BPE_TRAIN_MAX_THREADS, &o->train.threads, e);
        break;
    case 'm':
        rc = arg_u64(value, 1, UINT64_MAX, &o->train.min_count, e);
        break;
    case 'o':
        o->out = value;
        break;
    case 't':
        o->tokenizer = value;
        break;
    case 'f':
        o->field = value;
        break;
    case 'j':
        o->json = 1;
        break;
    }
    return rc;
}

static int check_needs(const struct command *c, const struct options *o)
{
    if ((c->needs & NEED_VOCAB) && !o->train.vocab)
        return fail_usage("--vocab N is needed");
    if ((c->needs & NEED_OUT) && (!o->out || !*o->out))
        return fail_usage("--out FILE is needed");
    if ((c->needs & NEED_TOKENIZER) && !o->tokenizer)
        return fail_usage("--tokenizer FILE is needed");
    if ((c->needs & NEED_INPUT) && !o->n_inputs)
        return fail_usage("at least one INPUT is needed");
    if (c->inputs_max && o->n_inputs > c->inputs_max)
        return fail_usage("only one input is taken");
    return -1;
}

/* -1: go on with *command; else the exit code. */
static int parse(int argc, char **argv, struct options *o, const struct command **command)
{
    static const struct option long_options[] = {{"vocab", 1, NULL, 'v'}, {"out", 1, NULL, 'o'},
        {"threads", 1, NULL, 'n'}, {"min-count", 1, NULL, 'm'}, {"field", 1, NULL, 'f'},
        {"tokenizer", 1, NULL, 't'}, {"json", 0, NULL, 'j'}, {"help", 0, NULL, 'h'},
        {"version", 0, NULL, 'V'}, {0}};
    struct err e = {0};
    int opt, index = 0;
    while ((opt = getopt_long(argc, argv, "", long_options, &index)) != -1) {
        if (opt == 'h') {
            fputs(usage, stdout);
            return 0;
        }
        if (opt == 'V') {
            puts("fb-tokenizer " FULLBAND_VERSION);
            return 0;
        }
        if (opt == '?')
            return 2; /* getopt has said what */
        if (take_option(o, opt, optarg, &e) < 0) {
            fprintf(stderr, "fb-tokenizer: --%s %s\n", long_options[index].name, e.msg);
            return 2;
        }
    }
    if (optind == argc)
        return fail_usage("train, encode, decode or info is needed");
    o->inputs = argv + optind + 1;
    o->n_inputs = argc - optind - 1;
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        if (!strcmp(argv[optind], commands[i].name))
            *command = &commands[i];
    return *command ? check_needs(*command, o) : fail_usage("no such command");
}

int main(int argc, char **argv)
{
    int cores = process_cores();
    struct options o = {.train = BPE_TRAIN_OPTS_DEFAULT, .field = "text"};
    const struct command *command = NULL;
    struct err e = {0};
    o.train.vocab = 0;
    o.train.threads = cores < BPE_TRAIN_MAX_THREADS ? cores : BPE_TRAIN_MAX_THREADS;
    process_open_streams();
    int code = parse(argc, argv, &o, &command);
    if (code >= 0)
        return code;
    int rc = command->run(&o, &e);
    if (rc == 0)
        rc = process_flush_output(&e);
    if (rc < 0)
        fprintf(stderr, "fb-tokenizer: %s\n", e.msg);
    return rc == 0 ? 0 : 1;
}
