"""Mutation testing: draw small mistakes in the product code at random, and see which of them the mirrored tests notice.

    python -m tests.mutants draw --seed 20261123 --count 60 --output drawn.json
    python -m tests.mutants run drawn.json --output results.json
    python -m tests.mutants report results.json

A mutant is recorded by its file, function, operator and source text, so that a list can be run again after the code
has moved (`find`), also after renames (`run --rename OLD=NEW`). Each runs in a copy of the tree, never in the tree
itself. In a results file, `equivalent` may be added to a survivor by hand: the reason why no test can see it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("data_prep", "launch", "trainer")
FOCUS = ("loop", "engine", "data", "checkpoint", "registry", "finetuning", "distributed")
AREAS = {name: f"trainer/{name}/*.py" for name in FOCUS} | {"elsewhere": "*.py"}
"""Packages of `trainer` whose mistakes are the most expensive, and everything else: the first that fits a file."""
FOCUS_SHARE = 0.7
"""Of the drawn mutants, in equal parts from all areas but the last."""

MEMORY_BYTES = 12 * 2**30
"""Address space of a test run: a mutant may allocate without end."""

_COMPARISONS: dict[type[ast.cmpop], tuple[tuple[str, type[ast.cmpop]], ...]] = {
    ast.Lt: (("boundary", ast.LtE), ("comparison", ast.Gt)),
    ast.LtE: (("boundary", ast.Lt), ("comparison", ast.GtE)),
    ast.Gt: (("boundary", ast.GtE), ("comparison", ast.Lt)),
    ast.GtE: (("boundary", ast.Gt), ("comparison", ast.LtE)),
    ast.Eq: (("comparison", ast.NotEq),),
    ast.NotEq: (("comparison", ast.Eq),),
    ast.In: (("comparison", ast.NotIn),),
    ast.NotIn: (("comparison", ast.In),),
    ast.Is: (("comparison", ast.IsNot),),
    ast.IsNot: (("comparison", ast.Is),),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_MIN_MAX = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
_SYMMETRIC = {*_MIN_MAX, "isinstance", "issubclass", "hasattr", "getattr", "setattr"}
"""Calls whose first arguments are not exchanged: nothing changes, or the call always fails."""
_LOGGING = re.compile(r"(logging|logger|_logger|log|_log|warnings)\b")


@dataclass(frozen=True)
class Mutant:
    """One changed place; `original` and `replacement` are source text as `ast.unparse` writes it."""

    file: str
    function: str
    """Qualified name (`Class.method`), or "" at module level."""
    operator: str
    original: str
    replacement: str
    statement: str
    """The statement around it, of a compound one its head."""
    occurrence: int = 0
    """Among mutants that are alike in all of the above."""


# A change that can be made and undone: operator, how the place reads, and the slot with its new content.
_Change = tuple[str, Callable[[], str], Any, Any, Any]


def mutants_of(source: str, file: str) -> Iterator[tuple[Mutant, ast.Module]]:
    """Every mutant of a module, with the tree of the mutated module: valid only until the next one is asked for."""
    tree = ast.parse(source)
    seen: dict[Mutant, int] = {}
    for function, statement, (operator, text, slots, key, new) in _changes_in(tree, "", ""):
        original, old = text(), _put(slots, key, new)
        mutant = Mutant(file, function, operator, original, text(), statement)
        seen[mutant] = seen.get(mutant, -1) + 1
        yield replace(mutant, occurrence=seen[mutant]), tree
        _put(slots, key, old)


def _put(slots: Any, key: Any, new: Any) -> Any:
    """Set a list's element or an object's attribute; return what was there."""
    if isinstance(slots, list):
        old, slots[key] = slots[key], new
    else:
        old = getattr(slots, key)
        setattr(slots, key, new)
    return old


def _changes_in(node: ast.AST, function: str, statement: str) -> Iterator[tuple[str, str, _Change]]:
    """Changes of everything below a node, with the qualified name and the statement that they lie in."""
    for child in _children(node):
        name, around = function, statement
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{function}.{child.name}".removeprefix(".")
        if isinstance(child, ast.stmt):
            around = _head(child)
        for change in list(_changes(child, function)):
            yield name, around, change
        yield from _changes_in(child, name, around)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """What may be mutated below a node: no annotations, decorators, assertions, log or error text."""
    skipped = {"annotation", "returns", "decorator_list", "bases", "type_comment"}
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or field in skipped:
                continue
            if isinstance(child, (ast.JoinedStr, ast.Raise, ast.Assert)) or _is_log(child):
                continue
            if isinstance(child, ast.If) and re.search("TYPE_CHECKING|__name__", ast.unparse(child.test)):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue  # of zip: an assertion
            if isinstance(node, ast.Slice) and isinstance(child, (ast.Constant, ast.UnaryOp)):
                continue  # the slice's own change
            yield child


def _is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and bool(_LOGGING.match(ast.unparse(node.func)))


def _head(statement: ast.stmt) -> str:
    """The text of a statement; of a compound one, what stands before its body."""
    if isinstance(statement, (ast.Try, ast.TryStar)):
        return "try"
    return ast.unparse(statement) if not hasattr(statement, "body") else _first_line(statement)


def _first_line(statement: ast.stmt) -> str:
    lines = ast.unparse(statement).splitlines()
    return next(line for line in lines if not line.startswith("@"))


def _changes(node: ast.AST, function: str) -> Iterator[_Change]:
    """The changes of one node itself."""

    def whole() -> str:
        return ast.unparse(node)

    for field in ("body", "orelse", "finalbody"):
        yield from _removals(getattr(node, field, None))
    if isinstance(node, ast.Compare):
        for number, comparison in enumerate(node.ops):
            for operator, other in _COMPARISONS[type(comparison)]:
                yield operator, whole, node.ops, number, other()
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _ARITHMETIC:
        of_types = isinstance(node.op, ast.BitOr) and not function
        if not of_types and not any(_is_text(part) for part in ast.iter_child_nodes(node)):
            yield "arithmetic", whole, node, "op", _ARITHMETIC[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        yield "and/or", whole, node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "constant", whole, node, "value", not node.value
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        for value in (node.value + 1, node.value - 1):
            yield "constant", whole, node, "value", value
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield "negation", lambda: ast.unparse(node.test), node, "test", _negated(node.test)
    elif isinstance(node, ast.comprehension):
        for number, condition in enumerate(node.ifs):
            yield "negation", lambda n=number: ast.unparse(node.ifs[n]), node.ifs, number, _negated(condition)
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        truth = isinstance(node.value, (ast.Compare, ast.BoolOp))
        yield "return", whole, node, "value", _negated(node.value) if truth else ast.Constant(None)
    elif isinstance(node, ast.Slice):
        for bound in ("lower", "upper"):
            if (old := getattr(node, bound)) is not None:
                for operator in (ast.Add(), ast.Sub()):
                    yield "slice", whole, node, bound, ast.BinOp(old, operator, ast.Constant(1))
    elif isinstance(node, ast.Call):
        yield from _changes_of_call(node, whole)


def _removals(body: Any) -> Iterator[_Change]:
    """Calls whose result nobody uses, and guards: `if condition: raise ...`."""
    for number, statement in enumerate(body if isinstance(body, list) else []):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and not _is_log(statement.value):
            yield "statement", lambda n=number: ast.unparse(body[n]), body, number, ast.Pass()
        elif isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[0], ast.Raise):
            text = lambda n=number: _head(body[n])  # noqa: E731
            yield "guard", text, body, number, ast.Pass()


def _changes_of_call(call: ast.Call, whole: Callable[[], str]) -> Iterator[_Change]:
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    if name in _MIN_MAX:
        yield "min/max", whole, call.func, "id" if isinstance(call.func, ast.Name) else "attr", _MIN_MAX[name]
    for number, (first, second) in enumerate(zip(call.args, call.args[1:], strict=False)):
        starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
        if name not in _SYMMETRIC and not starred and ast.dump(first) != ast.dump(second):
            yield "arguments", whole, call, "args", [*call.args[:number], second, first, *call.args[number + 2 :]]


def _negated(test: ast.expr) -> ast.expr:
    return (
        test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else ast.UnaryOp(ast.Not(), test)
    )


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def product_files(root: Path) -> list[str]:
    """Modules that are mutated, ascending; what a package exports (`__init__.py`) is not."""
    paths = (path for package in PACKAGES for path in (root / package).rglob("*.py") if path.name != "__init__.py")
    return sorted(path.relative_to(root).as_posix() for path in paths)


def area_of(file: str) -> str:
    return next(area for area, pattern in AREAS.items() if fnmatch(file, pattern))


def draw(root: Path, seed: int, count: int, without: Sequence[Mutant] = ()) -> list[Mutant]:
    """Choose mutants: an equal number from each area but the last, by a random operator and then a random place."""
    generator = random.Random(seed)
    pools: dict[str, dict[str, list[Mutant]]] = {area: {} for area in AREAS}
    for file in product_files(root):
        for mutant, _ in mutants_of((root / file).read_text(encoding="utf-8"), file):
            pools[area_of(file)].setdefault(mutant.operator, []).append(mutant)
    *focus, elsewhere = AREAS
    in_focus = round(FOCUS_SHARE * count)
    drawn: list[Mutant] = []
    while len(drawn) < count:
        area = focus[len(drawn) % len(focus)] if len(drawn) < in_focus else elsewhere
        pool = pools[area][generator.choice(sorted(pools[area]))]
        mutant = generator.choice(pool)
        if mutant not in drawn and mutant not in without:
            drawn.append(mutant)
    return drawn


def mutant_of(entry: dict[str, Any]) -> Mutant:
    """The mutant of an entry of a recorded list."""
    return Mutant(**{key: entry[key] for key in Mutant.__dataclass_fields__})


def find(root: Path, mutant: Mutant) -> tuple[str, str] | None:
    """The file in which a recorded mutant lies now, and that file's mutated source; None where it is nowhere.

    Looked for in its own file, then in functions of its name, then anywhere; first with the whole statement as it
    was. Where the text stands more than once outside its own file, it is not found.
    """
    files = [mutant.file] if (root / mutant.file).is_file() else []
    name = mutant.function.rpartition(".")[2]
    for places, same_function, keys in (
        (files, True, ("statement", "occurrence")),
        (files, True, ("occurrence",)),
        (product_files(root), True, ("statement", "occurrence")),
        (product_files(root), True, ()),
        (product_files(root), False, ("statement",)),
    ):
        hits = []
        for file in places:
            source = (root / file).read_text(encoding="utf-8")
            if same_function and name not in source:
                continue
            for other, tree in mutants_of(source, file):
                wanted = ("operator", "original", "replacement", *keys, *(("function",) if same_function else ()))
                if all(getattr(other, key) == getattr(mutant, key) for key in wanted):
                    hits.append((file, ast.unparse(tree)))
        if len(hits) == 1:
            return hits[0]
    return None


def renamed(mutant: Mutant, names: dict[str, str]) -> Mutant:
    """The mutant after identifiers of the code were renamed."""
    if not names:
        return mutant
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    texts = ("function", "original", "replacement", "statement")
    return replace(mutant, **{key: pattern.sub(lambda m: names[m[1]], getattr(mutant, key)) for key in texts})


def mirrored_tests(root: Path, file: str) -> list[str]:
    """The test files of a module: its own, and those of the same folder that import it (or import what does).

    A module without a file of its own has those of the modules that import it too.
    """
    own, folder = _own_test(file), f"tests/{Path(file).parent.as_posix()}"
    beside = [path.relative_to(root).as_posix() for path in sorted((root / folder).glob("test_*.py"))]
    found = [own, *(test for test in beside if file in _reached(root, test))]
    if not (root / own).is_file():
        found += [_own_test(other) for other in product_files(root) if file in _imported(root, other)]
    return [test for test in dict.fromkeys(found) if (root / test).is_file()]


def _own_test(file: str) -> str:
    path = Path(file)
    return f"tests/{path.parent.as_posix()}/test_{path.name}"


@cache
def _imported(root: Path, file: str) -> frozenset[str]:
    """The files of this repository that a file imports."""
    names = set()
    for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    files = {f"{name.replace('.', '/')}.py" for name in names}
    return frozenset(file for file in files if (root / file).is_file())


def _reached(root: Path, test: str) -> set[str]:
    """What a test imports itself and through the tests' own helpers."""
    found, open_files = set(), [test]
    while open_files:
        new = _imported(root, open_files.pop()) - found
        found |= new
        open_files += [file for file in new if file.startswith("tests/")]
    return found


class Trees:
    """Copies of the tree: one for each test run at a time, and `original`, which stays as it is."""

    def __init__(self, root: Path, folder: Path, copies: int, launcher: Sequence[str]) -> None:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True).stdout.split("\0")
        self._launcher = launcher
        self._free: SimpleQueue[Path] = SimpleQueue()
        self.original = folder / "original"
        for tree in (self.original, *(folder / str(number) for number in range(copies))):
            for name in names:
                if (root / name).is_file():
                    (tree / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(root / name, tree / name)
            if tree != self.original:
                self._free.put(tree)

    def run(self, tests: Sequence[str], limit_seconds: float, change: tuple[str, str] | None = None) -> dict[str, Any]:
        """Run tests against the code, with one file's source replaced: exit status, seconds and the first failure."""
        tree = self._free.get()
        try:
            if change is not None:
                original = _overwrite(tree / change[0], change[1])
            answer = self._pytest(tree, tests, limit_seconds)
            if answer["status"] == 5:  # all of them are slow
                answer = self._pytest(tree, ["-m", "slow", *tests], limit_seconds)
            return answer
        finally:
            if change is not None:
                _overwrite(tree / change[0], original)
            self._free.put(tree)

    def _pytest(self, tree: Path, arguments: Sequence[str], limit_seconds: float) -> dict[str, Any]:
        command = [*self._launcher, "env", f"PYTHONPATH={tree}"]
        command += ["prlimit", f"--as={MEMORY_BYTES}:", "timeout", "--kill-after=10", str(int(limit_seconds))]
        command += [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
        answer = subprocess.run(command, cwd=tree, capture_output=True, text=True, errors="replace")
        failure = re.search(r"^(?:FAILED|ERROR) (.*)$", answer.stdout, re.MULTILINE)
        took = re.findall(r" in ([\d.]+)s", answer.stdout[-300:])
        text = failure[1] if failure else answer.stdout[-200:]
        return {"status": answer.returncode, "seconds": float(took[-1]) if took else 0.0, "failure": text}


def _overwrite(path: Path, source: str) -> str:
    """Replace a module's source, and its bytecode, which is thought current where time and size are the same."""
    old = path.read_text(encoding="utf-8")
    path.write_text(source, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()
    return old


class Baseline:
    """Which tests pass without a mutant, and in how many seconds; each is run once, where it is asked for."""

    def __init__(self, trees: Trees) -> None:
        self._trees, self._lock, self._seconds = trees, Lock(), dict[str, float | None]()

    def seconds(self, test: str) -> float | None:
        """Of a test file, or of one test; None where it fails, or is not there."""
        with self._lock:
            if test not in self._seconds:
                answer = self._trees.run([test], 1800)
                self._seconds[test] = answer["seconds"] if answer["status"] == 0 else None
                print(f"without a mutant: {test}: status {answer['status']}, {answer['seconds']:.0f} s", flush=True)
            return self._seconds[test]


def judge(trees: Trees, mutant: Mutant, passes_in: Callable[[str], float | None], killer: str = "") -> dict[str, Any]:
    """Run one mutant against its tests; first the test that killed it in an earlier run, if it still does.

    `passes_in` gives the seconds of a test without the mutant, None where it fails then too.
    """
    found = find(trees.original, mutant)
    if found is None:
        return {"result": "not found"}
    if killer.startswith("tests/") and (seconds := passes_in(killer)) is not None:
        answer = trees.run([killer], limit_seconds=120 + 5 * seconds, change=found)
        if answer["status"] in (1, 2):  # a test failed, or its file cannot be read
            return {"result": "killed", "by": killer}
    durations = {test: passes_in(test) for test in mirrored_tests(trees.original, found[0])}
    if None in durations.values():
        return {"result": "tests fail without it"}
    if not durations:
        return {"result": "survived", "tests": 0}
    # The likeliest and the cheapest first.
    costs = {
        test: (seconds or 0) * (0.3 if test == _own_test(found[0]) else 1.0) for test, seconds in durations.items()
    }
    limit_seconds = 120 + 5 * sum(seconds or 0 for seconds in durations.values())
    answer = trees.run(sorted(costs, key=lambda test: costs[test]), limit_seconds, change=found)
    if answer["status"] == 0:
        return {"result": "survived", "tests": len(durations)}
    return {
        "result": "killed",
        "by": "time limit" if answer["status"] in (124, 137) else answer["failure"].split(" - ")[0],
    }


def run(entries: list[dict[str, Any]], names: dict[str, str], jobs: int, launcher: Sequence[str], save: Any) -> None:
    """Judge the recorded mutants that have no result yet; `save` is called after each."""
    todo = [entry for entry in entries if "result" not in entry]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        trees = Trees(REPOSITORY, Path(folder), jobs, launcher)
        baseline = Baseline(trees)
        futures = {}
        for entry in todo:
            mutant = renamed(mutant_of(entry), names)
            futures[pool.submit(judge, trees, mutant, baseline.seconds, entry.get("by", ""))] = entry, mutant
        for future in as_completed(futures):
            entry, mutant = futures[future]
            entry.pop("by", None)
            entry |= future.result()
            print(f"{entry['result']}: {mutant.file} {mutant.function}: {mutant.original!r} -> {mutant.replacement!r}")
            print(f"    {entry.get('by', '')}", flush=True)
            save()


def report(entries: list[dict[str, Any]]) -> str:
    """A table by area; shares are of the mutants that are not equivalent. Those whose code is gone are left out.

    `at first` counts those killed before tests were added for survivors, which `run --again` notes as `before`.
    """
    lines = [f"{'area':15}{'drawn':>7}{'equivalent':>12}{'killed at first':>24}{'killed now':>20}{'survived':>10}"]
    areas = dict.fromkeys([*AREAS, *(entry["area"] for entry in entries)])  # an earlier draw has others
    for area in [*areas, "all"]:
        part = [e for e in entries if area in (e["area"], "all") and e.get("result") != "not found"]
        killed = [entry for entry in part if entry.get("result") == "killed"]
        equivalent = sum("equivalent" in entry for entry in part)
        rest = len(part) - equivalent
        counts = (sum("before" not in entry for entry in killed), len(killed))
        first, now = (f"{count} ({count / rest:.1%})" if rest else "-" for count in counts)
        lines.append(f"{area:15}{len(part):7}{equivalent:12}{first:>24}{now:>20}{rest - len(killed):10}")
    return "\n".join(lines)


def write(path: Path, head: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    """One mutant a line, so that differences can be read."""
    rows = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    path.write_text(f'{json.dumps(head)[:-1]}, "mutants": [\n{rows}\n]}}\n', encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description="Mutants against their mirrored tests."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="choose mutants of the code as it is")
    drawing.add_argument("--seed", type=int, required=True)
    drawing.add_argument("--count", type=int, default=60)
    drawing.add_argument("--output", type=Path, required=True)
    drawing.add_argument(
        "--without", type=Path, nargs="*", default=[], help="lists of mutants that are not drawn again"
    )
    running = commands.add_parser("run", help="run recorded mutants; goes on where OUTPUT has results already")
    running.add_argument("file", type=Path)
    running.add_argument("--output", type=Path, help="default: FILE itself")
    running.add_argument("--again", action="store_true", help="run survivors of FILE again; results stay as `before`")
    running.add_argument("--all", action="store_true", help="run every mutant of FILE again, into a new OUTPUT")
    running.add_argument("--rename", action="append", default=[], metavar="OLD=NEW", help="an identifier, since then")
    running.add_argument("--jobs", type=int, default=2)
    running.add_argument("--launcher", default="", help="a command before each test run, as of a queue")
    commands.add_parser("report", help="count results by area").add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "draw":
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
        without = [mutant_of(entry) for path in options.without for entry in json.loads(path.read_text())["mutants"]]
        drawn = [
            {"area": area_of(mutant.file), **asdict(mutant)}
            for mutant in draw(REPOSITORY, options.seed, options.count, without)
        ]
        write(options.output, {"seed": options.seed, "commit": commit.stdout.strip()}, drawn)
        return
    output = getattr(options, "output", None) or options.file
    if getattr(options, "all", False) and output == options.file:
        running.error("--all needs --output, so that the earlier results stay")
    head = json.loads((output if output.is_file() else options.file).read_text(encoding="utf-8"))
    entries = head.pop("mutants")
    if options.command == "report":
        print(report(entries))
        return
    for entry in entries:
        if options.again and entry.get("result") != "killed" and "equivalent" not in entry:
            entry["before"] = entry.pop("result", None)
        if options.all and not output.is_file():
            entry.pop("result", None)
    names = dict(pair.split("=") for pair in options.rename)
    run(entries, names, options.jobs, shlex.split(options.launcher), lambda: write(output, head, entries))
    print(report(entries))


if __name__ == "__main__":
    os.chdir(REPOSITORY)
    main()
