#!/usr/bin/env bash
# Compiles the kernel with sanitizers into a folder of its own and runs tests on that one:
# tests/sanitize.sh SANITIZERS FOLDER TESTS…; `make sanitize` says which.
set -euo pipefail
cd "$(dirname "$0")/.."
sanitizers=$1 folder=$2
shift 2
rm -rf "$folder"
.venv/bin/python -m pip install -q --no-deps --target "$folder" -C build-dir="$folder/build" \
  -C cmake.build-type=RelWithDebInfo -C cmake.define.EINSIGHT_SANITIZE="$sanitizers" .
EINSIGHT_SANITIZED_KERNEL=$(ls "$folder"/einsight/engines/native/_native*.so)  # none if it didn't compile
export EINSIGHT_SANITIZED_KERNEL

# Python isn't linked against the sanitizer, so its library must come first; libstdc++ beside it, whose throw it wraps.
library() { "${CXX:-g++}" -print-file-name="$1"; }
case $sanitizers in
  thread) preload=$(library libtsan.so) ;;
  *) preload="$(library libasan.so) $(library libstdc++.so.6)" ;;
esac
# Python leaks by design; what torch does, compiled without the thread sanitizer, isn't looked at. -s: a report is
# written past Python while the process ends, and pytest would lose it.
export OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1
PYTHONPATH=tests LD_PRELOAD=$preload .venv/bin/python -m pytest -s -p sanitized -p no:cacheprovider "$@"
