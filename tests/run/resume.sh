#!/bin/bash
# Exact resume: one tiny run trained three times must end in the same bits.
#
#   whole    never stopped
#   stopped  ended by ops/stop, then by SIGTERM, each time continued by ops/resume; once with a byte of the
#            newest checkpoint changed in between
#   killed   every daemon, and once the supervisor, killed with -9 at seeded moments; some stalled with
#            SIGSTOP, so that the others take them for dead and they come back as zombies
#
# Compared: the final model.safetensors and optimizer file byte for byte, the digest chain of state.json, and
# the committed history of metrics.jsonl (each step once, the same losses).
#
#   BUILD=build/release SEED=1 tests/run/resume.sh     KEEP=1 leaves the work directory
#   PRECISION=bf16 tests/run/resume.sh                 the same with train.precision bf16
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$PWD/${BUILD:-build/release}/bin
RANDOM=${SEED:-1}
steps=120
last=step-00000120

work=$(mktemp -d "${TMPDIR:-/tmp}/resume.XXXXXX")
supervisor=
finish() {
    local status=$?
    if [ -n "$supervisor" ]; then
        kill -9 "$supervisor" 2>/dev/null || true
    fi
    if [ -n "${KEEP:-}" ]; then
        echo "left: $work"
    else
        rm -rf "$work"
    fi
    exit $status
}
trap finish EXIT

fail() {
    echo "resume: $*"
    local log
    for log in "$work"/*.log "$work"/runs/*/logs/*; do
        [ -f "$log" ] && echo "-- $log" && tail -n 15 "$log"
    done
    exit 1
}

# Documents with some structure, one a line: sentences of words of two syllables, from a fixed generator.
documents() {
    awk -v seed="$1" -v count="$2" '
        function draw(n) { x = (x * 69069 + 1) % 4294967296; return int(x / 65536) % n }
        BEGIN {
            n = split("ba re mi to lu sa ne ki do pu ra the ing and er on st al qu ve", part, " ")
            x = seed * 7919
            for (d = 0; d < count; d++) {
                line = ""
                for (s = 1 + draw(5); s > 0; s--) {
                    a = draw(n)
                    for (k = 3 + draw(9); k > 0; k--) {
                        a = (a * 3 + draw(4)) % n # the next word depends on this one
                        line = line part[a + 1] part[1 + (a + draw(3)) % n] " "
                    }
                    line = line ". "
                }
                print "{\"text\": \"" line "\"}"
            }
        }'
}

prepare() {
    local name seed=1
    mkdir "$work/text"
    for name in one two; do
        documents $((seed++)) 800 >"$work/text/$name.jsonl"
    done
    "$bin/fb-tokenizer" train --vocab 384 --out "$work/tokenizer.json" "$work/text"
    for name in one two; do
        "$bin/fb-ingest" --tokenizer "$work/tokenizer.json" --val-share 0.1 \
            --out "$work/shards-$name" "$work/text/$name.jsonl"
    done
    cat >"$work/config.yaml" <<YAML
run: {name: NAME, dir: $work/runs}
model: {dim: 32, layers: 2, heads: 2, kv_heads: 1, ffn: 64, qk_norm: true, attn_gate: true, window: 24, full_every: 2}
data:
  tokenizer: $work/tokenizer.json
  sources:
    - {name: one, path: $work/shards-one, weight: 2}
    - {name: two, path: $work/shards-two, weight: 1}
  seq_len: 64
train:
  steps: $steps
  batch_rows: 48
  micro_rows: 16
  seed: 5
  z_loss: 1e-4
  precision: ${PRECISION:-f32}
  passes:
    - {from: 0, passes: {1: 1}}
    - {from: 0.3, passes: {1: 0.2, 2: 0.8}}
    - {from: 0.6, passes: {1: 0.2, 2: 0.3, 3: 0.5}}
optim: {name: normuon, warmup_steps: 5}
checkpoint: {every_steps: 10, keep_last: 2}
eval: {every_steps: 40, rows: 4, fixed_point_passes: 4}
process: {trainer_threads: 2, evaluators: 1, heartbeat_seconds: 0.2}
YAML
}

# start NAME COMMAND…: a supervisor in the background; its output goes to NAME.log
start() {
    local name=$1
    shift
    "$@" >>"$work/$name.log" 2>&1 </dev/null &
    supervisor=$!
}

launch() {
    sed "s/NAME/$1/" "$work/config.yaml" >"$work/$1.yaml"
    start "$1" ops/launch "$work/$1.yaml"
}

# Waits up to a minute for the supervisor to leave; its exit status must be $2 (any where it is empty).
await() {
    local name=$1 want=${2-0} status=0 i
    for ((i = 0; i < 600; i++)); do
        kill -0 "$supervisor" 2>/dev/null || break
        sleep 0.1
    done
    ! kill -0 "$supervisor" 2>/dev/null || fail "$name: the supervisor has not left within a minute"
    wait "$supervisor" || status=$?
    supervisor=
    [ -z "$want" ] || [ "$status" = "$want" ] || fail "$name: supervisor left with $status"
}

finished() {
    [ -f "$work/runs/$1/checkpoints/$last/MANIFEST.json" ]
}

steps_done() {
    if [ -f "$work/runs/$1/metrics.jsonl" ]; then
        grep -c '"kind":"step"' "$work/runs/$1/metrics.jsonl" || true
    else
        echo 0
    fi
}

# Until run $1 has reported $2 more steps; gives up after 30 s.
wait_steps() {
    local name=$1 target=$(($(steps_done "$1") + $2)) i
    for ((i = 0; i < 600; i++)); do
        [ "$(steps_done "$name")" -lt "$target" ] || return 0
        finished "$name" && return 0
        sleep 0.05
    done
    fail "$name: no $2 further steps in 30 s"
}

# Process of program $1 in run $2, by its arguments; empty when there is none. Starts no process: it is quick.
pid_of() {
    local dir args
    for dir in /proc/[0-9]*; do
        { mapfile -d '' -t args <"$dir/cmdline"; } 2>/dev/null || continue
        if [[ ${args[0]-} == */fb-$1 && " ${args[*]} " == *" $work/runs/$2 "* ]]; then
            echo "${dir#/proc/}"
            return
        fi
    done
}

run_whole() {
    launch whole
    await whole
    finished whole || fail "whole: no $last"
}

# damage_newest NAME: changes a byte in the middle of the newest checkpoint's weights
damage_newest() {
    local dirs=("$work/runs/$1"/checkpoints/step-*) file byte
    [ ${#dirs[@]} -ge 2 ] || fail "$1: no second checkpoint to fall back on"
    file=${dirs[-1]}/model.safetensors
    byte=$(($(stat -c %s "$file") / 2))
    printf '%b' "\\0$(printf %o $(($(od -An -tu1 -j $byte -N 1 "$file") ^ 64)))" |
        dd of="$file" bs=1 seek=$byte conv=notrunc status=none
}

run_stopped() {
    launch stopped
    wait_steps stopped 13
    ops/stop "$work/runs/stopped" >>"$work/stopped.log" 2>&1 || fail "stopped: ops/stop"
    await stopped
    ! finished stopped || fail "stopped: was finished before it was stopped"
    damage_newest stopped
    start stopped ops/resume "$work/runs/stopped"
    wait_steps stopped 14
    kill -TERM "$supervisor"
    await stopped
    ! finished stopped || fail "stopped: was finished before SIGTERM"
    start stopped ops/resume "$work/runs/stopped"
    await stopped
    finished stopped || fail "stopped: no $last"
    compgen -G "$work/runs/stopped/checkpoints/damaged-step-*" >/dev/null ||
        fail "stopped: the damaged checkpoint was not noticed"
}

# kill_one PROGRAM: after a seeded number of steps, somewhere within a step
kill_one() {
    local pid
    wait_steps killed $((2 + RANDOM % 6))
    sleep "0.0$((RANDOM % 10))"
    pid=$(pid_of "$1" killed)
    finished killed && return
    if [ -n "$pid" ] && kill -9 "$pid" 2>/dev/null; then
        echo "killed $1 after $(steps_done killed) reports"
        kills=$((kills + 1))
    fi
}

# stall_one PROGRAM: stopped for so long that the others take it for dead, then let go
stall_one() {
    local pid
    wait_steps killed 2
    pid=$(pid_of "$1" killed)
    finished killed && return
    if [ -n "$pid" ] && kill -STOP "$pid" 2>/dev/null; then
        sleep 1.2
        kill -CONT "$pid"
        echo "stalled $1 after $(steps_done killed) reports"
    fi
}

run_killed() {
    local victim
    kills=0
    launch killed
    for victim in trainer scheduler loader; do
        kill_one $victim
        stall_one $victim
    done
    if ! finished killed; then # all at once: the daemons go with their supervisor
        kill -9 "$supervisor"
        await killed "" 2>/dev/null
        echo "killed the supervisor after $(steps_done killed) reports"
        start killed ops/resume "$work/runs/killed"
        for victim in trainer evaluator scheduler trainer loader; do
            kill_one $victim
        done
    fi
    await killed
    finished killed || fail "killed: no $last"
    [ $kills -ge 5 ] || fail "killed: only $kills kills hit before the end"
}

# One line a step, in order: its last report, without times and run epoch. The digest chain is among the rest.
history() {
    grep '"kind":"step"' "$work/runs/$1/metrics.jsonl" |
        sed -E 's/"(run_epoch|seconds|wait_seconds)":[^,]*,//g' |
        awk -F'"step":' '{ split($2, a, ","); last[a[1]] = $0 } END { for (s in last) print s, last[s] }' |
        sort -n
}

# state.json without the run epoch: the cursor and its chain.
state() {
    grep -v '"run_epoch"' "$work/runs/$1/checkpoints/$last/state.json"
}

compare() {
    local a=$work/runs/whole/checkpoints/$last b=$work/runs/$1/checkpoints/$last f
    for f in model.safetensors optimizer-00000-of-00001.safetensors; do
        cmp "$a/$f" "$b/$f" || fail "$1: $f differs"
    done
    grep -q '"chain"' "$a/state.json" || fail "state.json holds no digest chain"
    [ "$(state whole)" = "$(state "$1")" ] || fail "$1: the cursor or its digest chain differs"
    history "$1" >"$work/$1.history"
    [ "$(wc -l <"$work/$1.history")" = $steps ] ||
        fail "$1: $(wc -l <"$work/$1.history") steps in the history, expected $steps"
    diff "$work/whole.history" "$work/$1.history" >"$work/diff" ||
        fail "$1: the history differs: $(head -n 3 "$work/diff")"
    echo "$1: the same bits, chain and history"
}

prepare >"$work/prepare.log" 2>&1 || fail "preparing the data"
run_whole
history whole >"$work/whole.history"
run_stopped
compare stopped
run_killed
compare killed
echo "resume: 3 runs of $steps steps, $kills kills, all equal"
