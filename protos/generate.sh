#!/usr/bin/env bash
# Generates Python code from the .proto files into gen/ (or the folder given as the first argument).
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
out=${1:-gen}
mkdir -p "$out"
rm -rf "$out/inference"
mapfile -t files < <(find inference -name '*.proto' | sort)
"$python" -m grpc_tools.protoc -I . --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" --mypy_grpc_out="$out" \
  "${files[@]}" 2> >(grep -v '^Writing mypy' >&2)
find "$out/inference" -type d -exec touch {}/__init__.py \;
