"""The steps of both parts, most valuable first; each returns what the summary tells of it."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wheels
from kit import MAX_FILE_BYTES, Kit, Step, StepFailed

GLOO_ONLY = "gloo only: one device, so NCCL between ranks was not run"
TOY_MODEL = ["model.hidden_size=64", "model.num_hidden_layers=1", "model.num_attention_heads=2"]
TOY_MODEL += ["model.intermediate_size=64", "data.num_workers=1"]
TOY_BATCH = ["training.global_batch_tokens=1024", "training.micro_batch_tokens=512"]
LONG_STEPS = 360  # of 131,072 tokens: 240 s at 200,000 tokens/s, two starts 110 s and four saves 30 s: within 420 s


def environment(kit: Kit) -> dict[str, Any]:
    """Device, versions, and what pyproject.toml asks for and is not there; without a device nothing else is run."""
    names = ["torch", "triton", "deepspeed", "transformers", "numpy"]
    code = (
        "import json, sys, torch; from importlib.metadata import distributions; sys.path.insert(0, 'tests/gpu'); "
        "import wheels; print(json.dumps({"
        "'device': torch.cuda.get_device_name() if torch.cuda.is_available() else None, "
        "'versions': {each.name: each.version for each in distributions() if each.name in sys.argv}, "
        "'unmet': [str(each) for each in wheels.requirements() if not wheels.is_met_here(each)]}))"
    )
    found: dict[str, Any] = json.loads(kit.call(kit.python("-c", code, *names)).strip().splitlines()[-1])
    if not kit.toy:
        if found["device"] is None:
            kit.stopped = "torch sees no CUDA device"
            return found | {"status": "failed", "why": kit.stopped}
        kit.call(["nvidia-smi"])
    return found


def probe(kit: Kit) -> dict[str, Any]:
    results = kit.out / "probe.json"
    words = ["--repeats", "2" if kit.toy else "20", "--results", results]
    results.unlink(missing_ok=True)
    outcome = kit.try_call(kit.python("tests/gpu/probe.py", *words))
    found = json.loads(results.read_text()) if results.is_file() else {}
    curves = {
        name: {point["empty_per_row"]: round(point["forward_backward_ms"], 3) for point in points}
        for name, points in found.items()
        if name.endswith("_attention")
    }
    return outcome | {"copy_terabytes_per_second": found.get("copy_terabytes_per_second"), **curves}


def variants(
    *names: str, steps: int = 6, profile: bool = False, alone: bool = False
) -> Callable[[Kit], dict[str, Any]]:
    """Measure these variants in one process, or each `alone`; after one of which the process died, the next goes on."""

    def run(kit: Kit) -> dict[str, Any]:
        results, left = kit.out / "bench.jsonl", list(names)
        before = len(read_lines(results))
        while left:
            failure, tried = "its process ended without a result", left[: 1 if alone else None]
            command = kit.python(
                "tests/gpu/variants.py", "--results", results, "--steps", "2" if kit.toy else str(steps)
            )
            command += ["--toy"] if kit.toy else []
            command += ["--profile", kit.out / "profile.txt"] if profile else []
            try:
                kit.call([*command, *tried])
            except StepFailed as error:
                failure = str(error)
            done = {row["name"] for row in read_lines(results)[before:]}
            left = [name for name in left if name not in done]
            if tried[-1] not in done:  # it died of the first that is left
                with results.open("a") as sink:
                    sink.write(json.dumps({"name": left[0], "error": failure}) + "\n")
                if time.time() > kit.step_ends_at - 15:
                    break
                left = left[1:]
        return told(read_lines(results)[before:])

    return run


def told(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Variants for the summary; the step failed where one of them did."""
    keys = ("tokens_per_second", "mfu", "compiled", "start_seconds", "peak_memory_bytes")
    keys += ("error", "unavailable", "note")
    found = {row["name"]: {key: row[key] for key in keys if key in row} for row in rows}
    return {"status": "failed" if any("error" in row for row in rows) else "ok", "variants": found}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def two_ranks(kit: Kit) -> dict[str, Any]:
    """Counts over the hosts' group or the device's, and reduction that overlaps; over NCCL where two devices are."""
    devices = int(kit.call(kit.python("-c", "import torch; print(torch.cuda.device_count())")).split()[-1])
    results, names = kit.work / "ranks.jsonl", ["ranks", "ranks, counts on device", "ranks, stage 2 overlap"]
    results.unlink(missing_ok=True)
    command = kit.python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command += ["tests/gpu/variants.py", "--results", results, "--steps", "2", *([] if devices > 1 else ["--toy"])]
    on_cpu = {} if devices > 1 else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with kit.variables(**on_cpu):
        outcome = kit.try_call([*command, *names])
    rows = [row | ({} if devices > 1 else {"note": GLOO_ONLY}) for row in read_lines(results)]
    with (kit.out / "bench.jsonl").open("a") as sink:
        sink.writelines(json.dumps(row) + "\n" for row in rows)
    return told(rows) | ({} if outcome["status"] == "ok" else outcome)


def compilation(kit: Kit) -> dict[str, Any]:
    """Two starts, each in a process of its own: with an empty folder of compiled graphs, and with the full one."""
    folder = kit.work / "compiled"
    shutil.rmtree(folder, ignore_errors=True)
    with kit.variables(TORCHINDUCTOR_CACHE_DIR=str(folder)):
        return variants("bert_large cold compile", "bert_large warm compile", steps=2, alone=True)(kit)


def pretrain(kit: Kit, folder: Path, *settings: str) -> list[str | Path]:
    vocabulary = json.loads((kit.shards / "manifest.json").read_text())["tokenizer"]["vocab_size"]
    return kit.python(
        *("-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", "29617", "launch/pretrain.py"),
        *(f"output_dir={folder}", f"data.shards={kit.shards}", f"model.vocab_size={vocabulary}"),
        *settings,
    )


def resumed_bitwise(precision: str) -> Callable[[Kit], dict[str, Any]]:
    """40 steps at once, and 40 that are killed with SIGKILL after step 20 and resumed: the same bits on disk."""

    def run(kit: Kit) -> dict[str, Any]:
        whole, killed = (kit.work / f"{precision}-{kind}" for kind in ("whole", "killed"))
        for folder in (whole, killed):
            shutil.rmtree(folder, ignore_errors=True)
        settings = ["--config", "small_gpu", f"training.precision={precision}", "training.deterministic=true"]
        settings += ["training.max_steps=40", "checkpoint.every_steps=20", "evaluation.every_steps=40"]
        settings += ["schedule.warmup_ratio=0.1", "evaluation.max_tokens=32768", "logging.every_steps=1"]
        settings += [*TOY_MODEL, *TOY_BATCH] if kit.toy else []
        kit.call(pretrain(kit, whole, *settings))
        saved = killed / "checkpoints" / "step-00000020" / "checkpoint.json"
        kit.call(pretrain(kit, killed, *settings), until=saved.is_file)
        if (killed / "checkpoints" / "step-00000040").exists():
            raise StepFailed("the run was over before it was killed")
        kit.call(pretrain(kit, killed, *settings))
        digests = {path.name: digest(path / "checkpoints" / "step-00000040") for path in (whole, killed)}
        is_same = len(set(digests.values())) == 1
        return {"status": "ok" if is_same else "failed", "same_bits": is_same, "digests": digests}

    return run


def digest(folder: Path) -> str:
    """Of a checkpoint's tensors.

    Raises:
        StepFailed: it holds none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StepFailed(f"{folder} holds no tensors")
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def cuda_tests(kit: Kit) -> dict[str, Any]:
    """The tests marked `gpu`; only their files are collected, for others import what this machine lacks.

    What they found that is no error, such as bits that differ within rounding, is named in the result.
    """
    marked = [
        path for path in (wheels.REPOSITORY / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()
    ]
    files = [path for path in sorted(marked) if path.parent != Path(__file__).parent]
    command = kit.python("-m", "pytest", "-v", "-rsx", "-m", "gpu", "-p", "no:cacheprovider", "--timeout", "100")
    lines = kit.call([*command, *files]).strip().splitlines()
    return {"result": lines[-1], "found": [line for line in lines if line.startswith("XFAIL ")]}


def encoder(kit: Kit) -> dict[str, Any]:
    """Tokens per second of bert_large beside transformers: padded; compiled also grouped by length and without padding.

    The compiler takes most of the time, so what runs without it comes first.
    """
    outcome: dict[str, Any] = {"status": "ok", "comparisons": {}}
    sizes = ["--smoke"] if kit.toy else ["--tokens", "32768", "--steps", "4", "--rounds", "3"]
    every = ["documents"] if kit.toy else ["documents", "grouped", "full"]
    for mode, workloads in (("eager", every[:1]), ("compiled", every)):
        results = kit.out / f"encoder_{mode}.json"
        results.unlink(missing_ok=True)
        words = ["--config", "bert_large", "--modes", mode, "--workloads", *workloads, "--results", results, *sizes]
        ended = kit.try_call(kit.python("tests/benchmarks/encoder.py", *words))
        outcome |= ended if ended["status"] == "failed" else {}
        rows = json.loads(results.read_text())["rows"] if results.is_file() else []
        outcome["comparisons"] |= {row["name"]: [row[key] for key in ("ours", "peer", "ratio")] for row in rows}
    return outcome


PART1 = [
    Step("environment", 30, environment),
    Step("first figures", 150, variants("bert_large", "bert_base", "modernbert_base")),
    Step("resume bf16", 100, resumed_bitwise("bf16")),
    Step("encoder", 200, encoder),
    # Those above fit into the 530 s together. What follows is worth less, and runs where they need less.
    Step("cuda tests", 90, cuda_tests),
    Step("long rows", 120, variants("modern_large 8192", "modern_large 8192 whole rows")),
    Step("compilation", 140, compilation),
    Step("deterministic", 50, variants("bert_large deterministic")),
    Step("pairs and optimizer", 90, variants("bert_large pairs", "bert_large StableAdamW", "bert_large eager")),
    Step("probe", 40, probe),
    Step("capacity and sizes", 90, variants(*(f"bert_large {n}" for n in ("full capacity", "32768", "16384")))),
    Step("presets", 90, variants("modern_large", "bert_base pairs", "modern_large pairs")),
    Step(
        "small losses",
        120,
        variants(*(f"bert_large {n}" for n in ("FA3", "throughput timer", "token-type lookup", "stage 2 overlap"))),
    ),
    Step("profile", 60, variants("bert_large", profile=True)),
    Step("prefetch", 80, variants("bert_large full batch", "bert_large full batch, short prefetch", steps=2)),
    Step("resume fp16", 80, resumed_bitwise("fp16"), needs_gpu=True),
    Step("two ranks", 60, two_ranks),
]


def long_run(kit: Kit) -> dict[str, Any]:
    """bert_large with next-sentence prediction: SIGKILL after its first checkpoint, then resumed to the end."""
    folder = kit.work / "bert_large"
    for old in (folder, kit.work / "exported"):  # an export of an earlier run would pass for that of this one
        shutil.rmtree(old, ignore_errors=True)
    steps = 40 if kit.toy else kit.long_steps
    settings = ["--config", "bert_large", "data.sentence_pairs=next_sentence", f"training.max_steps={steps}"]
    settings += [
        f"evaluation.every_steps={steps // 6}",
        f"checkpoint.every_steps={steps // 4}",
        "checkpoint.keep_last=2",
    ]
    settings += ["evaluation.max_tokens=262144", "model.hidden_dropout_prob=0.0", "schedule.warmup_ratio=0.1"]
    settings += [*TOY_MODEL, *TOY_BATCH] if kit.toy else ["training.global_batch_tokens=131072"]
    first = folder / "checkpoints" / f"step-{steps // 4:08d}" / "checkpoint.json"
    try:
        kit.call(pretrain(kit, folder, *settings), until=first.is_file)
        kit.call(pretrain(kit, folder, *settings))
    finally:
        for source in ("status.json", "history.jsonl", "tracking/points.jsonl"):
            if (folder / source).is_file():
                (kit.out / Path(source).name).write_bytes((folder / source).read_bytes()[:MAX_FILE_BYTES])
    points = [line for line in read_lines(folder / "tracking" / "points.jsonl") if "valid/mlm_loss" in line["m"]]
    curve = {line["s"]: round(line["m"]["valid/mlm_loss"], 4) for line in points}
    logged = {line["s"] for line in read_lines(folder / "tracking" / "points.jsonl") if "train/loss" in line["m"]}
    falls = len(curve) >= 5 and list(curve.values())[-1] < max(curve.values())
    is_right = falls and logged == set(range(1, steps + 1))
    return {"status": "ok" if is_right else "failed", "steps_logged": len(logged), "valid_mlm_loss": curve}


def export(kit: Kit) -> dict[str, Any]:
    """The Hugging Face folder, and what it says in a mask's place."""
    shutil.rmtree(kit.work / "exported", ignore_errors=True)
    checkpoint = ["--checkpoint", kit.work / "bert_large", "--output", kit.work / "exported"]
    checked = kit.call(kit.python("launch/export.py", *checkpoint)).strip().splitlines()[-2:]
    answer = kit.call(kit.python("launch/fill_mask.py", "--model", kit.work / "exported", "the [MASK] of the city"))
    return {"export": checked, "fill_mask": answer.strip().splitlines()[-3:]}


def fine_tuning(kit: Kit) -> dict[str, Any]:
    """A made-up task of two classes, which one word tells apart."""
    table, fitted = kit.work / "labeled.tsv", kit.work / "fitted"
    shutil.rmtree(fitted, ignore_errors=True)
    filler = "the river of the old city was in the north".split()
    lines = [
        f"{' '.join(filler[: 3 + n % 6])} {'never' if n % 2 else 'always'} {' '.join(filler[n % 5 :])} {n}\t{n % 2}"
        for n in range(80 if kit.toy else 800)
    ]
    table.write_text("text\tlabel\n" + "\n".join(lines) + "\n")
    words = ["--model", kit.work / "exported", "--task", "classification", "--train", table, "--text-column", "text"]
    words += ["--label-column", "label", "--epochs", "1" if kit.toy else "3", "--seeds", "1", "--no-tracking"]
    text = kit.call(kit.python("launch/finetune.py", *words, "--learning-rates", "5e-5", "--output", fitted))
    return {"output": text.strip().splitlines()[-4:]}


PART2 = [
    Step("long run", 420, long_run),
    Step("export", 60, export, needs=("long run", "bert_large/checkpoints/step-*/checkpoint.json")),
    Step("fine-tuning", 100, fine_tuning, needs=("export", "exported/config.json")),
]
