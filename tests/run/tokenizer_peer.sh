#!/bin/bash
# The tokenizer against Hugging Face `tokenizers`, where that is installed (77: it is not).
if ! command -v "${PYTHON:-python3}" >/dev/null; then
    echo "skip: no python3"
    exit 77
fi
exec "${PYTHON:-python3}" tests/peer/tokenizer_peer.py "${BUILD:-build/release}/bin"
