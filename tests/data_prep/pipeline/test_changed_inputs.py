"""Inputs that change during a preparation and between two runs: the result is that of a fresh run on those of now."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import Tokenizer, verify
from data_prep.base.errors import UserError
from data_prep.storage import storage
from tests.support.data_prep_command import files_of
from tests.support.error_codes import coded
from tests.support.kill_points import before_writing, stopped_after
from tests.support.preparations import Planned, inputs_of, planned
from tests.support.s3_server import S3Bucket

SHARDS = {"min_shards": 2, "valid_fraction": 0.1, "unit_bytes": 20_000}
DROPPING = ("documents.min_document_characters=200",)


@pytest.fixture
def corpus(small_corpus: Path, tmp_path: Path) -> Path:
    """A folder of three files, each of several units, with copies in two of them."""
    lines = small_corpus.read_bytes().splitlines(keepends=True)
    folder = tmp_path / "in"
    folder.mkdir()
    for name, part in (("a", lines[:70]), ("b", lines[60:130]), ("c", lines[130:])):
        (folder / f"{name}.jsonl").write_bytes(b"".join(part))
    return folder


def plan_of(inputs: str | Path, tokenizer: Tokenizer, *overrides: str) -> Planned:
    pattern = f"{inputs}/*.jsonl" if not str(inputs).endswith(("l", "t")) else str(inputs)
    return planned(pattern, tokenizer, *overrides, shards=SHARDS)


def other(data: bytes) -> bytes:
    """Other text of the same size."""
    changed = data.replace(b"er", b"ur")
    assert changed != data
    return changed


def same_size(folder: Path) -> None:
    """Rewrite a file as tools that keep times do."""
    path = folder / "b.jsonl"
    data, status = path.read_bytes(), path.stat()
    path.write_bytes(other(data))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replaced(folder: Path) -> None:
    lines = (folder / "b.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "new").write_bytes(b"".join(lines[:0:-1]))
    os.replace(folder / "new", folder / "b.jsonl")


def appended(folder: Path) -> None:
    with open(folder / "a.jsonl", "ab") as file:
        file.writelines(
            json.dumps({"text": f"The river {number} is long. " * 60}).encode() + b"\n" for number in range(40)
        )


def removed(folder: Path) -> None:
    (folder / "b.jsonl").unlink()


def added(folder: Path) -> None:
    (folder / "aa.jsonl").write_bytes(other((folder / "c.jsonl").read_bytes()))


def touched(folder: Path) -> None:
    os.utime(folder / "b.jsonl", ns=(1, 1))


CHANGES = [same_size, replaced, appended, removed, added, touched]
changes = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


def assert_as_fresh(output: Path, fresh: Path, make: Callable[[Path], object]) -> None:
    make(fresh)
    assert files_of(output) == files_of(fresh)


@pytest.mark.fault(row=56, fault="an input is rewritten before a resume", required="the result is that of a fresh run")
@changes
@pytest.mark.parametrize("stop", ["map-*.sections", pytest.param("train-*.tar", marks=pytest.mark.long)])
def test_a_change_between_two_runs(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, change: Callable[[Path], None], stop: str
) -> None:
    output, names = tmp_path / "out", [unit.name for unit in plan_of(corpus, tokenizer).plan.units]
    with pytest.raises(KeyboardInterrupt), stopped_after(len(names) - 1 if "map" in stop else 1, stop):
        plan_of(corpus, tokenizer).make(output)
    finished = {path.name for path in output.glob(".work/map-*.sections")}
    assert len(finished) >= len(names) - 1
    change(corpus)
    plan = plan_of(corpus, tokenizer)
    is_changed = {f"map-{unit.name}.sections" for unit in plan.plan.units} - finished
    with before_writing("map-*.sections", lambda: None) as written:
        plan.make(output)
    assert {*written} == is_changed and len(written) < len(plan.plan.units), "units of the other files are not redone"
    assert_as_fresh(output, tmp_path / "fresh", lambda folder: plan_of(corpus, tokenizer).make(folder))


@changes
def test_a_change_during_the_run(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """It comes where some units are read, and others, of the changed file too, are not."""
    with before_writing("map-*.sections", lambda: change(corpus), 3) as written:
        plan_of(corpus, tokenizer).make(tmp_path / "out")
    assert len(written) > 3
    assert_as_fresh(tmp_path / "out", tmp_path / "fresh", lambda folder: plan_of(corpus, tokenizer).make(folder))


@pytest.mark.parametrize(
    ("with_", "change"),
    [
        pytest.param(with_, change, marks=pytest.mark.long if change in often else pytest.mark.slow)
        for with_, often in {"near": (same_size, added), "keep_dropped": (removed,), "workers": (replaced,)}.items()
        for change in CHANGES
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_change_with_further_files_and_processes(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, change: Callable[[Path], None], with_: str
) -> None:
    overrides = {
        "near": ("deduplication.near=true",),
        "keep_dropped": (*DROPPING, f"keep_dropped={tmp_path / 'dropped'}"),
        "workers": (),
    }[with_]

    def make(output: Path) -> None:
        plan_of(corpus, tokenizer, *overrides).make(output, 2 if with_ == "workers" else 1)

    with pytest.raises(KeyboardInterrupt), stopped_after(0, "manifest.json"):
        make(tmp_path / "out")
    with before_writing(".plan.json", lambda: change(corpus)):  # the inputs are found, and none is read
        plan_of(corpus, tokenizer, *overrides).make(tmp_path / "other", 2 if with_ == "workers" else 1)
    shutil.rmtree(tmp_path / "dropped", ignore_errors=True)
    make(tmp_path / "out")
    dropped = files_of(tmp_path / "dropped") if with_ == "keep_dropped" else {}
    shutil.rmtree(tmp_path / "dropped", ignore_errors=True)
    assert_as_fresh(tmp_path / "out", tmp_path / "fresh", make)
    assert files_of(tmp_path / "other") == files_of(tmp_path / "fresh")
    assert with_ != "keep_dropped" or (dropped and files_of(tmp_path / "dropped") == dropped)


@pytest.mark.long
def test_a_change_before_a_task_of_dask(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    from distributed import LocalCluster

    from data_prep.executors.dask_executor import DaskExecutor

    with (
        LocalCluster(n_workers=1, processes=False, threads_per_worker=1, dashboard_address=None) as cluster,
        DaskExecutor(cluster.scheduler_address) as executor,
        before_writing(".plan.json", lambda: same_size(corpus)),
    ):
        plan_of(corpus, tokenizer).make(tmp_path / "out", executor)
    assert_as_fresh(tmp_path / "out", tmp_path / "fresh", lambda folder: plan_of(corpus, tokenizer).make(folder))


@pytest.mark.spawn
@pytest.mark.long
@pytest.mark.parametrize("is_between_runs", [False, True])
def test_changes_in_a_store(
    corpus: Path, tokenizer: Tokenizer, s3_bucket: S3Bucket, tmp_path: Path, is_between_runs: bool
) -> None:
    inputs = f"{s3_bucket.url}/in"

    def upload() -> None:
        names = set(storage.list_names(inputs)) - {path.name for path in corpus.iterdir()}
        for name in names:
            storage.remove(f"{inputs}/{name}")
        for path in corpus.iterdir():
            url = f"{inputs}/{path.name}"
            if not storage.exists(url) or storage.read_bytes(url) != path.read_bytes():
                storage.write_bytes(url, path.read_bytes())

    upload()
    for number, change in enumerate(CHANGES[:-1]):
        output = tmp_path / f"out-{number}"
        before = files_of(corpus)
        with pytest.raises(KeyboardInterrupt), stopped_after(3, "map-*.sections"):
            plan_of(inputs, tokenizer).make(output)
        change(corpus)
        if is_between_runs:
            upload()
        with before_writing("map-*.sections", upload, 1):  # of the resumed run, which has found the inputs
            plan_of(inputs, tokenizer).make(output)
        assert_as_fresh(output, tmp_path / f"fresh-{number}", lambda to: plan_of(inputs, tokenizer).make(to))
        for name, data in before.items():
            (corpus / name).write_bytes(data)
        (corpus / "aa.jsonl").unlink(missing_ok=True)
        upload()
        plan = plan_of(inputs, tokenizer)
        if change is appended:
            with pytest.raises(UserError, match=r"/in/a.jsonl had \d+ bytes", check=coded("other-preparation")):
                plan.make(output)


@pytest.mark.fault(row=10, fault="input changed between two runs of one output", required="refused, naming the file")
@changes
def test_a_finished_data_set_of_changed_inputs_is_refused(
    corpus: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    change: Callable[[Path], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    manifest = plan_of(corpus, tokenizer).make(output)
    before = files_of(output)
    change(corpus)
    what = {
        same_size: r"b\.jsonl has other content",
        replaced: r"b\.jsonl had \d+ bytes",
        appended: r"a\.jsonl had \d+ bytes",
        removed: r"b\.jsonl is gone",
        added: r"aa\.jsonl is new",
    }
    if change is touched:
        assert plan_of(corpus, tokenizer).make(output) == manifest, "equal content is the same input"
        assert "comparing: " in capfd.readouterr().err
        assert plan_of(corpus, tokenizer).make(output) == manifest and "comparing: " not in capfd.readouterr().err
        before[".stamps.json"] = (output / ".stamps.json").read_bytes()
    else:
        with pytest.raises(UserError, match=rf"{what[change]}.*--fresh", check=coded("other-preparation")):
            plan_of(corpus, tokenizer).make(output)
    assert files_of(output) == before


@pytest.mark.fault(row=56, fault="inputs of a finished set rewritten", required="it is refused with the list")
def test_all_changed_files_of_a_finished_data_set_are_listed(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    plan_of(corpus, tokenizer).make(tmp_path / "out")
    same_size(corpus)
    appended(corpus)
    added(corpus)
    with pytest.raises(UserError) as refused:
        plan_of(corpus, tokenizer).make(tmp_path / "out")
    for name, what in (("a", "had"), ("aa", "is new"), ("b", "has other content")):
        assert f"/{name}.jsonl {what}" in str(refused.value)
    plan_of(corpus, tokenizer).make(tmp_path / "out", fresh=True)
    assert_as_fresh(tmp_path / "out", tmp_path / "fresh", lambda folder: plan_of(corpus, tokenizer).make(folder))


def test_a_data_set_without_stamps_is_compared_by_content_and_gets_them(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As one of an earlier release."""
    plan_of(corpus, tokenizer).make(tmp_path / "out")
    stamps = tmp_path / "out" / ".stamps.json"
    data = (corpus / "b.jsonl").read_bytes()
    for damage in (stamps.unlink, lambda: stamps.write_text("{}")):
        damage()
        same_size(corpus)
        with pytest.raises(UserError, match=r"b\.jsonl", check=coded("other-preparation")):
            plan_of(corpus, tokenizer).make(tmp_path / "out")
        path = corpus / "b.jsonl"
        path.write_bytes(data)
    stamps.unlink()
    plan_of(corpus, tokenizer).make(tmp_path / "out")
    assert "comparing: " in capfd.readouterr().err and stamps.exists()
    plan_of(corpus, tokenizer).make(tmp_path / "out")
    assert "comparing: " not in capfd.readouterr().err


def test_an_input_that_always_changes_ends_with_an_error(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    plan, output = plan_of(corpus, tokenizer), tmp_path / "out"
    local_write = storage.local_write

    def write(url: str | Path) -> object:
        if Path(url).name.startswith("map-"):
            os.utime(corpus / "b.jsonl")
        return local_write(url)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "local_write", write)
        with pytest.raises(UserError, match=r"5 times \(.*b\.jsonl\)", check=coded("input-changed")):
            plan.make(output)
    assert not (output / "manifest.json").exists()
    plan_of(corpus, tokenizer).make(output)
    assert_as_fresh(output, tmp_path / "fresh", lambda folder: plan_of(corpus, tokenizer).make(folder))


def test_the_ranges_of_an_array_and_their_merge(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    output = tmp_path / "out"
    plan_of(corpus, tokenizer).make_range(1, 2, output)
    appended(corpus)
    with before_writing("map-*.sections", partial(same_size, corpus), 1):
        plan_of(corpus, tokenizer).make_range(2, 2, output)
    with pytest.raises(UserError, match="units are not read yet", check=coded("ranges-unfinished")):
        plan_of(corpus, tokenizer).merge(output)
    plan_of(corpus, tokenizer).make_range(1, 2, output)
    plan_of(corpus, tokenizer).merge(output)
    assert_as_fresh(output, tmp_path / "fresh", lambda folder: plan_of(corpus, tokenizer).make(folder))


def test_a_range_after_a_merge_that_stopped_at_its_end(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    output, dropped = tmp_path / "out", f"keep_dropped={tmp_path / 'dropped'}"
    plan_of(corpus, tokenizer, dropped).make_range(1, 1, output)
    with pytest.raises(KeyboardInterrupt), stopped_after(0, "manifest.json"):
        plan_of(corpus, tokenizer, dropped).merge(output)
    appended(corpus)
    plan_of(corpus, tokenizer, dropped).make_range(1, 1, output)
    plan_of(corpus, tokenizer, dropped).merge(output)
    found = files_of(tmp_path / "dropped")
    shutil.rmtree(tmp_path / "dropped")
    assert_as_fresh(output, tmp_path / "fresh", lambda folder: plan_of(corpus, tokenizer, dropped).make(folder))
    assert files_of(tmp_path / "dropped") == found


def test_an_addition_of_changed_inputs(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    output, more = tmp_path / "out", tmp_path / "more.jsonl"
    plan_of(corpus / "[ab].jsonl", tokenizer).make(output)
    shutil.copytree(output, tmp_path / "fresh")
    more.write_bytes((corpus / "c.jsonl").read_bytes())

    def addition(parent: Path) -> Planned:
        return planned({"more": more}, tokenizer, parent=parent, shards={**SHARDS, "unit_bytes": 5_000})

    with pytest.raises(KeyboardInterrupt), stopped_after(0, "inputs-*"):
        addition(output).make(output)
    more.write_bytes(other(more.read_bytes()))
    made = addition(output).make(output)
    assert [each.name for each in made.input_files] == ["inputs-000001.jsonl", "inputs-000002.jsonl"]
    assert [Path(each.url).name for each in inputs_of(output)] == ["a.jsonl", "b.jsonl", "more.jsonl"]
    assert_as_fresh(output, tmp_path / "fresh", lambda folder: addition(folder).make(folder))
    verify(output)  # raises where a file is damaged
    more.write_bytes((corpus / "c.jsonl").read_bytes())
    with pytest.raises(UserError, match=r"more\.jsonl", check=coded("other-preparation")):
        addition(output).make(output)


def test_the_row_groups_of_a_parquet_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path, output = tmp_path / "corpus.parquet", tmp_path / "out"
    texts = pa.table({"text": [f"The river {number} is long. " * 500 for number in range(40)]})

    def write(row_group_size: int) -> None:
        pq.write_table(texts, path, row_group_size=row_group_size, compression="none", use_dictionary=False)

    write(10)
    with pytest.raises(KeyboardInterrupt), stopped_after(1, "map-*.sections"):
        plan_of(tmp_path / "*.parquet", tokenizer).make(output)
    write(20)
    plan_of(tmp_path / "*.parquet", tokenizer).make(output)
    assert_as_fresh(output, tmp_path / "fresh", lambda to: plan_of(tmp_path / "*.parquet", tokenizer).make(to))
