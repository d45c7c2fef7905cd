#!/usr/bin/env bash
# Creates the environment with the extra [test] and runs the tests. Other arguments are passed on to pytest.
#
#   bash tests/run.sh                              tests of the product, of about half a second or less each
#   bash tests/run.sh --long                       those and the long ones: real runs that fail, are killed and resume
#   bash tests/run.sh --project                    the second lane: pages, layout, ruff, mypy, benchmarks, demo,
#                                                  workarounds and the tests' own tools
#   bash tests/run.sh tests/trainer -k masking     some tests of both
#   bash tests/run.sh --cov                        tests of the product and the long ones, with coverage
#   bash tests/run.sh --cov tests/trainer          some tests, with coverage
#   bash tests/run.sh -m slow                      slow tests: those that take minutes or many GB
#   bash tests/run.sh --all                        all tests, and the fault table (hours on two cores)
#   bash tests/run.sh --constraints FILE ...       with the versions of FILE, in a separate environment
#
# In continuous integration (CI is set) both lanes run as one, with the long tests. A whole run with coverage fails if the
# coverage of data_prep and trainer is below the minimum in pyproject.toml (tool.coverage.report). Ranks and other
# processes are included, except killed ones. The last line names the command that lists uncovered lines by file.
# CLOZEWORKS_VENV is the folder of the environment (default: .venv in the repository root).

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
source "$root/launch/environment.sh"

# The caller's own modules and options of Python, pytest and coverage must not reach the tests. Without bytecode on disk
# (PYTHONDONTWRITEBYTECODE) every process compiles what it imports, which doubles the CPU time of an import.
while IFS= read -r name; do
    unset "$name"
done < <(compgen -e | grep -E '^(PYTEST_|COVERAGE_|PYTHON[A-Z_])' || true)

for word in "$@"; do
    if [[ $word == -h || $word == --help ]]; then
        sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
    fi
done

# Debian packages that tests need: git (the revision that a run records); for slow tests g++ (torch.compile and native
# ops; DeepSpeed installs ninja), and for tests of two hosts (tests/support/two_nodes.py) ip, pdsh, ssh and sshd, the
# last only if no service manager would start it.
missing=()
need() { command -v "$1" >/dev/null 2>&1 || missing+=("$2"); }
need git git
if [[ " $* " == *" --all "* || " $* " == *slow* ]]; then
    need g++ g++
    need ip iproute2
    need pdsh pdsh
    need ssh openssh-client
    [[ -d /run/systemd/system ]] || PATH=$PATH:/usr/sbin need sshd openssh-server
fi
if ((${#missing[@]})) && ! install_debian_packages "${missing[@]}"; then
    echo "warning: some tests need missing packages. Fix: as root, apt-get install ${missing[*]}" >&2
fi

arguments=()
whole=1 # 1: run whole lanes
long= # not empty: with the long tests, as in continuous integration
[[ -z ${CI:-} ]] || long=1
coverage=
lane=${CI:+both}
lane=${lane:-product}
while (($#)); do
    case $1 in
        --all) arguments+=(-m "" -p tests.fault_table --timeout 3600) whole=0 ;;
        --constraints)
            [[ -f ${2:-} ]] || _die "the file '${2:-}' of --constraints does not exist." \
                "Fix: give a file of versions, such as constraints.txt. [missing-constraints]"
            CLOZEWORKS_CONSTRAINTS=$2
            CLOZEWORKS_VENV=${CLOZEWORKS_VENV:-$root/.venv-$(sha256sum <"$2" | cut -c1-8)}
            shift
            ;;
        --cov) coverage=--cov long=1 ;;
        --long) long=1 ;;
        --project) lane=project ;;
        *) arguments+=("$1") whole=0 ;;
    esac
    shift
done

prepare_environment test

# The caller's settings of MLflow and Hugging Face must not reach the tests.
while IFS= read -r name; do
    unset "$name"
done < <(compgen -e | grep -E '^(MLFLOW|_MLFLOW|HF_|HUGGING_FACE_|TRANSFORMERS_|DATABRICKS_)' || true)
export HF_HUB_OFFLINE=1 MLFLOW_DISABLE_TELEMETRY=true
export OMP_NUM_THREADS=1 # the tests start ranks, which share the cores
if [[ $(count_gpus) -eq 0 ]]; then
    export DS_ACCELERATOR=cpu
fi

# Coverage data go to the folder of the environment, not into the sources.
export COVERAGE_FILE=$CLOZEWORKS_VENV/coverage/data
mkdir -p "${COVERAGE_FILE%/*}"
cd "$root"
pytest() { python -m pytest --durations=15 "$@"; }
if ((!whole)); then
    pytest ${coverage:+--cov} --cov-fail-under=0 "${arguments[@]}" # a path right after --cov would be what is measured
    exit
fi
# Tests wait for servers, ranks and time limits: four workers keep two cores busy.
cores=$(env -u OMP_NUM_THREADS nproc) # nproc reads that variable if it is set
workers=$((cores + 2))
# What is about this project rather than about what it makes. Everything else, also new folders, is of the product.
project=(tests/test_*.py tests/benchmarks tests/gpu tests/workarounds tests/fuzzing/test_watching.py
    tests/system/test_demo.py)
chosen="not slow" files=()
case $lane in
    both)
        # In a new environment every worker would compile the libraries that it imports, and the tests, and there is no
        # cache of mypy. So one process imports and collects them first. What fails fails in tests too.
        python -m mypy >/dev/null 2>&1 &
        PYTHONPATH=$root python -W ignore tests/support/fork_server.py --compile >/dev/null 2>&1 || true
        wait
        ;;
    project) files=("${project[@]}") ;;
    product)
        [[ $long ]] || chosen+=" and not long"
        files=("${project[@]/#/--ignore=}")
        ;;
esac
[[ $lane == project || ! $coverage ]] || files=(--cov ${files[@]+"${files[@]}"})
status=0
# A worker runs whole files, the longest ones first (tests/conftest.py).
pytest -m "$chosen" --numprocesses "$workers" --dist loadfile --no-loadscope-reorder ${files[@]+"${files[@]}"} || status=1
if [[ $lane != project && $coverage ]]; then
    echo "uncovered lines by file: COVERAGE_FILE=$COVERAGE_FILE python -m coverage report --show-missing"
fi
if [[ $lane == product ]]; then
    [[ $long ]] || echo "not run: long tests, such as those of faults. Run bash tests/run.sh --long"
    echo "not run: pages, layout, ruff, mypy, benchmarks and tools. Run bash tests/run.sh --project"
fi
exit $status
