#!/usr/bin/env bash
# Builds the sdist and a wheel into dist/, and tries them as users would: the wheel without a compiler, the sdist with
# one and without. torch comes from .venv. Run it by `make ship`.
set -euo pipefail
cd "$(dirname "$0")/.."
there=$(.venv/bin/python -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

python3 -m venv "$scratch/build"
"$scratch/build/bin/python" -m pip install -q build twine
rm -rf dist
"$scratch/build/bin/python" -m build -o dist .  # the wheel from the sdist: nothing is missing in it
"$scratch/build/bin/twine" check dist/*

environment() {
  python3 -m venv "$scratch/$1"
  echo "$there" > "$(echo "$scratch/$1"/lib/python*/site-packages)/torch.pth"
}
cat > "$scratch/try.py" <<'PYTHON'
import sys, torch, einsight as es
q, k, v = torch.randn(3, 1, 2, 7, 5)
assert sys.prefix in es.__file__
output, entropy = es.attention(q, k, v, es.causal(), readouts=es.Entropy())
right = es.attention(q, k, v, es.causal(), engine="reference")
assert torch.allclose(output, right, atol=1e-6) and entropy.shape == (1, 2, 7)
assert es.plan(q, k, v, es.causal(), readouts=es.Entropy()).engine == sys.argv[1], sys.argv[1]
print(sys.argv[1], "as expected")
PYTHON
try() { (cd "$scratch" && "$1/bin/python" try.py "$2"); }

environment wheel
env CC=/none CXX=/none "$scratch/wheel/bin/python" -m pip install -q --no-deps dist/*.whl
try wheel native
environment bare
env CC=/none CXX=/none "$scratch/bare/bin/python" -m pip install -q --no-deps dist/*.tar.gz
try bare stream
environment compiled
"$scratch/compiled/bin/python" -m pip install -q --no-deps dist/*.tar.gz
try compiled native
