"""Fixtures that several test files share: a small corpus, its tokenizer and its shards, each made once."""

from __future__ import annotations

import gc
import json
import os
import random
import runpy
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep import Tokenizer
from data_prep.base.garbage import collect_rarely
from data_prep.base.known_secrets import secrets_of
from tests.support import advice, fork_server
from tests.support.data_prep_command import Command
from tests.support.mlflow_servers import Server, run_mlflow_server
from tests.support.preparations import prepared, read_texts, trained
from tests.support.s3_server import S3Bucket, S3Server, shared_server

NUM_DOCUMENTS = 200

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # a machine that runs the tests marked `gpu` alone, of which none needs it
    pass
else:
    # A loaded machine is slow, and that is no failure. The default run tries the same examples every time; others are
    # tried by `pytest --hypothesis-profile random`.
    settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("random", settings.get_profile("same"), derandomize=False)
    settings.load_profile("same")

_NOUNS = (
    "river village teacher engine letter garden winter morning harbour library machine question answer "
    "mountain student "
    "doctor kitchen window painting journey market theory number method experiment language history forest "
    "island bridge "
    "captain soldier queen farmer merchant telescope planet ocean storm candle mirror shadow council "
    "treaty harvest"
).split()
_VERBS = (
    "crossed described remembered followed opened carried measured repaired discovered explained watched "
    "painted "
    "collected abandoned defended visited improved translated questioned imagined compared protected "
    "finished studied"
).split()
_ADJECTIVES = (
    "old quiet bright narrow distant careful famous broken early golden simple curious heavy gentle modern "
    "ancient "
    "unexpected northern silent patient remarkable wooden crowded empty honest foreign delicate enormous"
).split()
_OPENINGS = (
    "In the summer of {year}, ",
    "After the {noun}, ",
    "According to Dr. {name}, ",
    "However, ",
    "Nobody knew why ",
    "Today ",
    "Although it rained, ",
    "",
    "",
    "",
)
_NAMES = "Müller Okafor Tanaka García Johansson O'Neill Petrović Zhang Dubois Rossi Novák Haddad".split()


LONGEST_FILES = """
test_static.py trainer/follow/test_followed_run.py trainer/follow/test_client.py system/test_faults_training_signals.py
system/test_faults_preparation_kill.py test_readme_example.py trainer/model/test_compilation.py
trainer/loop/test_contract5.py launch/test_finetune.py data_prep/storage/test_remote_files.py
trainer/engine/test_engine.py system/test_faults_preparation_input.py trainer/distributed/test_watchdog.py
data_prep/dataset/test_removal.py trainer/loop/test_pair_counting.py trainer/data/test_loader.py
data_prep/pipeline/test_preparation.py system/test_stop_in_evaluation.py trainer/loop/test_setup.py system/test_demo.py
system/test_end_to_end.py system/test_faults_tracking.py launch/test_pretrain.py data_prep/storage/test_leases.py
data_prep/pipeline/test_sources_and_sidecars.py trainer/registry/test_registration.py system/test_faults_registry.py
system/test_faults_ranks_differ.py data_prep/test_prepare_remote.py data_prep/executors/test_executors.py
system/test_stages.py data_prep/executors/test_dask_executor.py system/test_faults_preparation_storage.py
data_prep/documents/test_hub_inputs.py trainer/finetuning/test_fit.py system/test_faults_training_disk.py
trainer/data/test_remote_shards.py trainer/hf_export/test_export.py trainer/checkpoint/test_upload.py
trainer/distributed/test_rendezvous.py trainer/checkpoint/test_writer.py data_prep/documents/test_documents.py
trainer/model/test_cuda_path.py system/test_faults_registry_files.py trainer/finetuning/test_regression_task.py
test_mutants.py system/test_lost_rank.py
""".split()
"""The files that take longest, by `--durations`: started first, so that no worker has a long one at the end."""


LONG_FOLDERS = ("fuzzing", "system")
"""Real runs, and thousands of damaged files. Their tests, and those marked `spawn`, are `long` if not `slow`."""


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    places = {tests / name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        in_folder = any(item.path.is_relative_to(tests / name) for name in LONG_FOLDERS)
        if (in_folder or "spawn" in markers) and "slow" not in markers:
            item.add_marker("long")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):  # which workers do not have
        fork_server.share()
    else:
        gc.disable()  # the garbage collector takes a third of the time of a collection of tests


def pytest_collection_finish() -> None:
    gc.freeze()  # nor does it search later what all tests share: modules, functions and cases
    collect_rarely()  # as the commands do, an eighth of the time of a test of theirs
    gc.enable()


def pytest_runtest_teardown() -> None:
    collections = gc.get_stats()[2]["collections"]
    if collections > _collections[0] and not gc.get_freeze_count():  # a training in this process has ended
        gc.freeze()
    _collections[0] = collections


_collections = [0]
"""Of all objects, before the last test ended; asking whether any are exempt from them takes as long as one."""


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An environment of the tests' own: no secret of the user's, no proxy before this machine's servers, no cache.

    Nor do they wait for the disk, which only a crash of the machine would show: what is brought to it, and in which
    order, is what `tests/support/disk_events.py` records. A wrong descriptor is an error still.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1,localhost")
        for name in secrets_of(os.environ):
            patch.delenv(name)
        patch.setattr(os, "fsync", os.fstat)
        yield


advice.record()


@pytest.fixture(autouse=True)
def right_advice() -> Iterator[None]:
    """Fails a test whose errors advise commands, options or settings that do not work."""
    advice.wrong.clear()
    yield
    advice.check_printed()
    assert not advice.wrong, advice.wrong


@pytest.fixture(autouse=True)
def no_thread_of_the_product_goes_on() -> Iterator[None]:
    """Fails a test after which a thread that it started still reads, uploads or reports, which others would print."""
    before = set(threading.enumerate())
    yield
    started = [thread for thread in threading.enumerate() if thread not in before]
    ours = [thread for thread in started if thread.name.startswith(THREADS_THAT_END)]
    for thread in ours:
        thread.join(30.0)
    assert not [thread.name for thread in ours if thread.is_alive()], "close what started them"


THREADS_THAT_END = (
    "checkpoint-upload",
    "job",
    "lease",
    "log_file",
    "mlflow-delivery",
    "prefetch",
    "status",
    "sum",
    "watchdog",
)
THREADS_THAT_STAY = ("launcher-watch", "meeting", "read", "stop-signal")
"""By the beginnings of their names; each of the latter waits as long as the process lives, or for what never comes."""


@pytest.fixture(scope="session")
def names_of_threads() -> tuple[str, ...]:
    """The names that the product gives its threads."""
    return THREADS_THAT_END + THREADS_THAT_STAY


@pytest.fixture(scope="session")
def longest_files() -> tuple[str, ...]:
    """The test files that are started first."""
    return tuple(LONGEST_FILES)


@pytest.fixture(scope="session")
def small_corpus() -> Path:
    """A JSONL file of 200 different documents, most of several paragraphs, a few of one sentence."""

    def make(folder: Path) -> None:
        generator = random.Random(20)
        lines = [
            json.dumps({"text": _document(generator)}, ensure_ascii=number % 2 == 0) for number in range(NUM_DOCUMENTS)
        ]
        (folder / "small.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    return fork_server.made_once("corpus", make) / "small.jsonl"


@pytest.fixture(scope="session")
def small_tokenizer(small_corpus: Path) -> Path:
    """The folder of a tokenizer of 800 pieces, trained on the small corpus."""
    texts = read_texts(small_corpus)
    return fork_server.made_once("tokenizer", lambda folder: trained(texts, folder, vocab_size=800))


@pytest.fixture(scope="session")
def tokenizer(small_tokenizer: Path) -> Tokenizer:
    """The same, loaded; not to be changed."""
    return Tokenizer.load(small_tokenizer)


@pytest.fixture(scope="session")
def small_shards(small_corpus: Path, small_tokenizer: Path) -> Path:
    """The folder of a shard set of the small corpus: 4 train shards of several records, 1 valid shard."""
    return _shards(small_corpus, small_tokenizer, "shards", 0.1)


@pytest.fixture(scope="session")
def shards_without_valid(small_corpus: Path, small_tokenizer: Path) -> Path:
    """The same without a valid split."""
    return _shards(small_corpus, small_tokenizer, "train_only", 0.0)


@pytest.fixture(scope="session")
def shards_without_sentences(small_corpus: Path, small_tokenizer: Path) -> Path:
    """The small shard set without sentence boundaries."""
    return _shards(small_corpus, small_tokenizer, "without_sentences", 0.1, "documents.sentences=none")


def _shards(corpus: Path, tokenizer_folder: Path, name: str, valid_fraction: float, *settings: str) -> Path:
    overrides = [
        "shards.min_shards=4",
        f"shards.valid_fraction={valid_fraction}",
        "shards.record_tokens=2000",
        *settings,
    ]
    return fork_server.made_once(name, lambda folder: prepared(corpus, tokenizer_folder, folder, *overrides))


@pytest.fixture(scope="session")
def tokenizer_folder() -> Path:
    """The folder of the tokenizer of tiny runs; not to be changed."""
    from tests.support.toy_run import make_tokenizer

    return fork_server.made_once("tokenizer-of-tiny-runs", make_tokenizer)


@pytest.fixture
def run_folder(tokenizer_folder: Path, tmp_path: Path) -> Path:
    """A tiny run with checkpoints after steps 10 and 20, made without training."""
    from tests.support.toy_run import make_run

    return make_run(tmp_path / "run", tokenizer_folder)


@pytest.fixture
def forking_python(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    """A `python` whose processes are forks (`fork_server.stand_in`) if they have this process's environment."""
    for name, value in fork_server.FIXED.items():
        monkeypatch.setenv(name, value)
    return str(fork_server.stand_in(tmp_path_factory.mktemp("python")))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """`python -m data_prep ...`, run in this process."""
    return Command(monkeypatch, capfd)


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of real corpora; a test that asks for it is skipped where there is none."""
    default = Path(__file__).resolve().parents[2] / "shared" / "corpora"
    folder = Path(os.environ.get("CLOZEWORKS_CORPORA", default))
    if not (folder / "pack_small.jsonl.gz").is_file():
        pytest.skip(f"no corpora at {folder}; set CLOZEWORKS_CORPORA to the folder that holds pack_small.jsonl.gz")
    return folder


def _document(generator: random.Random) -> str:
    paragraphs = [
        " ".join(_sentence(generator) for _ in range(generator.randint(1, 7)))
        for _ in range(generator.choice((1, 2, 3, 5, 8)))
    ]
    return "\n\n".join(paragraphs)


def _sentence(generator: random.Random) -> str:
    def phrase() -> str:
        adjective = generator.choice(_ADJECTIVES) + " " if generator.random() < 0.6 else ""
        return f"the {adjective}{generator.choice(_NOUNS)}"

    opening = generator.choice(_OPENINGS).format(
        year=generator.randint(1700, 2030), noun=generator.choice(_NOUNS), name=generator.choice(_NAMES)
    )
    clauses = [f"{phrase()} {generator.choice(_VERBS)} {phrase()}" for _ in range(generator.choice((1, 1, 1, 2)))]
    sentence = opening + " and ".join(clauses) + generator.choice(("", "", f" at {generator.randint(1, 12)}.30 a.m."))
    return sentence[0].upper() + sentence[1:].removesuffix(".") + generator.choice("....?!")


@pytest.fixture(scope="session")
def s3_server() -> S3Server:
    """One moto server for the whole run and all its workers."""
    return shared_server()


@pytest.fixture
def s3_bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Bucket:
    """A new bucket that this process, and every one that it starts, reaches by its AWS_ environment.

    `s3_bucket.url` is s3://NAME; give `s3_bucket.storage_options` to `storage.configure` where the environment is
    not passed on; `s3_bucket.objects()` is what really lies there.
    """
    bucket = s3_server.make_bucket()
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    return bucket


@pytest.fixture(scope="session")
def tiny_hugging_face() -> Path:
    """The folder of a random BertForPreTraining; not to be changed."""

    def make(folder: Path) -> None:
        runpy.run_path(str(Path(__file__).parent / "support" / "tiny_hugging_face.py"))["build"](folder / "tiny")

    return fork_server.made_once("model", make) / "tiny"


@pytest.fixture
def tiny_eurobert(tiny_hugging_face: Path, tmp_path: Path) -> Path:
    """The same tokenizer; classifiers of this family average what their head gives for every position."""
    import torch
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32, "pad_token_id": 0}
    config = transformers.EuroBertConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    folder = shutil.copytree(tiny_hugging_face, tmp_path / "eurobert")
    torch.manual_seed(0)
    transformers.EuroBertForMaskedLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def empty_database() -> Path:
    """A database with MLflow's tables: making one takes seconds, copying none."""

    def make(folder: Path) -> None:
        from trainer.tracking.mlflow_server import connect

        connect(f"sqlite:///{folder}/empty.db").search_experiments()

    return fork_server.made_once("mlflow", make) / "empty.db"


@pytest.fixture
def database(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a store of the test's own, in its folder, which is the working folder too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def mlflow_server(tmp_path: Path, database: str) -> Iterator[Server]:
    """A real server over `database`."""
    with run_mlflow_server(tmp_path, database) as server:
        yield server
