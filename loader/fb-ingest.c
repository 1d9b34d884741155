/* fb-ingest: text → a sealed source of shards. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/args.h"
#include "common/mem.h"
#include "common/process.h"
#include "common/progress.h"
#include "common/version.h"
#include "loader/block.h"
#include "loader/ingest.h"

static const char usage[] =
    "usage: fb-ingest --tokenizer FILE --out DIR [options] INPUT...\n"
    "\n"
    "Makes a source for training: a directory of sealed shards with manifest.json.\n"
    "INPUT: a text file (one document), a .jsonl file (one document a line), or a directory\n"
    "of such files, searched recursively (hidden names, links and binary files are passed over).\n"
    "Exact copies of a document are dropped. Order and validation split depend on the contents.\n"
    "\n"
    "  --tokenizer FILE   tokenizer.json (see fb-tokenizer)\n"
    "  --out DIR          the source to make; must not exist, or be the result of the same ingest\n"
    "  --name NAME        its name (default: the last part of DIR)\n"
    "  --field NAME       the text of a .jsonl line (default: text)\n"
    "  --skip-bad         pass over .jsonl lines that are not right, and count them\n"
    "  --val-share X      share of documents for validation, 0 to 0.5 (default: 0.01)\n"
    "  --seed N           of the documents' order (default: 1)\n"
    "  --max-mb N         take about N MB of text, a random choice of documents (default: all)\n"
    "  --shard-mb N       stored size of a shard, 1 to 65536 (default: 256)\n"
    "  --threads N        1 to 256 (default: one a core); the result is the same for any number\n"
    "  --json             a report to read by program on standard output\n"
    "  --help, --version\n"
    "\n"
    "An interrupted ingest leaves only DIR.partial; the next call starts over.\n";

struct options {
    struct ingest_options ingest;
    int json;
};

static int fail_usage(const char *what)
{
    fprintf(stderr, "fb-ingest: %s; see fb-ingest --help\n", what);
    return 2;
}

enum {
    OPT_TOKENIZER = 256,
    OPT_OUT,
    OPT_NAME,
    OPT_FIELD,
    OPT_SKIP_BAD,
    OPT_VAL_SHARE,
    OPT_SEED,
    OPT_MAX_MB,
    OPT_SHARD_MB,
    OPT_THREADS,
    OPT_JSON,
    OPT_HELP,
    OPT_VERSION,
};

static const struct option long_options[] = {
    {"tokenizer", required_argument, NULL, OPT_TOKENIZER},
    {"out", required_argument, NULL, OPT_OUT},
    {"name", required_argument, NULL, OPT_NAME},
    {"field", required_argument, NULL, OPT_FIELD},
    {"skip-bad", no_argument, NULL, OPT_SKIP_BAD},
    {"val-share", required_argument, NULL, OPT_VAL_SHARE},
    {"seed", required_argument, NULL, OPT_SEED},
    {"max-mb", required_argument, NULL, OPT_MAX_MB},
    {"shard-mb", required_argument, NULL, OPT_SHARD_MB},
    {"threads", required_argument, NULL, OPT_THREADS},
    {"json", no_argument, NULL, OPT_JSON},
    {"help", no_argument, NULL, OPT_HELP},
    {"version", no_argument, NULL, OPT_VERSION},
    {0},
};

static int take_option(struct options *o, int opt, const char *value, struct err *e)
{
    struct ingest_options *i = &o->ingest;
    uint64_t n = 0;
    int rc = 0;
    switch (opt) {
    case OPT_TOKENIZER:
        i->tokenizer = value;
        break;
    case OPT_OUT:
        i->out = value;
        break;
    case OPT_NAME:
        i->name = value;
        break;
    case OPT_FIELD:
        i->read.field = value;
        break;
    case OPT_SKIP_BAD:
        i->read.skip_bad = 1;
        break;
    case OPT_JSON:
        o->json = 1;
        break;
    case OPT_VAL_SHARE:
        rc = arg_double(value, 0, 0.5, &i->val_share, e);
        break;
    case OPT_SEED:
        rc = arg_u64(value, 0, UINT64_MAX, &i->seed, e);
        break;
    case OPT_MAX_MB:
        rc = arg_u64(value, 1, 1u << 30, &n, e);
        i->max_bytes = n * 1000000;
        break;
    case OPT_SHARD_MB:
        rc = arg_u64(value, 1, 65536, &n, e);
        i->shard_bytes = n * 1000000;
        break;
    case OPT_THREADS:
        rc = arg_int(value, 1, 256, &i->read.threads, e);
        break;
    }
    return rc;
}

/* −1: go on; else the exit code. */
static int parse(int argc, char **argv, struct options *o)
{
    struct err e = {0};
    int opt, index = 0;
    while ((opt = getopt_long(argc, argv, "", long_options, &index)) != -1) {
        if (opt == OPT_HELP) {
            fputs(usage, stdout);
            return 0;
        }
        if (opt == OPT_VERSION) {
            puts("fb-ingest " FULLBAND_VERSION);
            return 0;
        }
        if (opt == '?')
            return 2; /* getopt has said what */
        if (take_option(o, opt, optarg, &e) < 0) {
            fprintf(stderr, "fb-ingest: --%s %s\n", long_options[index].name, e.msg);
            return 2;
        }
    }
    o->ingest.inputs = (const char *const *)(argv + optind);
    o->ingest.input_count = argc - optind;
    if (!o->ingest.tokenizer)
        return fail_usage("--tokenizer FILE is needed");
    if (!o->ingest.out || !*o->ingest.out)
        return fail_usage("--out DIR is needed");
    if (optind == argc)
        return fail_usage("at least one INPUT is needed");
    return -1;
}

/* The last part of a path. */
static char *default_name(const char *path)
{
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/')
        end--;
    size_t start = end;
    while (start > 0 && path[start - 1] != '/')
        start--;
    return mem_printf("%.*s", (int)(end - start), path + start);
}

struct watch {
    struct progress bar;
    const char *what;
};

static int watch(void *arg, const char *what, uint64_t done, uint64_t total)
{
    struct watch *w = arg;
    if (w->what != what) {
        if (w->what)
            progress_end(&w->bar);
        progress_start(&w->bar, what, total, "MB", 1e6);
        w->what = what;
    }
    progress_at(&w->bar, done);
    return process_stopped();
}

static void print_report(const struct options *o, const struct ingest_report *r)
{
    if (o->json) {
        printf(
            "{\"existed\": %s, \"files\": %llu, \"documents\": %llu, \"duplicates\": %llu, "
            "\"empty\": %llu, \"binary_files\": %llu, \"bad_lines\": %llu, \"text_bytes\": %llu, "
            "\"stored_bytes\": %llu, \"train_tokens\": %llu, \"val_tokens\": %llu, "
            "\"shards\": %d, \"root\": \"%s\"}\n",
            r->existed ? "true" : "false", (unsigned long long)r->files,
            (unsigned long long)r->documents, (unsigned long long)r->duplicates,
            (unsigned long long)r->empty, (unsigned long long)r->binary_files,
            (unsigned long long)r->bad_lines, (unsigned long long)r->text_bytes,
            (unsigned long long)r->stored_bytes, (unsigned long long)r->train_tokens,
            (unsigned long long)r->val_tokens, r->shards, r->root);
        return;
    }
    if (r->existed) {
        printf(
            "%s: there already, made from the same inputs; root %.12s\n", o->ingest.out, r->root);
        return;
    }
    printf("%s: %llu documents, %.1f MB of text, %llu + %llu tokens (train + validation), %.2f "
           "bytes a "
           "token, %d shard%s of %.1f MB together; root %.12s\n",
        o->ingest.out, (unsigned long long)r->documents, (double)r->text_bytes / 1e6,
        (unsigned long long)r->train_tokens, (unsigned long long)r->val_tokens,
        (double)r->text_bytes / (double)(r->train_tokens + r->val_tokens), r->shards,
        r->shards == 1 ? "" : "s", (double)r->stored_bytes / 1e6, r->root);
    printf("dropped: %llu copies, %llu empty, %llu binary files, %llu bad lines\n",
        (unsigned long long)r->duplicates, (unsigned long long)r->empty,
        (unsigned long long)r->binary_files, (unsigned long long)r->bad_lines);
    if (r->val_tokens == 0 && o->ingest.val_share > 0)
        printf(
            "note: none of so few documents fell to validation at --val-share %g; a larger share "
            "gives some\n",
            o->ingest.val_share);
}

int main(int argc, char **argv)
{
    int cores = process_cores();
    struct options o = {.ingest = {.read = {.field = "text", .threads = cores < 256 ? cores : 256},
                            .val_share = 0.01,
                            .seed = 1,
                            .shard_bytes = 256000000,
                            .block_tokens = BLOCK_TOKENS}};
    struct ingest_report report;
    struct watch w = {.what = NULL};
    struct err e = {0};
    process_open_streams();
    int code = parse(argc, argv, &o);
    if (code >= 0)
        return code;
    char *name = o.ingest.name ? mem_strdup(o.ingest.name) : default_name(o.ingest.out);
    o.ingest.name = name;
    process_catch_stop();
    int rc = ingest_run(&o.ingest, watch, &w, &report, &e);
    if (w.what)
        progress_end(&w.bar);
    if (rc == 0) {
        print_report(&o, &report);
        rc = process_flush_output(&e);
    }
    if (rc < 0)
        fprintf(stderr, "fb-ingest: %s\n", e.msg);
    free(name);
    return rc == 0 ? 0 : 1;
}
