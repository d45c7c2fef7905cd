#!/usr/bin/env bash
# Creates the project's virtual environment: torch first, then the project, with the versions of constraints.txt.
#
#   bash launch/environment.sh [EXTRAS]
#   source launch/environment.sh; prepare_environment [EXTRAS]      the same, and puts its bin/ first in PATH
#
# EXTRAS is a comma-separated list of extras of pyproject.toml:
#   core       no extra: preparing data (no torch, DeepSpeed or MLflow)
#   train      pretraining; registry: exporting, registering and using models; finetune: fine-tuning
#   embedding  finetune, and fine-tuning for vectors; onnx: finetune, and exporting to ONNX
#   all        train, registry, finetune and plots (default)
#   test       everything that the tests need
#   plots, s3, gcs, http, dask, language, datatrove   libraries of preparation, without torch
#
# CLOZEWORKS_VENV          folder of the environment (default: .venv in the repository root)
# CLOZEWORKS_CONSTRAINTS   file of versions (default: constraints.txt; it must contain the version of torch)
# CLOZEWORKS_PYTHON        Python interpreter (default: the newest of python3.13, python3.12, python3.11, python3)
# CLOZEWORKS_INSTALLER     uv (default: downloads in parallel, and is itself installed by pip if missing) or pip
# The settings of pip (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf) apply to both installers. A second call returns at
# once if pyproject.toml, the constraints, the Python and the versions of the installed packages are unchanged.

set -euo pipefail

CLOZEWORKS_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PREPARATION="core plots s3 gcs http dask language datatrove" # the extras without torch
EXTRAS="$PREPARATION train registry finetune embedding onnx all test"

# Create or complete the environment in $CLOZEWORKS_VENV and put it first in PATH.
prepare_environment() {
    local extras=${1:-all}
    extras=${extras//core,/} extras=${extras%,core} # every installation contains core
    [[ ${CLOZEWORKS_INSTALLER:-uv} =~ ^(uv|pip)$ ]] ||
        _die "CLOZEWORKS_INSTALLER=$CLOZEWORKS_INSTALLER is unknown. Fix: set it to uv or pip. [unknown-installer]"
    CLOZEWORKS_VENV=${CLOZEWORKS_VENV:-$CLOZEWORKS_ROOT/.venv}
    [[ $CLOZEWORKS_VENV == /* ]] || CLOZEWORKS_VENV=$PWD/$CLOZEWORKS_VENV
    CLOZEWORKS_CONSTRAINTS=${CLOZEWORKS_CONSTRAINTS:-$CLOZEWORKS_ROOT/constraints.txt}
    [[ $CLOZEWORKS_CONSTRAINTS == /* ]] || CLOZEWORKS_CONSTRAINTS=$PWD/$CLOZEWORKS_CONSTRAINTS
    [[ -f $CLOZEWORKS_CONSTRAINTS ]] || _die "the file $CLOZEWORKS_CONSTRAINTS does not exist." \
        "Fix: set CLOZEWORKS_CONSTRAINTS to a file of versions. [missing-constraints]"
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
    export DS_BUILD_OPS=0 # DeepSpeed is a source distribution: copy its Python files, compile nothing
    unset PYTHONHOME
    _make_venv
    local wanted stamp
    wanted=$("$CLOZEWORKS_VENV/bin/python" -c 'import hashlib, sys
parts = [sys.version, sys.prefix, sys.argv[1], *(open(name, encoding="utf-8").read() for name in sys.argv[2:])]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())' \
        "$CLOZEWORKS_ROOT" "$CLOZEWORKS_ROOT/pyproject.toml" "$CLOZEWORKS_CONSTRAINTS")
    ( # a lock serializes commands that share the environment
        if command -v flock >/dev/null 2>&1; then flock 9; fi
        if _is_installed "$extras" "$wanted"; then exit 0; fi
        _install "$extras"
        stamp=$CLOZEWORKS_VENV/clozeworks-$extras.stamp
        { # the packages are folders named by package and version
            printf '%s\n' "$wanted"
            cd "$CLOZEWORKS_VENV" && compgen -G 'lib/python*/site-packages/*.dist-info' | grep -v '/pip-' || true
        } >"$stamp.new"
        mv "$stamp.new" "$stamp"
    ) 9>"$CLOZEWORKS_VENV/clozeworks.lock" || exit 1
    export CLOZEWORKS_VENV VIRTUAL_ENV=$CLOZEWORKS_VENV PATH=$CLOZEWORKS_VENV/bin:$PATH
}

# Print the number of NVIDIA GPUs: 0 if the driver's nvidia-smi is missing or fails.
count_gpus() {
    { timeout 60 nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true
}

# Install Debian packages; false if that is impossible (no apt-get, not root) or fails.
install_debian_packages() {
    command -v apt-get >/dev/null 2>&1 && [[ $(id -u) -eq 0 ]] || return 1
    _say "installing the Debian package(s) $*"
    local install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@")
    "${install[@]}" >/dev/null 2>&1 || { apt-get update -q >/dev/null 2>&1 && "${install[@]}" >/dev/null; }
}

_say() { printf '%s %s\n' "$(date +%H:%M:%S)" "$*"; }

_die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

_is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

_has_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

_make_venv() {
    local venv=$CLOZEWORKS_VENV python='' name package names=(python3.13 python3.12 python3.11 python3)
    [[ -z ${CLOZEWORKS_PYTHON:-} ]] || names=("$CLOZEWORKS_PYTHON")
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        _is_new_enough "$venv/bin/python" || _die "the Python of the environment $venv is older than 3.11." \
            "Fix: remove the folder, or set CLOZEWORKS_VENV to another one. [python-too-old]"
        return
    fi
    if [[ -d $venv && ! -f $venv/pyvenv.cfg && -n $(ls -A "$venv") ]]; then
        _die "$venv is not empty and is not a virtual environment." \
            "Fix: set CLOZEWORKS_VENV to another folder. [not-an-environment]"
    fi
    for name in "${names[@]}"; do # which must run: version managers have shims for versions that are not installed
        _is_new_enough "$name" || continue
        python=${python:-$name}
        if _has_venv "$name"; then python=$name && break; fi
    done
    [[ $python ]] || _die "none of ${names[*]} is Python 3.11 or newer." \
        "Fix: install one (Debian 12 or newer: apt-get install python3 python3-venv), or set CLOZEWORKS_PYTHON." \
        "[python-too-old]"
    if ! _has_venv "$python"; then # Debian has it in a separate package
        package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        if ! install_debian_packages "$package" || ! _has_venv "$python"; then
            _die "$python cannot create virtual environments because its module ensurepip is missing." \
                "Fix: as root, apt-get install python3-venv (or $package), then rerun this command. [missing-ensurepip]"
        fi
    fi
    _say "creating the virtual environment $venv with $("$python" --version) ($(command -v "$python"))"
    "$python" -m venv --clear "$venv"
}

# _all_among WORDS EXTRAS: whether each extra of a comma-separated list is one of the words.
_all_among() {
    local extra
    for extra in ${2//,/ }; do [[ " $1 " == *" $extra "* ]] || return 1; done
}

# _is_installed EXTRAS WANTED: by a stamp of these extras, or of others that contain them.
_is_installed() {
    local name names=$1
    if _all_among "core plots train registry finetune all" "$1"; then names+=" all test"; fi
    if [[ $1 == core ]]; then names=$EXTRAS; fi
    for name in $names; do
        if _stamp_is_true "$CLOZEWORKS_VENV/clozeworks-$name.stamp" "$2"; then return 0; fi
    done
    return 1
}

# _stamp_is_true STAMP WANTED: whether all packages that it lists are there in the versions of then.
_stamp_is_true() {
    local line
    [[ -f $1 ]] || return 1
    {
        IFS= read -r line && [[ $line == "$2" ]] || return 1
        while IFS= read -r line; do [[ -d $CLOZEWORKS_VENV/$line ]] || return 1; done
    } <"$1"
}

_install() {
    local extras=$1 log=$CLOZEWORKS_VENV/install.log started=$SECONDS project=$CLOZEWORKS_ROOT script first
    : >"$log"
    _say "installing into $CLOZEWORKS_VENV (the installer's output is in $log)"
    _all_among core "$extras" || project+="[$extras]"
    _all_among "$PREPARATION" "$extras" || _install_torch "$log"
    _say "installing clozeworks [$extras] and its dependencies, versions from ${CLOZEWORKS_CONSTRAINTS##*/}"
    _uv "$log" -e "$project" || _pip "$log" -e "$project" || _pip_failed "$log"
    # pip writes the path of Python after the "#!" of packages' own scripts (deepspeed), and the system accepts one word
    # of at most 127 or 255 bytes there.
    if [[ $CLOZEWORKS_VENV == *[[:space:]]* || ${#CLOZEWORKS_VENV} -gt 100 ]]; then
        for script in "$CLOZEWORKS_VENV"/bin/*; do
            { IFS= read -r first <"$script"; } 2>/dev/null || continue
            [[ $first != "#!$CLOZEWORKS_VENV/bin/python"* ]] ||
                sed -i "1c #!/bin/sh\n'''exec' \"\$(dirname \"\$0\")/python\" \"\$0\" \"\$@\"\n' '''" "$script"
        done
    fi
    _say "installed: $(du -sh "$CLOZEWORKS_VENV" | cut -f1) in $((SECONDS - started)) s"
}

# _uv LOG REQUIREMENT...: install with uv, which takes a third of pip's time; false if it is missing, fails, or lacks a
# setting that pip has.
_uv() {
    local uv options
    [[ ${CLOZEWORKS_INSTALLER:-uv} == uv ]] || return 1
    uv=$(command -v uv) || uv=$CLOZEWORKS_VENV/bin/uv
    [[ -x $uv ]] || { _pip "$1" uv && [[ -x $uv ]]; } || return 1
    options=$(_uv_options) || return 1
    # The system's certificates, as pip uses them: a company's own authority is among them.
    # shellcheck disable=SC2086 # words of options
    UV_NATIVE_TLS=${UV_NATIVE_TLS:-true} "$uv" pip install --python "$CLOZEWORKS_VENV/bin/python" \
        -c "$CLOZEWORKS_CONSTRAINTS" $options "${@:2}" >>"$1" 2>&1 ||
        { _say "uv failed; continuing with pip" && return 1; }
}

# Print the options of uv for pip's settings, one word per line; false for settings that uv does not have.
_uv_options() {
    "$CLOZEWORKS_VENV/bin/python" -m pip config list 2>/dev/null | "$CLOZEWORKS_VENV/bin/python" -c '
import ast, sys

OPTIONS = {"index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links",
           "trusted-host": "--allow-insecure-host", "constraint": "-c"}
WITHOUT_EFFECT = {"cert", "timeout", "default-timeout", "disable-pip-version-check", "no-input", "retries", "quiet",
                  "verbose", "progress-bar", "no-color", "cache-dir", "no-cache-dir", "root-user-action", "no-compile",
                  "config-file"}
found = [line.strip().partition("=")[::2] for line in sys.stdin]
settings = {}
for section in ("global", "install", ":env:"):  # the later one counts
    settings |= {name.rpartition(".")[2]: value for name, value in found if name.rpartition(".")[0] == section}
words = ["--index-strategy", "unsafe-best-match"]
for name, value in settings.items():
    if name in OPTIONS:
        words += [word for item in ast.literal_eval(value).split() for word in (OPTIONS[name], item)]
    elif name not in WITHOUT_EFFECT:
        sys.exit(1)
print(*words, sep="\n")'
}

# The CPU build if there is no GPU: the default Linux build pulls several GB of CUDA libraries. Always by pip, because
# uv does not find a local CPU build of the version without its +cpu.
_install_torch() {
    local log=$1 version
    version=$(sed -n 's/^torch==//p' "$CLOZEWORKS_CONSTRAINTS")
    [[ $version ]] || _die "$CLOZEWORKS_CONSTRAINTS contains no version of torch." \
        "Fix: add a line such as torch==2.13.0. [missing-torch-version]"
    if [[ -n $(compgen -G "$CLOZEWORKS_VENV/lib/python*/site-packages/torch-$version*.dist-info") ]]; then return; fi
    if [[ $(uname -s) == Linux && $(count_gpus) -eq 0 ]]; then
        _say "no NVIDIA GPU found: installing the CPU build of torch $version (about 200 MB)"
        if _pip "$log" "torch==$version+cpu"; then return; fi
        # pip has two messages for the absence of that build; a network failure must not count as absence.
        if ! grep -qE 'No matching distribution found|ResolutionImpossible' "$log" ||
            grep -qE 'connection broken|NewConnectionError|timed out|SSLError' "$log"; then
            _pip_failed "$log"
        fi
        _say "warning: pip finds no CPU build of torch $version, so the default build follows. On x86_64 it downloads" \
            "several GB of CUDA libraries that this machine cannot use. To avoid that, press Ctrl-C and rerun with" \
            "PIP_EXTRA_INDEX_URL set to PyTorch's index of CPU wheels (PyTorch's page 'Start Locally', pip, CPU," \
            "shows it after --index-url)."
    fi
    _pip "$log" "torch==$version" || _pip_failed "$log"
}

# _pip LOG REQUIREMENT...: Python compiles modules at their first import; compiling all of them takes 15 s longer.
_pip() {
    "$CLOZEWORKS_VENV/bin/python" -m pip install -c "$CLOZEWORKS_CONSTRAINTS" --no-compile "${@:2}" >>"$1" 2>&1
}

_pip_failed() {
    tail -n 15 "$1" >&2
    _die "the installation failed; the last lines of $1 are above." \
        "Fix: remove the cause (network, disk, settings of pip), then rerun this command. [installation-failed]"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    if [[ ${1:-} == -h || ${1:-} == --help ]]; then
        sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    elif _all_among "$EXTRAS" "${1:-all}"; then
        prepare_environment "${1:-}"
        _say "ready: source $(printf %q "$CLOZEWORKS_VENV/bin/activate")"
    else
        echo "error: $1 is not a list of extras. Fix: give one or several of ${EXTRAS// /, }," \
            "separated by commas. [unknown-extra]" >&2
        exit 2
    fi
fi
