#!/bin/sh
# The checks that need an NVIDIA GPU, in one short run on a machine that has one (5 GB of disk, 4 GB of GPU memory):
# the tests of the CUDA path, then a full check of a conversion of the published size, its deltas made on the GPU.
# The engine is not run. PYTHON: one with CUDA's torch and this repository's packages; .venv's if left out.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
"$python" -c '
import sys, torch
if not torch.cuda.is_available():
    sys.exit("torch sees no GPU: " + torch.__version__)
print(torch.cuda.get_device_name(), "torch", torch.__version__)
'
"$python" -m pytest -q tests/test_check_cuda.py
"$python" -m bench check --device cuda --turns 1 --seeds 1 "$@"
