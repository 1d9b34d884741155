#!/bin/bash
# Data parallel: 1, 2 and 4 ranks train the same run.
#
#   w1 w2 w4   the same steps: one digest chain, losses equal to rounding
#   killed     as w2, but rank 1 is killed with -9, later rank 0 while mpirun is held, so that the survivor
#              has only its own watchdog: it must end by itself; the run ends in the bits of w2
#   changed    stopped with 2 ranks, continued with 4, then with 1: the same chain, losses to rounding
#
#   BUILD=build/release tests/run/ranks.sh
. tests/tiny.sh
if ! command -v mpirun >/dev/null || [ ! -e "$bin/fb-coll-mpi.so" ]; then
    echo "OpenMPI is not installed (ops/setup), or its transport is not built (make)"
    exit 77
fi
steps=60
last=step-00000060
supervisor=
trap 'test -z "$supervisor" || kill -9 $supervisor 2>/dev/null; rm -rf "$work"' EXIT

config() {
    cat >"$work/ranks.yaml" <<YAML
run: {name: NAME, dir: $work/runs}
model: {dim: 32, layers: 3, heads: 2, kv_heads: 1, ffn: 64}
data:
  tokenizer: $work/tokenizer.json
  seq_len: 64
  sources: [{name: text, path: $work/shards}]
train:
  steps: $steps
  batch_rows: 60
  micro_rows: 12
  seed: 3
  passes: [{from: 0, passes: {1: 1}}, {from: 0.3, passes: {1: 0.3, 2: 0.4, 3: 0.3}}]
optim: {lr: 3e-3, warmup_steps: 5}
checkpoint: {every_steps: 10, keep_last: 2}
eval: {every_steps: 0}
process: {trainer_threads: 1, evaluators: 0, heartbeat_seconds: 1}
YAML
}

say_logs() {
    tail -n 12 "$work"/*.log "$work"/runs/*/logs/trainer* "$work"/runs/*/logs/scheduler.log 2>/dev/null
}
broken() {
    say_logs
    fail "$@"
}

# start NAME COMMAND...: a supervisor in the background
start() {
    local name=$1
    shift
    "$@" >>"$work/$name.log" 2>&1 </dev/null &
    supervisor=$!
}

launch() {
    sed "s/NAME/$1/" "$work/ranks.yaml" >"$work/$1.yaml"
    start "$1" ops/launch "$work/$1.yaml" --set "process.trainers=$2"
}

await() {
    local i status=0
    for ((i = 0; i < 1200; i++)); do
        kill -0 "$supervisor" 2>/dev/null || break
        sleep 0.1
    done
    ! kill -0 "$supervisor" 2>/dev/null || broken "$1: the supervisor has not left within two minutes"
    wait "$supervisor" || status=$?
    supervisor=
    [ $status = 0 ] || broken "$1: supervisor left with $status"
}

finished() {
    [ -f "$work/runs/$1/checkpoints/$last/MANIFEST.json" ]
}

committed() {
    find "$work/runs/$1/checkpoints" -name MANIFEST.json 2>/dev/null | sort | tail -n 1 || true
}

# wait_past NAME STEP: until a checkpoint of at least STEP is committed, and two steps more are reported
wait_past() {
    local i reached name
    for ((i = 0; i < 1200; i++)); do
        name=$(committed "$1")
        name=${name%/MANIFEST.json}
        reached=$((10#0${name##*-}))
        if [ $reached -ge "$2" ] && grep -q "\"step\":$((reached + 2))," "$work/runs/$1/metrics.jsonl"; then
            return
        fi
        sleep 0.05
    done
    broken "$1: no step $2 within a minute"
}

# pid_of RUN RANK: of a trainer, or of mpirun where RANK is empty
pid_of() {
    local dir args
    for dir in /proc/[0-9]*; do
        { mapfile -d '' -t args <"$dir/cmdline"; } 2>/dev/null || continue
        [[ " ${args[*]} " == *" $work/runs/$1 "* ]] || continue
        if [[ -z $2 && ${args[0]} == mpirun ]]; then
            echo "${dir#/proc/}"
        elif [[ -n $2 && ${args[0]} == */fb-trainer ]] &&
            grep -qzx "OMPI_COMM_WORLD_RANK=$2" "$dir/environ" 2>/dev/null; then
            echo "${dir#/proc/}"
        fi
    done
}

# Whether the process has ended, be it unreaped.
is_gone() {
    local state
    state=$(sed -n 's/^State:\s*\(.\).*/\1/p' "/proc/$1/status" 2>/dev/null) || true
    [ -z "$state" ] || [ "$state" = Z ]
}

# Rank 1 dies, mpirun ends the rest.
kill_a_rank() {
    local victim
    wait_past killed 10
    victim=$(pid_of killed 1)
    [ -n "$victim" ] || broken "killed: no rank 1"
    kill -9 "$victim"
    echo "killed rank 1"
}

# Rank 0 dies while mpirun sleeps: rank 1 must end by its own.
kill_a_rank_unseen() {
    local mpirun victim survivor started
    wait_past killed 30
    mpirun=$(pid_of killed "") victim=$(pid_of killed 0) survivor=$(pid_of killed 1)
    if [ -z "$mpirun" ] || [ -z "$victim" ] || [ -z "$survivor" ]; then
        broken "killed: no second group of ranks"
    fi
    kill -STOP "$mpirun"
    kill -9 "$victim"
    started=$(date +%s%N)
    for ((i = 0; i < 200; i++)); do
        is_gone "$survivor" && break
        sleep 0.05
    done
    is_gone "$survivor" || broken "killed: the survivor still waits for the dead"
    echo "killed rank 0 unseen; the survivor left after $((($(date +%s%N) - started) / 1000000)) ms"
    kill -CONT "$mpirun"
}

run_killed() {
    launch killed 2
    kill_a_rank
    kill_a_rank_unseen
    await killed
    finished killed || broken "killed: no $last"
    grep -q 'fb-trainer: collectives: rank 1 of 2 gave up' "$work"/runs/killed/logs/trainers.log ||
        broken "killed: the survivor does not say why it left"
    [ "$(grep -c 'starting it again' "$work/killed.log")" -ge 2 ] || broken "killed: was not restarted twice"
}

# trainers NAME N: from the next start on
trainers() {
    sed -i "s/trainers: .*/trainers: $2/" "$work/runs/$1/run.yaml"
}

run_changed() {
    launch changed 2
    wait_past changed 10
    ops/stop "$work/runs/changed" >>"$work/changed.log" 2>&1
    await changed
    trainers changed 4
    start changed ops/resume "$work/runs/changed"
    wait_past changed 30
    ops/stop "$work/runs/changed" >>"$work/changed.log" 2>&1
    await changed
    ! finished changed || broken "changed: was finished before it was continued with one rank"
    trainers changed 1
    start changed ops/resume "$work/runs/changed"
    await changed
    finished changed || broken "changed: no $last"
}

chain() {
    sed -n 's/.*"chain": "\(.*\)".*/\1/p' "$work/runs/$1/checkpoints/$last/state.json"
}

# STEP CHAIN TOTAL NORM of each step's last report, in order
history() {
    grep '"kind":"step"' "$work/runs/$1/metrics.jsonl" |
        sed -E 's/.*"step":([0-9]+),.*"total":([^,]*),"grad_norm":([^,]*),.*"rows":([0-9]+),.*"chain":"([^"]*)".*/\1 \5 \2 \3 \4/' |
        awk '{ last[$1] = $0 } END { for (s in last) print last[s] }' | sort -n
}

# Same chain and rows in each step; losses and norms to the relative tolerance.
compare() {
    local name=$1 tolerance=$2
    [ -n "$(chain w1)" ] || broken "w1: no digest chain"
    [ "$(chain w1)" = "$(chain "$name")" ] || broken "$name: the digest chain differs"
    history "$name" >"$work/$name.history"
    paste -d ' ' "$work/w1.history" "$work/$name.history" | awk -v tolerance="$tolerance" -v want=$steps '
        function off(a, b) { d = (a - b) / a; return d < 0 ? -d : d }
        { if ($1 != $6 || $2 != $7 || $5 != $10) { print "step " $1 ": chain or rows differ"; exit 1 }
          o = off($3, $8); if (off($4, $9) / 10 > o) o = off($4, $9) / 10
          if (o > worst) worst = o }
        END { if (NR != want) { print NR " steps"; exit 1 }
              printf "relative difference at most %.1e\n", worst
              if (!(worst <= tolerance)) exit 1 }' >"$work/$name.diff" ||
        broken "$name: $(cat "$work/$name.diff")"
    echo "$name: the same chain, $(cat "$work/$name.diff")"
}

tiny_data
config
for world in 1 2 4; do
    launch w$world $world
    await w$world
    grep 'msg="lost"' "$work/runs/w$world/logs/scheduler.log" || true # none, unless the machine is overloaded
    finished w$world || broken "w$world: no $last"
done
history w1 >"$work/w1.history"
compare w2 1e-4
compare w4 1e-4
run_killed
compare killed 1e-4
for file in model.safetensors optimizer-00000-of-00002.safetensors optimizer-00001-of-00002.safetensors; do
    cmp "$work/runs/w2/checkpoints/$last/$file" "$work/runs/killed/checkpoints/$last/$file" ||
        broken "killed: $file differs from the undisturbed run's"
done
run_changed
compare changed 1e-4
echo "ranks: 1, 2 and 4 ranks agree; killed ranks cost no bit"
