"""Runs `dcpjax batch` from a checkout: reads requests from a JSONL file and writes results to another.

python scripts/generate_batch.py in.jsonl -o out.jsonl --model smollm2-135m
"""

import sys

from dcpjax.cli import main

if __name__ == "__main__":
    sys.exit(main(["batch", *sys.argv[1:]]))
