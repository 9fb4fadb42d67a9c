#!/usr/bin/env bash
# Makes the environment that demo, tests and CI share, and tells its progress.
#
#   base     the third-party packages of requirements.lock and nothing else, in the user's cache
#            folder under the lock's digest and the Python version; all clones share it
#   .venv    this clone's thin environment: the base's packages, and our own two wheels, which
#            are built and installed anew whenever a source file has changed
#
#   PYTHON=python3.12   takes this interpreter instead of the first that fits
#   FRESH=1             ignores the base: installs the lock in full into a new .venv
#
# Needs bash, Python 3.11 or 3.12 with pip, and on a new machine a package index.
# A marker written last tells a finished environment from an interrupted one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME
export PYTHONSAFEPATH=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

PIP_VERSION=25.3
LOCK=requirements.lock
NUM_LOCKED=$(grep -c == "$LOCK")

say() { printf 'env: %s\n' "$*"; }
fail() {
    printf 'env: %s\n' "$*" >&2
    exit 1
}

# Prints the first interpreter that is a Python 3.11 or 3.12 with venv and pip.
find_python() {
    local candidates=${PYTHON:-python3.11 python3.12 python3} candidate
    local fits='import sys, pip, venv; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)})'
    for candidate in $candidates; do
        "$candidate" -c "$fits" 2>/dev/null && echo "$candidate" && return
    done
    fail "none of '$candidates' is a Python 3.11 or 3.12 with pip; set PYTHON to one that is"
}

# hold FD WHAT: takes the lock on an open file, and says so if another run has it.
hold() {
    flock --nonblock "$1" && return
    say "another run is making $2; waiting for it"
    flock "$1"
}

# show_progress DIR: reads the output of pip, which installs into DIR; prints a line every 10 s.
show_progress() {
    local line fetched=0 installed next=$((SECONDS + 10))
    while read -r -t 5 line || (($? > 128)); do
        [[ $line == Collecting* || $line == Processing* ]] && fetched=$((fetched + 1))
        ((SECONDS < next)) && continue
        installed=$(find "$1"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' | wc -l)
        say "  $SECONDS s: of $NUM_LOCKED packages $fetched fetched, $((installed - 1)) installed"
        next=$((SECONDS + 10))
    done
}

# install_lock DIR: a new environment in DIR that holds exactly the lock's packages and pip.
install_lock() {
    local log=$1/install.log
    rm -rf "$1"
    say "installing $NUM_LOCKED packages: about 5 GB to fetch, 11 GB on disk, 4 to 15 minutes"
    "$python" -m venv --without-pip "$1"
    "$python" -m pip --python "$1/bin/python" install -qq "pip==$PIP_VERSION"
    if ! "$1/bin/python" -m pip install --no-deps --only-binary=:all: --progress-bar=off \
        --requirement="$LOCK" 2>&1 | tee "$log" | show_progress "$1"; then
        grep ERROR "$log" >&2 || tail -n 5 "$log" >&2
        fail "pip could not install $LOCK; the whole log is $log"
    fi
}

make_base() {
    mkdir -p "${base%/*}"
    exec 9>"$base.lock"
    hold 9 "the base environment"
    if [[ ! -e $base/complete ]]; then
        install_lock "$base"
        touch "$base/complete"
    fi
    exec 9>&-
}

# A .pth line that adds the base as a site folder also runs the .pth files of the base;
# --system-site-packages would reach past the base to the interpreter that made it.
make_thin() {
    local packages=lib/python$version/site-packages
    say "making .venv over the base"
    rm -rf .venv
    "$python" -m venv --without-pip .venv
    printf 'import site; site.addsitedir("%s")\n' "$base/$packages" >".venv/$packages/base.pth"
}

install_ours() {
    say "building and installing our wheels"
    rm -rf .venv/sources .venv/wheels
    scripts/wheels.sh build .venv/bin/python .venv/wheels
    .venv/bin/python -m pip install --quiet --no-deps --no-index --force-reinstall \
        .venv/wheels/*.whl
    .venv/bin/python -m pip check || fail "the packages above contradict each other"
}

# made_of NAME: what the marker .venv/NAME says, nothing if there is none.
made_of() { cat ".venv/$1" 2>/dev/null || true; }

exec 8<"$LOCK"
hold 8 "this .venv"
python=$(find_python)
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
tag=$(sha256sum "$LOCK" | cut -c1-16)-py$version
base=${XDG_CACHE_HOME:-$HOME/.cache}/sglang-pic/base-$tag

if [[ ${FRESH:-0} == 1 ]]; then
    rm -f .venv/packages
    install_lock .venv
    echo "full $tag" >.venv/packages
elif [[ $(made_of packages) != "full $tag" ]]; then
    make_base
    if [[ $(made_of packages) != "thin $base" ]]; then
        make_thin
        echo "thin $base" >.venv/packages
    fi
fi
sources=$(scripts/wheels.sh digest)
if [[ $(made_of sources) != "$sources" ]]; then
    install_ours
    echo "$sources" >.venv/sources
fi
say "ready after $SECONDS s: .venv, Python $version"
