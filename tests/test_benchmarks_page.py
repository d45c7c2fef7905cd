"""The figures of the pages are those of tests/benchmarks/results; `python -m tests.benchmarks` measures and prints."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from data_prep.base.errors import UserError
from tests.benchmarks import __main__ as command
from tests.benchmarks import corpus_part, language_tables, page, plots, reports, running
from tests.benchmarks.catalog import BENCHMARKS, Benchmark
from tests.benchmarks.reports import Row, figure
from tests.support import fork_server
from tests.support.error_codes import coded

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = {path: path.read_text(encoding="utf-8") for path in page.PAGES}
FRONT, TABLES = PAGES.values()
BY_HAND = [
    REPOSITORY / folder / "README.md"
    for folder in ("", "configs", "data_prep", "launch", "tests", "tests/benchmarks", "tests/system", "trainer")
]
GROWING = (
    *("speedrun", "proof", "ablations", "masking", "adoption", "causal", "distillation", "domain", "domain_few"),
    *("extension", "retrieval"),
)
"""Benchmarks whose results grow run by run and have tables of their own."""
AGAIN = "run python -m tests.benchmarks --readme"


@pytest.fixture(scope="module")
def measured() -> dict[str, reports.Report]:
    """The reports in the repository."""
    return page.load_reports(reports.RESULTS)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a script of the benchmarks' folder, which finds its neighbors there."""
    monkeypatch.syspath_prepend(str(running.SCRIPTS))
    return importlib.import_module


def test_the_tables_of_the_pages_are_exactly_what_the_results_give(measured: dict[str, reports.Report]) -> None:
    assert page.names_in(FRONT) == ["summary", "language"]
    assert set(page.names_in(TABLES)) == {"worse", "fills", *(benchmark.name for benchmark in BENCHMARKS)}
    for text in PAGES.values():
        assert page.rewritten(text, measured) == text, AGAIN


def test_the_picture_of_all_ratios_is_that_of_the_results(measured: dict[str, reports.Report]) -> None:
    picture = (reports.RESULTS / command.RATIOS).read_text(encoding="utf-8")
    assert picture == command.ratios_picture(measured), AGAIN
    assert len(picture) < 100_000


@pytest.mark.parametrize("path", BY_HAND, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_page_states_a_speed_outside_the_generated_tables(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    by_hand = re.sub(r"<!-- benchmarks: \w+ -->.*?<!-- end -->|```.*?```", "", text, flags=re.DOTALL)
    assert re.findall(r".*\d (?:[MG]B/s|tok(?:ens)?/s|(?:million |billion )?tokens (?:a|per) second).*", by_hand) == []


def test_every_result_says_where_and_how_it_was_measured(measured: dict[str, reports.Report]) -> None:
    assert {path.stem for path in reports.RESULTS.glob("*.json")} == measured.keys()
    assert measured.keys() == {benchmark.name for benchmark in BENCHMARKS}
    for report in measured.values():
        assert set(report) == {"date", "commit", "machine", "versions", "command", "rows", "details"}
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", report["date"])
        assert report["machine"]["cores"] and report["versions"]["python"]
        assert re.match(r"python tests/benchmarks/\w+\.py", report["command"]), report["command"]
        assert not re.search(r"(^| )/", report["command"])


def test_every_result_names_the_commit_that_was_measured(measured: dict[str, reports.Report]) -> None:
    for name, report in measured.items():
        runs = report["details"]["runs"] if name in GROWING else []
        commits = {part.get("commit", "none") for part in (report, *runs)}
        assert all(re.fullmatch(r"[0-9a-f]{7}( or before)?", commit) for commit in commits), (name, commits)


def test_a_measurement_records_the_commit_and_whether_files_differ_from_it(
    script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    machine, results = script("machine"), tmp_path / "tests" / "benchmarks" / "results"
    results.mkdir(parents=True)
    for path in (tmp_path / "code.py", results / "a.json"):
        path.touch()
    git("init", "-q"), git("add", "."), git("commit", "-qm", "one")
    commit = git("rev-parse", "--short=7", "HEAD")
    (results / "a.json").write_text("{}")
    assert machine.commit_of(tmp_path) == commit
    (tmp_path / "code.py").write_text("changed")
    assert machine.commit_of(tmp_path) == f"{commit}-modified"
    row = reports.alone("speed", 1.0, "MB/s", "more")
    described = machine.described("numpy")
    reports.save(tmp_path / "new.json", described, {}, [row])
    assert reports.read(tmp_path / "new.json")["commit"] == described["commit"] == machine.commit_of(REPOSITORY)


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_the_rows_of_a_result_are_those_that_its_script_makes_of_its_details(
    benchmark: Benchmark, script: Callable[[str], ModuleType], measured: dict[str, reports.Report]
) -> None:
    report = measured[benchmark.name]
    if benchmark.name in GROWING:
        return
    rows = script(benchmark.file.removesuffix(".py")).rows(report["details"])
    assert [asdict(row) | {"ratio": row.ratio} for row in rows] == report["rows"] != []
    assert all(row.runs >= 1 and row.unit for row in rows)


def test_a_ratio_above_one_means_that_ours_is_better() -> None:
    assert Row("speed", 20.0, 5.0, "peer", "MB/s", "more", 3).ratio == 4.0
    assert Row("memory", 20.0, 5.0, "peer", "MB", "less", 3).ratio == 0.25
    assert Row("alone", 20.0, None, None, "s", "less", 3).ratio is None


def shaped(details: dict[str, Any], rows: list[Any] | None = None) -> reports.Report:
    """A report with these details."""
    machine = {"cpu": "a processor", "cores": 2, "memory_gib": 8.0, "load_average": 0.1}
    made = [asdict(row) for row in rows or ()]
    return {"date": "2026-01-02", "machine": machine, "command": "python x.py", "rows": made, "details": details}


def test_a_peer_counts_in_its_fastest_form_where_it_gives_the_right_ids(script: Callable[[str], ModuleType]) -> None:
    """Two corpora: SentencePiece is faster by paragraph on one; gigatoken has other ids on that one."""

    def corpus(text_mb: float, gigatoken_differs: int, **seconds: float) -> dict[str, Any]:
        runs = {name: [{"cpu_seconds": value, "again_cpu_seconds": value / 2}] * 3 for name, value in seconds.items()}
        middle = {"cpu_seconds": 5.0, "again_cpu_seconds": 5.0}
        runs["tokenizers"] = [dict.fromkeys(middle, 1.0), middle, dict.fromkeys(middle, 90.0)]  # the median counts
        differing = dict.fromkeys(runs, 0) | {"gigatoken": gigatoken_differs}
        training = {"ours": [{"cpu_seconds": 3.0}], "spm_train": [{"cpu_seconds": text_mb / 10}]}
        found = {"text_mb": text_mb, "documents": 9, "documents_with_other_ids": differing, "runs": runs}
        return found | {"training": training}

    corpora = {
        "long": corpus(20.0, 1, ours=2.0, sentencepiece=12.0, sentencepiece_paragraphs=8.0, gigatoken=1.0),
        "short": corpus(10.0, 0, ours=4.0, sentencepiece=2.0, sentencepiece_paragraphs=2.5, gigatoken=5.0),
    }
    *rows, again, _, _, trained = script("tokenizing").rows({"corpora": corpora})
    assert again.name.startswith("tokenizing the same text again") and (again.ours, again.peer) == (10.0, 6.0)
    assert (trained.peer_name, trained.ours, trained.peer) == ("spm_train", 30.0 / 6.0, 30.0 / 3.0)
    assert [(row.peer_name, row.ours, row.peer) for row in rows] == [
        ("SentencePiece", 30.0 / 6.0, 30.0 / 10.0),  # by paragraph on one corpus, by document on the other
        ("tokenizers (encode_batch_fast)", 30.0 / 6.0, 30.0 / 10.0),
        ("gigatoken", 10.0 / 4.0, 10.0 / 5.0),  # the corpus on which it has the same ids
    ]
    assert [row.ratios for row in rows] == [
        {"long": 4.0, "short": 0.5},
        {"long": 2.5, "short": 1.25},
        {"short": 1.25},
    ]
    assert [row.range for row in rows] == ["0.500 (short) to 4.00 (long)", "1.25 (short) to 2.50 (long)", ""]


def test_a_report_keeps_what_describes_it_without_the_machines_folders(tmp_path: Path) -> None:
    described = {"cpu": "a processor", "cores": 2, "memory_gib": 8.0, "load_average": 0.1, "date": "2026-01-02"}
    words = "--corpora a=/corpora/books/*.gz,/x/y/z.csv ../b/*.gz --work /w --runs 3 --results /r"
    described |= {"python": "3.11.7", "versions": {"sentencepiece": "0.2.3"}}
    described |= {"command": f"python /somewhere/tests/benchmarks/tokenizing.py {words}"}
    row = Row("speed", 20.0, 5.0, "peer", "MB/s", "more", 3, {"a": 4.0})
    reports.save(tmp_path / "tokenizing.json", described, {"corpora": {}}, [row])
    report = reports.read_report(tmp_path / "tokenizing.json")
    assert report["command"] == "python tests/benchmarks/tokenizing.py --corpora a=books/*.gz,y/z.csv *.gz --runs 3"
    assert report["machine"] == {"cpu": "a processor", "cores": 2, "memory_gib": 8.0, "load_average": 0.1}
    assert report["versions"] == {"sentencepiece": "0.2.3", "python": "3.11.7"}
    assert report["date"] == "2026-01-02" and report["details"] == {"corpora": {}}
    assert reports.rows_of(report) == [row] and report["rows"][0]["ratio"] == 4.0


def test_resuming_and_masking_are_compared_with_every_peer_and_with_its_fastest_form(
    script: Callable[[str], ModuleType],
) -> None:
    def runs(seconds: float) -> list[dict[str, float]]:
        return [{"cpu_seconds": seconds, "peak_mb": 100.0}] * 3

    details = {
        "tokens_before_the_stop": {"streamed": 100_000_000, "long": 50_000_000_000},
        "runs": {
            "streamed": {"ours": runs(0.5), "trainer": runs(50.0), "datasets": runs(0.25)},
            "long": {"ours": runs(1.0)},
        },
    }
    found = [(row.name, row.peer_name, row.ratio) for row in script("resuming").rows(details) if row.unit == "CPU s"]
    name = "resume after 100M tokens of a stream"
    assert found[:2] == [(name, "datasets' state_dict", 0.5), (name, "Trainer, which skips", 100.0)]
    assert found[2] == ("resume after 50G tokens of 100G planned", None, None)
    speeds = {
        "collator on lists 512": 1.0,
        "collator on np arrays 512": 4.0,
        "ours none 512": 20.0,
        "ours none 128": 10.0,
    }
    throughput = {name: {"million_tokens_per_cpu_second": speed, "runs": [speed]} for name, speed in speeds.items()}
    scale = {"tokens": 1e11, "shards": 20_000, "none": {"cpu_seconds": 1.0, "peak_memory_mb": 300}}
    rows = script("loader").rows({"throughput": throughput, "start": {}, "scale": scale})
    compared = [(row.peer_name, row.ratio) for row in rows if row.ratio]
    assert compared == [("DataCollatorForLanguageModeling, np arrays", 5.0)]


def test_training_is_reported_by_preset_beside_the_faster_form_of_the_peer(script: Callable[[str], ModuleType]) -> None:
    def runs(*speeds: float) -> list[dict[str, float]]:
        return [
            {"step_tokens": 100.0, "step_cpu_seconds": 100.0 / speed, "whole_tokens": 200.0}
            | {"whole_cpu_seconds": 400.0 / speed, "peak_mb": speed}
            for speed in speeds
        ]

    english = {"ours": runs(20.0, 20.0), "group_by_length": runs(10.0, 2.0), "run_mlm": runs(8.0, 5.0)}
    models = {"tiny_cpu": {"steps": 49, "corpora": {"english": english}}}
    steps, whole, memory = script("training").rows({"models": models})
    assert (steps.name, whole.name) == ("optimizer steps, tiny_cpu", "whole run of 50 steps, tiny_cpu")
    assert (steps.ours, steps.peer, steps.runs) == (20.0, pytest.approx(200.0 / 30.0), 2)
    assert steps.ratios == whole.ratios == {"english, seed 0": 2.0, "english, seed 1": 4.0}
    assert (whole.ours, memory.ours, memory.peer, memory.ratio) == (10.0, 20.0, 8.0, 0.4), "of the smaller process"


def test_the_front_page_gives_the_range_over_rows_corpora_and_presets() -> None:
    def row(name: str, peer: str, *ratios: float) -> Row:
        return Row(name, 1.0, 1.0, peer, "x", "more", 3, {f"corpus {number}": one for number, one in enumerate(ratios)})

    training = [row("optimizer steps, tiny", "Trainer", 2.0, 3.0), row("optimizer steps, large", "Trainer", 1.5, 1.75)]
    rows = [row(beginning, peer or "any", 0.5) for beginning, peer in page.SUMMARY if isinstance(beginning, str)]
    others = [row("resume after 1 token", "datasets", 9.0)]
    found = {"training": shaped({}, rows + training + others)}
    lines = list(page.summary(found))
    assert "| training steps by preset | transformers | 1.50 (large) to 3.00 (tiny) |" in lines
    assert "| resuming | datasets, mosaicml-streaming, Trainer | 0.500 to 9.00 |" in lines
    assert "| masked batches | DataCollatorForLanguageModeling | 0.500 |" in lines


def test_a_table_repeats_nothing_and_puts_memory_on_the_line_of_its_row() -> None:
    def row(name: str, ours: float, peer: str | None, **ratios: float) -> Row:
        return Row(name, ours, None if peer is None else 4.0 * ours, peer, "s", "less", 3, ratios)

    rows = [row("resume after 1 token", 2.0, peer, **{"seed 1": 3.0, "seed 2": 5.0}) for peer in ("a", "b")]
    rows += [row("memory of a resume after 1 token", 8.0, "a"), row("resume after 9", 2.0, None)]
    rows += [row("resume after 7 (long), memory", 6.0, None)]
    text = page.made("resuming", {"resuming": shaped({}, rows)})
    assert "Medians of 3 runs. 2 cores of a processor, 2026-01-02, load average 0.1." in text
    table = "| resume after | ours | compared with | times better | range | memory | of the peer | times better |\n"
    assert table + "|---|---|---|---|---|---|---|---|\n" in text
    assert "| 1 token | 2.00 s | a: 8.00 | 4.00 | 3.00 to 5.00 | 8.00 s | 32.0 | 4.00 |\n" in text
    assert "\n| | | b: 8.00 | 4.00 | 3.00 to 5.00 | | | |\n| 9 | 2.00 s | | | | | | |\n" in text
    assert "| 7 (long), memory | 6.00 s |" in text, "memory of no row stands alone"
    text = page.made("resuming", {"resuming": shaped({}, rows[:1])})
    assert "| | ours | compared with a | times better | range |\n" in text, "no title of a single row"
    assert "| resume after 1 token | 2.00 s | 8.00 | 4.00 | 3.00 to 5.00 |\n" in text


def test_a_row_is_listed_as_worse_if_a_peer_is_better_anywhere() -> None:
    def row(name: str, ratio: float, peer: str = "peer", **ratios: float) -> Row:
        return Row(name, ratio, 1.0, peer, "x", "more", 3, ratios)

    rows = [row("good", 1.0), row("bad", 0.5), row("bad", 0.25, "other"), row("mixed", 2.0, a=0.75, b=4.0)]
    text = page.made("worse", {"loader": shaped({}, [*rows, row("ours", 0.5, "this project at c025165")])})
    assert "| bad | peer | 0.500 | |\n| | other | 0.250 | |\n| mixed | peer | 2.00 | 0.750 (a) to 4.00 (b) |\n" in text
    assert "good" not in text and "this project" not in text


def test_memory_is_that_of_the_command_and_not_of_the_process_that_starts_it(
    script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    held = bytearray(300_000_000)
    figures = script("contained_process").run_contained([sys.executable, "-c", "sum(range(10**6))"], tmp_path, [0])
    assert figures["peak_mb"] < 100 and figures["cpu_seconds"] > 0.0 and len(held) == 300_000_000
    with pytest.raises(SystemExit, match="status 3"):
        script("contained_process").run_contained([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, [0])


def test_an_interrupted_measurement_continues_only_with_the_same_command_and_commit(tmp_path: Path) -> None:
    described = {"cpu": "a", "cores": 2, "memory_gib": 8.0, "load_average": 0.1, "date": "2026-01-02", "python": "3"}
    described |= {"versions": {}, "command": "python x.py --runs 3", "commit": "abcdef0"}
    path = tmp_path / "x.json"
    assert reports.kept(None, described) == reports.kept(path, described) == {}
    reports.save(path, described, {"corpora": {"a": 1}}, [])
    assert reports.kept(path, described | {"load_average": 9.0}) == {"corpora": {"a": 1}}
    for other in ({"commit": "abcdef1"}, {"command": "python x.py"}, {"versions": {"numpy": "2"}}, {"cpu": "b"}):
        assert reports.kept(path, described | other) == {}


def test_training_steps_are_compared_by_mode_at_each_sides_best_micro_batch(
    script: Callable[[str], ModuleType],
) -> None:
    def entry(speed: float) -> dict[str, Any]:
        return {"tokens_per_second": speed, "runs_tokens_per_second": [speed, 2 * speed]}

    workloads = [
        {"full": {"ours eager": entry(30), "ours compiled": entry(40), "transformers eager": entry(20)}},
        {"full": {"ours eager": entry(35), "ours compiled": None, "transformers eager": entry(10)}},
    ]
    comparisons = [{"preset": "bert_base", "precision": "bf16", "workloads": found} for found in workloads]
    details = {"comparisons": comparisons, "rounds": 2, "device": {"device": "a cpu", "cpu": "a cpu"}}
    (row,) = script("encoder").rows(details)
    assert row.name == "training step, bert_base bf16, rows that are all full", "memory ran out for the peer, compiled"
    assert (row.ours, row.peer, row.unit, row.ratios) == (35, 20, "tokens/CPU s", {"seed 0": 1.75, "seed 1": 1.75})
    (row,) = script("encoder").rows(details | {"device": {"device": "an H200", "cpu": "a cpu"}})
    assert row.unit == "tokens/s"


def test_a_kernel_is_compared_with_the_other_over_models_of_as_many_tokens(script: Callable[[str], ModuleType]) -> None:
    def model(length: int, *speeds: float) -> dict[str, Any]:
        kinds = [("fp32", True), ("fp32", False), ("bf16", False), ("bf16", True)]
        contestants = [
            {"precision": precision, "is_chosen": chosen, "tokens_per_cpu_second": speed}
            for (precision, chosen), speed in zip(kinds, speeds, strict=True)
        ]
        return {"isa": "DEFAULT", "preset": "tiny", "length": length, "contestants": contestants}

    details = {"rounds": 7, "comparisons": [model(64, 20.0, 10.0, 10.0, 40.0), model(512, 5.0, 10.0, 5.0, 10.0)]}
    fp32, bf16, precisions = script("cpu_steps").rows(details)
    assert (fp32.ours, fp32.peer, fp32.ratios) == (8.0, 10.0, {"tiny, 64": 2.0, "tiny, 512": 0.5})
    assert (bf16.ours, bf16.ratios) == (16.0, {"tiny, 64": 4.0, "tiny, 512": 2.0})
    assert (precisions.peer_name, precisions.ratio) == ("fp32", 2.0)


def test_a_figure_changed_by_hand_is_put_right_and_nothing_else_is_touched(measured: dict[str, reports.Report]) -> None:
    block = f"<!-- benchmarks: loader -->\n{page.made('loader', measured)}<!-- end -->\n"
    text = f"before 1.23 MB/s\n{block}after\n"
    spoilt = re.sub(r"\| \d+\.\d Mtokens", "| 999.9 Mtokens", text, count=1)
    assert spoilt != text
    assert page.rewritten(spoilt, measured) == text


def test_a_block_that_cannot_be_made_is_an_error(measured: dict[str, reports.Report]) -> None:
    with pytest.raises(UserError, match="nonsense", check=coded("unknown-benchmark-block")):
        page.rewritten("<!-- benchmarks: nonsense -->\n<!-- end -->\n", measured)
    with pytest.raises(UserError, match=r"results/loader\.json", check=coded("missing-benchmark-result")):
        page.made("loader", {})
    with pytest.raises(UserError, check=coded("missing-benchmark-row")):
        page.made("summary", {})


def described(**run: Any) -> dict[str, Any]:
    return {"date": "2026-01-02", "cpu": "a cpu", "load_average": 1.5, "commit": "abcdef0", **run}


def recipe(corpus: str, side: str, steps: int, seconds: float, reached: bool = True, **values: Any) -> dict[str, Any]:
    found = {"corpus": corpus, "side": side, "steps": steps, "cpu_seconds": seconds, "reached": reached}
    found |= {
        "tokens": 2048 * steps,
        "settings": ["training.global_batch_tokens=2048"],
        "all_cpu_seconds": [seconds] * 3,
    }
    return described(**found, mean_loss=6.0, losses=[6.0] * 3, goal_nats=6.2, **values)


def test_the_speed_run_compares_the_fewest_steps_that_reach_the_goal_on_every_corpus() -> None:
    other_machine = {"commit": "c025165", "cpu": "a faster one"}
    runs = [
        recipe("a", "ours", 220, 8.0, **other_machine),
        *(recipe("a", "ours", 220, 80.0, commit="c025165"), recipe("b", "ours", 220, 90.0, commit="c025165")),
        *(
            recipe("a", "ours", 380, 30.0, reached=False),
            recipe("a", "ours", 400, 40.0),
            recipe("a", "ours", 420, 44.0),
        ),
        *(recipe("b", "ours", 400, 50.0), recipe("a", "run_mlm", 500, 160.0)),
    ]
    trainer, before = language_tables.speedrun_rows(runs)
    assert (trainer.ours, trainer.peer, trainer.ratio, trainer.runs) == (40.0, 160.0, 4.0, 3), (
        "run_mlm has corpus a alone"
    )
    assert before.ratio == pytest.approx(170.0 / 90.0) and before.ratios == {"a": 2.0, "b": 1.8}
    text = page.made("speedrun", {"speedrun": shaped({"runs": runs})})
    assert "| a, 6.200 | a faster one | ours, c025165, 2,048 | 220 | 8 (8 to 8) | 1.00 | 6.000 | |\n" in text
    assert "| a, 6.200 | a cpu | ours, c025165, 2,048 | 220 | 80 (80 to 80) | 1.00 | 6.000 | |\n" in text
    assert "| | | ours, abcdef0, 2,048 | 400 | 40 (40 to 40) | 0.50 | 6.000 | 380 (6.000) |\n" in text, "a row below"
    assert "| b | | run_mlm | missing |" in text and "| a | | run_mlm | missing" not in text
    assert "| pack_medium_third | | ours, c025165 | missing |" in text
    assert "| 420 |" not in text and "| 380 |" not in text


def test_the_proof_table_shows_planned_rows_without_a_result_as_missing() -> None:
    def run(side: str, seed: int, share: float) -> dict[str, Any]:
        fields = dict.fromkeys(("morphology", "semantics", "syntax", "syntax_semantics"), share)
        values = {"shape": "6 x 96", "side": side, "epochs": 1, "seed": seed, "parameters": 1234, "pairs": 67000}
        return described(**values, loss=4.0 + seed, overall=share, fields=fields, scoring_cpu_seconds=100.0 * seed)

    planned = [
        {"shape": "6 x 96", "side": side, "epochs": epochs, "seed": seed}
        for side, epochs in (("ours", 1), ("run_mlm", 1), ("run_mlm", 2))
        for seed in (1, 2)
    ]
    guesses = {"ours": ["x", "-y"], "run_mlm": ["z"]}
    words = "a b c d e f g h i j [MASK] k"
    found = {
        "epochs": 1,
        "seed": 2,
        "masks": 2,
        "hits": {"ours": {"top_1": 0.5, "top_5": 1.0}, "unigram": {"top_1": 0.0, "top_5": 0.25}},
        "sentences": [
            {"masked": text, "word": word, **guesses} for text, word in (("The [MASK].", "end"), (words, "w|w"))
        ],
        "shown": [{"masked": words, "word": "w|w", **guesses}],
    }
    earlier = {name: value for name, value in run("ours", 2, 0.5).items() if name != "scoring_cpu_seconds"}
    raw = {"runs": [run("ours", 1, 0.6), earlier], "planned": planned, "published": {"RoBERTa": 69.5}}
    raw |= {"corpus": {"words": 10, "documents": 2, "digest": "ab" * 32}, "fills": found}
    report = shaped(raw)
    text = page.made("proof", {"proof": report})
    spread = "55.0 (50.0 to 60.0)"
    assert f"| ours, 6 x 96 | 1 | 2 of 2 | 5.500 (5.000 to 6.000) | 67,000 | {spread} |" in text
    assert "missing: run_mlm, 6 x 96 after 1, 2 epochs.\n" in text and "RoBERTa 69.5" in text
    assert "67,000 pairs takes 100 to 100 CPU seconds (1 encoders)" in text, "earlier rows have no time"
    text = page.made("language", {"proof": report})
    assert f"one epoch of 0 million words: ours {spread}. " in text and "| The [MASK]. | end | x, -y | z |" in text
    assert page.made("language", {"proof": shaped(raw | {"fills": None})}) == "\n"
    text = page.made("fills", {"proof": report})
    assert "after 1 epoch, seed 2" in text and "proof.json has 1 of these" in text
    assert "| ours | 50.0% | 100.0% |" in text and "| the most frequent words | 0.0% | 25.0% |" in text
    assert "| … b c d e f g h i j [MASK] k | w\\|w | x, -y | z |" in text
    assert "missing" in page.made("fills", {"proof": shaped(raw | {"fills": None})})


def test_a_continued_encoder_is_shown_where_its_text_has_no_labels() -> None:
    planned = [{"seed": seed, "rate": rate, "replay": 0} for seed in (1, 2) for rate in (0, 0.001)]
    losses = {"law_loss": 5.0, "general_loss": 4.0}
    runs = [described(**planned[0], **losses, accuracy=None)]
    text = page.made("domain", {"domain": shaped({"runs": runs, "planned": planned})})
    assert "| before | 5.000 | 4.000 | missing | 1 of 2 |" in text and "| continued at 0.001 | missing |" in text
    runs = [described(**each, **losses, accuracy=40.0 + each["seed"]) for each in planned]
    text = page.made("domain", {"domain": shaped({"runs": runs, "planned": planned})})
    assert "| continued at 0.001 | 5.000 | 4.000 | 41.5% ± 0.7 | 2 of 2 |" in text


def test_few_labels_are_compared_seed_by_seed_over_the_same_draws() -> None:
    planned = [{"seed": seed, "rate": rate, "replay": 0} for seed in (1, 2) for rate in (0, 0.001)]
    shown = {"train texts": 60, "test texts": 1000}
    runs = [
        described(**each, **shown, accuracies={"frozen, 4": [30.0, 32.0] if not each["rate"] else [33.0, 35.0]})
        for each in planned[:3]
    ]
    text = page.made("domain_few", {"domain_few": shaped({"runs": runs, "planned": planned})})
    assert "scored on 1,000 others" in text
    assert "| frozen, 4 | 31.0% | 34.0% | +3.0 | 1 of 1 | 1 of 2 |" in text, "a seed counts once it has both"
    runs.append(described(**planned[3], **shown, accuracies={"frozen, 4": [30.0, 31.0]}))
    text = page.made("domain_few", {"domain_few": shaped({"runs": runs, "planned": planned})})
    assert "| frozen, 4 | 31.0% | 32.2% | +1.2 (-0.5 to +3.0) | 1 of 2 | 2 of 2 |" in text
    runs = [described(**planned[0], accuracies={})]
    assert "missing" in page.made("domain_few", {"domain_few": shaped({"runs": runs, "planned": planned})})


def test_an_extended_encoder_is_shown_between_the_short_one_and_the_long_one() -> None:
    ways = ("before", "extended", "from the start")
    planned = [{"way": way, "seed": seed} for seed in (1, 2) for way in ways]
    runs = [described(**each, loss_128=5.0, loss_512=6.0 - ways.index(each["way"]), tokens=2000) for each in planned]
    text = page.made("extension", {"extension": shaped({"runs": runs[:4], "planned": planned})})
    assert "| before | 2,000 | 5.000 (5.000 to 5.000) | 6.000 (6.000 to 6.000) | 2 of 2 |" in text
    assert "| from the start | 2,000 | 5.000 | 4.000 | 1 of 2 |" in text
    assert "| extended |" in page.made("extension", {"extension": shaped({"runs": runs[:1], "planned": planned})})
    assert "missing" in page.made("extension", {"extension": shaped({"runs": runs[:1], "planned": planned})})


def test_a_fit_of_embeddings_is_shown_beside_the_encoder_before_it() -> None:
    planned = [{"seed": seed} for seed in range(4)]
    names = ("ndcg_at_10", "mrr_at_10", "accuracy", "unrelated_cosine")
    both = {"tf_idf": 0.75, "pairs": {"train": 3000, "valid": 1, "test": 2000}}
    before = described(seed=0, **dict.fromkeys(names, 0.25), **both)
    fits = [described(seed=seed, **dict.fromkeys(names, 0.5 + seed / 100), **both, fit_seconds=9.0) for seed in (1, 2)]
    text = page.made("retrieval", {"retrieval": shaped({"runs": [before, *fits], "planned": planned})})
    assert "2,000 abstracts; fitted on 3,000" in text and "The 2 fits took 18 s" in text
    assert "| before | 0.250 | 0.250 | 0.250 | 0.250 | 1 of 1 |" in text
    assert "| fitted | 0.515 (0.510 to 0.520) |" in text and "| 2 of 3 |" in text and "(tf-idf) | 0.750 |" in text
    assert ", one thread, " in text, "rows of earlier versions do not say"
    faster = [{**each, "threads": 2} for each in (before, *fits)]
    text = page.made("retrieval", {"retrieval": shaped({"runs": faster, "planned": planned})})
    assert ", 2 threads, " in text
    text = page.made("retrieval", {"retrieval": shaped({"runs": [before], "planned": planned})})
    assert "| fitted | missing |" in text


def test_a_teacher_is_judged_against_the_spread_of_the_seeds_without_it() -> None:
    def text(**losses: list[float]) -> str:
        planned = [{"way": way, "seed": seed} for way in losses for seed in (1, 2)]
        figures = {"teacher_loss": 3.0, "unigram_entropy": 7.0, "cpu_seconds": 9.0}
        runs = [
            described(way=way, seed=seed, loss=loss, **figures)
            for way, found in losses.items()
            for seed, loss in enumerate(found, 1)
        ]
        return page.made("distillation", {"distillation": shaped({"runs": runs, "planned": planned})})

    found = text(labels=[5.0, 4.5], near=[4.5, 4.25], far=[4.0, 4.25], later=[1.0])
    assert "(unigram entropy 7.000; the teacher's is 3.000)" in found
    assert "| far | 4.000 | 4.250 | 4.125 | 9 |" in found and "| later | 1.000 | missing | missing | 9 |" in found
    assert "seeds are 0.500 nats apart: `near` -0.375 (not reached), `far` -0.625 (reached).\n" in found
    assert "not reached" in text(labels=[4.0, 4.0], same=[4.0, 4.0])
    assert all("is open" in each for each in (text(labels=[5.0], far=[1.0, 1.0]), text(labels=[5.0, 5.0], far=[1.0])))


def test_ablations_show_the_best_rate_and_what_is_missing() -> None:
    def run(variant: str, rate: float, seed: int, loss: float) -> dict[str, Any]:
        return {"corpus": "a", "variant": variant, "learning_rate": rate, "seed": seed, "equal": "tokens", "loss": loss}

    runs = [run("default", 1e-3, 1, 5.0), run("default", 2e-3, 1, 4.0), run("default", 2e-3, 2, 4.5)]
    runs.append(run("StableAdamW", 1e-3, 2, 4.25))
    raw = {"runs": [described(**each, cpu_seconds=9.0) for each in runs], "planned": [*runs, run("Muon", 1e-3, 1, 0.0)]}
    raw["variants"] = ["default", "later"]
    text = page.made("ablations", {"ablations": shaped(raw)})
    assert "| default | 4.250 (4.000 to 4.500) (2 of 3 seeds) | |\n" in text, "of the better rate"
    assert "| StableAdamW | 4.250 (1 of 3 seeds) | -0.250 |\n" in text, "seed 2 of both"
    assert "| Muon | missing | |\n" in text and "| later | missing | |\n" in text
    assert "by more than the range of the default's seeds: none." in text, "0.5 is the range"
    assert "for one epoch of 10 million words: missing." in text
    runs += [run("WSD", 1e-3, seed, 3.7) for seed in (1, 2)]
    runs += [
        run(variant, 3e-3, seed, loss + 0.1 * seed) | {"corpus": language_tables.EPOCH}
        for variant, loss in (("default", 4.0), ("both", 3.5))
        for seed in (1, 2)
    ]
    raw["runs"] = [described(**each, cpu_seconds=9.0) for each in runs]
    text = page.made("ablations", {"ablations": shaped(raw)})
    assert "by more than the range of the default's seeds: WSD." in text
    assert "| both | 2 of 3 | 3.650 (3.600 to 3.700) | 9 |" in text and text.count("| both |") == 1
    assert "Difference: -0.500 nats. The default's seeds have a range of 0.100." in text


def test_adopted_models_are_compared_at_their_start_and_by_tokens() -> None:
    run = {"name": "deeper", "seed": 1, "kind": "start", "difference": 0.25}
    reach = {**run, "kind": "reach", "tokens": 60, "tokens_of_nothing": 100, "loss_of_nothing": 4.0, "loss": 3.5}
    runs = [described(**each) for each in (run, {**run, "seed": 2, "difference": 0.35}, reach)]
    raw = {"runs": runs, "planned": [run, reach, {**reach, "name": "later"}], "variants": ["deeper", "later", "random"]}
    raw["goals"] = {"deeper": 0.15}
    text = page.made("adoption", {"adoption": shaped(raw)})
    start = "| deeper | +0.30 (+0.25 to +0.35) | +0.15 | 1 of 2 |"
    assert f"{start} 4.000 | 3.500, 60% of the tokens | 1 of 1 |" in text
    assert "| later | missing | | | missing | | |\n" in text and "| random | missing | | | | | |\n" in text


def test_tasks_are_compared_with_training_from_scratch_seed_by_seed(script: Callable[[str], ModuleType]) -> None:
    variants = {
        name: {"fits": [{"scores": {"accuracy": each}} for each in accuracies]}
        for name, accuracies in (("scratch", (0.5, 0.25)), ("frozen", (0.25, 0.5)), ("full", (0.75, 0.75)))
    }
    full, frozen = script("downstream").rows({"tasks": {"sst2, 500 rows": {"variants": variants}}})
    assert (full.name, full.ours, full.peer, full.runs) == ("sst2, 500 rows, full: accuracy", 75.0, 37.5, 2)
    assert full.ratios == {"seed 1": 1.5, "seed 2": 3.0} and frozen.ratios == {"seed 1": 0.5, "seed 2": 2.0}
    report = shaped({"tasks": {"sst2, 500 rows": {"variants": variants}}}, [full, frozen])
    row = "| sst2, 500 rows | 37.5 (25.0 to 50.0) | 37.5 (25.0 to 50.0) | 75.0 (75.0 to 75.0) |\n"
    assert row in page.made("downstream", {"downstream": report})
    assert page.compared_rows({"downstream": report}) == [], "from scratch is no peer"


def test_scaling_is_reported_by_tokens_per_step_against_a_reduction_after_the_backward(
    script: Callable[[str], ModuleType],
) -> None:
    seconds = {"within the backward": [1.0] * 3, "after the backward": [2.0] * 3}
    efficiency = {"within the backward": 0.9, "after the backward": 0.45}
    raw = {"like": "a cluster", "batches": {"8 tokens": {"seconds": seconds, "efficiency": efficiency}}}
    (row,) = script("scaling").rows(raw)
    assert (row.name, row.ours, row.ratio, row.runs) == ("scaling like a cluster, 8 tokens", 90.0, 2.0, 3)


def test_the_stages_of_preparation_are_less_than_the_whole(measured: dict[str, reports.Report]) -> None:
    for name, corpus in measured["peers_preparation"]["details"]["corpora"].items():
        whole = statistics.median(run["cpu_seconds"] for run in corpus["runs"]["ours"])
        assert sum(seconds for stage, seconds in corpus["stages"].items() if stage != "SentencePiece") < whole, name


def test_an_encoder_counts_where_its_ids_are_equal_and_missed_goals_are_numbers(
    script: Callable[[str], ModuleType],
) -> None:
    def corpus(gigatoken: int | None, ours: float) -> dict[str, Any]:
        seconds = {"ours": ours, "sentencepiece": 3.0, "sentencepiece_paragraphs": 2.0, "tokenizers": 3.0}
        seconds |= {"gigatoken": 0.5, "datatrove": 4.0, "datasets": 4.0, "datasets_gigatoken": 0.4}
        other = {"start_cpu_seconds": 0.5, "verify_cpu_seconds": 0.25, "again_cpu_seconds": 0.25}
        runs = {name: [{"cpu_seconds": value, "peak_mb": 100 * value, **other}] for name, value in seconds.items()}
        stages = {"decompression": 0.1, "JSON": 0.1, "normalization": 0.1, "sentences (sentencex)": 0.2, "words": 0.1}
        stages |= {"new words": 0.2, "SentencePiece": 0.1}
        compared = {"tokenizers": 0} if gigatoken is None else {"tokenizers": 0, "gigatoken": gigatoken}
        found = {"text_mb": 10.0, "documents": 9, "runs": runs, "stages": stages}
        return found | {"documents_with_other_ids": compared}

    details = {"corpora": {"english": corpus(0, 1.0), "chinese": corpus(4, 1.0), "old": corpus(None, 1)}}
    report = shaped(details, script("peers_preparation").rows(details))
    ratios = {row["peer_name"]: list(row["ratios"]) for row in report["rows"] if row["better"] == "more"}
    assert ratios["gigatoken's encode_batch alone"] == ["english"], "others gave other ids, or nobody compared them"
    assert ratios["tokenizers' encode_batch_fast alone"] == ["english", "chinese", "old"]
    text = page.made("peers_preparation", {"peers_preparation": report})
    assert "| gigatoken's encode_batch alone | 20.0 (0.500) | ids not proved equal | ids not proved equal |" in text
    assert "| datasets.map in arrow format + gigatoken | 25.0 (0.400) | ids not" in text
    assert "On english, chinese, old the pipeline with gigatoken seems faster than gigatoken alone" in text
    assert "| datatrove | 400 to 400 | 4.00 (english) to 4.00 (english) |" in text and "`verify` is 25% to 25%" in text
    assert "| decompression and JSON | 20.0 |" in text and "| other stages | 20.0 | 20.0 | 20.0 |" in text
    assert "4 times SentencePiece; measured: 2.00. Ours takes 50.0 ms per MB too much." in text
    assert "1.5 times tokenizers; measured: 3.00. It is met." in text


@pytest.mark.parametrize(
    ("value", "told"),
    [(0.0634, "0.063"), (0.634, "0.634"), (8.254, "8.25"), (9.996, "10.0"), (25.36, "25.4"), (163.2, "163")]
    + [(99.96, "100"), (19970.0, "19,970")],
)
def test_figures_have_three_digits_that_count(value: float, told: str) -> None:
    assert figure(value) == told


def test_bars_are_as_long_as_their_ratios_and_names_cannot_break_the_picture() -> None:
    compared = [Row("a < b & c", 30.0, 10.0, "peer", "MB/s", "more", 3), reports.alone("alone", 2.0, "s", "less")]
    picture = plots.draw_ratios("title", [Row("slow", 1.0, 2.0, "peer", "MB/s", "more", 3), *compared])
    assert re.findall(r">([\d.]+ x)<", picture) == ["3.00 x", "0.500 x"]
    assert re.findall(r'<rect x="540" y="\d+" width="(\d+)"', picture) == ["300", "1"]
    assert "a &lt; b &amp; c" in picture


def test_corpora_are_read_from_json_lines_csv_and_tsv_and_cut_to_size(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"text": f"été {number}"}) + "\n" for number in range(10))
    (tmp_path / "b.csv").write_text('\ufefftext,label\n"one, ""two""\nthree",1\n', encoding="utf-8")
    (tmp_path / "c.tsv").write_text('sentence\tlabel\na "quote\t0\n', encoding="utf-8")
    corpora = corpus_part.corpora_of([f"english={tmp_path}/*.gz", f"reviews={tmp_path}/b.csv,{tmp_path}/c.tsv"])
    assert {name: [Path(path).name for path in files] for name, files in corpora.items()} == {
        "english": ["a.jsonl.gz"],
        "reviews": ["b.csv", "c.tsv"],
    }
    assert corpus_part.take_part(corpora["english"], None, tmp_path / "unused") == corpora["english"]
    reviews = corpus_part.take_part(corpora["reviews"], None, tmp_path / "reviews")
    texts = [text for path in reviews for text in corpus_part.read_texts(path)]
    assert texts == ['one, "two"\nthree', 'a "quote']
    (part,) = corpus_part.take_part(corpora["english"], 20e-6, tmp_path / "part")
    assert list(corpus_part.read_texts(part)) == ["été 0", "été 1", "été 2"], "seven bytes each"
    (tmp_path / "plain.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert list(corpus_part.read_texts(str(tmp_path / "plain.jsonl"))) == ["a", "b"]
    (tmp_path / "other.csv").write_text("title,body\na,b\n")
    with pytest.raises(SystemExit, match="other.csv has no column text or sentence"):
        list(corpus_part.read_texts(str(tmp_path / "other.csv")))
    with pytest.raises(SystemExit, match="no file matches"):
        corpus_part.corpora_of([f"none={tmp_path}/*.txt"])


def test_a_benchmark_gets_every_corpus_and_without_any_the_one_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").touch()
    one = Benchmark("name", "something", 1, "--corpora {corpora}", full="--work {work}")
    inputs = running.Inputs(Path("w"), tmp_path, ["a=x", "b=y,z"], None, None, quick=False)
    assert inputs.arguments(one) == ["--corpora", "a=x", "b=y,z", "--work", "w"]
    inputs = running.Inputs(Path("w"), tmp_path, [], None, None, quick=False)
    assert inputs.arguments(one) == ["--corpora", f"corpus={tmp_path}/*.jsonl.gz", "--work", "w"]


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose benchmarks are scripts of a line or two, which write their arguments."""
    folder = tmp_path / "tests" / "benchmarks"
    folder.mkdir(parents=True)
    (folder / "good.py").write_text(
        "import json, os, sys\njson.dump([os.environ['OMP_NUM_THREADS'], *sys.argv[1:-2]], open(sys.argv[-1], 'w'))\n"
    )
    (folder / "bad.py").write_text("import sys; sys.exit('the disk is full')\n")
    monkeypatch.setattr(running, "SCRIPTS", folder)
    monkeypatch.setattr(running, "REPOSITORY", tmp_path)
    return folder


def run(monkeypatch: pytest.MonkeyPatch, scripts: list[str], *words: str) -> int:
    benchmarks = [Benchmark(name, "something", 1, "--corpus {corpus}", quick="--small") for name in scripts]
    monkeypatch.setattr(command, "BENCHMARKS", benchmarks)
    return command.main(words)


@pytest.mark.spawn
def test_each_runs_on_its_own_and_what_cannot_run_says_why_and_stops_no_other(
    scripts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    corpus, results = tmp_path / "corpus", tmp_path / "results"
    corpus.mkdir()
    with gzip.open(corpus / "a.jsonl.gz", "wt") as lines:
        lines.write('{"text": "a"}\n')
    words = ("--corpus", str(corpus), "--results", str(results))
    assert run(monkeypatch, ["bad", "good"], *words) == 1
    printed = capfd.readouterr()
    assert "the disk is full" in printed.err and "bad ended with status 1" in printed.err
    assert "not measured: bad;" in printed.err and "[2/2]" in printed.out
    assert [path.name for path in results.iterdir()] == ["good.json"]
    assert reports.read(results / "good.json") == ["1", "--corpus", str(corpus)]
    assert run(monkeypatch, ["bad", "good"], *words, "--quick", "--only", "good") == 0
    assert reports.read(results / "good.json") == ["1", "--corpus", str(corpus), "--small"]


@pytest.mark.spawn
def test_quick_figures_are_not_kept_and_a_missing_corpus_is_an_error(
    scripts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CLOZEWORKS_CORPORA", raising=False)
    before = {path: path.read_bytes() for path in reports.RESULTS.iterdir()}
    (tmp_path / "a.jsonl.gz").touch()
    assert run(monkeypatch, ["good"], "--quick", "--work", str(tmp_path), "--corpus", str(tmp_path)) == 0
    assert {path: path.read_bytes() for path in reports.RESULTS.iterdir()} == before
    assert run(monkeypatch, ["good"], "--results", str(tmp_path / "results")) == 1
    assert "no --corpus is given" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        run(monkeypatch, ["good"], "--only", "nonsense")
    assert "invalid choice: 'nonsense'" in capfd.readouterr().err


HELP_OF_ALL = """\
import runpy, sys
root, *scripts = sys.argv[1:]
sys.path.remove(root)
for script in scripts:
    sys.argv, sys.path[0] = [script, "--help"], "tests/benchmarks"
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print(f"status of {script}: {end.code}")
"""


def test_every_script_that_the_page_starts_finds_what_it_imports() -> None:
    """As its user starts it, but all in one process: the folder of the repository is not on Python's path."""
    scripts = sorted(set(re.findall(r"python (tests/benchmarks/\w+\.py)", TABLES)))
    words = ["-c", HELP_OF_ALL, str(REPOSITORY), *scripts]
    done = fork_server.run(words, REPOSITORY, os.environ | fork_server.FIXED)
    ended = re.findall(r"^status of (.*): 0$", done.stdout, re.MULTILINE)
    assert len(scripts) > 10 and ended == scripts, done.stdout + done.stderr
    assert done.stdout.count("usage:") == len(scripts)


def test_the_list_names_every_benchmark_and_every_script_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    printed = capsys.readouterr().out
    for benchmark in BENCHMARKS:
        assert re.search(rf"^{benchmark.name} +(\d+ h )?\d+ min  \w", printed, re.MULTILINE)
        assert (running.SCRIPTS / benchmark.file).is_file()
    names = [benchmark.name for benchmark in BENCHMARKS]
    assert len(set(names)) == len(names)


LACK_INPUT = {"peers_preparation", "proof", "downstream", "masking"}
"""Of their quick runs one installs peers from a package index; the others may read labeled data or minimal pairs."""


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.timeout(1800)
def test_every_benchmark_that_needs_no_package_index_runs(
    small_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    corpus, results = tmp_path / "corpus", tmp_path / "results"
    corpus.mkdir()
    with gzip.open(corpus / "small.jsonl.gz", "wb") as target:
        target.write(small_corpus.read_bytes())
    own = [benchmark.name for benchmark in BENCHMARKS if benchmark.name not in LACK_INPUT]
    words = ["--quick", "--corpus", str(corpus), "--results", str(results), "--work", str(tmp_path), "--only", *own]
    assert command.main(words) == 0, capfd.readouterr().err
    found = page.load_reports(results)
    assert found.keys() == set(own)
    assert sys.executable not in "".join(report["command"] for report in found.values())
    assert all("| ours |" in page.made(name, found) for name in own if name not in {*GROWING, "roofline"})
