#!/usr/bin/env bash
# Fails when the committed code in gen/ differs from what the .proto files generate.
set -euo pipefail
cd "$(dirname "$0")"
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
./generate.sh "$fresh"
if ! diff -r --exclude=__pycache__ "$fresh/inference" gen/inference; then
  echo "protos/gen is not up to date: run 'make protos' and commit the result" >&2
  exit 1
fi
