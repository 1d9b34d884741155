#!/bin/bash
# Tools that make and read data, used wrongly: one line that says what is wrong, the right exit status,
# and nothing of the user's lost.
cd "$(dirname "$0")/../.." || exit
. tests/tiny.sh

# expect STATUS PATTERN COMMAND...: exit status, and one line on stderr that matches
expect() {
    local status=$1 pattern=$2 rc=0
    shift 2
    timeout 20 "$@" >"$work/out" 2>"$work/err" </dev/null || rc=$?
    [ $rc = "$status" ] || fail "$*: exit $rc, expected $status: $(cat "$work/err")"
    grep -qE -- "$pattern" "$work/err" || fail "$*: expected /$pattern/, got: $(cat "$work/err")"
    [ "$(wc -l <"$work/err")" = 1 ] || fail "$*: more than one line"
}

tiny_data
tokenizer=$work/tokenizer.json shards=$work/shards text=$work/text.jsonl
train=("$bin/fb-tokenizer" train --vocab 300 --out)
ingest=("$bin/fb-ingest" --tokenizer "$tokenizer" --out)

# What stands where the output goes.
cp "$text" "$work/copy.jsonl"
expect 1 'is one of the inputs' "${train[@]}" "$work/copy.jsonl" "$work/copy.jsonl"
cmp "$text" "$work/copy.jsonl"
mkfifo "$work/fifo"
expect 1 'not a file' "${train[@]}" "$work/fifo" "$text"
expect 1 'not a file' "${train[@]}" "$work" "$text"
expect 1 'not a directory' "${train[@]}" "$text/x.json" "$text"
expect 2 'out FILE is needed' "${train[@]}" '' "$text"
mkdir "$work/mine.partial"
echo mine >"$work/mine.partial/notes"
expect 1 'not the rest of an interrupted ingest' "${ingest[@]}" "$work/mine" "$text"
[ -f "$work/mine.partial/notes" ] || fail "fb-ingest emptied a directory that was not its own"

# A FIFO where a file should be is refused, not waited for.
expect 1 'fifo: not a regular file' "$bin/fb-tokenizer" info --tokenizer "$work/fifo"
expect 1 'fifo: not a regular file' "$bin/fb-plan" "$work/fifo"
expect 1 'fifo: not a regular file' "$bin/fb-step" --check "$work/fifo"
cp -r "$shards" "$work/damaged"
rm "$work"/damaged/train-00000.shard
mkfifo "$work/damaged/train-00000.shard"
expect 1 'shard: not a regular file' "$bin/fb-shards" verify "$work/damaged"
expect 1 'shard: not a regular file' "$bin/fb-shards" inspect "$work/damaged"

# Half a list of ids is not a list.
echo '[1, 2' >"$work/ids"
expect 1 'one list' "$bin/fb-tokenizer" decode --tokenizer "$tokenizer" "$work/ids"

# Output that is lost is said; closed streams do not end up in the data.
for command in "fb-tokenizer info --tokenizer $tokenizer" "fb-shards inspect $shards" \
    "fb-shards verify $shards"; do
    rc=0
    # shellcheck disable=SC2086
    "$bin"/$command >/dev/full 2>"$work/err" || rc=$?
    if [ $rc != 1 ] || ! grep -q 'standard output' "$work/err"; then
        fail "$command: a full disk is not told"
    fi
done
"${ingest[@]}" "$work/quiet" --val-share 0.1 "$text" <&- 2>&- >/dev/null || fail "closed streams"
cmp "$work/quiet/train-00000.shard" "$shards/train-00000.shard"
if "${ingest[@]}" "$work/silent" --val-share 0.1 "$text" <&- >&- 2>&-; then
    fail "lost output is not told"
fi
cmp "$work/silent/train-00000.shard" "$shards/train-00000.shard"
