# shellcheck shell=bash
# For scripts under tests/run: a directory of their own with tiny text, tokenizer, shards and config.
#
#   . tests/tiny.sh     defines bin, work (removed at exit), tiny_data, tiny_config, and fail
set -euo pipefail
bin=$(realpath "${BUILD:-build/release}")/bin
work=$(mktemp -d "${TMPDIR:-/tmp}/fullband-run-XXXXXX")
trap 'rm -rf "$work"' EXIT

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# Text that compresses to a small vocabulary, as 200 documents; then a tokenizer and shards of it.
tiny_data() {
    awk 'BEGIN { for (d = 0; d < 200; d++) {
        printf "{\"text\":\""
        for (w = 0; w < 60; w++) printf "word%d is %d of %d. ", (d * 7 + w * w) % 97, w % 5, d % 11
        print "\"}" } }' >"$work/text.jsonl"
    "$bin/fb-tokenizer" train --vocab 300 --out "$work/tokenizer.json" "$work/text.jsonl" >/dev/null
    "$bin/fb-ingest" --tokenizer "$work/tokenizer.json" --out "$work/shards" --val-share 0.1 \
        "$work/text.jsonl" >/dev/null
}

# A model of a few thousand parameters; runs go to $work/runs/tiny.
tiny_config() {
    cat >"$work/tiny.yaml" <<YAML
run: {name: tiny, dir: $work/runs}
model: {dim: 16, layers: 2, heads: 2, ffn: 32}
data:
  tokenizer: $work/tokenizer.json
  seq_len: 32
  sources: [{name: text, path: $work/shards}]
train: {steps: 12, batch_rows: 4, micro_rows: 2, passes: [{from: 0, passes: {1: 1}}, {from: 0.5, passes: {2: 0.5, 3: 0.5}}]}
checkpoint: {every_steps: 4}
eval: {rows: 4, fixed_point_passes: 4}
process: {trainer_threads: 1}
YAML
}
