#!/usr/bin/env bash
# Regenerates protos/gen from the .proto files. `make protos` runs it; CI runs it and fails on a difference.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
rm -rf gen/inference
"$python" -m grpc_tools.protoc -I . --python_out=gen --grpc_python_out=gen --mypy_out=gen --mypy_grpc_out=gen \
  $(find inference -name '*.proto' | sort)
find gen/inference -type d -exec touch {}/__init__.py \;
