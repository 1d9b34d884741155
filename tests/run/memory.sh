#!/bin/bash
# The plan's memory against what the kernel counted: fb-plan's total within 5 % of fb-trainer's peak resident
# size, for a model of 6 M parameters that runs through 3-pass steps and writes a checkpoint, at each level
# of recompute.
cd "$(dirname "$0")/../.." || exit
# shellcheck source=tests/tiny.sh
. tests/tiny.sh

tiny_data
cat >"$work/base.yaml" <<YAML
model: {dim: 256, layers: 6, heads: 8, ffn: 688}
data:
  tokenizer: $work/tokenizer.json
  seq_len: 256
  sources: [{name: text, path: $work/shards}]
train: {steps: 3, batch_rows: 8, micro_rows: 8, passes: [{from: 0, passes: {3: 1}}]}
checkpoint: {every_steps: 2}
eval: {every_steps: 0}
process: {trainer_threads: 2, evaluators: 0}
YAML

# check LEVEL: plan, run, compare.
check() {
    local level=$1 planned peak
    { echo "run: {name: $level, dir: $work/runs}" && cat "$work/base.yaml"; } >"$work/$level.yaml"
    planned=$("$bin/fb-plan" "$work/$level.yaml" --set "train.recompute=$level" --rate 1e9 --json |
        sed -n '/"memory_bytes"/,/}/s/^ *"total": \([0-9]*\).*/\1/p')
    ops/launch "$work/$level.yaml" --set "train.recompute=$level" >"$work/$level.log" 2>&1 ||
        { tail -n 20 "$work/$level.log"; fail "$level: the run ended with an error"; }
    peak=$(cat "$work/runs/$level/logs/"* |
        sed -n 's/.*msg="memory used" peak_mib=\([0-9.]*\).*/\1/p' | tail -n 1)
    if [ -z "$planned" ] || [ -z "$peak" ]; then
        fail "$level: planned '$planned', peak '$peak'"
    fi
    awk -v planned="$planned" -v peak="$peak" -v level="$level" 'BEGIN {
        planned /= 1048576
        off = 100 * (planned / peak - 1)
        printf "recompute %s: planned %.1f MiB, peak %.1f MiB, %+.1f %%\n", level, planned, peak, off
        exit !(off >= -5 && off <= 5)
    }' || fail "$level: the plan is more than 5 % off"
}

for level in none inner layer; do
    check "$level"
done
