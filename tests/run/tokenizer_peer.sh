#!/bin/bash
# The tokenizer against Hugging Face `tokenizers`, where that is installed (77: it is not).
exec "${PYTHON:-python3}" tests/peer/tokenizer_peer.py "${BUILD:-build/release}/bin"
