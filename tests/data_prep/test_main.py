"""The command line of data preparation, run in this process: what it prints, writes and answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import __main__, open_dataset
from data_prep.__main__ import COMMANDS, GROUPS
from tests.support.data_prep_command import Command
from tests.support.living_data_sets import document_ids


def test_a_corpus_becomes_a_tokenizer_shards_and_reports(command: Command, small_corpus: Path, tmp_path: Path) -> None:
    tokenizer, shards = tmp_path / "tokenizer", tmp_path / "shards"
    assert command("tokenizer", "--input", small_corpus, "--output", tokenizer, "--vocab-size", 700) == 0
    assert re.search(r"vocabulary +700\b", command.output)
    arguments = ["shards", "--input", small_corpus, "--tokenizer", tokenizer, "--output", shards, "--workers", 1]
    assert command(*arguments, "shards.min_shards=2") == 0
    assert re.search(r"^train +2 ", command.output, re.MULTILINE)
    assert re.search(r"^deduplication +200 +0 +200 ", command.output, re.MULTILINE)
    assert command(*arguments, "shards.min_shards=2") == 0
    assert "is complete" in command.output
    assert command(*arguments, "shards.min_shards=3") == 1
    assert "shards.min_shards was 2 and is now 3" in command.errors and "Traceback" not in command.errors
    assert command(*arguments, "shards.min_shards=3", "--fresh") == 0
    assert command("verify", shards, "--workers", 1) == 0
    assert command.output.startswith("ok: 4 shards, 200 documents")


@pytest.mark.long
def test_the_tokenizer_command_again_does_nothing_or_refuses(
    command: Command, small_corpus: Path, tmp_path: Path
) -> None:
    arguments = ["tokenizer", "--input", small_corpus, "--output", tmp_path / "out"]
    assert command(*arguments, "--vocab-size", 700) == 0
    assert command(*arguments, "--vocab-size", 700) == 0 and "is complete" in command.output
    assert command(*arguments, "--vocab-size", 701) == 1 and "--fresh" in command.errors
    assert command(*arguments, "--vocab-size", 701, "--fresh") == 0


def test_overrides_may_follow_the_input_files(command: Command, small_corpus: Path, tmp_path: Path) -> None:
    assert (
        command(
            "tokenizer", "--output", tmp_path / "out", "--dry-run", "--input", small_corpus, "tokenizer.vocab_size=777"
        )
        == 0
    )
    assert "777" in command.output and str(tmp_path / "out") in command.output and not (tmp_path / "out").exists()


def test_a_dry_run_of_shards_writes_nothing(
    command: Command, small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    assert (
        command("shards", "--input", small_corpus, "--tokenizer", small_tokenizer, "--output", output, "--dry-run") == 0
    )
    assert "8 train and 1 valid shard to" in command.output and "trillion" not in command.output
    assert not output.exists()


@pytest.mark.fault(row=1, fault="a command without a usable input", required="one paragraph, no manifest")
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--input", "{tmp}/missing.jsonl"], 2, "missing.jsonl"),
        (["--input", "{tmp}"], 2, "{tmp}"),
        (["--input", "{tmp}/report.pdf"], 2, "report.pdf"),
        (["--input", "{tmp}/empty.jsonl"], 1, "1 file without a document"),
        ([], 2, "[missing-input]"),
        (["--input", "{corpus}", "documents.text_field=body"], 1, "'body'"),
        (["--input", "{corpus}", "shards.valid_fraction=2"], 2, "shards.valid_fraction=2"),
        (["--input", "{corpus}", "shards.vaild_fraction=0.1"], 2, "shards.valid_fraction"),
        (["--input", "{corpus}", "--workers", "0"], 2, "[workers-out-of-range]"),
        (
            ["--input", "{corpus}", "--wrokers", "2"],
            2,
            "unrecognized arguments: --wrokers 2. Fix: write --workers, or see `",
        ),
        (["--input", "{corpus}", "--config", "{tmp}/none.yaml"], 2, "none.yaml does not exist"),
    ],
)
def test_mistakes_are_one_paragraph_and_leave_no_manifest(
    command: Command,
    small_corpus: Path,
    small_tokenizer: Path,
    tmp_path: Path,
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "report.pdf").touch()
    filled = [argument.format(tmp=tmp_path, corpus=small_corpus) for argument in arguments]
    assert command("shards", "--tokenizer", small_tokenizer, "--output", tmp_path / "out", *filled) == status
    assert message.format(tmp=tmp_path) in command.errors and "Traceback" not in command.errors
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_verify_answers_1_and_names_the_damage(command: Command, small_shards: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    for path in small_shards.rglob("*"):
        if path.is_file():
            target = folder / path.relative_to(small_shards)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    (folder / "train-000001.tar").unlink()
    assert command("verify", folder, "--workers", 1) == 1
    assert "train-000001.tar" in command.errors and "[damaged-data-set]" in command.errors
    assert command("stats", tmp_path / "nowhere") == 2 and str(tmp_path / "nowhere") in command.errors


def test_inspect_shows_sentences_of_real_documents(command: Command, small_shards: Path, small_corpus: Path) -> None:
    assert command("inspect", small_shards, "--documents", 2, "--split", "valid") == 0
    assert command.output.count("=== valid-000000.tar") == 2
    lines = [line.removeprefix("  | ").strip() for line in command.output.splitlines() if line.startswith("  | ")]
    corpus = " ".join(" ".join(json.loads(line)["text"].split()) for line in small_corpus.read_text().splitlines())
    assert lines and all(line in corpus for line in lines)
    assert (
        command("inspect", small_shards, "--shard", 4) == 2
        and "0 to 3" in command.errors
        and "[unknown-shard]" in command.errors
    )


def test_stats_show_counts_lengths_and_pieces(command: Command, small_shards: Path) -> None:
    assert command("stats", small_shards) == 0
    manifest = json.loads((small_shards / "manifest.json").read_text())
    for text in (f"{manifest['train']['tokens']:,}", "median", "most frequent tokens: ", "#####", "corpus"):
        assert text in command.output


def test_ranges_and_merge_on_the_command_line(
    command: Command, small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    rest = ["--input", small_corpus, "--tokenizer", small_tokenizer, "--output", output, "--workers", 1]
    rest += ["shards.unit_bytes=30000", "shards.min_shards=2"]
    assert command("shards", "--shard-range", "2/2", *rest) == 0 and "range 2/2 is done" in command.output
    assert command("shards", "--shard-range", "2/2", *rest) == 0 and "range 2/2 was done already" in command.output
    assert command("merge", *rest) == 1 and "--shard-range 1/2" in command.errors
    assert command("merge", *rest, "--dry-run") == 0 and "units are not done yet" in command.output
    assert (
        command("shards", "--shard-range", "1/2", *rest, "--fresh") == 2
        and "[contradicting-arguments]" in command.errors
    )
    assert command("merge", *rest, "--fresh", "--dry-run") == 0 and (output / ".work").exists()
    assert command("merge", *rest, "--fresh") == 0 and not (output / ".work").exists()
    for number in (1, 2):
        assert command("shards", "--shard-range", f"{number}/2", *rest) == 0
    assert command("merge", *rest) == 0 and f"\n{output}\nnext: clozeworks verify {output}; " in command.output
    vocab_size = open_dataset(output).manifest.tokenizer.vocab_size
    assert f"data.shards={output} model.vocab_size={vocab_size} " in command.output
    assert command("merge", *rest) == 0 and "is complete" in command.output
    assert command("verify", output, "--workers", 1) == 0


def test_a_source_is_added_on_the_command_line(
    command: Command, small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    more, output = tmp_path / "more.jsonl", tmp_path / "out"
    first = json.loads(small_corpus.read_text().splitlines()[0])
    more.write_text("".join(json.dumps({"text": text}) + "\n" for text in (first["text"], "A new text.", "Another.")))
    rest = ["--workers", 1, "shards.min_shards=2"]
    make = ["shards", "--input", small_corpus, "--tokenizer", small_tokenizer, "--output", output, *rest]
    assert command(*make) == 0
    add = ["shards", "--input", more, "--add-to", output, *rest]
    assert command(*add) == 2 and "'corpus'" in command.errors
    assert command(*add, "--source-name", "more", "--dry-run") == 0 and "more: 3 documents" in command.output
    assert command(*add, "--source-name", "more") == 0 and "1 in the data set already" in command.output
    assert re.search(r"^more +en +2 ", command.output, re.MULTILINE)
    assert command(*add, "--source-name", "more") == 0 and "is complete" in command.output
    assert command("verify", output, "--workers", 1) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "out", "--add-to", "out"], "[contradicting-arguments]"),
        (["--tokenizer", "x"], "[missing-output]"),
        (["--output", "out"], "[missing-tokenizer]"),
        (["--output", "out", "--tokenizer", "{tokenizer}", "--shard-range", "3/2"], "3/2"),
        (["--output", "out", "--tokenizer", "{tokenizer}", "--executor", "dask"], "[dask]'. [missing-extra]"),
        (["--output", "out", "--tokenizer", "{tokenizer}", "--scheduler", "tcp://x:1"], "[scheduler-without-cluster]"),
        (
            ["--output", "out", "--tokenizer", "{tokenizer}", "--executor", "dask", "--scheduler", "tcp://x:1"],
            "distributed",
        ),
    ],
)
def test_contradicting_arguments_are_reported(
    command: Command,
    small_corpus: Path,
    small_tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.delitem(sys.modules, "data_prep.executors.dask_executor", raising=False)
    filled = [argument.format(tokenizer=small_tokenizer) for argument in arguments]
    assert command("shards", "--input", small_corpus, *filled) == 2
    assert message in command.errors and not (tmp_path / "out").exists()


def test_options_of_stores_in_the_config_hold_while_shards_are_made(
    command: Command, small_corpus: Path, small_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "data.yaml"
    config.write_text("storage_options: {'s3://bucket': {profile: research}}\nshards: {min_shards: 2}\n")
    seen: list[object] = []
    monkeypatch.setattr("data_prep.storage.storage.configure", seen.append)
    rest = ["--input", small_corpus, "--tokenizer", small_tokenizer, "--output", tmp_path / "out", "--workers", 1]
    assert command("shards", "--config", config, *rest) == 0
    assert {"s3://bucket": {"profile": "research"}} in seen


def test_a_misspelt_section_after_the_inputs_is_named_as_a_setting(
    command: Command, small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    arguments = ["shards", "--tokenizer", small_tokenizer, "--output", tmp_path / "out", "--input", small_corpus]
    assert command(*arguments, "shard.min_shards=3") == 2
    assert "shard" in command.errors and "lang=en" not in command.errors
    assert command(*arguments, f"{tmp_path}/lang=en/*.jsonl") == 2
    assert "lang=en/*.jsonl" in command.errors


def test_an_empty_parquet_file_without_the_column_is_counted_as_empty(
    command: Command, small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"content": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    arguments = ["shards", "--input", small_corpus, tmp_path / "empty.parquet", "--tokenizer", small_tokenizer]
    arguments += ["--output", tmp_path / "out", "--workers", 1]
    assert command(*arguments) == 1 and "content" in command.errors
    assert command(*arguments, "documents.on_bad_input=skip") == 0
    assert "warning: source corpus: 1 file without a document" in command.errors and "empty file" not in command.output
    assert "0 left out" not in command.errors


def test_the_top_level_lists_every_command_in_groups(command: Command) -> None:
    assert command("--help") == 0
    for group, commands in GROUPS.items():
        assert f"{group}:" in command.output
        assert all(re.search(rf"^  {name} ", command.output, re.MULTILINE) for name in commands)
    assert command() == 2 and "usage:" in command.errors
    assert command("shard") == 2 and "'shards'" in command.errors and "[unknown-command]" in command.errors
    folder = Path(__main__.__file__).parent / "commands"
    assert {name for name in COMMANDS if not (folder / f"{name}.py").is_file()} == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_wrapped_and_writing_commands_have_a_dry_run(
    command: Command, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert command(name, "--help") == 0
    assert max(map(len, command.output.splitlines())) <= 80
    assert "--dry-run" in command.output
    assert ("tokenizer.vocab_size" in command.output) is (name == "tokenizer")
    assert ("deduplication.near" in command.output) is (name in ("shards", "merge"))


HELP = """
import contextlib, runpy, sys
before, sys.argv = set(sys.modules), ["data_prep", "--help"]
with contextlib.suppress(SystemExit):
    runpy.run_module("data_prep", run_name="__main__")
added = {name.partition(".")[0] for name in set(sys.modules) - before if not name.startswith("_")}
print("imported:", sorted(added - sys.stdlib_module_names - {"data_prep"}))
"""


@pytest.mark.spawn
def test_the_top_level_help_imports_only_the_standard_library() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "imported: []", done.stdout


OWN_EXECUTOR = """
class Mine:
    def run(self, task, units):
        for unit in units:
            with open("runs.txt", "a") as file:
                file.write(f"{task.__name__}\\n")
            yield unit, task(unit)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def open_mine(options):
    return Mine()
"""


@pytest.mark.long
def test_every_command_runs_its_work_on_an_executor_of_the_working_folder(
    command: Command, small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor is one file: a class with `run`, and a function from the options to it."""
    (tmp_path / "executor_of_the_working_folder.py").write_text(OWN_EXECUTOR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as for the installed command
    mine = ("--executor", "executor_of_the_working_folder:open_mine")
    made = ("--input", small_corpus, "--tokenizer", "tokenizer", "--output", "shards", *mine)
    settings = ("shards.min_shards=2", "shards.unit_bytes=200000")

    def ran(*words: object) -> set[str]:
        (tmp_path / "runs.txt").write_text("")
        assert command(*words) == 0, command.errors
        return set((tmp_path / "runs.txt").read_text().split())

    trained = ran("tokenizer", "--input", small_corpus, "--output", "tokenizer", "--vocab-size", 400, *mine)
    assert trained
    mapped, merged = ran("shards", *made, "--shard-range", "1/1", *settings), ran("merge", *made, *settings)
    assert len(mapped) == len(merged) == 1 and mapped != merged
    assert ran("verify", "shards", *mine)
    (tmp_path / "ids.txt").write_text(f"{document_ids(tmp_path / 'shards')[-1]:016x}\n")
    assert ran("remove", "shards", "--documents", "ids.txt", *mine)


PREPARING = ("--input", "nothing*.jsonl", "--output", "out", "--workers", "1")
STARTS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "tokenizer": (PREPARING, {"dataset", "deduplication", "pipeline", "estimate", "reports"}),
    "shards": ((*PREPARING, "--tokenizer", "tokenizer"), {"estimate", "tokenizer_training"}),
    "merge": ((*PREPARING, "--tokenizer", "tokenizer"), {"estimate", "tokenizer_training"}),
    "verify": (("nothing",), {"api", "pipeline", "estimate", "reports", "tokenizer_training"}),
    "inspect": (("nothing",), {"api", "pipeline", "estimate", "tokenizer_training"}),
    "stats": (("nothing",), {"api", "pipeline", "estimate", "tokenizer_training"}),
    "remove": (("nothing", "--source", "a"), {"api", "pipeline", "estimate", "reports", "tokenizer_training"}),
}
"""Of each command: arguments that it refuses once it looks at its input, and packages not imported before."""

SLOW_TO_IMPORT = {
    "concurrent.futures", "dask", "fsspec", "logging", "matplotlib", "numpy.ma", "psutil", "pyarrow",
    "tqdm", "transformers", "yaml",
}  # fmt: skip


@pytest.mark.spawn
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_imports_little_before_it_looks_at_its_input(name: str, tmp_path: Path) -> None:
    arguments, without = STARTS[name]
    code = (
        "import sys\nfrom data_prep.__main__ import main\nfrom data_prep.base.errors import UsageError\n"
        "try:\n    main()\nexcept UsageError as error:\n    print(error.code, *sys.modules)\n"
    )
    words = [sys.executable, "-c", code, name, *arguments]
    output = subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    error, *modules = output.split()
    assert error in {"input-not-found", "missing-path"}
    own = {module.split(".")[1] for module in modules if module.startswith("data_prep.")}
    assert not own & without
    assert not SLOW_TO_IMPORT & set(modules)
