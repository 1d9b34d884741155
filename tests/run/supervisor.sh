#!/bin/bash
# fb-launch with daemons that are shell scripts: restart, fatal exit, clean stop, no orphans.
cd "$(dirname "$0")/../.." || exit
. tests/tiny.sh

tiny_data
tiny_config
mkdir "$work/bin"
cp "$bin/fb-launch" "$work/bin/"

# daemon NAME: its script is read from stdin; $n in it counts its starts from 1.
daemon() {
    {
        echo '#!/bin/bash'
        echo "n=\$(cat $work/$1.starts 2>/dev/null || echo 0); n=\$((n + 1)); echo \$n >$work/$1.starts"
        echo "echo \$\$ >>$work/pids"
        cat
    } >"$work/bin/$1"
    chmod +x "$work/bin/$1"
    rm -f "$work/$1.starts"
}

# Every process a daemon script ever was is gone.
all_gone() {
    local pid
    while read -r pid; do
        # One that is dead and only waits for its new parent to notice is gone as well.
        ! grep -qs '^State:[[:space:]]*[^Z[:space:]]' "/proc/$pid/status" ||
            fail "$1: process $pid is still there: $(tr '\0' ' ' <"/proc/$pid/cmdline")"
    done <"$work/pids"
    : >"$work/pids"
}

start_fresh() {
    rm -rf "$work/runs"
    daemon fb-loader <<<'exec sleep 100'
    daemon fb-trainer <<<'exec sleep 100'
    daemon fb-evaluator <<<'exec sleep 100'
    daemon fb-scheduler <<<'exec sleep 100'
}

launch() {
    timeout 60 "$work/bin/fb-launch" "$work/tiny.yaml" >"$work/out" 2>"$work/err" </dev/null
}

# Two deaths of the trainer, then the scheduler ends the run.
start_fresh
until_done="until [ -e $work/done ]; do sleep 0.1; done"
daemon fb-loader <<<"$until_done"
daemon fb-evaluator <<<"$until_done"
daemon fb-trainer <<SH
case \$n in
1) kill -9 \$\$ ;;
2) exit 111 ;;
*) touch $work/third; $until_done ;;
esac
SH
daemon fb-scheduler <<<"until [ -e $work/third ]; do sleep 0.1; done; touch $work/done"
launch || fail "restart: exit $?: $(cat "$work/err")"
grep -q 'trainer-0 ended with signal 9 (Killed); starting it again in 0.5 s' "$work/err" || fail "no word of the first death: $(cat "$work/err")"
grep -q 'trainer-0 ended with exit 111; starting it again in 1.0 s' "$work/err" || fail "no word of the second death"
[ "$(cat "$work/fb-trainer.starts")" = 3 ] || fail "the trainer was started $(cat "$work/fb-trainer.starts") times"
[ "$(cat "$work/fb-loader.starts")" = 1 ] || fail "the loader was started again"
all_gone restart

# A daemon that must not be restarted stops the run, with its own words.
start_fresh
daemon fb-loader <<<'echo "ts=1 level=error msg=\"shard wiki-7 is damaged\"" >&2; exit 100'
rc=0
launch || rc=$?
[ $rc = 1 ] || fail "fatal: exit $rc"
grep -q 'fb-launch: loader ended with exit 100 .*shard wiki-7 is damaged' "$work/err" || fail "no reason: $(cat "$work/err")"
all_gone fatal

# One SIGTERM asks for a clean stop, which these daemons do not know; a second one cuts it short.
start_fresh
"$work/bin/fb-launch" "$work/tiny.yaml" >"$work/out" 2>"$work/err" </dev/null &
launcher=$!
until [ -e "$work/fb-evaluator.starts" ]; do sleep 0.05; done
kill -TERM $launcher
sleep 0.5
kill -0 $launcher || fail "one SIGTERM ended it at once"
kill -TERM $launcher
rc=0
wait $launcher || rc=$?
[ $rc = 1 ] || fail "two signals: exit $rc"
grep -q 'stopping: the step under way' "$work/err" || fail "no word of the clean stop"
grep -q 'stopped at once' "$work/err" || fail "no word of the end"
all_gone signals

# Whatever happens to the launcher, no daemon outlives it; and one launcher a run.
start_fresh
"$work/bin/fb-launch" "$work/tiny.yaml" >"$work/out" 2>"$work/err" </dev/null &
launcher=$!
until [ -e "$work/fb-evaluator.starts" ]; do sleep 0.05; done
rc=0
timeout 20 "$work/bin/fb-launch" "$work/tiny.yaml" >"$work/out2" 2>"$work/err2" </dev/null || rc=$?
[ $rc = 1 ] || fail "second launcher: exit $rc"
grep -q 'is running already' "$work/err2" || fail "second launcher: $(cat "$work/err2")"
kill -KILL $launcher
wait $launcher 2>/dev/null || true
sleep 0.3
all_gone "kill -9"

# The same name with another plan is not that run.
rc=0
timeout 20 "$work/bin/fb-launch" "$work/tiny.yaml" --set train.steps=13 >"$work/out" 2>"$work/err" </dev/null || rc=$?
[ $rc = 1 ] || fail "another plan: exit $rc"
grep -qE 'fb-launch: .*runs/tiny.*[0-9a-f]{64}.*[0-9a-f]{64}' "$work/err" || fail "another plan: $(cat "$work/err")"

# In the background.
start_fresh
daemon fb-scheduler <<<'echo "fb-scheduler: no room" >&2; exit 1'
rc=0
timeout 30 "$work/bin/fb-launch" "$work/tiny.yaml" --detach >"$work/out" 2>"$work/err" </dev/null || rc=$?
[ $rc = 1 ] || fail "detach: exit $rc"
grep -q 'no room' "$work/err" || fail "detach: $(cat "$work/err")"
