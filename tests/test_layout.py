"""The shape of the repository: folders, who may import what, package data, no machine's paths."""

from __future__ import annotations

import ast
import fnmatch
import importlib.resources
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("configs", "data_prep", "trainer", "launch")
TOP_LEVEL_FOLDERS = {".ci", "configs", "data_prep", "launch", "tests", "trainer"}
TOP_LEVEL_FILES = {".gitignore", "LICENSE", "README.md", "constraints.txt", "pyproject.toml"}

# What each package takes from the others: configs <- data_prep <- trainer <- launch.
ALLOWED = {
    "configs": set(),
    "data_prep": {"configs", "data_prep"},
    "trainer": {"configs", "data_prep", "trainer"},
    "launch": set(PACKAGES),
}
FORBIDDEN_LIBRARIES = {"configs": {"torch", "transformers"}, "data_prep": {"torch", "transformers"}}

# The only package that may import a library, and in how many of its modules at most.
SEAMS = {
    "sentencepiece": ("data_prep", 1),
    "webdataset": ("data_prep", 1),
    "fsspec": ("data_prep", 1),
    "sentencex": ("data_prep", 1),
    "dask": ("data_prep", 1),
    "distributed": ("data_prep", 1),
    "cloudpickle": ("data_prep", 3),
    "pyarrow": ("data_prep", 3),
    "rensa": ("data_prep", 1),
    "tenacity": ("data_prep", 1),
    "braceexpand": ("data_prep", 1),
    "py3langid": ("data_prep", 1),
    "datatrove": ("data_prep", 1),
    "deepspeed": ("trainer", 4),
    "mlflow": ("trainer", 6),  # with `served_rows`, of which registered models contain a copy
}

# The packages of `data_prep` and `trainer` in the order in which they build on each other: each imports from those
# before it alone.
ORDER = {
    "data_prep": (
        "base", "storage", "executors", "text", "tokenizer", "config", "documents", "filters", "tokenizer_training",
        "dataset", "deduplication", "pipeline", "reports", "api", "commands",
    ),
    "trainer": (
        "config", "distributed", "data", "model", "objectives", "tracking", "engine", "checkpoint",
        "validation", "metrics", "preflight", "loop",
        "hf_export", "inference", "registry", "finetuning", "evaluation",
        "follow", "benchmark", "api",
    ),
}  # fmt: skip
MODULES = {"trainer": {"api"}}
"""Names in `ORDER` that are modules beside the packages."""

# Two towers stand on the packages before them: nothing in one imports from the other.
TOWERS = (
    {"validation", "metrics", "preflight", "loop"},  # training
    {"hf_export", "inference", "registry", "finetuning", "evaluation"},  # models
)
TAKEN_BY_TRAINER = {"base", "storage", "text", "tokenizer", "dataset"}  # packages of data_prep
COMMANDS = ("data_prep/commands", "launch")  # a command bears the name of what it is a front end of

# What works on a laptop without deepspeed: these modules may reach it at no depth of imports at module level.
WITHOUT_DEEPSPEED = (
    "trainer.hf_export.export",
    "launch.export",
    "launch.export_onnx",
    "launch.register",
    "launch.fill_mask",
    "launch.finetune",
    "launch.predict",
    "launch.embed",
    "launch.next_sentence",
    "launch.show_attention",
    "launch.evaluate",
    "launch.follow",
    "launch.push",
)

# What the settings of few runs use: `launch/pretrain.py` reaches it at no depth of imports at module level.
RARE_IN_A_START = {
    "data_prep.config.preparation_config",
    "data_prep.dataset.verification",
    "data_prep.executors.executors",
    "trainer.checkpoint.adoption",
    "trainer.checkpoint.initial_weights",
    "trainer.checkpoint.teacher",
    "trainer.checkpoint.upload",
    "trainer.config.promotion",
    "trainer.config.synonyms",
    "trainer.data.minimal_pairs",
    "trainer.engine.muon",
    "trainer.engine.stable_adamw",
    "trainer.loop.pair_counting",
    "trainer.metrics.custom_metrics",
    "trainer.objectives.distillation",
    "trainer.objectives.sentence_pairs",
    "trainer.preflight.dry_run",
    "trainer.preflight.hosts",
    "trainer.preflight.rehearsal",
    "trainer.preflight.service_checks",
    "trainer.validation.minimal_pairs",
}

PRINTS = {
    "data_prep/__main__.py": "help",
    "data_prep/base/errors.py": "the end of a process",
    "data_prep/base/logs.py": "what is logged",
    "data_prep/base/progress.py": "progress",
    "data_prep/pipeline/reduce_phase.py": "a note on standard error",
    "data_prep/storage/leases.py": "what it waits for",
    "data_prep/storage/store_errors.py": "what it waits for",
    "data_prep/tokenizer_training/training.py": "progress",
    "trainer/__main__.py": "help",
    "trainer/evaluation/evaluate_checkpoint.py": "its result as JSON",
    "trainer/preflight/service_checks.py": "its result as JSON",
    "trainer/registry/register_checkpoint.py": "its result as JSON",
    "trainer/distributed/exit.py": "the end of a process",
    "trainer/distributed/watchdog.py": "the end of a process",
}
"""The files of `data_prep` and `trainer` that print, and what; all other lines go through `data_prep.base.logs`.

The commands of `data_prep` print their results. The end of a process is printed, for a stuck thread may hold the lock
of a handler of `logging`.
"""

PRODUCT_FILES = sorted(path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py"))


@cache
def tracked_files() -> list[Path]:
    """The files of the repository that git knows or would add."""
    command = "git -c safe.directory=* ls-files --cached --others --exclude-standard -z".split()
    try:
        answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in answer.stdout.decode().split("\0") if name and (path := Path(name))]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.AST, everywhere: bool) -> Iterator[str]:
    """Names of the imported modules; with `everywhere` those inside functions and `if TYPE_CHECKING` too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif everywhere or not _runs_later(node):
            yield from imports(node, everywhere)


def _runs_later(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def imported_by(path: Path, everywhere: bool = True) -> frozenset[str]:
    return _imported_by(path)[everywhere]


@cache
def _imported_by(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(imports(tree, False)), frozenset(imports(tree, True))


@cache
def product_modules() -> dict[str, Path]:
    return {module_name(path): path for path in PRODUCT_FILES}


def libraries_reached(name: str, everywhere: bool) -> dict[str, str]:
    """The libraries that a module imports, itself or through modules of the project, each with one importer of it."""
    found: dict[str, str] = {}
    for current in modules_reached(name, everywhere):
        for imported in imported_by(product_modules()[current], everywhere):
            top = imported.split(".")[0]
            if top not in sys.stdlib_module_names | {*PACKAGES, "_typeshed"}:
                found.setdefault(top, current)
    return found


def modules_reached(name: str, everywhere: bool) -> list[str]:
    """The module, and those of the project that it imports, itself or through others."""
    modules = product_modules()
    seen: dict[str, None] = {}
    todo = [name]
    while todo:
        current = todo.pop()
        if current in seen or current not in modules:
            continue
        seen[current] = None
        for imported in imported_by(modules[current], everywhere):
            todo += [imported, imported.rpartition(".")[0]]
    return list(seen)


def importers(library: str) -> list[Path]:
    return [path for path in PRODUCT_FILES if any(name.split(".")[0] == library for name in imported_by(path))]


def test_the_walk_over_imports_sees_every_form() -> None:
    tree = ast.parse(
        "import a.b\nfrom c import d\nif TYPE_CHECKING:\n    import e\n"
        "try:\n    import f\nexcept ImportError:\n    pass\n"
        "def g():\n    import h\nclass I:\n    import j\n"
    )
    assert set(imports(tree, everywhere=True)) == {"a.b", "c", "c.d", "e", "f", "h", "j"}
    assert set(imports(tree, everywhere=False)) == {"a.b", "c", "c.d", "f", "j"}


def test_a_start_imports_what_most_runs_use() -> None:
    reached = {*modules_reached("launch.pretrain", False), *modules_reached("trainer.loop.train", False)}
    assert product_modules().keys() >= RARE_IN_A_START
    assert RARE_IN_A_START & reached == set()


def test_the_top_level_holds_what_is_agreed() -> None:
    files = tracked_files()
    assert {path.parts[0] for path in files if len(path.parts) > 1} <= TOP_LEVEL_FOLDERS
    assert {path.name for path in files if len(path.parts) == 1} <= TOP_LEVEL_FILES


@pytest.mark.parametrize("path", PRODUCT_FILES, ids=module_name)
def test_imports_follow_one_direction(path: Path) -> None:
    package = path.relative_to(REPOSITORY).parts[0]
    roots = {name.split(".")[0] for name in imported_by(path)}
    assert roots & {*PACKAGES, "tests"} <= ALLOWED[package]
    assert not roots & FORBIDDEN_LIBRARIES.get(package, set())


@pytest.mark.parametrize("top", ORDER)
def test_packages_import_downwards_only(top: str) -> None:
    found = {path.name for path in (REPOSITORY / top).iterdir() if (path / "__init__.py").is_file()}
    assert found == set(ORDER[top]) - MODULES.get(top, set())
    used = imports_within(top)
    assert sum(map(len, used.values())) > 100
    assert not upward_imports(used, ORDER[top])


def imports_within(top: str) -> dict[str, frozenset[str]]:
    """The modules of a top-level package that each of them imports, without `__init__` and `__main__`."""
    modules = {module_name(path): path for path in PRODUCT_FILES if not path.name.startswith("__")}
    own = {module: path for module, path in modules.items() if module.startswith(f"{top}.")}
    return {module: imported_by(path) & own.keys() for module, path in own.items()}


def upward_imports(used: Mapping[str, Collection[str]], order: Sequence[str]) -> list[tuple[str, str]]:
    """The imports of a module in a package that stands later in `order` than the importing module's own."""
    level = {package: number for number, package in enumerate(order)}
    return [
        (module, other)
        for module, others in used.items()
        for other in others
        if level[other.split(".")[1]] > level[module.split(".")[1]]
    ]


def test_an_upward_import_is_seen() -> None:
    used = {"top.low.a": {"top.low.b"}, "top.high.c": {"top.low.a"}, "top.low.b": {"top.high.c"}}
    assert upward_imports(used, ("low", "high")) == [("top.low.b", "top.high.c")]


def crossing_imports(
    used: Mapping[str, Collection[str]], towers: Sequence[Collection[str]] = TOWERS
) -> list[tuple[str, str]]:
    """The imports of a module in one tower that lead into another."""
    tower = {package: number for number, packages in enumerate(towers) for package in packages}
    return [
        (module, other)
        for module, others in used.items()
        for other in others
        if len({tower[name] for name in (module.split(".")[1], other.split(".")[1]) if name in tower}) > 1
    ]


def test_training_and_models_are_two_towers() -> None:
    assert set().union(*TOWERS) < set(ORDER["trainer"])
    assert crossing_imports(imports_within("trainer")) == []


def test_an_import_from_one_tower_into_the_other_is_seen() -> None:
    used = {
        "top.base.a": {"top.base.b"},
        "top.left.c": {"top.base.a", "top.left.d", "top.right.e"},
        "top.right.e": {"top.base.a", "top.left.c"},
        "top.above.f": {"top.left.c", "top.right.e"},
    }
    found = crossing_imports(used, ({"left"}, {"right"}))
    assert found == [("top.left.c", "top.right.e"), ("top.right.e", "top.left.c")]


def test_no_module_lies_loose_beside_the_packages() -> None:
    for top in ORDER:
        loose = {path.stem for path in (REPOSITORY / top).glob("*.py")}
        assert loose == {"__init__", "__main__"} | MODULES.get(top, set())


def test_public_classes_have_unique_names() -> None:
    """A folder is the namespace of its files; a class of `trainer` or `launch` is known by its name alone."""
    names: dict[str, list[str]] = {}
    for path in PRODUCT_FILES:
        if path.relative_to(REPOSITORY).parts[0] in ("trainer", "launch"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    names.setdefault(node.name, []).append(module_name(path))
    assert len(names) > 100
    assert {name: modules for name, modules in names.items() if len(modules) > 1} == {}


def test_the_trainer_takes_the_lower_packages_of_data_prep_alone() -> None:
    of_trainer = [path for path in PRODUCT_FILES if path.relative_to(REPOSITORY).parts[0] == "trainer"]
    taken = {name for path in of_trainer for name in imported_by(path) if name.startswith("data_prep.")}
    assert {name.split(".")[1] for name in taken} == TAKEN_BY_TRAINER


@pytest.mark.parametrize("library", SEAMS)
def test_a_library_is_met_in_its_own_package_and_in_few_modules(library: str) -> None:
    package, most = SEAMS[library]
    found = importers(library)
    assert {path.relative_to(REPOSITORY).parts[0] for path in found} <= {package}
    assert len(found) <= most, [module_name(path) for path in found]


@pytest.mark.parametrize("name", WITHOUT_DEEPSPEED)
def test_what_a_laptop_needs_never_imports_deepspeed(name: str) -> None:
    assert name in set(map(module_name, PRODUCT_FILES))
    assert "deepspeed" not in libraries_reached(name, everywhere=False)


def test_every_package_is_listed_and_its_files_are_carried() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {".".join(path.relative_to(REPOSITORY).parent.parts) for path in PRODUCT_FILES} | {"configs"}
    assert folders == set(project["packages"])
    for folder in folders:
        patterns = [*project["package-data"].get(folder, []), "*.py"]
        for path in (REPOSITORY / folder.replace(".", "/")).iterdir():
            if path.is_file():
                assert any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns), path


def test_every_folder_of_modules_is_a_package_that_says_what_it_is_for() -> None:
    for folder in {path.parent for path in PRODUCT_FILES}:
        assert (folder / "__init__.py").is_file(), folder
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))), folder


def test_lines_of_a_run_go_through_logging() -> None:
    writes = {"print", "sys.stdout.write", "sys.stderr.write", "tqdm.write", "tqdm.tqdm.write"}

    def prints(path: Path) -> bool:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        return any(isinstance(node, ast.Call) and ast.unparse(node.func) in writes for node in nodes)

    found = {path.relative_to(REPOSITORY).as_posix() for path in PRODUCT_FILES if prints(path)}
    assert {name for name in found if not name.startswith(COMMANDS)} == PRINTS.keys()


def test_the_variables_of_the_process_are_copied_where_other_threads_may_change_them() -> None:
    """`os.environ` is asked for single names; iterating over it or copying it fails in a thread now and then."""
    single = {"get", "setdefault", "pop", "update", "clear"}

    def takes_all(source: str) -> Iterator[int]:
        nodes = list(ast.walk(ast.parse(source)))
        asked = {id(node.value) for node in nodes if isinstance(node, ast.Subscript)}
        asked |= {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in single}
        for node in nodes:
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
                asked.add(id(node.comparators[0]))
        for node in nodes:
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "os.environ" and id(node) not in asked:
                yield node.lineno
            if isinstance(node, ast.ImportFrom) and node.module == "os" and "environ" in {x.name for x in node.names}:
                yield node.lineno

    whole = ("dict(os.environ)", "{**os.environ}", "os.environ | {}", "os.environ.items()", "list(os.environ)",
             "f(os.environ)", "[each for each in os.environ]", "os.environ == {}", "os.environ.copy()",
             "from os import environ")  # fmt: skip
    assert all(list(takes_all(source)) for source in whole)
    assert not list(takes_all("os.environ['A'], os.environ.get('A'), 'A' in os.environ, os.environ.update({})"))
    found = {path.relative_to(REPOSITORY).as_posix() for path in PRODUCT_FILES if list(takes_all(path.read_text()))}
    assert found == {"data_prep/base/environment.py"}


def test_what_tests_and_benchmarks_name_exists(longest_files: tuple[str, ...]) -> None:
    tests = REPOSITORY / "tests"
    assert not [name for name in longest_files if not (tests / name).is_file()]
    script = re.compile(r"""launch"? / "(\w+\.(?:py|sh))\"""")
    named = {name for path in tests.rglob("*.py") for name in script.findall(path.read_text(encoding="utf-8"))}
    assert len(named) > 5
    assert not [name for name in named if not (REPOSITORY / "launch" / name).is_file()]


def test_the_presets_are_found_as_package_data() -> None:
    found = {entry.name for entry in importlib.resources.files("configs").iterdir()}
    presets = {path.name for path in (REPOSITORY / "configs").glob("*.yaml")}
    assert presets and presets <= found


def test_no_file_names_a_machines_paths_or_a_package_index() -> None:
    folders = "|".join(("work", "root", "opt", "tmp"))
    hosts = "|".join(("download" + r"\.pytorch", "files" + r"\.pythonhosted", "pypi" + r"\.org"))
    pattern = re.compile(rf"(?<![\w.\-}}$/*])/({folders})/\w|/home/\w|{hosts}")
    for name in tracked_files():
        path = REPOSITORY / name
        if path.is_file() and name.name != "LICENSE":
            text = path.read_text(encoding="utf-8", errors="replace")
            assert not (found := pattern.search(text)), f"{name}: {found.group() if found else ''}"


def test_every_pin_is_exact_and_every_dependency_pinned() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin) for pin in pins)
    pinned = {re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    unpinned = {"gcs", "http"}  # installed by no test and no demo
    extras = [lines for extra, lines in project["optional-dependencies"].items() if extra not in unpinned]
    wanted = [*project["dependencies"], *(line for lines in extras for line in lines if "clozeworks[" not in line)]
    assert {re.split(r"[^\w.-]", line)[0].lower() for line in wanted} <= pinned


def test_test_folders_are_no_packages() -> None:
    assert not list((REPOSITORY / "tests").rglob("__init__.py"))


def test_the_lowest_versions_are_those_that_the_project_asks_for() -> None:
    """Of torch, pydantic, fsspec, regex and tokenizers the lowest that work together are higher, as the file says."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [
        *project["dependencies"],
        *(line for name in ("train", "finetune", "registry", "onnx") for line in extras[name]),
    ]
    bounds = dict(re.findall(r"^([\w-]+)>=([\w.]+)", "\n".join(asked), re.MULTILINE))
    lines = (REPOSITORY / "tests" / "lowest_versions.txt").read_text().splitlines()
    lowest = dict(line.split("==") for line in lines if not line.startswith("#"))
    others = {"torch", "pydantic", "fsspec", "regex", "tokenizers"}
    assert len(bounds) > 20 and bounds.keys() - others <= lowest.keys()
    assert {name for name in bounds.keys() - others if Version(bounds[name]) != Version(lowest[name])} == set()


def test_the_tests_know_of_every_named_thread_whether_it_ends(names_of_threads: tuple[str, ...]) -> None:
    name = re.compile(r"""Thread\([^()]*(?:\([^()]*\)[^()]*)*name=f?"([\w-]+)""")
    sources = [path for folder in ("data_prep", "trainer", "launch") for path in (REPOSITORY / folder).rglob("*.py")]
    found = {each for path in sources for each in name.findall(path.read_text(encoding="utf-8"))}
    assert found == {*names_of_threads}, "correct the names in tests/conftest.py"
