/* fb-sample: text from a checkpoint, in a decoding regime. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "common/args.h"
#include "common/config.h"
#include "common/fs.h"
#include "common/process.h"
#include "common/version.h"
#include "evaluator/generate.h"

static const char usage[] =
    "usage: fb-sample CHECKPOINT [options]\n"
    "Writes text from a checkpoint directory (config.json, model.safetensors, tokenizer.json).\n"
    "\n"
    "  --prompt TEXT        a prompt; may be given several times (default: the empty document)\n"
    "  --prompt-file FILE   a prompt from a file\n"
    "  --regime R           standard, soft or fused (default standard)\n"
    "  --fused-passes N     in fused, passes over the prompt: 2 or more, or 'sequential' (2)\n"
    "  --max-new N          tokens to make at most (default 128)\n"
    "  --temperature X      0 is greedy (default 0)\n"
    "  --top-k N            only the N likeliest (default 0: all)\n"
    "  --top-p X            only the likeliest that make up this share (default 1: all)\n"
    "  --seed N             of the draws (default 0)\n"
    "  --threads N          default: every core\n"
    "  --json               one JSON object: tokens, log-probabilities, timings\n"
    "  --help, --version\n"
    "\n"
    "A long generation of a single prompt is shown as it is made.\n";

struct arguments {
    const char *checkpoint;
    struct buf *prompts;
    int prompt_count, threads, json;
    struct generate_options o;
};

static struct buf *add_prompt(struct arguments *a)
{
    a->prompts = mem_grow_array(a->prompts, (size_t)a->prompt_count + 1, sizeof *a->prompts);
    a->prompts[a->prompt_count] = (struct buf)BUF_INIT;
    return &a->prompts[a->prompt_count++];
}

enum option_id {
    PROMPT = 256,
    PROMPT_FILE,
    REGIME,
    FUSED,
    MAX_NEW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SEED,
    THREADS,
    JSON,
    HELP,
    VERSION
};

static const struct option options[] = {
    {"prompt", required_argument, NULL, PROMPT},
    {"prompt-file", required_argument, NULL, PROMPT_FILE},
    {"regime", required_argument, NULL, REGIME},
    {"fused-passes", required_argument, NULL, FUSED},
    {"max-new", required_argument, NULL, MAX_NEW},
    {"temperature", required_argument, NULL, TEMPERATURE},
    {"top-k", required_argument, NULL, TOP_K},
    {"top-p", required_argument, NULL, TOP_P},
    {"seed", required_argument, NULL, SEED},
    {"threads", required_argument, NULL, THREADS},
    {"json", no_argument, NULL, JSON},
    {"help", no_argument, NULL, HELP},
    {"version", no_argument, NULL, VERSION},
    {0},
};

static int take_option(struct arguments *a, int opt, struct err *e)
{
    struct generate_options *o = &a->o;
    double x = 0;
    int rc = 0;
    switch (opt) {
    case PROMPT:
        buf_add_str(add_prompt(a), optarg);
        break;
    case PROMPT_FILE:
        rc = fs_read(optarg, 64 << 20, add_prompt(a), e);
        break;
    case REGIME:
        o->regime = name_index(optarg, regime_name, REGIME_COUNT);
        if (o->regime < 0)
            rc = err_set(e, ERR_INPUT, "%s: standard, soft or fused expected", optarg);
        break;
    case FUSED:
        o->fused_passes = 0;
        if (strcmp(optarg, "sequential") != 0)
            rc = arg_int(optarg, 2, 1024, &o->fused_passes, e);
        break;
    case MAX_NEW:
        rc = arg_int(optarg, 1, 1 << 20, &o->max_new, e);
        break;
    case TEMPERATURE:
        rc = arg_double(optarg, 0, 100, &x, e);
        o->sampler.temperature = (float)x;
        break;
    case TOP_K:
        rc = arg_int(optarg, 0, 1 << 30, &o->sampler.top_k, e);
        break;
    case TOP_P:
        rc = arg_double(optarg, 1e-6, 1, &x, e);
        o->sampler.top_p = (float)x;
        break;
    case SEED:
        rc = arg_u64(optarg, 0, UINT64_MAX, &o->sampler.seed, e);
        break;
    case THREADS:
        rc = arg_int(optarg, 0, 4096, &a->threads, e);
        break;
    case JSON:
        a->json = 1;
        break;
    }
    return rc;
}

/* 0: go on; 1: done (help, version), with *status the exit status. */
static int read_arguments(int argc, char **argv, struct arguments *a, int *status)
{
    struct err e = {0};
    int index = 0;
    for (int opt; (opt = getopt_long(argc, argv, "", options, &index)) != -1;) {
        *status = 0;
        if (opt == HELP)
            return fputs(usage, stdout), 1;
        if (opt == VERSION)
            return puts("fb-sample " FULLBAND_VERSION), 1;
        *status = 2;
        if (opt == '?')
            return fputs(usage, stderr), 1;
        if (opt == PROMPT_FILE)
            *status = 1; /* a file that cannot be read is wrong input, not wrong usage */
        if (take_option(a, opt, &e) < 0)
            return fprintf(stderr, "fb-sample: --%s %s\n", options[index].name, e.msg), 1;
    }
    *status = 2;
    if (optind != argc - 1)
        return fputs(usage, stderr), 1;
    a->checkpoint = argv[optind];
    if (a->prompt_count == 0)
        add_prompt(a);
    return 0;
}

/* A document begins with its <|endoftext|>. */
static int encode_prompts(const struct snapshot *s, const struct arguments *a,
    struct generation *items, struct ids *ids, struct err *e)
{
    struct tokenizer_scratch *scratch = tokenizer_scratch_new(s->tokenizer);
    int rc = 0;
    for (int i = 0; rc == 0 && i < a->prompt_count; i++) {
        ids_add(&ids[i], (uint32_t)tokenizer_eot(s->tokenizer));
        const struct buf *p = &a->prompts[i];
        rc = tokenizer_encode(s->tokenizer, scratch, p->len ? p->data : "", p->len, &ids[i], e);
        items[i].prompt = (const int32_t *)ids[i].data;
        items[i].prompt_len = (int)ids[i].len;
    }
    tokenizer_scratch_free(&scratch);
    return rc;
}

struct stream {
    const struct snapshot *snap;
    struct buf text;
};

static void show_token(void *ctx, int prompt, int32_t token)
{
    struct stream *s = ctx;
    uint32_t id = (uint32_t)token;
    (void)prompt;
    buf_clear(&s->text);
    if (tokenizer_decode(s->snap->tokenizer, &id, 1, &s->text, NULL) == 0 && s->text.len)
        fwrite(s->text.data, 1, s->text.len, stdout);
    fflush(stdout);
}

static int decode_text(
    const struct snapshot *s, const struct generation *g, struct buf *out, struct err *e)
{
    buf_clear(out);
    buf_add(out, "", 0);
    return tokenizer_decode(s->tokenizer, (const uint32_t *)g->tokens, (size_t)g->len, out, e);
}

/* JSON strings are UTF-8: bytes that are not become U+FFFD; the tokens hold the exact text. */
static json_t *text_json(const struct buf *text)
{
    json_t *j = json_stringn(text->data, text->len);
    if (j)
        return j;
    struct buf clean = BUF_INIT;
    for (size_t i = 0; i < text->len;) {
        size_t n = 1;
        while (n <= 4 && i + n <= text->len && !(j = json_stringn(text->data + i, n)))
            n++;
        if (j)
            buf_add(&clean, text->data + i, n);
        else
            buf_add_str(&clean, "\xef\xbf\xbd");
        i += j ? n : 1;
        json_decref(j);
        j = NULL;
    }
    j = json_stringn(clean.data, clean.len);
    buf_release(&clean);
    return j;
}

static int print_json(const struct snapshot *s, const struct arguments *a,
    const struct generation *items, const struct generate_times *times, struct err *e)
{
    json_t *list = json_array();
    struct buf text = BUF_INIT;
    int rc = 0;
    for (int i = 0; rc == 0 && i < a->prompt_count; i++) {
        const struct generation *g = &items[i];
        json_t *tokens = json_array(), *logprobs = json_array();
        for (int k = 0; k < g->len; k++) {
            json_array_append_new(tokens, json_integer(g->tokens[k]));
            json_array_append_new(logprobs, json_real(g->logprobs[k]));
        }
        rc = decode_text(s, g, &text, e);
        json_array_append_new(
            list, json_pack("{s:i, s:o, s:o, s:o, s:b}", "prompt_tokens", g->prompt_len, "text",
                      text_json(&text), "tokens", tokens, "logprobs", logprobs, "ended", g->ended));
    }
    json_t *j = json_pack("{s:s, s:s, s:I, s:o, s:{s:f, s:I, s:f, s:I}}", "checkpoint",
        a->checkpoint, "regime", regime_name(a->o.regime), "step", (json_int_t)s->step, "samples",
        list, "timings", "prefill_seconds", times->prefill_seconds, "prefill_tokens",
        (json_int_t)times->prefill_tokens, "decode_seconds", times->decode_seconds, "decode_tokens",
        (json_int_t)times->decode_tokens);
    json_dumpf(j, stdout, JSON_INDENT(2));
    putchar('\n');
    json_decref(j);
    buf_release(&text);
    return rc;
}

static int print_text(const struct snapshot *s, const struct arguments *a,
    const struct generation *items, struct err *e)
{
    struct buf text = BUF_INIT;
    int rc = 0;
    for (int i = 0; rc == 0 && i < a->prompt_count; i++) {
        rc = decode_text(s, &items[i], &text, e);
        if (a->prompt_count > 1)
            printf("--- prompt %d\n", i + 1);
        if (text.len)
            fwrite(text.data, 1, text.len, stdout);
        putchar('\n');
    }
    buf_release(&text);
    return rc;
}

static int run(struct arguments *a, struct err *e)
{
    struct model_limits limits = {.batch = 1, .seq = 1, .passes = 1};
    struct snapshot snap;
    int rc = snapshot_open(a->checkpoint, a->threads, &limits, &snap, e), n = a->prompt_count;
    if (rc < 0)
        return rc;
    struct generation *items = mem_array((size_t)n, sizeof *items);
    struct ids *ids = mem_array((size_t)n, sizeof *ids);
    struct generate_times times;
    struct stream stream = {.snap = &snap, .text = BUF_INIT};
    int live = n == 1 && !a->json;
    if (live) {
        a->o.on_token = show_token;
        a->o.ctx = &stream;
    }
    rc = encode_prompts(&snap, a, items, ids, e);
    if (rc == 0)
        rc = generate(&snap, items, n, &a->o, &times, e);
    if (rc == 0 && a->json)
        rc = print_json(&snap, a, items, &times, e);
    else if (rc == 0 && live)
        putchar('\n');
    else if (rc == 0)
        rc = print_text(&snap, a, items, e);
    for (int i = 0; i < n; i++) {
        generation_release(&items[i]);
        ids_release(&ids[i]);
    }
    a->o.ctx = NULL; /* the stream ends here */
    buf_release(&stream.text);
    free(items);
    free(ids);
    snapshot_release(&snap);
    return rc;
}

int main(int argc, char **argv)
{
    struct arguments a = {.o = {.regime = REGIME_STANDARD,
                              .fused_passes = 2,
                              .max_new = 128,
                              .sampler = {.temperature = 0, .top_p = 1}}};
    struct err e = {0};
    int status;
    process_open_streams();
    if (read_arguments(argc, argv, &a, &status))
        return status;
    status = run(&a, &e) < 0 || process_flush_output(&e) < 0;
    if (status)
        fprintf(stderr, "fb-sample: %s\n", e.msg);
    for (int i = 0; i < a.prompt_count; i++)
        buf_release(&a.prompts[i]);
    free(a.prompts);
    return status;
}
