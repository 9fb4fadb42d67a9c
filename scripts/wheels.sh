#!/usr/bin/env bash
# Our two wheels, built from a copy of the sources: setuptools would otherwise pack what an
# earlier build left behind, and would write into the clone.
#
#   wheels.sh digest             prints a digest of everything the wheels are built from
#   wheels.sh build PYTHON OUT   builds both into the empty or new folder OUT; needs no network,
#                                but a PYTHON with pip, setuptools and wheel
set -euo pipefail

# The sources as a tar stream that is the same wherever and whenever they are the same.
pack() {
    find pyproject.toml README.md LICENSE sglang_ext chunk_index recompute sched profiles scripts \
        \( -name __pycache__ -o -name '*.egg-info' \) -prune -o \( -type f -o -type l \) -print0 |
        LC_ALL=C sort --zero-terminated |
        tar --create --null --files-from=- --owner=0 --group=0 --mtime='2020-01-01 UTC'
}

build() {
    local python=$1 out=$2 copy
    copy=$(mktemp -d)
    # shellcheck disable=SC2064  # expand now: the variable is gone when the trap runs
    trap "rm -rf '$copy'" EXIT
    (cd "$root" && pack) | tar --extract --directory="$copy"
    "$python" -m pip wheel --quiet --no-deps --no-index --no-build-isolation \
        --wheel-dir "$out" "$copy" "$copy/sglang_ext/cpu/dist"
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
    digest) cd "$root" && pack | sha256sum | cut -c1-64 ;;
    build) build "$2" "$3" ;;
    *) echo "usage: wheels.sh digest | wheels.sh build PYTHON OUT" >&2 && exit 2 ;;
esac
