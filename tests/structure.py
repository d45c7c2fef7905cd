"""How much one must hold in one's head, in figures: packages, their imports, and the files on five ways.

`python tests/structure.py` counts packages, the imports between them and sizes, and traces real runs: a training run of
a few steps with a log line at every second step and a save, then the registration of its checkpoint.

    python tests/structure.py --before c025165            the figures of that commit beside those of this tree
    python tests/structure.py --before c025165 --tests    with the time of the default test run of both (minutes)

`--json` writes the figures, `--static` leaves out the runs. The figures are reported and never enforced.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import resource
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("configs", "data_prep", "trainer", "launch")
STEP, SAVE = "take_step", "save"  # the functions that the ways are cut at
STEPS, LOGGED, SAVED = 6, 2, 3


def modules() -> dict[str, Path]:
    """The product's modules by dotted name, `__init__` left out."""
    paths = (path for top in TOPS for path in sorted((ROOT / top).rglob("*.py")) if path.name != "__init__.py")
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}


def package_of(module: str) -> str:
    """The package of a module, such as trainer.model; a module in the root of `trainer` or `data_prep` is its own."""
    return module.split(".")[0] if module.startswith("launch") else ".".join(module.split(".")[:2])


def imported(path: Path, known: Iterable[str]) -> set[str]:
    """The modules of `known` that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names & set(known)


def in_cycles(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The imports that are part of a cycle of packages: no order of the packages has all of them go down."""
    reached: dict[str, set[str]] = defaultdict(set)
    for source, target in edges:
        reached[source].add(target)
    while True:
        wider = {
            source: targets.union(*(reached.get(one, ()) for one in targets)) for source, targets in reached.items()
        }
        if wider == reached:
            return {(source, target) for source, target in edges if source in reached.get(target, ())}
        reached = defaultdict(set, wider)


def static_figures() -> dict[str, Any]:
    """Packages, imports between them, and sizes, by top-level package."""
    known = modules()
    figures: dict[str, Any] = {}
    for top in ("data_prep", "trainer", "launch"):
        own = {name: path for name, path in known.items() if name.split(".")[0] == top}
        edges = {
            (package_of(name), package_of(other))
            for name, path in own.items()
            for other in imported(path, own)
            if package_of(name) != package_of(other)
        }
        circular = in_cycles(edges)
        lines: dict[str, list[int]] = defaultdict(list)
        for name, path in own.items():
            lines[package_of(name)].append(len(path.read_text(encoding="utf-8").splitlines()))
        figures[top] = {
            "packages": len(lines),
            "imports_between_packages": len(edges),
            "imports_in_cycles": len(circular),
            "packages_in_cycles": len({name for edge in circular for name in edge}),
            "files": sum(map(len, lines.values())),
            "lines": sum(map(sum, lines.values())),
            "by_package": {
                name: {"files": len(counts), "lines": sum(counts)} for name, counts in sorted(lines.items())
            },
        }
    return figures


class Trace:
    """The functions of the product that a process enters, in order, and when it leaves those that ways are cut at."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []  # call or return, file, function

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(ROOT)):
            return
        file = os.path.relpath(code.co_filename, ROOT)
        is_kept = event == "call" or code.co_name in (STEP, SAVE)
        if is_kept and file.split(os.sep)[0] in TOPS and code.co_name[0] != "<":
            self.events.append((event, file, code.co_qualname))


def follow(output: Path, script: str, arguments: list[str]) -> None:
    """Run a script of the project in this process and write what it entered."""
    trace, end_process = Trace(), os._exit

    def write_and_exit(status: int) -> NoReturn:  # a rank ends by os._exit
        sys.setprofile(None)
        output.write_text(json.dumps(trace.events), encoding="utf-8")
        end_process(status)

    os._exit = write_and_exit
    sys.argv = [script, *arguments]
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        write_and_exit(int(end.code or 0))
    write_and_exit(0)


def traced(folder: Path, script: str, *arguments: str) -> list[list[str]]:
    """The events of a script that runs in a process of its own in `folder`."""
    output = folder / "trace.json"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    ours = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--follow", str(output), str(ROOT / "launch" / script), *arguments]
    done = subprocess.run(command, cwd=folder, env=kept | ours, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{script} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    events: list[list[str]] = json.loads(output.read_text(encoding="utf-8"))
    return events


def size(events: list[list[str]]) -> dict[str, int]:
    """Files and functions that a part of a trace enters."""
    entered = {(file, function) for event, file, function in events if event == "call"}
    return {"files": len({file for file, _ in entered}), "functions": len(entered)}


def ways() -> dict[str, dict[str, int]]:
    """The files and functions of five ways through the product."""
    sys.path.insert(0, str(ROOT))
    from tests.sameness import CONFIG, call, write_corpus

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus.jsonl")
        source = ["--input", "corpus.jsonl", "--workers", "1"]
        call(ROOT, folder, "-m", "data_prep", "tokenizer", *source, "--output", "tokenizer", "--vocab-size", "400")
        call(ROOT, folder, "-m", "data_prep", "shards", *source, "--tokenizer", "tokenizer", "--output", "shards")
        (folder / "run.yaml").write_text(f"output_dir: run\n{CONFIG}", encoding="utf-8")
        settings = [f"training.max_steps={STEPS}", f"logging.every_steps={LOGGED}", f"checkpoint.every_steps={SAVED}"]
        settings += ["evaluation.every_steps=100", "training.precision=fp32"]
        run = traced(folder, "pretrain.py", "--config", "run.yaml", *settings)
        model = ["--checkpoint", "run", "--name", "structure"]
        registered = traced(folder, "register.py", *model, "--tracking-uri", "sqlite:///mlflow.db")
    ends = [at for at, (event, _, function) in enumerate(run) if (event, function) == ("return", STEP)]
    assert len(ends) == STEPS, ends
    saves = [at for at, (_, file, function) in enumerate(run) if function == SAVE and "checkpoint" in file]
    return {
        "start until step 1": size(run[: ends[0]]),
        "fetch and step": size(run[ends[4] + 1 : ends[5] + 1]),  # step 5 is neither logged nor saved
        "step with a log line": size(run[ends[3] + 1 : ends[4] + 1]),  # step 4 is logged and not saved
        "a save": size(run[saves[0] : saves[1]]),
        "a registration": size(registered),
    }


def time_of_tests() -> dict[str, float]:
    """Wall and CPU seconds of the default test run, whose environment is made before where it is missing."""
    script = str(ROOT / "tests" / "run.sh")
    subprocess.run(["bash", script, "--co", "-q"], check=True, stdout=subprocess.DEVNULL)
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["bash", script], stdout=sys.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall seconds": round(time.monotonic() - started), "CPU seconds": round(cpu)}


def figures_at(commit: str, options: list[str]) -> dict[str, Any]:
    """The figures of a commit, by this script."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        tree.mkdir()
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
        for script in ("structure.py", "sameness.py"):
            shutil.copy(ROOT / "tests" / script, tree / "tests" / script)
        output = Path(name) / "figures.json"
        command = [sys.executable, str(tree / "tests" / "structure.py"), "--json", str(output), *options]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
        figures: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return figures


def rows_of(figures: dict[str, Any], names: tuple[str, ...] = ()) -> dict[tuple[str, ...], float]:
    """Every number of nested figures by its path."""
    rows: dict[tuple[str, ...], float] = {}
    for name, value in figures.items():
        path = (*names, name)
        rows |= rows_of(value, path) if isinstance(value, dict) else {path: value}
    return rows


def table(after: dict[str, Any], before: dict[str, Any] | None) -> str:
    """One line per figure; with `before` its values first, and `-` where one tree lacks the package."""
    new, old = rows_of(after), rows_of(before or {})
    names = sorted({*new, *old}, key=lambda path: (path not in new, list(new).index(path) if path in new else 0))
    lines = [] if before is None else [f"{'':<66}{'before':>9}{'after':>9}"]
    for path in names:
        values = [new] if before is None else [old, new]
        cells = "".join(f"{rows[path]:>9,}" if path in rows else f"{'-':>9}" for rows in values)
        *names_above, figure = (name for name in path[1:] if name != "by_package")
        lines.append(f"{'  '.join([*names_above, figure.replace('_', ' ')]):<66}{cells}")
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == ["--follow"]:
        follow(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--static", action="store_true", help="leave out the runs")
    parser.add_argument("--tests", action="store_true", help="also time the default test run")
    parser.add_argument("--before", metavar="COMMIT", help="also measure this commit")
    arguments = parser.parse_args()
    options = [option for option in ("--static", "--tests") if getattr(arguments, option[2:])]
    before = figures_at(arguments.before, options) if arguments.before else None
    figures: dict[str, Any] = {"packages": static_figures()}
    if not arguments.static:
        figures["ways"] = ways()
    if arguments.tests:
        figures["tests"] = {"default test run": time_of_tests()}
    print(table(figures, before))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
