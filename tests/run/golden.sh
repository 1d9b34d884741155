#!/bin/sh
# Every golden case of the reference through fb-step --check; the worst tensor of each is printed.
set -u
cd "$(dirname "$0")/../.." || exit 1
reference=${FB_REFERENCE:-../shared/reference}
step=${FB_BIN:-build/release/bin}/fb-step
[ -d "$reference" ] || { echo "skipped: no reference directory"; exit 77; }

work=$(mktemp -d "${TMPDIR:-/tmp}/golden-XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
status=0 cases=0

fail()
{
    echo "FAIL $*"
    status=1
}

check()
{
    name=$(basename "$1" .safetensors)
    cases=$((cases + 1))
    if "$step" --check "$1" >"$work/out" 2>"$work/err"; then
        sort -gk2 "$work/out" | tail -1 | sed "s/^/ok $name: worst /"
        "$step" --case "$1" --out "$work/again" >/dev/null || fail "$name: --out"
    else
        fail "$name"
        grep fail "$work/out"
        cat "$work/err"
    fi
}

for case in "$reference"/*.safetensors; do
    [ -e "$case" ] || { echo "skipped: no cases in $reference"; exit 77; }
    check "$case"
done
echo "$cases golden cases"
exit $status
