#!/bin/bash
# ops/bench: what it prints holds together. No speed is tested.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d "${TMPDIR:-/tmp}/fullband-bench.XXXXXX")
trap 'rm -rf "$work"' EXIT

die() {
    echo "bench: $*" >&2
    exit 1
}

# A peer that prints what torch_bench.py would: its seconds must come back as they are.
cat >"$work/peer" <<'PEER'
#!/bin/bash
echo '{"steps": 3, "median_s": 0.5, "best_s": 0.25, "cpu_s": 1.0, "peak_bytes": 1048576, "first_loss": 6.5, "last_loss": 6.25}'
PEER
chmod +x "$work/peer"
bin=${BUILD:-build/release}/bin
"$bin/fb-bench" train --config tiny --passes 1,3 --seconds 0.05 --rounds 1 --peer "$work/peer" --json \
    >"$work/out.json" 2>"$work/log"
python3 - "$work/out.json" <<'CHECK' || die "wrong output"
import json, sys
r = json.load(open(sys.argv[1]))
assert r["multiply_adds_before"] > 1e9 and r["naive_flops_per_second"]["tiny"] > 0
assert [(row["passes"], row["shared"]) for row in r["rows"]] == [(1, False), (3, False), (3, True)]
for row in r["rows"]:
    ops, steps = row["by_op"], row["steps"]
    products = sum(ops[o]["flops"] for o in ("matmul x Wt", "matmul dy W", "matmul dyt x"))
    attention = row["passes"] * 6 * 2 * 64 * 64 * 256  # 6 L T d a token
    assert abs(products - row["products"]["flops"]) <= 1e-4 * products, (products, row["products"])
    # What the formula counts is what was computed; W_G is computed once for all passes.
    once = max(0, row["passes"] - 2) * 6 * 64 * 64 * 256
    computed = products + attention + once
    if row["shared"]:
        assert computed < 0.9 * row["flops"]
    else:
        assert abs(computed - row["flops"]) <= 1e-4 * row["flops"]
    assert 0 < sum(o["seconds"] for o in ops.values()) and steps["best_s"] <= steps["median_s"]
    assert steps["last_loss"] < steps["first_loss"]
    assert row["peer"]["median_s"] == 0.5 and row["peer"]["tokens_per_second"] == 512
CHECK
"$bin/fb-bench" train --config huge 2>/dev/null && die "a configuration that is none"
"$bin/fb-bench" train --config tiny --passes 1 --seconds 0.05 --rounds 1 --peer "false" >/dev/null 2>"$work/log" &&
    die "a peer that fails"
grep -q 'the peer ended with status' "$work/log" || die "no reason: $(cat "$work/log")"
