/* Writing tokenizer.json. By hand, because the order and the layout are part of the file's hash. */
#include <string.h>

#include "common/byte_alphabet.h"
#include "common/json_canonical.h"
#include "common/tokenizer_impl.h"

/* Appends the spelling of a token: in the byte alphabet, or as it is for a special one. */
static void add_spelling(const struct tokenizer_spec *spec, uint32_t id, struct buf *out)
{
    const char *bytes = spec->bytes + spec->offset[id];
    size_t n = spec->offset[id + 1] - spec->offset[id];
    if (id == TOKENIZER_TRAINED_EOT)
        buf_add(out, bytes, n);
    else
        byte_alphabet_spell(out, bytes, n);
}

static void add_vocab(const struct tokenizer_spec *spec, struct buf *out)
{
    struct buf spelling = BUF_INIT;
    buf_add_str(out, "    \"vocab\": {\n");
    for (uint32_t id = 0; id < spec->n_ids; id++) {
        buf_clear(&spelling);
        add_spelling(spec, id, &spelling);
        buf_add_str(out, "      ");
        json_canonical_text(spelling.data, spelling.len, out);
        buf_printf(out, ": %u%s\n", id, id + 1 < spec->n_ids ? "," : "");
    }
    buf_add_str(out, "    },\n");
    buf_release(&spelling);
}

static void add_merges(const struct tokenizer_spec *spec, struct buf *out)
{
    struct buf spelling = BUF_INIT;
    buf_add_str(out, "    \"merges\": [\n");
    for (uint32_t i = 0; i < spec->n_merges; i++) {
        buf_clear(&spelling);
        add_spelling(spec, spec->merges[i].left, &spelling);
        buf_add_char(&spelling, ' ');
        add_spelling(spec, spec->merges[i].right, &spelling);
        buf_add_str(out, "      ");
        json_canonical_text(spelling.data, spelling.len, out);
        buf_add_str(out, i + 1 < spec->n_merges ? ",\n" : "\n");
    }
    buf_add_str(out, "    ]\n");
    buf_release(&spelling);
}

void tokenizer_format(const struct tokenizer_spec *spec, struct buf *out)
{
    buf_printf(out,
        "{\n"
        "  \"version\": \"1.0\",\n"
        "  \"truncation\": null,\n"
        "  \"padding\": null,\n"
        "  \"added_tokens\": [\n"
        "    {\"id\": %d, \"content\": \"%s\", \"single_word\": false, \"lstrip\": false,\n"
        "     \"rstrip\": false, \"normalized\": false, \"special\": true}\n"
        "  ],\n"
        "  \"normalizer\": null,\n"
        "  \"pre_tokenizer\": {\n"
        "    \"type\": \"Sequence\",\n"
        "    \"pretokenizers\": [\n"
        "      {\"type\": \"Split\", \"behavior\": \"Isolated\", \"invert\": false,\n"
        "       \"pattern\": {\"Regex\": ",
        TOKENIZER_TRAINED_EOT, TOKENIZER_EOT);
    json_canonical_text(spec->regex, strlen(spec->regex), out);
    buf_add_str(out, "}},\n"
                     "      {\"type\": \"ByteLevel\", \"add_prefix_space\": false, "
                     "\"trim_offsets\": true,\n"
                     "       \"use_regex\": false}\n"
                     "    ]\n"
                     "  },\n"
                     "  \"post_processor\": null,\n"
                     "  \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, "
                     "\"trim_offsets\": true,\n"
                     "    \"use_regex\": false},\n"
                     "  \"model\": {\n"
                     "    \"type\": \"BPE\",\n"
                     "    \"dropout\": null,\n"
                     "    \"unk_token\": null,\n"
                     "    \"continuing_subword_prefix\": null,\n"
                     "    \"end_of_word_suffix\": null,\n"
                     "    \"fuse_unk\": false,\n"
                     "    \"byte_fallback\": false,\n"
                     "    \"ignore_merges\": false,\n");
    add_vocab(spec, out);
    add_merges(spec, out);
    buf_add_str(out, "  }\n}\n");
}
