#!/usr/bin/env python3
"""The bench's model, passes and optimizer in PyTorch, timed: what `ops/bench train` stands beside.

usage: torch_bench.py --dim D --layers L --heads H --ffn F --vocab V --seq T --batch B --passes K
                      [--precision f32|bf16] [--threads N] [--seconds S]
       torch_bench.py --check       prints the version of torch and of its BLAS, or exits 77

Prints one line of JSON: seconds of a step (median, best), CPU seconds, peak memory, losses.
Random tokens, one document a row, uniform cuts; every pass is computed whole.
"""
import argparse
import json
import math
import os
import resource
import sys
import time

try:
    import torch
    import torch.nn.functional as F
    from torch import nn
except ImportError:
    print("skip: the Python module `torch` is not installed (python3-torch, or pip install torch)")
    sys.exit(77)

EPS = 1e-5
WARM_STEPS = 2
MIN_STEPS = 3


def rms(x, weight=None):
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return y if weight is None else y * weight


def rope_tables(seq, hd):
    angle = torch.arange(seq)[:, None] * 10000.0 ** (-torch.arange(0, hd, 2) / hd)[None, :]
    both = torch.cat([angle, angle], -1)
    return both.cos(), both.sin()


def rotate(x, cos, sin):
    lo, hi = x.chunk(2, -1)
    return x * cos + torch.cat([-hi, lo], -1) * sin


class Block(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.heads, self.scale = a.heads, 1 / math.sqrt(2 * a.layers)
        self.n1, self.n2 = nn.Parameter(torch.ones(a.dim)), nn.Parameter(torch.ones(a.dim))
        # One product for q, k and v, and one for gate and up: the strongest form.
        self.qkv = nn.Linear(a.dim, 3 * a.dim, bias=False)
        self.o = nn.Linear(a.dim, a.dim, bias=False)
        self.up = nn.Linear(a.dim, 2 * a.ffn, bias=False)
        self.down = nn.Linear(a.ffn, a.dim, bias=False)

    def forward(self, x, cos, sin, hidden):
        b, t, d = x.shape
        q, k, v = self.qkv(rms(x, self.n1)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        if hasattr(F, "scaled_dot_product_attention"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            score = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
            y = score.masked_fill(hidden, -math.inf).softmax(-1).to(v.dtype) @ v
        x = x + self.scale * self.o(y.transpose(1, 2).reshape(b, t, d))
        gate, up = self.up(rms(x, self.n2)).chunk(2, -1)
        return x + self.scale * self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.embed = nn.Parameter(torch.randn(a.vocab, a.dim) * 0.02)
        self.blocks = nn.ModuleList(Block(a) for _ in range(a.layers))
        self.norm = nn.Parameter(torch.ones(a.dim))
        self.w_u, self.w_g = nn.Linear(a.dim, a.dim, bias=False), nn.Linear(a.dim, a.dim, bias=False)
        self.cos, self.sin = rope_tables(a.seq, a.dim // a.heads)
        self.hidden = torch.ones(a.seq, a.seq, dtype=torch.bool).triu(1)

    def state(self, u):
        for block in self.blocks:
            u = block(u, self.cos, self.sin, self.hidden)
        return rms(u, self.norm)

    def loss(self, tokens, targets, masks):
        plain = rms(F.embedding(tokens, self.embed))
        gate = torch.sigmoid(self.w_g(plain)) if masks else None
        h, losses = None, []
        for k in range(len(masks) + 1):
            u = plain
            if k:
                carried = F.pad(h[:, :-1], (0, 0, 1, 0))
                carried = carried + torch.empty_like(carried).uniform_(-0.02, 0.02)
                u = torch.where(masks[k - 1], rms(self.w_u(carried) * gate), plain)
            h = self.state(u)
            logits = F.linear(h, self.embed).flatten(0, 1)
            losses.append(F.cross_entropy(logits, targets.flatten()))
        return losses[0] + (sum(losses[1:]) / len(masks) if masks else 0)


def optimizer_of(model):
    try:
        return torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1, fused=True)
    except (TypeError, RuntimeError):
        return torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1,
                                 foreach=True)


def step(model, optimizer, batch, precision):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = model.loss(*batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def batch_of(a):
    tokens = torch.randint(a.vocab, (a.batch, a.seq))
    targets = torch.randint(a.vocab, (a.batch, a.seq))
    at = torch.arange(a.seq)[None, :]
    cuts = [1 + (torch.rand(a.batch, 1) * a.seq).long() for _ in range(a.passes - 1)]
    return tokens, targets, [(at >= c)[..., None] for c in cuts]


def blas_in_use():
    with open("/proc/self/maps", encoding="ascii") as f:
        names = {os.path.basename(line.split()[-1]) for line in f if "blas" in line and ".so" in line}
    return ", ".join(sorted(names)) or "built in"


def main():
    p = argparse.ArgumentParser()
    for name in ("dim", "layers", "heads", "ffn", "vocab", "seq", "batch", "passes"):
        p.add_argument("--" + name, type=int, default=1)
    p.add_argument("--precision", choices=("f32", "bf16"), default="f32")
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--seconds", type=float, default=5)
    p.add_argument("--check", action="store_true")
    a = p.parse_args()
    if a.check:
        print(f"PyTorch {torch.__version__}, BLAS: {blas_in_use()}")
        return
    torch.manual_seed(1)
    torch.set_num_threads(a.threads or len(os.sched_getaffinity(0)))
    model, batch = Model(a), batch_of(a)
    optimizer = optimizer_of(model)
    losses = [step(model, optimizer, batch, a.precision) for _ in range(WARM_STEPS)]
    taken, cpu, start = [], time.process_time(), time.perf_counter()
    while len(taken) < MIN_STEPS or time.perf_counter() - start < a.seconds:
        since = time.perf_counter()
        losses.append(step(model, optimizer, batch, a.precision))
        taken.append(time.perf_counter() - since)
    cpu = (time.process_time() - cpu) / len(taken)
    taken.sort()
    print(json.dumps({
        "steps": len(taken),
        "median_s": (taken[len(taken) // 2] + taken[(len(taken) - 1) // 2]) / 2,
        "best_s": taken[0],
        "cpu_s": cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }))


if __name__ == "__main__":
    main()
