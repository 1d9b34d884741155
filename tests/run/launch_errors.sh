#!/bin/bash
# What is wrong with a config, a run directory or the arguments is told in one line, with exit 1 or 2.
cd "$(dirname "$0")/../.." || exit
. tests/tiny.sh

# expect STATUS PATTERN COMMAND...: exit status, and one line on stderr that matches
expect() {
    local status=$1 pattern=$2 rc=0
    shift 2
    "$@" >"$work/out" 2>"$work/err" </dev/null || rc=$?
    [ $rc = "$status" ] || fail "$*: exit $rc, expected $status: $(cat "$work/err")"
    [ -z "$pattern" ] || grep -qE -- "$pattern" "$work/err" || fail "$*: expected /$pattern/, got: $(cat "$work/err")"
    [ "$status" != 1 ] || [ "$(wc -l <"$work/err")" = 1 ] || fail "$*: more than one line"
}

tiny_data
tiny_config
launch=$bin/fb-launch status=$bin/fb-status config=$work/tiny.yaml

expect 2 '^usage: ' "$launch"
expect 2 '^usage: ' "$launch" a b
expect 2 '^usage: ' "$launch" --resume x --set a=b
expect 2 '^usage: ' "$status"
expect 2 '^usage: ' "$status" x --watch --json
expect 0 '' "$launch" --help
expect 0 '' "$status" --version

expect 1 '^fb-launch: .*nowhere.yaml: No such file' "$launch" "$work/nowhere.yaml"
expect 1 'train\.stesp.*train\.steps' "$launch" "$config" --set train.stesp=5
expect 1 'train\.steps' "$launch" "$config" --set train.steps=many
expect 1 'tokenizer' "$launch" "$config" --set "data.tokenizer=$work/none.json"
echo "  nonsense: 3" >"$work/bad.yaml"
expect 1 'bad\.yaml:1: .*nonsense' "$launch" "$work/bad.yaml"
echo '{}' >"$work/broken.json"
expect 1 'ingest it again' "$launch" "$config" --set "data.tokenizer=$work/broken.json"
expect 1 "$work/none" "$launch" --resume "$work/none"
expect 1 "$work" "$status" "$work"
expect 1 "$work/none" "$status" "$work/none" --stop

# Nothing of all that made a run directory.
[ ! -e "$work/runs/tiny" ] || fail "a run directory was made"
