"""The mutant generator: its operators on small sources, the draw, and recorded mutants in code that has moved."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants import (
    AREAS,
    FOCUS,
    REPOSITORY,
    Mutant,
    Trees,
    area_of,
    draw,
    find,
    judge,
    main,
    mirrored_tests,
    mutants_of,
    product_files,
    renamed,
    report,
    write,
)

MODULE = '''"""A module."""

LIMIT = 7


class Counter:
    """Counts."""

    def cut(self, values: list[int], size: int = 3) -> list[int]:
        """Return the first values."""
        if size < 0:
            raise ValueError(f"size {size + 1}")
        self.flush(values, size)
        return values[:size]
'''


def changed(source: str) -> set[tuple[str, str, str]]:
    return {(m.operator, m.original, m.replacement) for m, _ in mutants_of(source, "trainer/a.py")}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", {("boundary", "a <= b"), ("comparison", "a > b")}),
        ("a >= b", {("boundary", "a > b"), ("comparison", "a <= b")}),
        ("a is not b", {("comparison", "a is b")}),
        ("a not in b", {("comparison", "a in b")}),
        ("a + b", {("arithmetic", "a - b")}),
        ("a += b", {("arithmetic", "a -= b")}),
        ("a // b", {("arithmetic", "a * b")}),
        ("a + 'text'", set()),
        ("x = a or b", {("and/or", "a and b")}),
        ("x = True", {("constant", "False")}),
        ("x = 0.5", {("constant", "1.5"), ("constant", "-0.5")}),
        ("x = a if b else c", {("negation", "not b")}),
        ("x = [a for a in b if not a]", {("negation", "a")}),
        ("a[:b]", {("slice", ":b + 1"), ("slice", ":b - 1")}),
        ("a[-1:]", {("slice", "-1 + 1:"), ("slice", "-1 - 1:")}),
        ("x = f(a, b, *c)", {("arguments", "f(b, a, *c)")}),
        ("x = f(a, a)", set()),
        ("x = min(a, b)", {("min/max", "max(a, b)")}),
        ("x = np.maximum(a, b)", {("min/max", "np.minimum(a, b)")}),
        ("def f():\n    g()", {("statement", "pass")}),
        ("def f():\n    if a:\n        raise b", {("guard", "pass"), ("negation", "not a")}),
        ("def f():\n    return a", {("return", "return None")}),
        ("def f():\n    return not a", {("return", "return None")}),
        ("def f():\n    return a in b", {("return", "return not a in b"), ("comparison", "a not in b")}),
    ],
)
def test_an_operator_changes_what_it_names(source: str, expected: set[tuple[str, str]]) -> None:
    assert {(operator, new) for operator, _, new in changed(source)} == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Text of 3 words."""',
        "def f(a: Literal[3]) -> Literal[4]: ...",
        "x: Literal[3]",
        "@cache(3)\ndef f(): ...",
        "assert a < 3",
        "raise ValueError(3)",
        "x = f'{a + 3}'",
        "logger.info(3)",
        "x = zip(a, strict=True)",
        "if TYPE_CHECKING:\n    f(3)",
        "if __name__ == '__main__':\n    main(3)",
        "from a import b",
    ],
)
def test_what_no_test_should_see_is_not_mutated(source: str) -> None:
    assert {change for change in changed(source) if change[0] != "arguments"} == set()


def test_every_mutant_is_valid_and_another_program_and_the_tree_comes_back() -> None:
    original = ast.dump(ast.parse(MODULE))
    sources = []
    for mutant, tree in mutants_of(MODULE, "trainer/a.py"):
        sources.append(ast.unparse(tree))
        assert ast.dump(ast.parse(sources[-1])) != original, mutant
        compile(sources[-1], "a", "exec")
    assert len(set(sources)) == len(sources) > 8
    *_, last_tree = (tree for _, tree in mutants_of(MODULE, "trainer/a.py"))
    assert ast.dump(last_tree) == original


def test_every_module_of_the_product_can_be_mutated() -> None:
    for file in ("trainer/loop/step.py", "trainer/engine/fragments.py", "launch/nodes.py"):
        source = (REPOSITORY / file).read_text(encoding="utf-8")
        compiled = [compile(ast.unparse(tree), mutant.file, "exec") for mutant, tree in mutants_of(source, file)]
        assert len(compiled) > 20, file


def test_equal_texts_of_a_function_are_told_apart_by_their_number() -> None:
    found = [m for m, _ in mutants_of("def f():\n    g(0)\n    g(0)\n", "trainer/a.py") if m.operator == "statement"]
    assert [m.occurrence for m in found] == [0, 1]
    assert found[0] == replace(found[1], occurrence=0)
    assert found[0] == Mutant("trainer/a.py", "f", "statement", "g(0)", "pass", "def f():", 0)


def test_a_seed_gives_one_draw_of_todays_code_and_most_of_it_from_the_named_areas(tmp_path: Path) -> None:
    """Of one module of each area, so that it takes a second and not a minute."""
    files = product_files(REPOSITORY)
    assert len(files) > 250 and set(map(area_of, files)) == set(AREAS)
    for area in AREAS:
        of_area = [file for file in files if area_of(file) == area]
        middle = sorted(of_area, key=lambda file: (REPOSITORY / file).stat().st_size)[len(of_area) // 2]
        (tmp_path / middle).parent.mkdir(parents=True)
        shutil.copy(REPOSITORY / middle, tmp_path / middle)
    first = draw(tmp_path, 5, 20)
    assert first == draw(tmp_path, 5, 20) != draw(tmp_path, 6, 20)
    assert len(set(first)) == 20
    assert not set(first) & set(draw(tmp_path, 5, 20, without=first)), "what was drawn before is left out"
    areas = Counter(area_of(mutant.file) for mutant in first)
    assert areas == Counter(dict.fromkeys(FOCUS, 2)) + Counter(elsewhere=6)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "trainer" / "parts").mkdir(parents=True)
    (tmp_path / "trainer" / "parts" / "counter.py").write_text(MODULE)
    return tmp_path


def recorded(tree: Path, operator: str) -> Mutant:
    file = tree / "trainer" / "parts" / "counter.py"
    return next(m for m, _ in mutants_of(file.read_text(), "trainer/parts/counter.py") if m.operator == operator)


@pytest.mark.parametrize("operator", ["boundary", "guard", "slice", "statement", "constant", "arguments"])
def test_a_recorded_mutant_is_found_after_its_file_has_moved(tree: Path, operator: str) -> None:
    mutant = recorded(tree, operator)
    before = find(tree, mutant)
    assert before is not None and before[0] == mutant.file
    (tree / "trainer" / "parts" / "counter.py").rename(tree / "trainer" / "other.py")
    assert find(tree, mutant) == ("trainer/other.py", before[1])


def test_a_recorded_mutant_is_found_after_other_lines_have_changed_and_names_too(tree: Path) -> None:
    mutant = recorded(tree, "slice")
    changed = (
        MODULE.replace("LIMIT = 7", "LIMIT = 8\nOTHER = LIMIT[:1]").replace("Counter", "Cutter").replace("cut", "front")
    )
    (tree / "trainer" / "parts" / "counter.py").write_text(changed.replace("values[:size]", "values[: size]"))
    assert find(tree, renamed(mutant, {"Counter": "Cutter", "cut": "front"})) == find(
        tree, replace(mutant, function="")
    )
    moved = find(tree, renamed(mutant, {"Counter": "Cutter", "cut": "front"}))
    assert moved is not None and "values[:size + 1]" in moved[1]


def test_a_recorded_mutant_whose_text_is_gone_or_stands_twice_is_not_found(tree: Path) -> None:
    mutant = recorded(tree, "slice")
    file = tree / "trainer" / "parts" / "counter.py"
    (tree / "trainer" / "copy.py").write_text(MODULE)
    assert find(tree, mutant) is not None
    file.rename(file.with_name("another.py"))
    assert find(tree, mutant) is None
    (tree / "trainer" / "copy.py").unlink()
    file.with_name("another.py").write_text(MODULE.replace("[:size]", "[:size + 5]"))
    assert find(tree, mutant) is None


def test_the_tests_of_a_module_are_its_mirror_and_those_beside_it_that_import_it() -> None:
    tests = mirrored_tests(REPOSITORY, "trainer/checkpoint/format.py")
    assert tests[0] == "tests/trainer/checkpoint/test_format.py"
    assert "tests/trainer/checkpoint/test_writer.py" in tests
    assert all(Path(test).parent.as_posix() == "tests/trainer/checkpoint" for test in tests)
    assert "tests/trainer/loop/test_contract5.py" in mirrored_tests(REPOSITORY, "trainer/loop/step.py"), (
        "through toy_pretraining"
    )


@pytest.fixture
def project(tree: Path) -> Path:
    """A repository of one module with one test, which notices what becomes of `size` and nothing else."""
    (tree / "tests" / "trainer" / "parts").mkdir(parents=True)
    source = (
        "import time\n\n\ndef cut(size):\n    while size < 0:\n        size += 1\n    time.sleep(0)\n    return size\n"
    )
    (tree / "trainer" / "parts" / "counter.py").write_text(source)
    test = (
        "from trainer.parts.counter import cut\n\n\ndef test_cut():\n    assert cut(-1) == 0\n    assert cut(1) == 1\n"
    )
    (tree / "tests" / "trainer" / "parts" / "test_counter.py").write_text(test)
    (tree / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow']\n")
    return tree


def test_a_mutant_is_killed_by_a_failure_or_by_the_time_limit_and_otherwise_survives(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    trees = Trees(project, tmp_path_factory.mktemp("copies"), 1, [])
    test = "tests/trainer/parts/test_counter.py"
    assert trees.run([test], 620)["status"] == 0
    mutants = {
        (mutant.operator, mutant.replacement): mutant
        for mutant, _ in mutants_of((project / "trainer/parts/counter.py").read_text(), "trainer/parts/counter.py")
    }
    patient, impatient = {test: 100.0}.get, {test: -23.6}.get  # limits of 620 seconds and of 2
    survivor, wrong, endless = ("statement", "pass"), ("return", "return None"), ("arithmetic", "size -= 1")
    assert judge(trees, mutants[survivor], patient) == {"result": "survived", "tests": 1}
    assert judge(trees, mutants[wrong], patient) == {"result": "killed", "by": f"{test}::test_cut"}
    assert judge(trees, mutants[endless], impatient) == {"result": "killed", "by": "time limit"}
    assert trees.run([test], 620)["status"] == 0, "the copy is as it was"
    assert judge(trees, mutants[wrong], {}.get) == {"result": "tests fail without it"}
    killer = f"{test}::test_cut"
    known = {killer: 100.0}.get
    assert judge(trees, mutants[wrong], known, killer) == {"result": "killed", "by": killer}
    everything = {killer: 100.0, test: 100.0}.get
    assert judge(trees, mutants[survivor], everything, killer) == {"result": "survived", "tests": 1}


def test_the_report_counts_by_area_and_leaves_equivalent_ones_out(tmp_path: Path) -> None:
    entries = [
        {"area": "engine", "result": "killed"},
        {"area": "engine", "result": "killed", "before": "survived"},
        {"area": "engine", "result": "survived", "equivalent": "the same"},
        {"area": "engine", "result": "survived"},
        {"area": "order", "result": "killed"},
        {"area": "order", "result": "not found"},
    ]
    lines = {line.split()[0]: line.split()[1:] for line in report(entries).splitlines()}
    assert lines["engine"] == ["4", "1", "1", "(33.3%)", "2", "(66.7%)", "1"]
    assert lines["all"] == ["5", "1", "2", "(50.0%)", "3", "(75.0%)", "1"]
    assert lines["registry"] == ["0", "0", "-", "-", "0"]
    write(tmp_path / "results.json", {"seed": 1}, entries)
    assert json.loads((tmp_path / "results.json").read_text()) == {"seed": 1, "mutants": entries}


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "tests" / "golden" / "mutants").glob("*.json")), ids=lambda p: p.stem
)
def test_the_recorded_mutants_have_results_and_a_reason_where_they_are_equivalent(path: Path) -> None:
    entries = json.loads(path.read_text(encoding="utf-8"))["mutants"]
    assert len(entries) == 60
    assert sum(entry["area"] != "elsewhere" for entry in entries) >= 30
    assert {entry["result"] for entry in entries} <= {"killed", "survived", "not found"}
    assert all(len(entry["equivalent"]) > 20 for entry in entries if "equivalent" in entry)


def test_the_tests_that_killed_recorded_mutants_exist() -> None:
    """They are tried first; without them all tests of a module run."""
    files = sorted((REPOSITORY / "tests" / "golden" / "mutants").glob("*.json"))
    killers = {entry.get("by", "") for path in files for entry in json.loads(path.read_text())["mutants"]}
    for killer in sorted(killer for killer in killers if "::" in killer):
        path, name = killer.partition("[")[0].split("::")[:2]
        assert (REPOSITORY / path).is_file() and f"def {name}(" in (REPOSITORY / path).read_text(), killer


def test_all_mutants_run_again_into_a_file_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", str(tmp_path / "drawn.json"), "--all"])
    assert "--all needs --output" in capsys.readouterr().err
