#include "loader/inspect.h"

#include <stdlib.h>
#include <string.h>

#include "common/tokenizer.h"

#define BAR_CELLS 40

static int bin_of(uint64_t tokens)
{
    int k = 63 - __builtin_clzll(tokens);
    return k < INSPECT_BINS ? k : INSPECT_BINS - 1;
}

static void add_document(struct inspection *x, uint64_t tokens)
{
    x->documents++;
    x->lengths[bin_of(tokens)]++;
    x->shortest = x->documents == 1 || tokens < x->shortest ? tokens : x->shortest;
    x->longest = tokens > x->longest ? tokens : x->longest;
}

int inspect_split(struct source *s, int split, source_progress *progress, void *arg,
    struct inspection *out, struct err *e)
{
    struct block b = {0};
    uint64_t blocks = source_blocks(s, split), open = 0; /* tokens of the document going on */
    int rc = 0;
    memset(out, 0, sizeof *out);
    for (uint64_t i = 0; rc == 0 && i < blocks; i++) {
        uint64_t stored = 0, from = 0;
        rc = source_block(s, split, i, &b, NULL, &stored, e);
        if (rc < 0)
            break;
        for (size_t k = 0; k < b.end_count; k++) {
            add_document(out, open + b.ends[k] - from);
            from = b.ends[k];
            open = 0;
        }
        open += b.token_count - from;
        out->blocks++;
        out->tokens += b.token_count;
        out->stored_bytes += stored;
        if (progress && progress(arg, i + 1, blocks))
            rc = err_set(e, ERR_STOPPED, "stopped before all was read");
    }
    out->raw_bytes = out->tokens * (uint64_t)block_dtype(source_manifest(s)->vocab);
    block_release(&b);
    return rc;
}

static json_t *split_json(const struct manifest_split *m, const struct inspection *x)
{
    json_t *lengths = json_array();
    for (int k = 0; k < INSPECT_BINS; k++)
        if (x->lengths[k])
            json_array_append_new(lengths, json_pack("{s:I, s:I}", "from", (json_int_t)1 << k,
                                               "documents", (json_int_t)x->lengths[k]));
    return json_pack("{s:I, s:I, s:I, s:i, s:I, s:I, s:I, s:I, s:I, s:o}", "documents",
        (json_int_t)x->documents, "tokens", (json_int_t)x->tokens, "text_bytes",
        (json_int_t)m->text_bytes, "shards", m->shard_count, "blocks", (json_int_t)x->blocks,
        "raw_bytes", (json_int_t)x->raw_bytes, "stored_bytes", (json_int_t)x->stored_bytes,
        "shortest", (json_int_t)x->shortest, "longest", (json_int_t)x->longest, "lengths", lengths);
}

json_t *inspect_json(const struct manifest *m, const struct inspection *per)
{
    json_t *j = json_pack("{s:s, s:s, s:s, s:i, s:i, s:i, s:I}", "name", m->name, "root", m->root,
        "tokenizer_sha256", m->tokenizer_sha256, "vocab", m->vocab, "eot", m->eot, "block_tokens",
        m->block_tokens, "duplicates", (json_int_t)m->duplicates);
    for (int k = 0; k < SPLIT_COUNT; k++)
        json_object_set_new(j, split_name(k), split_json(&m->splits[k], &per[k]));
    return j;
}

static void print_lengths(const struct inspection *x, struct buf *out)
{
    uint64_t most = 1;
    for (int k = 0; k < INSPECT_BINS; k++)
        most = x->lengths[k] > most ? x->lengths[k] : most;
    for (int k = bin_of(x->shortest); k <= bin_of(x->longest); k++) {
        buf_printf(out, "  %10llu+ %10llu ", (unsigned long long)1 << k,
            (unsigned long long)x->lengths[k]);
        for (uint64_t i = 0; i < x->lengths[k] * BAR_CELLS / most; i++)
            buf_add_str(out, "▇");
        buf_add_char(out, '\n');
    }
}

void inspect_print(const struct manifest *m, const struct inspection *per, struct buf *out)
{
    buf_printf(out,
        "source      %s\nroot        %s\ntokenizer   %s, vocabulary %d\ncopies      %llu dropped\n",
        m->name, m->root, m->tokenizer_sha256, m->vocab, (unsigned long long)m->duplicates);
    for (int k = 0; k < SPLIT_COUNT; k++) {
        const struct inspection *x = &per[k];
        buf_printf(out, "\n%s: %llu documents, %llu tokens, %d shard%s, %llu blocks\n",
            split_name(k), (unsigned long long)x->documents, (unsigned long long)x->tokens,
            m->splits[k].shard_count, m->splits[k].shard_count == 1 ? "" : "s",
            (unsigned long long)x->blocks);
        if (x->documents == 0)
            continue;
        buf_printf(out,
            "  %.2f MB stored, %.2f bytes a token (%.2f × smaller than %d-byte ids), %.2f bytes of "
            "text a token\n  length of documents in tokens: %llu to %llu, mean %.0f\n",
            (double)x->stored_bytes / 1e6, (double)x->stored_bytes / (double)x->tokens,
            (double)x->raw_bytes / (double)x->stored_bytes, block_dtype(m->vocab),
            (double)m->splits[k].text_bytes / (double)x->tokens, (unsigned long long)x->shortest,
            (unsigned long long)x->longest, (double)x->tokens / (double)x->documents);
        print_lengths(x, out);
    }
}

static int load_tokenizer(
    const struct source *s, const char *path, struct tokenizer **t, struct err *e)
{
    const char *want = source_manifest(s)->tokenizer_sha256;
    int rc = tokenizer_load(path, t, e);
    if (rc == 0 && strcmp(tokenizer_sha256(*t), want) != 0) {
        rc = err_set(e, ERR_MISMATCH, "%s: tokenizer %.16s, the source was made with %.16s", path,
            tokenizer_sha256(*t), want);
        tokenizer_free(t);
    }
    return rc;
}

int inspect_row(struct source *s, int split, uint64_t index, int seq, const char *tokenizer_path,
    struct buf *out, struct err *e)
{
    struct tokenizer *t = NULL;
    int rc = load_tokenizer(s, tokenizer_path, &t, e);
    if (rc < 0)
        return rc;
    uint32_t *tokens = mem_array((size_t)seq + 1, sizeof *tokens);
    uint8_t *starts = mem_array((size_t)seq, 1);
    uint32_t eot = (uint32_t)tokenizer_eot(t);
    rc = source_row(s, split, index, seq, tokens, starts, e);
    for (int i = 0; rc == 0 && i < seq;) {
        int n = 1;
        while (i + n < seq && !starts[i + n])
            n++;
        int begins = tokens[i] == eot; /* column 0 is marked even inside of a document */
        buf_add_str(out, begins ? "⟦document⟧" : "⟦inside a document⟧");
        rc = tokenizer_decode(t, tokens + i + begins, (size_t)(n - begins), out, e);
        buf_add_char(out, '\n');
        i += n;
    }
    free(tokens);
    free(starts);
    tokenizer_free(&t);
    return rc;
}
