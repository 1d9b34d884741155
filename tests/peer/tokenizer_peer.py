#!/usr/bin/env python3
"""fb-tokenizer against Hugging Face `tokenizers`: the same ids for the same tokenizer.json.

usage: tokenizer_peer.py BIN_DIR

Trains tokenizers with fb-tokenizer and with `tokenizers` (one in the style of GPT-2, one with a
pattern of GPT-4's kind and ignore_merges), and encodes odd and random texts with both programs.
Exits 0 when all ids are equal, 1 with the first difference, 77 where `tokenizers` is missing.
"""
import json
import os
import random
import subprocess
import sys
import tempfile

try:
    import tokenizers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
except ImportError:
    print("skip: the Python module `tokenizers` is not installed (pip install tokenizers)")
    sys.exit(77)

EOT = "<|endoftext|>"
FOREIGN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

ODD_TEXTS = [
    "", " ", "\n", "a", "I'm she'll they've DON'T I'LL 'select' 'sd we're",
    "x = 12345678 + 0x1F; // 3.14\r\n\r\n\tif (a) {\n        return;\n    }\n",
    "trailing   \n\n   leading\n \n  \n", "tabs\t\tand\u00a0nbsp\u2003em\u3000wide",
    "\u0085next line\u2028line sep\u2029para\x0b\x0c\x1c\x1f\x00nul",
    "\u180emongolian vowel \u180e separator\u180e\n",
    "naïve café — “quotes” … № ½ ² ٣٤ ४५ Ⅷ", "日本語のテキスト。中文，标点！한국어",
    "हिन्दी में लिखा हुआ, ภาษาไทย עברית العربية", "e\u0301a\u0308 combining\u0301 \u0301alone",
    "😀👍🏽👨‍👩‍👧‍👦🇩🇪", "ſ'ſ K'K 'S 'ST ﬅ", "\ufeffbom \ufffd\ufffe\uffff\U0010ffff",
    "a" * 5000, " " * 3000 + "x", "\n" * 2000, "ab" * 2500, "=" * 999 + "\n" * 5, "9" * 1000,
    "end of text <|endoftext|> <|endoftext", "\u200b\u200d zero\u200bwidth", "_snake_case __init__",
]

SCRIPTS = [(0x20, 0x7E), (0x20, 0x7E), (0x09, 0x0D), (0xA0, 0x17F), (0x370, 0x3FF), (0x400, 0x45F),
           (0x5D0, 0x5EA), (0x900, 0x94D), (0x2000, 0x206F), (0x3040, 0x30FF), (0x4E00, 0x4FFF),
           (0x1F600, 0x1F64F)]


def random_text(rng):
    """A text of characters that every Unicode version of the last ten years knows."""
    words = []
    for _ in range(rng.randrange(1, 60)):
        lo, hi = rng.choice(SCRIPTS)
        words.append("".join(chr(rng.randint(lo, hi)) for _ in range(rng.randrange(1, 9))))
        words.append(rng.choice([" ", " ", "", "\n", "  ", "\t", "'", "'s ", "\r\n", "1"]))
    return "".join(words)


def corpus(rng):
    """Text to train on: this program's source, the Python library's, and random scripts."""
    parts = [open(__file__, encoding="utf-8").read()]
    folder = os.path.dirname(os.__file__)
    for name in sorted(os.listdir(folder)):
        if name.endswith(".py") and sum(map(len, parts)) < 3_000_000:
            parts.append(open(os.path.join(folder, name), encoding="utf-8", errors="replace").read())
    parts += [random_text(rng) for _ in range(2000)] + ODD_TEXTS
    return "\n".join(parts)


def run(program, *args, text=b""):
    done = subprocess.run([program, *args], input=text, capture_output=True, timeout=300)
    if done.returncode != 0:
        sys.exit(f"fail: {' '.join(args)}: {done.stderr.decode(errors='replace')}")
    return done.stdout


def train_peer(path, pre_tokenizer, text, **model):
    peer = Tokenizer(models.BPE(**model))
    peer.pre_tokenizer = pre_tokenizer
    peer.decoder = decoders.ByteLevel()
    peer.train_from_iterator(text.splitlines(keepends=True), trainers.BpeTrainer(
        vocab_size=3000, special_tokens=[EOT], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    peer.save(path)


def compare(program, path, texts):
    """All texts with both; one call of the program a text keeps its ids apart."""
    peer = Tokenizer.from_file(path)
    peer.encode_special_tokens = True  # a special token's text is text, as it is to us
    for text in texts:
        ours = json.loads(run(program, "encode", "--tokenizer", path, "--json", text=text.encode()))
        theirs = peer.encode(text, add_special_tokens=False).ids
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b),
                      min(len(ours), len(theirs)))
            sys.exit(f"fail: {os.path.basename(path)}: {text[:80]!r}: from token {at} on: "
                     f"ours {ours[at:at + 8]} theirs {theirs[at:at + 8]}")
        back = run(program, "decode", "--tokenizer", path, text=" ".join(map(str, theirs)).encode())
        if back != text.encode():
            sys.exit(f"fail: {os.path.basename(path)}: {text[:80]!r} does not round-trip")
        if peer.decode(ours, skip_special_tokens=False) != text:
            sys.exit(f"fail: {os.path.basename(path)}: {text[:80]!r}: the peer decodes otherwise")
    print(f"ok: {os.path.basename(path)}: {len(texts)} texts, "
          f"{sum(map(len, texts))} characters, the same ids and texts")


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: tokenizer_peer.py BIN_DIR")
    program = os.path.join(sys.argv[1], "fb-tokenizer")
    rng = random.Random(20260101)
    text = corpus(rng)
    texts = ODD_TEXTS + [random_text(rng) for _ in range(150)] + [text]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    split = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(FOREIGN_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    with tempfile.TemporaryDirectory() as folder:
        train = os.path.join(folder, "corpus.txt")
        with open(train, "w", encoding="utf-8", newline="") as f:
            f.write(text)
        for vocab in (300, 4000):
            path = os.path.join(folder, f"fullband-{vocab}.json")
            run(program, "train", "--vocab", str(vocab), "--out", path, train)
            compare(program, path, texts)
        path = os.path.join(folder, "gpt2-style.json")
        train_peer(path, byte_level, text)
        compare(program, path, texts)
        path = os.path.join(folder, "gpt4-style.json")
        train_peer(path, split, text, ignore_merges=True)
        compare(program, path, texts)
    print(f"ok: all equal to tokenizers {tokenizers.__version__}")


if __name__ == "__main__":
    main()
