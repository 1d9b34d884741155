/* fb-shards: what is inside of a source, and is it whole. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/args.h"
#include "common/config.h"
#include "common/process.h"
#include "common/progress.h"
#include "common/version.h"
#include "loader/inspect.h"

static const char usage[] =
    "usage: fb-shards inspect DIR [--json] [--row N --tokenizer FILE [--seq N] [--split NAME]]\n"
    "       fb-shards verify DIR [--json]\n"
    "\n"
    "inspect reads a source made by fb-ingest: documents, tokens, lengths, compression.\n"
    "  --row N           print row N as text, marking where documents begin\n"
    "  --tokenizer FILE  the tokenizer.json the source was made with\n"
    "  --seq N           tokens of a row (default: 256)\n"
    "  --split NAME      train (default) or val\n"
    "verify checks every byte: the files' SHA-256, each block's checksums, counts, and the root.\n"
    "  --json            output to read by program\n"
    "  --help, --version\n"
    "\n"
    "Exit codes: 0 whole; 1 damaged, or the input was wrong; 2 usage.\n";

struct options {
    const char *dir, *tokenizer;
    int json, split, show_row;
    uint64_t row;
    int seq;
};

static const struct option long_options[] = {
    {"json", no_argument, NULL, 'j'},
    {"row", required_argument, NULL, 'r'},
    {"tokenizer", required_argument, NULL, 't'},
    {"seq", required_argument, NULL, 'q'},
    {"split", required_argument, NULL, 's'},
    {"help", no_argument, NULL, 'h'},
    {"version", no_argument, NULL, 'v'},
    {0},
};

/* A bar that begins with the first report, when the total is known. */
struct watch {
    const char *what, *unit;
    double scale;
    struct progress bar;
};

static int watch(void *arg, uint64_t done, uint64_t total)
{
    struct watch *w = arg;
    if (!w->bar.what)
        progress_start(&w->bar, w->what, total, w->unit, w->scale);
    progress_at(&w->bar, done);
    return process_stopped();
}

static void watch_end(struct watch *w)
{
    if (w->bar.what)
        progress_end(&w->bar);
    w->bar.what = NULL;
}

static int verify(const struct options *o, struct err *e)
{
    struct watch w = {.what = "verify", .unit = "MB", .scale = 1e6};
    struct manifest m = {0};
    int rc = source_verify(o->dir, watch, &w, e);
    watch_end(&w);
    if (rc == 0)
        rc = manifest_load(o->dir, &m, e);
    if (rc < 0)
        return rc;
    uint64_t blocks = 0;
    int shards = 0;
    for (int k = 0; k < SPLIT_COUNT; k++)
        for (int i = 0; i < m.splits[k].shard_count; i++, shards++)
            blocks += m.splits[k].shards[i].blocks;
    if (o->json)
        printf("{\"ok\": true, \"shards\": %d, \"blocks\": %llu, \"root\": \"%s\"}\n", shards,
            (unsigned long long)blocks, m.root);
    else
        printf("%s: whole: %d shard%s, %llu blocks, root %s\n", o->dir, shards,
            shards == 1 ? "" : "s", (unsigned long long)blocks, m.root);
    manifest_release(&m);
    return 0;
}

static int print_source(struct source *s, int json, struct err *e)
{
    struct inspection per[SPLIT_COUNT];
    struct watch w = {.what = "inspect", .unit = "blocks", .scale = 1};
    int rc = 0;
    for (int k = 0; rc == 0 && k < SPLIT_COUNT; k++) {
        rc = inspect_split(s, k, watch, &w, &per[k], e);
        watch_end(&w);
    }
    if (rc < 0)
        return rc;
    if (json) {
        json_t *j = inspect_json(source_manifest(s), per);
        json_dumpf(j, stdout, JSON_INDENT(2));
        putchar('\n');
        json_decref(j);
        return 0;
    }
    struct buf text = BUF_INIT;
    inspect_print(source_manifest(s), per, &text);
    fwrite(text.data, 1, text.len, stdout);
    buf_release(&text);
    return 0;
}

static int inspect(const struct options *o, struct err *e)
{
    struct source *s;
    int rc = source_open(o->dir, 8, &s, e);
    if (rc < 0)
        return rc;
    if (!o->show_row) {
        rc = print_source(s, o->json, e);
    } else {
        struct buf text = BUF_INIT;
        rc = inspect_row(s, o->split, o->row, o->seq, o->tokenizer, &text, e);
        if (text.len)
            fwrite(text.data, 1, text.len, stdout);
        buf_release(&text);
    }
    source_close(&s);
    return rc;
}

static const struct {
    const char *name;
    int (*run)(const struct options *o, struct err *e);
} commands[] = {{"inspect", inspect}, {"verify", verify}};

static int fail_usage(const char *what, const char *value)
{
    fprintf(stderr, "fb-shards: %s%s; see fb-shards --help\n", what, value);
    return 2;
}

static int take_option(struct options *o, int opt, const char *value, struct err *e)
{
    int rc = 0;
    switch (opt) {
    case 'j':
        o->json = 1;
        break;
    case 'r':
        o->show_row = 1;
        rc = arg_u64(value, 0, UINT64_MAX, &o->row, e);
        break;
    case 't':
        o->tokenizer = value;
        break;
    case 'q':
        rc = arg_int(value, 1, 1 << 24, &o->seq, e);
        break;
    case 's':
        o->split = name_index(value, split_name, SPLIT_COUNT);
        if (o->split < 0)
            rc = err_set(e, ERR_INPUT, "%s: train or val expected", value);
        break;
    }
    return rc;
}

/* −1: go on; else the exit code. */
static int parse(int argc, char **argv, struct options *o)
{
    struct err e = {0};
    int index = 0;
    for (int opt; (opt = getopt_long(argc, argv, "", long_options, &index)) != -1;) {
        if (opt == 'h') {
            fputs(usage, stdout);
            return 0;
        }
        if (opt == 'v') {
            puts("fb-shards " FULLBAND_VERSION);
            return 0;
        }
        if (opt == '?')
            return 2;
        if (take_option(o, opt, optarg, &e) < 0) {
            fprintf(stderr, "fb-shards: --%s %s\n", long_options[index].name, e.msg);
            return 2;
        }
    }
    if (o->show_row && !o->tokenizer)
        return fail_usage("--row needs --tokenizer FILE", "");
    if (o->show_row && o->json)
        return fail_usage("--row prints text, not --json", "");
    if (argc - optind != 2)
        return fail_usage("a command and one DIR are expected", "");
    return -1;
}

int main(int argc, char **argv)
{
    struct options o = {.seq = 256};
    struct err e = {0};
    process_open_streams();
    int code = parse(argc, argv, &o);
    if (code >= 0)
        return code;
    process_catch_stop();
    o.dir = argv[optind + 1];
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (strcmp(argv[optind], commands[i].name) == 0) {
            int rc = commands[i].run(&o, &e);
            if (rc == 0)
                rc = process_flush_output(&e);
            if (rc < 0)
                fprintf(stderr, "fb-shards: %s\n", e.msg);
            return rc < 0 ? 1 : 0;
        }
    return fail_usage("unknown command ", argv[optind]);
}
