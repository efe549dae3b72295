#!/bin/sh
# Sets up the virtual environment: requirements/install.sh VENV. With --check it only says what is missing.
#
# What is missing is said before anything is downloaded, all at once. A set-up that was interrupted begins
# with a new environment and goes on with what was downloaded by then: uv and pip keep that in their caches.
#
# PYTHON              the interpreter to use; otherwise python3.11, python3.12 or python3, if it is one of the
#                     two; otherwise uv fetches Python 3.11
# PIP_FIND_LINKS      directories with wheels, separated by spaces; PyTorch's CPU build is taken from there if it
#                     is there
# UV_OFFLINE=1        there is no network, and the caches have everything
# SKIP_CHECKS=1       set up although something is missing
# PROC                where to read cpuinfo and meminfo instead of /proc
set -eu
cd "$(dirname "$0")/.."

DISK_GB=6
MEMORY_GB=9
FETCHED=3.11

missing=
lacks() {
    missing="$missing
  - $1"
}

# Of an interpreter: "3.11", or nothing when it does not run (pyenv has commands that only print a message).
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || :; }
makes_environments() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

is_supported() {
    case "$(version_of "$1")" in 3.11 | 3.12) ;; *) return 1 ;; esac
}

# Sets $python to the interpreter to use, or to nothing when uv has to fetch one.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_supported "$PYTHON" || lacks "PYTHON=$PYTHON is not Python 3.11 or 3.12: unset it, or name one that is"
        python=$PYTHON
        return
    fi
    for python in python3.11 python3.12 python3; do
        if is_supported "$python"; then return; fi
    done
    python=
}

# Sets $helper to an interpreter from which an environment with uv can be made, of any version that pip has;
# to nothing when uv itself is there, or when there is none.
find_helper() {
    helper=
    if [ -n "$python" ] && makes_environments "$python"; then
        helper=$python
    elif ! command -v uv >/dev/null; then
        for helper in python3.13 python3.12 python3.11 python3.10 python3; do
            if makes_environments "$helper"; then return; fi
        done
        helper=
        lacks "Python 3.11 or 3.12 with its venv module, or any Python with it, or uv: \
sudo apt install python3 python3-venv, or set PYTHON=/path/to/python3.12"
    fi
}

# Whether anything at all answers there. Without a tool to ask with, nothing is said against it.
reaches() {
    case $1 in http*) ;; *) return 0 ;; esac
    if command -v curl >/dev/null; then
        curl -sk -o /dev/null --max-time 10 "$1"
    elif command -v wget >/dev/null; then
        wget -q --no-check-certificate -T 10 -t 1 --spider "$1" || [ $? -eq 8 ]
    fi
}

check_network() {
    if [ -n "${UV_OFFLINE:-}" ]; then return; fi
    index=${UV_DEFAULT_INDEX:-${UV_INDEX_URL:-${PIP_INDEX_URL:-https://pypi.org/simple/}}}
    reaches "$index" \
        || lacks "network: $index does not answer; set HTTPS_PROXY, or UV_DEFAULT_INDEX and PIP_INDEX_URL to a mirror"
    if [ -z "$(local_torch)" ]; then
        reaches https://download.pytorch.org/whl/cpu/ \
            || lacks "network: https://download.pytorch.org/whl/cpu does not answer; set HTTPS_PROXY, \
or put the wheel of torch+cpu for Python ${version:-$FETCHED} into a directory and set PIP_FIND_LINKS to it"
    fi
    if [ -z "$python" ] && { [ -n "$helper" ] || command -v uv >/dev/null; }; then
        reaches "${UV_PYTHON_INSTALL_MIRROR:-https://github.com/astral-sh/python-build-standalone}" \
            || lacks "Python 3.11 or 3.12: there is none here, and github.com, from where uv would fetch one, \
does not answer; sudo apt install python3.12 python3.12-venv, or set PYTHON=/path/to/python3.12"
    fi
}

# The wheel of PyTorch's CPU build for $version under PIP_FIND_LINKS.
local_torch() {
    tag=cp$(echo "${version:-$FETCHED}" | tr -d .)
    for directory in ${PIP_FIND_LINKS:-}; do
        for wheel in "$directory"/torch-*+cpu*-"$tag"-*.whl; do
            if [ -e "$wheel" ]; then echo "$wheel"; fi
        done
    done
}

check_machine() {
    proc=${PROC:-/proc}
    [ "$(uname -s) $(uname -m)" = "Linux x86_64" ] || lacks "Linux on x86-64: this is $(uname -s) on $(uname -m)"
    grep -qw avx2 "$proc/cpuinfo" 2>/dev/null || lacks "a CPU with AVX2: the engine's kernels need it"
    command -v cc >/dev/null || command -v gcc >/dev/null || lacks "a C compiler: sudo apt install build-essential"
    memory_kb=$(awk '/^(MemTotal|SwapTotal):/ { sum += $2 } END { print sum + 0 }' "$proc/meminfo" 2>/dev/null || echo 0)
    [ "$memory_kb" -ge $((MEMORY_GB * 1000000)) ] \
        || lacks "$MEMORY_GB GB of memory for the two engines of \`make serve\`: $((memory_kb / 1000000)) GB are there, with swap"
    used_kb=$(du -sk "$venv" 2>/dev/null | awk '{ print $1 }')
    free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
    [ $((free_kb + ${used_kb:-0})) -ge $((DISK_GB * 1000000)) ] \
        || lacks "$DISK_GB GB of disk under $PWD: $((free_kb / 1000000)) GB are free"
}

check() {
    find_python
    version=${python:+$(version_of "$python")}
    find_helper
    check_machine
    check_network
    [ -n "$missing" ] || return 0
    echo "Not set up, and nothing downloaded. Missing here:$missing
SKIP_CHECKS=1 sets up all the same." >&2
    return 1
}

# An empty environment with uv in it.
make_environment() {
    if [ -n "$python" ] && [ "$helper" = "$python" ]; then
        "$python" -m venv "$venv"
        "$venv/bin/python" -m pip install -q uv
        return
    fi
    uv=uv
    if [ -n "$helper" ]; then
        scratch=$(mktemp -d)
        trap 'rm -rf "$scratch"' EXIT
        "$helper" -m venv "$scratch"
        "$scratch/bin/python" -m pip install -q uv
        uv=$scratch/bin/uv
    fi
    "$uv" venv -q --seed --python "${python:-$FETCHED}" "$venv"
    "$uv" pip install -q --python "$venv/bin/python" uv
}

# Bytecode is compiled once here: every replica imports some 10,000 modules, in several processes.
install_packages() {
    version=$(version_of "$venv/bin/python")
    torch_backend='--torch-backend cpu'
    if [ -n "$(local_torch)" ]; then torch_backend=; fi
    # shellcheck disable=SC2086 # pip separates them by any spaces, uv by a comma
    export UV_FIND_LINKS="${UV_FIND_LINKS:-$(echo ${PIP_FIND_LINKS:-} | tr ' ' ,)}"
    # shellcheck disable=SC2086 # two words, or none
    "$venv/bin/uv" pip install -q --python "$venv/bin/python" --no-deps --compile-bytecode $torch_backend \
        -r requirements/cpu.lock
    "$venv/bin/uv" pip install -q --python "$venv/bin/python" --no-deps -e .
}

# Whether the environment was complete once: an interrupted set-up may have left half a package.
is_complete() {
    [ -e "$venv/.ready" ] && is_supported "$venv/bin/python" && "$venv/bin/uv" --version >/dev/null 2>&1
}

if [ "$1" = --check ]; then
    venv=.venv
    check
    exit
fi
venv=$1
if ! is_complete; then
    check || [ -n "${SKIP_CHECKS:-}" ]
    if [ -e "$venv" ]; then
        echo "Setting up $venv anew; what was downloaded is kept"
        rm -rf "$venv"
    else
        echo "Setting up $venv (once, about two minutes)"
    fi
    make_environment
fi
rm -f "$venv/.ready"
install_packages
touch "$venv/.ready"
