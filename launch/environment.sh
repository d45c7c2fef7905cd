#!/usr/bin/env bash
# Makes the project's virtual environment: torch first, then the project with the versions of constraints.txt.
#
#   bash launch/environment.sh [EXTRAS]      EXTRAS: optional dependencies by name, e.g. test or test,s3
#   source launch/environment.sh; prepare_environment [EXTRAS]      the same, and its bin/ comes first in PATH
#
# CLOZEWORKS_VENV     the folder of the environment (default: .venv in the repository root)
# CLOZEWORKS_CONSTRAINTS   versions to install (default: constraints.txt; it must name torch's)
# CLOZEWORKS_PYTHON   the Python that makes it (default: the newest of python3.13, python3.12, python3.11, python3)
# Pip's own settings (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf) are honored.
# Run again, it returns at once when pyproject.toml, the constraints and the Python are unchanged.

set -euo pipefail

CLOZEWORKS_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Make or complete the environment in $CLOZEWORKS_VENV and put it first in PATH.
prepare_environment() {
    local extras=${1:-}
    CLOZEWORKS_VENV=${CLOZEWORKS_VENV:-$CLOZEWORKS_ROOT/.venv}
    [[ $CLOZEWORKS_VENV == /* ]] || CLOZEWORKS_VENV=$PWD/$CLOZEWORKS_VENV
    export CLOZEWORKS_VENV
    CLOZEWORKS_CONSTRAINTS=${CLOZEWORKS_CONSTRAINTS:-$CLOZEWORKS_ROOT/constraints.txt}
    [[ $CLOZEWORKS_CONSTRAINTS == /* ]] || CLOZEWORKS_CONSTRAINTS=$PWD/$CLOZEWORKS_CONSTRAINTS
    [[ -f $CLOZEWORKS_CONSTRAINTS ]] ||
        _die "there is no file $CLOZEWORKS_CONSTRAINTS; name a file of versions in CLOZEWORKS_CONSTRAINTS"
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
    export DS_BUILD_OPS=0 # DeepSpeed comes as source: copy its Python and compile nothing
    unset PYTHONHOME
    _make_venv
    _install_once "$extras"
    export VIRTUAL_ENV=$CLOZEWORKS_VENV PATH=$CLOZEWORKS_VENV/bin:$PATH
}

# Print how many NVIDIA GPUs the machine has: 0 where the driver's nvidia-smi is missing or fails.
count_gpus() {
    if command -v nvidia-smi >/dev/null 2>&1; then
        { timeout 60 nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true
    else
        echo 0
    fi
}

_say() { printf '%s %s\n' "$(date +%H:%M:%S)" "$*"; }

_die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

_make_venv() {
    local venv=$CLOZEWORKS_VENV
    if [[ -x $venv/bin/python ]] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        _is_new_enough "$venv/bin/python" ||
            _die "the environment $venv has a Python older than 3.11; remove it, or set CLOZEWORKS_VENV to another folder"
        return
    fi
    if [[ -d $venv && ! -f $venv/pyvenv.cfg && -n $(ls -A "$venv") ]]; then
        _die "$venv is not empty and no virtual environment; set CLOZEWORKS_VENV to another folder"
    fi
    local python
    python=$(_find_python) || exit 1
    _have_venv "$python" || _install_venv_package "$python"
    _say "making the virtual environment $venv with $("$python" --version) ($python)"
    "$python" -m venv --clear "$venv"
}

# Print the path of the Python to use. Shims of version managers exist for versions that do not run: try each.
_find_python() {
    local name path first=
    if [[ -n ${CLOZEWORKS_PYTHON:-} ]]; then
        if ! _is_new_enough "$CLOZEWORKS_PYTHON"; then
            _die "CLOZEWORKS_PYTHON=$CLOZEWORKS_PYTHON is no Python of version 3.11 or newer"
        fi
        command -v "$CLOZEWORKS_PYTHON"
        return
    fi
    for name in python3.13 python3.12 python3.11 python3; do
        if ! path=$(command -v "$name") || ! _is_new_enough "$path"; then continue; fi
        if _have_venv "$path"; then
            echo "$path"
            return
        fi
        first=${first:-$path}
    done
    [[ -n $first ]] || _die "no Python of version 3.11 or newer found among python3.13, python3.12, python3.11 and" \
        "python3; install one (Debian 12 or newer: apt-get install python3 python3-venv) or name it in CLOZEWORKS_PYTHON"
    echo "$first"
}

_is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

_have_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

# Debian ships venv's ensurepip in a package of its own.
_install_venv_package() {
    local package
    package=$("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if ! install_debian_packages "$package" || ! _have_venv "$1"; then
        _die "$1 cannot make virtual environments (its module ensurepip is missing);" \
            "as root: apt-get install python3-venv (or $package), then run this again"
    fi
}

# Install Debian packages; false where that is not possible (no apt-get, not root, or it failed).
install_debian_packages() {
    command -v apt-get >/dev/null 2>&1 && [[ $(id -u) -eq 0 ]] || return 1
    _say "installing the Debian package(s) $*"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" >/dev/null 2>&1 ||
        { apt-get update -q >/dev/null 2>&1 &&
            DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" >/dev/null; }
}

# Install unless the stamp says it is done; one at a time where two commands share the environment.
_install_once() {
    local extras=$1 stamp wanted
    stamp=$CLOZEWORKS_VENV/clozeworks-${extras:-base}.stamp
    wanted=$(_fingerprint)
    (
        if command -v flock >/dev/null 2>&1; then flock 9; fi
        if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then exit 0; fi
        # An installation with extras holds the one without.
        if [[ -z $extras ]] && grep -qsxF "$wanted" "$CLOZEWORKS_VENV"/clozeworks-*.stamp; then exit 0; fi
        _install "$extras"
        printf '%s\n' "$wanted" >"$stamp.new"
        mv "$stamp.new" "$stamp"
    ) 9>"$CLOZEWORKS_VENV/clozeworks.lock" || exit 1
}

_fingerprint() {
    (cd "$CLOZEWORKS_ROOT" && "$CLOZEWORKS_VENV/bin/python" - pyproject.toml "$CLOZEWORKS_CONSTRAINTS") <<'PYTHON'
import hashlib, os, sys

parts = [sys.version, sys.prefix, os.getcwd()] + [open(name, encoding="utf-8").read() for name in sys.argv[1:]]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PYTHON
}

_install() {
    local extras=$1 log=$CLOZEWORKS_VENV/install.log started=$SECONDS
    : >"$log"
    _say "installing into $CLOZEWORKS_VENV (pip's own words go to $log)"
    _install_torch "$log"
    _say "installing clozeworks${extras:+ with [$extras]} and its dependencies, versions from ${CLOZEWORKS_CONSTRAINTS##*/} (about 200 MB)"
    _pip "$log" -e "$CLOZEWORKS_ROOT${extras:+[$extras]}" ||
        _pip_failed "$log" "the installation of clozeworks failed"
    _mend_scripts
    _say "installed: $(du -sh "$CLOZEWORKS_VENV" | cut -f1) in $((SECONDS - started)) s"
}

# The CPU build where there is no GPU: the ordinary Linux build draws several GB of CUDA libraries.
_install_torch() {
    local log=$1 version
    version=$(sed -n 's/^torch==//p' "$CLOZEWORKS_CONSTRAINTS")
    [[ -n $version ]] || _die "$CLOZEWORKS_CONSTRAINTS names no version of torch; add a line such as torch==2.13.0"
    if "$CLOZEWORKS_VENV/bin/python" -c "import importlib.metadata as m, sys
sys.exit(m.version('torch').partition('+')[0] != '$version')" 2>/dev/null; then
        _say "torch $version is there already"
        return
    fi
    if [[ $(uname -s) == Linux && $(count_gpus) -eq 0 ]]; then
        _say "no NVIDIA GPU found: installing the CPU build of torch $version (about 200 MB)"
        if _pip "$log" "torch==$version+cpu"; then return; fi
        # Pip words the absence of that build in two ways; a failing network must not look like it.
        if ! grep -qE 'No matching distribution found|ResolutionImpossible' "$log" ||
            grep -qE 'connection broken|NewConnectionError|timed out|SSLError' "$log"; then
            _pip_failed "$log" "the installation of torch failed"
        fi
        _say "pip finds no CPU build of torch $version here, so the ordinary build follows. On x86_64 it downloads" \
            "several GB of CUDA libraries that this machine cannot use. To avoid that, stop this (Ctrl-C) and run it" \
            "again with PIP_EXTRA_INDEX_URL set to PyTorch's own index of CPU wheels (PyTorch's page" \
            "'Start Locally', pip, CPU, shows it after --index-url)."
    else
        _say "installing torch $version (with CUDA on Linux: several GB)"
    fi
    _pip "$log" "torch==$version" || _pip_failed "$log" "the installation of torch failed"
}

# Let the scripts that a package brings as they are (deepspeed) begin with a line of sh where their path has a space or
# is long: pip puts Python's path after their "#!", of which the system takes one word, of 127 or 255 bytes at most.
_mend_scripts() {
    local script first
    [[ $CLOZEWORKS_VENV == *[[:space:]]* || ${#CLOZEWORKS_VENV} -gt 100 ]] || return 0
    for script in "$CLOZEWORKS_VENV"/bin/*; do
        { IFS= read -r first <"$script"; } 2>/dev/null || continue
        [[ $first == "#!$CLOZEWORKS_VENV/bin/python"* ]] || continue
        cp -p "$script" "$script.new" # for its permissions
        {
            cat <<'LINES'
#!/bin/sh
'''exec' "$(dirname "$0")/python" "$0" "$@"
' '''
LINES
            tail -n +2 "$script"
        } >"$script.new"
        mv "$script.new" "$script"
    done
}

_pip() {
    local log=$1
    shift
    "$CLOZEWORKS_VENV/bin/python" -m pip install -c "$CLOZEWORKS_CONSTRAINTS" "$@" >>"$log" 2>&1
}

_pip_failed() {
    tail -n 15 "$1" >&2
    _die "$2; pip's last lines are above, all of them in $1. Fix the cause (network, disk, pip's settings) and run this again"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    case ${1:-} in
        -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" ;;
        -* | *[!a-z0-9,]*)
            echo "error: unknown argument $1; see bash launch/environment.sh --help" >&2
            exit 2
            ;;
        *)
            prepare_environment "${1:-}"
            _say "ready: source $(printf %q "$CLOZEWORKS_VENV/bin/activate")"
            ;;
    esac
fi
