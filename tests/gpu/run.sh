#!/bin/sh
# Kernels and engine on a GPU: correctness, then speed against the machine's own rates. One table, within
# 4 minutes; the exit status says whether correctness held. Needs torch, triton, transformers and no web package.
# Without a GPU, or with --small, it is small and runs in Triton's interpreter.
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}
if [ -x .venv/bin/python ] && [ -z "$PYTHON" ]; then python=.venv/bin/python; fi
if [ "$1" = --small ] || ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    TRITON_INTERPRET=1 exec "$python" -m tests.gpu.check --small
fi
exec "$python" -m tests.gpu.check
