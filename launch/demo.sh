#!/usr/bin/env bash
# The main job on real text, by one command: environment, corpus, tokenizer, shards, pretraining, export, registry and
# filled masks. Takes 5 to 26 minutes on two CPU cores; uses GPUs where it finds them. Needs Python 3.11 or newer.
#
#   bash launch/demo.sh [--full] [--fresh] [--corpus PATH_OR_GLOB] [--vocab-size N] [--output DIR] \
#       [-- section.field=value ...]
#
#   --full                  train the whole recipe of configs/small_cpu.yaml (about half an hour) instead of its
#                           beginning, in the same folder's "run-full"
#   --fresh                 repeat every step (the installation and MLflow's history stay)
#   --corpus PATH_OR_GLOB   your own text (.txt, or .jsonl or .parquet with a "text" field) instead of the docstrings of
#                           the installed Python packages; quote a glob; hf://datasets/USER/NAME/data/*.parquet is
#                           read from the Hub
#   --vocab-size N          vocabulary size of the tokenizer (default: 8192); a small text supports only a smaller one
#   --output DIR            output directory (default: demo in the repository root)
#   -- section.field=value  settings of the training run that override those of configs/small_cpu.yaml
#   --help                  this text
#
# Run again, the command skips finished steps and resumes a stopped training run. Full logs are in DIR/logs.
# MLFLOW_TRACKING_URI is honored; without it, runs and models are tracked in DIR/mlflow.db. CLOZEWORKS_VENV names the
# environment (default: .venv).

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
source "$root/launch/environment.sh"

NUM_STEPS=6
MODEL_NAME=clozeworks-demo
MODEL_ALIAS=demo
VOCAB_SIZE=8192 # that of configs/small_cpu.yaml
SHORT=(training.max_steps=2000 training.global_batch_tokens=2048 training.micro_batch_tokens=1024
    evaluation.every_steps=500 checkpoint.every_steps=500)

child=
step_number=0
redo=no # becomes yes with the first step that is done: what is built on it is done again

main() {
    read_arguments "$@"
    prepare_output
    announce "environment: Python packages in ${CLOZEWORKS_VENV:-$root/.venv}"
    local started=$SECONDS
    prepare_environment
    # A finished environment keeps the time that its installation took.
    if ((SECONDS - started > 3)) || [[ ! -f $output/timings.tsv ]]; then
        record_time environment $((SECONDS - started))
    fi
    pretrain_arguments=("$root/launch/pretrain.py" --config configs/small_cpu.yaml output_dir="$output/$run"
        data.shards="$output/shards" "${settings[@]}")
    if ((${#given[@]})); then # refuse a wrong setting now, not in the fifth step
        python "${pretrain_arguments[@]}" --print-config >/dev/null
    fi
    choose_devices

    if [[ -z $corpus ]]; then
        corpus=$output/corpus/docstrings.jsonl corpus_settings=(documents.id_field=module)
        run_step corpus "$corpus" "corpus: the docstrings of the installed Python packages" ' documents from ' \
            python "$root/launch/demo/collect_docstrings.py" --output "$corpus"
    else
        announce "corpus: your text, $corpus"
    fi
    run_step tokenizer "$output/tokenizer/tokenizer_info.json" \
        "tokenizer: SentencePiece BPE with a vocabulary of $vocab_size" '^tokenizer: .* agree' \
        python -m data_prep tokenizer --input "$corpus" --output "$output/tokenizer" --vocab-size "$vocab_size"
    run_step shards "$output/shards/manifest.json" "shards: webdataset tars with a train and a valid split, verified" \
        '^(train|valid) |^ok: ' make_shards
    local ranks="$num_ranks ranks"
    ((num_ranks != 1)) || ranks="1 rank"
    run_step "pretraining-$run" "$output/$run/status.json" "pretraining: $ranks on $device" \
        '^([0-9:]{8} )?(starting|resum|step [0-9]*[05]00/|step ([0-9]+)/\3 |valid)' pretrain
    run_step "results-$run" "$output/results-$run.json" \
        "export, registry (models:/$MODEL_NAME@$MODEL_ALIAS) and filled masks" \
        '^(exported|registered|No word|Words|masked|guesses|  "|ACTUAL|MASKED|MODEL|$)' \
        python "$root/launch/demo/demo_results.py" --demo "$output" --run "$run" --name "$MODEL_NAME" --alias "$MODEL_ALIAS"
    echo
    python "$root/launch/demo/demo_summary.py" --demo "$output" --run "$run" --model "models:/$MODEL_NAME@$MODEL_ALIAS" \
        --ranks "$num_ranks"
}

read_arguments() {
    if [[ -n ${CLOZEWORKS_VENV:-} ]]; then CLOZEWORKS_VENV=$(absolute "$CLOZEWORKS_VENV"); fi
    fresh=no corpus='' output=$root/demo vocab_size=$VOCAB_SIZE run=run settings=("${SHORT[@]}") given=() options=' '
    corpus_settings=()
    while (($#)); do
        [[ $options != *" $1 "* ]] || usage_error "$1 is given twice"
        options+="$1 "
        case $1 in
            --full) run=run-full settings=() ;;
            --fresh) fresh=yes ;;
            --corpus | --output)
                [[ -n ${2:-} ]] || usage_error "$1 needs a value"
                if [[ $1 == --corpus ]]; then corpus=$(absolute "$2"); else output=$(absolute "$2"); fi
                shift
                ;;
            --vocab-size)
                [[ ${2:-} =~ ^[1-9][0-9]{0,8}$ ]] || usage_error "--vocab-size needs a number, such as 2000, not '${2:-}'"
                vocab_size=$2
                shift
                ;;
            -h | --help)
                sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
                exit 0
                ;;
            --)
                given=("${@:2}")
                break
                ;;
            *) usage_error "unknown option $1" ;;
        esac
        shift
    done
    ((vocab_size == VOCAB_SIZE)) || settings+=("model.vocab_size=$vocab_size")
    local each index
    for each in "${given[@]}"; do # takes the place of the demo's own
        for index in "${!settings[@]}"; do
            [[ ${settings[index]} != "${each%%=*}="* ]] || unset "settings[index]"
        done
    done
    settings+=("${given[@]}")
    if [[ -d $corpus ]]; then
        usage_error "--corpus $corpus is a folder; give a file of it, or a quoted pattern such as '${corpus%/}/*.txt'"
    fi
    # Patterns that bash does not read as data_prep does are left to it.
    if [[ -n $corpus && $corpus != *://* && $corpus != *[{}]* && $corpus != *'**'* ]] &&
        ! compgen -G "$corpus" >/dev/null; then
        usage_error "--corpus $corpus matches no file; check the path, and quote a pattern"
    fi
}

usage_error() {
    printf 'error: %s; see bash launch/demo.sh --help\n' "$1" >&2
    exit 2
}

absolute() {
    case $1 in
        /) echo / ;;
        /* | *://*) printf '%s\n' "${1%/}" ;;
        *) printf '%s\n' "$PWD/${1%/}" ;;
    esac
}

# Make the folder, or refuse one that holds another corpus's demo: its finished steps would be taken for this one's.
prepare_output() {
    [[ $output != *://* ]] || usage_error "--output $output is a URL; the demo writes to a local folder"
    make_folders
    output=$(cd "$output" && pwd)
    # One demo at a time in a folder; the steps are started without the lock, so that a killed demo blocks nobody.
    exec 8>"$output/.lock"
    if command -v flock >/dev/null 2>&1 && ! flock -n 8; then
        usage_error "another demo is at work in $output; wait for its end, or give another --output"
    fi
    if [[ $fresh == yes ]]; then
        rm -rf "${output:?}"/{.done,corpus,tokenizer,shards,run,run-full,export,logs,timings.tsv,corpus.txt,vocab_size.txt}
        rm -f "$output"/{results,curves}-*
        make_folders
    fi
    local wanted=${corpus:-docstrings}
    # A demo without a finished step has made nothing.
    if [[ -f $output/corpus.txt && $(<"$output/corpus.txt") != "$wanted" && -n $(ls -A "$output/.done") ]]; then
        usage_error "$output holds a demo made from $(<"$output/corpus.txt"), not from $wanted; give --fresh to rebuild it, or another --output"
    fi
    local made=$VOCAB_SIZE
    [[ ! -f $output/vocab_size.txt ]] || made=$(<"$output/vocab_size.txt")
    if [[ $made != "$vocab_size" && -f $output/.done/tokenizer ]]; then
        usage_error "$output holds a demo with --vocab-size $made, not $vocab_size; give --fresh to rebuild it, or another --output"
    fi
    printf '%s\n' "$wanted" >"$output/corpus.txt"
    printf '%s\n' "$vocab_size" >"$output/vocab_size.txt"
    # Whatever is named by a relative path, such as an embedded database of MLflow, stays in this folder.
    cd "$output"
    export MLFLOW_TRACKING_URI=${MLFLOW_TRACKING_URI:-sqlite:///$output/mlflow.db}
    export MLFLOW_DISABLE_TELEMETRY=true
    [[ $corpus == hf://* ]] || export HF_HUB_OFFLINE=1
}

make_folders() {
    local refusal
    [[ ! -e $output || -d $output ]] || usage_error "--output $output is a file; name a folder"
    refusal=$(LC_ALL=C mkdir -p "$output/logs" "$output/.done" 2>&1) ||
        usage_error "--output $output cannot be made (${refusal##*: }); give another folder"
    [[ -w $output ]] || usage_error "--output $output cannot be written; give another folder"
}

# One rank a GPU; without a GPU two ranks over gloo, which share the cores.
choose_devices() {
    num_ranks=0 device=GPUs launcher_options=()
    if [[ $(count_gpus) -gt 0 ]]; then
        num_ranks=$(python -c 'import torch; print(torch.cuda.device_count())')
    fi
    if [[ $num_ranks -eq 0 ]]; then
        num_ranks=2 device="the CPU"
        local cores
        cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)))')
        export DS_ACCELERATOR=cpu
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 3 ? cores / 2 : 1))}
    fi
    # The launcher takes CUDA_VISIBLE_DEVICES into account only where no number is given (deepspeed 0.19.8). No test tells
    # when that is fixed, for it takes GPUs.
    if [[ -z ${CUDA_VISIBLE_DEVICES:-} ]]; then launcher_options=(--num_gpus "$num_ranks"); fi
}

make_shards() {
    show python -m data_prep shards --input "$corpus" --tokenizer "$output/tokenizer" --output "$output/shards" \
        shards.valid_fraction=0.03 "${corpus_settings[@]}"
    show python -m data_prep verify "$output/shards"
}

pretrain() {
    local port
    port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    show deepspeed "${launcher_options[@]}" --log_level warning --master_port "$port" "${pretrain_arguments[@]}"
    # The launcher may end with status 0 although its ranks did not finish.
    python - "$output/$run/status.json" <<'PYTHON'
import json, sys

state = json.load(open(sys.argv[1], encoding="utf-8"))["state"]
sys.exit(None if state == "finished" else f"error: {sys.argv[1]} says that the run is {state}, not finished")
PYTHON
}

# run_step NAME RESULT TITLE SHOWN COMMAND...: announce, run with a log, record the time. Lines that match SHOWN,
# commands, warnings and errors go to the terminal, with paths relative to the repository. A step is skipped if it was
# finished before, RESULT exists, and no step before it ran now.
run_step() {
    local name=$1 result=$2 title=$3 shown=$4 log=$output/logs/$1.log key started status=0 advice
    shift 4
    key=$(step_key "$name")
    announce "$title"
    if [[ $redo == no && -f $output/.done/$name && $(<"$output/.done/$name") == "$key" && -e $result ]]; then
        echo "finished before; --fresh repeats it"
        return
    fi
    rm -f "$output/.done/$name"
    started=$SECONDS
    # In a process group of its own, so that a signal reaches all of it (the ranks of a launcher, too).
    set -m
    (
        set +m
        show "$@" 2>&1 | (trap '' INT TERM HUP && exec tee "$log") | (trap '' INT TERM HUP && shorten "$shown")
    ) </dev/null 8>&- &
    child=$!
    set +m
    wait "$child" || status=$?
    child=
    if ((status != 0)); then
        tail -n 20 "$log" >&2
        advice="Fix: run the same command again without --fresh to resume."
        if ((status == 2)); then # refused for what it was given: the same command would be, too
            advice="Fix: change what its error names (settings of the training run come after --), and run it again."
            [[ $name != tokenizer ]] || advice="Fix: if it asks for another vocab_size, give --vocab-size N (was $vocab_size)."
        fi
        printf 'error: step %s of the demo (%s) failed with exit status %s; its output is in %s. %s\n' \
            "$step_number/$NUM_STEPS" "$name" "$status" "$log" "$advice" >&2
        exit "$status"
    fi
    record_time "$name" $((SECONDS - started))
    printf '%s\n' "$key" >"$output/.done/$name"
    redo=yes
}

# Pass the lines that match a pattern on, with paths relative to the repository.
shorten() {
    local path
    path=$(sed 's/[][\.*^$#]/\\&/g' <<<"$root/")
    sed -u -n -E "/^\\$ |error|warning|$(sed 's#/#\\/#g' <<<"$1")/ { s#$path##g; p; }"
}

# What a finished step depends on beside the steps before it: the state of the run, and the MLflow server.
step_key() {
    case $1 in
        results-*) { cat "$output/$run/status.json" && printf '%s' "$MLFLOW_TRACKING_URI"; } 2>/dev/null | cksum ;;
        *) echo finished ;;
    esac
}

announce() {
    step_number=$((step_number + 1))
    printf '\n[%s/%s] %s  %s\n' "$step_number" "$NUM_STEPS" "$(date +%H:%M:%S)" "${1//"$root/"/}"
}

# Print a command as one could type it, then run it; functions of this script print their own.
show() {
    if [[ $(type -t "$1") != function ]]; then
        { printf '$'; printf ' %q' "$@"; printf '\n'; } >&2
    fi
    "$@"
}

# timings.tsv has a line a step: name, seconds. A step done again replaces its line.
record_time() {
    local file=$output/timings.tsv
    { if [[ -f $file ]]; then grep -v "^$1	" "$file" || true; fi; printf '%s\t%s\n' "$1" "$2"; } >"$file.new"
    mv "$file.new" "$file"
}

# Pass a signal on to the running step, wait until it has ended (a training saves its state), and end.
stop() {
    trap '' INT TERM HUP
    if [[ -n $child ]]; then
        printf '\nstopping step %s; run the same command again to resume\n' "$step_number/$NUM_STEPS" >&2
        kill -TERM -- "-$child" 2>/dev/null || true
        local tenths=0
        while kill -0 -- "-$child" 2>/dev/null && ((tenths < 900)); do
            sleep 0.1
            tenths=$((tenths + 1))
        done
        kill -KILL -- "-$child" 2>/dev/null || true
    fi
    exit "$1"
}

trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP
main "$@"
