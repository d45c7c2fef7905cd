#!/usr/bin/env bash
# Creates the project's virtual environment: torch first, then the project, with the versions of constraints.txt.
#
#   bash launch/environment.sh [EXTRAS]
#   source launch/environment.sh; prepare_environment [EXTRAS]      the same, and puts its bin/ first in PATH
#
# EXTRAS is a comma-separated list of extras of pyproject.toml:
#   core       no extra: preparing data (no torch, DeepSpeed or MLflow)
#   train      pretraining; registry: exporting, registering and using models; finetune: fine-tuning
#   all        train, registry and finetune (default)
#   test       everything that the tests need
#   s3, gcs, http, dask, language, datatrove   libraries of preparation, without torch
#
# CLOZEWORKS_VENV          folder of the environment (default: .venv in the repository root)
# CLOZEWORKS_CONSTRAINTS   file of versions (default: constraints.txt; it must contain the version of torch)
# CLOZEWORKS_PYTHON        Python interpreter (default: the newest of python3.13, python3.12, python3.11, python3)
# CLOZEWORKS_INSTALLER     uv (default: downloads in parallel, and is itself installed by pip if missing) or pip
# The settings of pip (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf) apply to both installers.
# A second call returns at once if pyproject.toml, the constraints, the Python and the versions of the installed packages
# are unchanged.

set -euo pipefail

CLOZEWORKS_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PREPARATION="core s3 gcs http dask language datatrove" # the extras without torch
EXTRAS="$PREPARATION train registry finetune all test"

# Create or complete the environment in $CLOZEWORKS_VENV and put it first in PATH.
prepare_environment() {
    local extras=${1:-all}
    extras=${extras//core,/} extras=${extras%,core} # every installation contains core
    case ${CLOZEWORKS_INSTALLER:-uv} in uv | pip) ;; *)
        _die "CLOZEWORKS_INSTALLER=$CLOZEWORKS_INSTALLER is unknown. Fix: set it to uv or pip. [unknown-installer]" ;;
    esac
    CLOZEWORKS_VENV=${CLOZEWORKS_VENV:-$CLOZEWORKS_ROOT/.venv}
    [[ $CLOZEWORKS_VENV == /* ]] || CLOZEWORKS_VENV=$PWD/$CLOZEWORKS_VENV
    export CLOZEWORKS_VENV
    CLOZEWORKS_CONSTRAINTS=${CLOZEWORKS_CONSTRAINTS:-$CLOZEWORKS_ROOT/constraints.txt}
    [[ $CLOZEWORKS_CONSTRAINTS == /* ]] || CLOZEWORKS_CONSTRAINTS=$PWD/$CLOZEWORKS_CONSTRAINTS
    [[ -f $CLOZEWORKS_CONSTRAINTS ]] ||
        _die "the file $CLOZEWORKS_CONSTRAINTS does not exist." \
            "Fix: set CLOZEWORKS_CONSTRAINTS to a file of versions. [missing-constraints]"
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
    export DS_BUILD_OPS=0 # DeepSpeed is a source distribution: copy its Python files, compile nothing
    unset PYTHONHOME
    _make_venv
    _install_once "$extras"
    export VIRTUAL_ENV=$CLOZEWORKS_VENV PATH=$CLOZEWORKS_VENV/bin:$PATH
}

# Print the number of NVIDIA GPUs: 0 if the driver's nvidia-smi is missing or fails.
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
            _die "the Python of the environment $venv is older than 3.11." \
                "Fix: remove the folder, or set CLOZEWORKS_VENV to another one. [python-too-old]"
        return
    fi
    if [[ -d $venv && ! -f $venv/pyvenv.cfg && -n $(ls -A "$venv") ]]; then
        _die "$venv is not empty and is not a virtual environment." \
            "Fix: set CLOZEWORKS_VENV to another folder. [not-an-environment]"
    fi
    local python
    python=$(_find_python) || exit 1
    _have_venv "$python" || _install_venv_package "$python"
    _say "creating the virtual environment $venv with $("$python" --version) ($python)"
    "$python" -m venv --clear "$venv"
}

# Print the path of the Python to use. It must run: version managers have shims for versions that are not installed.
_find_python() {
    local name path first=
    if [[ -n ${CLOZEWORKS_PYTHON:-} ]]; then
        if ! _is_new_enough "$CLOZEWORKS_PYTHON"; then
            _die "CLOZEWORKS_PYTHON=$CLOZEWORKS_PYTHON is not a Python of version 3.11 or newer." \
                "Fix: set it to one. [python-too-old]"
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
    [[ -n $first ]] || _die "none of python3.13, python3.12, python3.11 and python3 is Python 3.11 or newer." \
        "Fix: install one (Debian 12 or newer: apt-get install python3 python3-venv)," \
        "or set CLOZEWORKS_PYTHON. [python-too-old]"
    echo "$first"
}

_is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

_have_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

# Debian has venv's ensurepip in a separate package.
_install_venv_package() {
    local package
    package=$("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if ! install_debian_packages "$package" || ! _have_venv "$1"; then
        _die "$1 cannot create virtual environments because its module ensurepip is missing." \
            "Fix: as root, apt-get install python3-venv (or $package), then rerun this command. [missing-ensurepip]"
    fi
}

# Install Debian packages; false if that is impossible (no apt-get, not root) or fails.
install_debian_packages() {
    command -v apt-get >/dev/null 2>&1 && [[ $(id -u) -eq 0 ]] || return 1
    _say "installing the Debian package(s) $*"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" >/dev/null 2>&1 ||
        { apt-get update -q >/dev/null 2>&1 &&
            DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" >/dev/null; }
}

# Install unless a stamp records it; a lock serializes commands that share the environment.
_install_once() {
    local extras=$1 stamp wanted
    stamp=$CLOZEWORKS_VENV/clozeworks-$extras.stamp
    wanted=$(_fingerprint)
    (
        if command -v flock >/dev/null 2>&1; then flock 9; fi
        if _is_installed "$extras" "$wanted"; then exit 0; fi
        _install "$extras"
        {
            printf '%s\n' "$wanted"
            _packages
        } >"$stamp.new"
        mv "$stamp.new" "$stamp"
    ) 9>"$CLOZEWORKS_VENV/clozeworks.lock" || exit 1
}

# _all_among WORDS EXTRAS: whether each extra of a comma-separated list is one of the words.
_all_among() {
    local extra
    for extra in ${2//,/ }; do [[ " $1 " == *" $extra "* ]] || return 1; done
}

# The installed packages, whose folders are named by package and version.
_packages() {
    local folder
    for folder in "$CLOZEWORKS_VENV"/lib/python*/site-packages/*.dist-info; do
        [[ ! -d $folder || ${folder##*/} == pip-* ]] || printf '%s\n' "${folder#"$CLOZEWORKS_VENV/"}"
    done
}

# _is_installed EXTRAS FINGERPRINT: by a stamp of these extras, or of others that contain them, whose packages are all
# there in the versions of then.
_is_installed() {
    local stamp stamps=("$CLOZEWORKS_VENV/clozeworks-$1.stamp")
    if _all_among core "$1"; then
        stamps=("$CLOZEWORKS_VENV"/clozeworks-*.stamp)
    elif _all_among "core train registry finetune all" "$1"; then
        stamps+=("$CLOZEWORKS_VENV"/clozeworks-{all,test}.stamp)
    fi
    for stamp in "${stamps[@]}"; do
        if [[ -f $stamp ]] && _holds "$stamp" "$2"; then return 0; fi
    done
    return 1
}

# _holds STAMP FINGERPRINT
_holds() {
    local line
    {
        IFS= read -r line && [[ $line == "$2" ]] || return 1
        while IFS= read -r line; do
            [[ -d $CLOZEWORKS_VENV/$line ]] || return 1
        done
    } <"$1"
}

_fingerprint() {
    (cd "$CLOZEWORKS_ROOT" && "$CLOZEWORKS_VENV/bin/python" - pyproject.toml "$CLOZEWORKS_CONSTRAINTS") <<'PYTHON'
import hashlib, os, sys

parts = [sys.version, sys.prefix, os.getcwd()] + [open(name, encoding="utf-8").read() for name in sys.argv[1:]]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PYTHON
}

_install() {
    local extras=$1 log=$CLOZEWORKS_VENV/install.log started=$SECONDS project=$CLOZEWORKS_ROOT
    : >"$log"
    _say "installing into $CLOZEWORKS_VENV (the installer's output is in $log)"
    _all_among core "$extras" || project+="[$extras]"
    _all_among "$PREPARATION" "$extras" || _install_torch "$log"
    _say "installing clozeworks [$extras] and its dependencies, versions from ${CLOZEWORKS_CONSTRAINTS##*/}"
    _uv "$log" -e "$project" || _pip "$log" -e "$project" || _pip_failed "$log" "the installation of clozeworks failed"
    _repair_scripts
    _say "installed: $(du -sh "$CLOZEWORKS_VENV" | cut -f1) in $((SECONDS - started)) s"
}

# Install with uv, which downloads in parallel; false if uv is missing, cannot use pip's settings, or fails.
_uv() {
    local log=$1 uv options
    shift
    [[ ${CLOZEWORKS_INSTALLER:-uv} == uv ]] || return 1
    if ! uv=$(command -v uv); then
        uv=$CLOZEWORKS_VENV/bin/uv
        [[ -x $uv ]] || _pip "$log" uv || return 1
        [[ -x $uv ]] || return 1
    fi
    options=$(_uv_options) || return 1
    # The system's certificates, as pip uses them: a company's own authority is among them.
    # shellcheck disable=SC2086 # words of options
    if UV_NATIVE_TLS=${UV_NATIVE_TLS:-true} "$uv" pip install --python "$CLOZEWORKS_VENV/bin/python" \
        -c "$CLOZEWORKS_CONSTRAINTS" $options "$@" >>"$log" 2>&1
    then return 0; fi
    _say "uv failed; continuing with pip"
    return 1
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
settings = {}
for line in sys.stdin:
    name, _, value = line.strip().partition("=")
    section, _, name = name.rpartition(".")
    if section in ("global", "install", ":env:"):
        settings[name] = ast.literal_eval(value)
words = ["--index-strategy", "unsafe-best-match"]
for name, value in settings.items():
    if name in OPTIONS:
        words += [word for item in value.split() for word in (OPTIONS[name], item)]
    elif name not in WITHOUT_EFFECT:
        sys.exit(1)
print(*words, sep="\n")'
}

# The CPU build if there is no GPU: the default Linux build pulls several GB of CUDA libraries. Always by pip, because
# uv does not find a local CPU build of the version without its +cpu.
_install_torch() {
    local log=$1 version
    version=$(sed -n 's/^torch==//p' "$CLOZEWORKS_CONSTRAINTS")
    [[ -n $version ]] || _die "$CLOZEWORKS_CONSTRAINTS contains no version of torch." \
        "Fix: add a line such as torch==2.13.0. [missing-torch-version]"
    if "$CLOZEWORKS_VENV/bin/python" -c "import importlib.metadata as m, sys
sys.exit(m.version('torch').partition('+')[0] != '$version')" 2>/dev/null; then
        _say "torch $version is installed already"
        return
    fi
    if [[ $(uname -s) == Linux && $(count_gpus) -eq 0 ]]; then
        _say "no NVIDIA GPU found: installing the CPU build of torch $version (about 200 MB)"
        if _pip "$log" "torch==$version+cpu"; then return; fi
        # pip has two messages for the absence of that build; a network failure must not count as absence.
        if ! grep -qE 'No matching distribution found|ResolutionImpossible' "$log" ||
            grep -qE 'connection broken|NewConnectionError|timed out|SSLError' "$log"; then
            _pip_failed "$log" "the installation of torch failed"
        fi
        _say "warning: pip finds no CPU build of torch $version, so the default build follows. On x86_64 it downloads" \
            "several GB of CUDA libraries that this machine cannot use. To avoid that, press Ctrl-C and rerun with" \
            "PIP_EXTRA_INDEX_URL set to PyTorch's index of CPU wheels (PyTorch's page 'Start Locally', pip, CPU," \
            "shows it after --index-url)."
    else
        _say "installing torch $version (with CUDA on Linux: several GB)"
    fi
    _pip "$log" "torch==$version" || _pip_failed "$log" "the installation of torch failed"
}

# Rewrite the first line of packages' own scripts (deepspeed) if the path of Python has a space or is long: pip writes
# that path after "#!", and the system accepts one word of at most 127 or 255 bytes there.
_repair_scripts() {
    local script first
    [[ $CLOZEWORKS_VENV == *[[:space:]]* || ${#CLOZEWORKS_VENV} -gt 100 ]] || return 0
    for script in "$CLOZEWORKS_VENV"/bin/*; do
        { IFS= read -r first <"$script"; } 2>/dev/null || continue
        [[ $first == "#!$CLOZEWORKS_VENV/bin/python"* ]] || continue
        cp -p "$script" "$script.new" # keeps the permissions
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
    # Python compiles modules at their first import; compiling all of them here takes 15 s longer.
    "$CLOZEWORKS_VENV/bin/python" -m pip install -c "$CLOZEWORKS_CONSTRAINTS" --no-compile "$@" >>"$log" 2>&1
}

_pip_failed() {
    tail -n 15 "$1" >&2
    _die "$2; the last lines of $1 are above." \
        "Fix: remove the cause (network, disk, settings of pip), then rerun this command. [installation-failed]"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    case ${1:-} in
        -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" ;;
        *)
            if ! _all_among "$EXTRAS" "${1:-all}"; then
                echo "error: $1 is not a list of extras. Fix: give one or several of ${EXTRAS// /, }," \
                    "separated by commas. [unknown-extra]" >&2
                exit 2
            fi
            prepare_environment "${1:-}"
            _say "ready: source $(printf %q "$CLOZEWORKS_VENV/bin/activate")"
            ;;
    esac
fi
