#!/usr/bin/env bash
# Makes the environment (as launch/demo.sh does, with the extra [test]) and runs the tests; arguments go to pytest:
#
#   bash tests/run.sh                              all but the slow ones
#   bash tests/run.sh tests/trainer -k masking     some
#   bash tests/run.sh --cov                        all but the slow ones, and the lines that they reach
#   bash tests/run.sh --cov tests/trainer          some, and the lines that they reach
#   bash tests/run.sh -m slow                      those that take minutes or many GB
#   bash tests/run.sh --all                        every test, and at the end the table of faults (hours on two cores)
#   bash tests/run.sh --constraints FILE ...       with the versions of FILE, in an environment of its own
#
# A whole run that counts lines (--cov; always in continuous integration, where CI is set) fails where its tests reach
# less of data_prep and trainer than pyproject.toml's floor (tool.coverage.report). Lines of ranks and other processes
# count, except those of killed ones. The lines that no test reaches, by file: coverage report, as the end says.
# CLOZEWORKS_VENV names the environment's folder (default: .venv in the repository root).

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
source "$root/launch/environment.sh"

for word in "$@"; do
    if [[ $word == -h || $word == --help ]]; then
        sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
    fi
done

# Debian packages that tests need beside Python: git (the revision that a run records); for the slow tests g++
# (torch.compile and native ops; ninja comes with DeepSpeed), and for those with two hosts (tests/support/two_nodes.py) ip, pdsh,
# ssh and sshd, the last only where no service manager would start it.
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
    echo "warning: not installed and needed by some tests: ${missing[*]} (as root: apt-get install ${missing[*]})" >&2
fi

arguments=()
whole=1 # whether every test runs that is not slow
coverage=
while (($#)); do
    case $1 in
        --all) arguments+=(-m "" -p tests.fault_table --timeout 3600) whole=0 ;;
        --constraints)
            [[ -f ${2:-} ]] || _die "--constraints needs a file of versions, such as constraints.txt; there is no ${2:-}"
            CLOZEWORKS_CONSTRAINTS=$2
            CLOZEWORKS_VENV=${CLOZEWORKS_VENV:-$root/.venv-$(sha256sum <"$2" | cut -c1-8)}
            shift
            ;;
        --cov) coverage=--cov ;;
        *) arguments+=("$1") whole=0 ;;
    esac
    shift
done

prepare_environment test

# Nothing of the caller's MLflow or Hugging Face settings may reach the tests.
while IFS= read -r name; do
    unset "$name"
done < <(compgen -e | grep -E '^(MLFLOW|_MLFLOW|HF_|HUGGING_FACE_|TRANSFORMERS_|DATABRICKS_)' || true)
export HF_HUB_OFFLINE=1 MLFLOW_DISABLE_TELEMETRY=true
export OMP_NUM_THREADS=1 # the tests start ranks of their own, which share the cores
if [[ $(count_gpus) -eq 0 ]]; then
    export DS_ACCELERATOR=cpu
fi

# Lines are counted in the environment's folder, so that nothing of it lies among the sources.
export COVERAGE_FILE=$CLOZEWORKS_VENV/coverage/data
mkdir -p "${COVERAGE_FILE%/*}"
cd "$root"
pytest() { python -m pytest --durations=15 "$@"; }
if ((!whole)); then
    pytest ${coverage:+--cov} "${arguments[@]}" --cov-fail-under=0
    exit
fi
# Tests wait for servers, ranks and time limits: three workers keep two cores busy.
cores=$(env -u OMP_NUM_THREADS nproc) # which counts that variable's threads where it is set
workers=$((cores + (cores + 1) / 2))
[[ -z ${CI:-} ]] || coverage=--cov
status=0
pytest -m "not slow" --numprocesses "$workers" --dist worksteal ${coverage:+--cov} || status=1
if [[ $coverage ]]; then
    echo "lines by file: COVERAGE_FILE=$COVERAGE_FILE python -m coverage report --show-missing"
fi
exit $status
