"""Whatever another library says, no command shows a login: not its own lines, its errors, its tracebacks, its files.

One fork of the tests' server runs all commands, each with what a process of its own would start with.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.base import errors, known_secrets
from data_prep.base.errors import UserError
from data_prep.base.logs import logger
from data_prep.storage import storage
from launch.__main__ import main
from launch.command_table import COMMANDS
from tests.support import fork_server
from tests.support.data_prep_command import as_command
from tests.support.error_codes import coded

REPOSITORY = Path(__file__).resolve().parents[2]
LOGIN, PASSWORD = "AKIALOGIN", "do-not/show+this"
STORE = f"s3://{LOGIN}:{PASSWORD}@bucket/shards"
FTP = f"ftp://{LOGIN}:{PASSWORD}@127.0.0.1:9"
FINETUNE = ["--task", "classification", "--text-column", "text", "--label-column", "label"]
SHARDS = f"data.shards={REPOSITORY / 'tests' / 'golden' / 'v1' / 'shards'}"
DATABASE = f"postgresql://{LOGIN}:{PASSWORD}@127.0.0.1:9/runs"

ARGUMENTS: dict[str, list[list[str]]] = {
    "tokenizer": [["--input", STORE, "--output", "out"], ["--input", "text.txt", "--output", STORE]],
    "shards": [
        ["--input", STORE, "--tokenizer", "tok", "--output", "out"],
        ["--input", "text.txt", "--tokenizer", STORE, "--output", "out"],
        ["--input", "text.txt", "--tokenizer", STORE, "--output", STORE],
        ["--add-to", STORE, "--input", "text.txt"],
    ],
    "merge": [["--input", "text.txt", "--tokenizer", STORE, "--output", "out"]],
    "verify": [[STORE], [STORE, "--config", STORE]],
    "inspect": [[STORE], [STORE, "--tokenizer", "x"]],
    "stats": [[STORE]],
    "remove": [[STORE, "--purge"], [STORE, "--urls", STORE]],
    "pretrain": [
        ["--config", "tiny_cpu", f"data.shards={STORE}", "output_dir=run"],
        ["--config", "tiny_cpu", f"output_dir={STORE}"],
        ["--config", "tiny_cpu", SHARDS, "output_dir=run", f"tracking.uri={FTP}"],
        ["--config", STORE],
    ],
    "finetune": [
        ["--model", STORE, "--train", train, "--output", "out", *FINETUNE] for train in (f"{STORE}/x.csv", "new.tsv")
    ],
    "status": [[STORE]],
    "show-batch": [["--config", "tiny_cpu", f"data.shards={STORE}"]],
    "attention": [["--model", STORE, "x", "--output", "a.png"]],
    "evaluate": [["--model", STORE, "--minimal-pairs", STORE]],
    "compare": [[STORE, STORE], [f"a={STORE}", f"b={STORE}", "--minimal-pairs", STORE]],
    "export": [["--checkpoint", STORE, "--output", "out"]],
    "average": [[STORE, "--last", "2", "--output", "out"]],
    "register": [[*words, "--name", "birds", "--tracking-uri", FTP] for words in (["--model", STORE], ["--list"])],
    "fill-mask": [["--model", STORE, "x [MASK]"]],
    "next-sentence": [["--model", STORE, "x", "y"]],
    "embed": [["--model", STORE, "--input", text, "--output", "v.npy"] for text in ("text.txt", f"{STORE}/x.txt")],
    "predict": [["--model", STORE, "--input", table, "--output", "out.csv"] for table in (STORE, "new.tsv")],
    "push": [["--hub", "owner/tiny", "--model", STORE], ["--hub", STORE, "--model", "text.txt"]],
    "doctor": [["--config", "tiny_cpu", f"data.shards={STORE}", "output_dir=run"]],
    "benchmark": [["--config", STORE]],
    "nodes": [["--hostfile", STORE, "--", "--config", "tiny_cpu", f"data.shards={STORE}"]],
    "ranks": [["--nproc-per-node", STORE, "text.txt", STORE]],
    "follow": [[STORE], ["run", "--tracking-uri", FTP]],
    "sync-tracking": [[STORE], ["run", "--tracking-uri", FTP]],
}


def test_the_table_has_every_command() -> None:
    assert ARGUMENTS.keys() == COMMANDS.keys()


CASES = [(name, words) for name, cases in ARGUMENTS.items() for words in cases]


@contextlib.contextmanager
def as_a_process_of_its_own(name: str, words: list[str], folder: Path) -> Iterator[None]:
    """Give a command a folder, standard streams that are files beside it, and nothing that one before it has set."""
    folder.mkdir()
    (folder / "text.txt").write_text("A bird.\n")
    (folder / "new.tsv").write_text("text\tlabel\nA bird.\tyes\nA cat.\tno\n")
    os.chdir(folder)
    sys.argv = ["clozeworks", name, *words]
    known_secrets._known.clear()
    storage.configure({})
    hooks = [(sys, "excepthook"), (threading, "excepthook"), (warnings, "formatwarning")]
    before = [getattr(module, hook) for module, hook in hooks]
    make_record, environment = logging.getLogRecordFactory(), dict(os.environ)
    try:
        with open(folder.with_suffix(".shown"), "w") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
            yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        logging.setLogRecordFactory(make_record)
        for (module, hook), value in zip(hooks, before, strict=True):
            setattr(module, hook, value)
        os.environ.clear()
        os.environ.update(environment)


def run_all(folder: Path) -> None:
    """Run every case in this process, and write the exit statuses."""
    statuses, end_process = [], os._exit
    os._exit = sys.exit  # type: ignore[assignment]  # as a rank ends, which runs no other case
    for number, (name, words) in enumerate(CASES):
        with as_a_process_of_its_own(name, words, folder / str(number)):
            try:
                main()
                statuses.append(0)
            except SystemExit as ended:
                statuses.append(ended.code)
            except Exception:  # noqa: BLE001 - shown as Python shows it
                sys.excepthook(*sys.exc_info())
                statuses.append(1)
    (folder / "statuses.json").write_text(json.dumps(statuses))
    os._exit = end_process


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    environment = {**os.environ, "CLOZEWORKS_RETRY_SECONDS": "0", "PYTHONPATH": str(REPOSITORY)}
    code = f"from tests.launch.test_secrets_of_commands import run_all, Path; run_all(Path({str(folder)!r}))"
    done = fork_server.run(["-c", code], folder, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.long
@pytest.mark.parametrize(("number", "name"), [(number, name) for number, (name, _) in enumerate(CASES)])
def test_no_command_shows_a_login(number: int, name: str, outcomes: Path) -> None:
    assert json.loads((outcomes / "statuses.json").read_text())[number] != 0
    shown = (outcomes / f"{number}.shown").read_text()
    written = "".join(
        path.read_text(errors="replace") for path in (outcomes / str(number)).rglob("*") if path.is_file()
    )
    for secret in (LOGIN, PASSWORD, "show+this"):
        assert secret not in shown and secret not in written
    assert shown and "Traceback" not in shown
    assert name == "ranks" or "[usage]" not in shown, "the command refused its words before it used the URLs"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command whose arguments hold a login."""
    monkeypatch.setattr(sys, "argv", ["clozeworks", "verify", STORE, f"tracking.uri={DATABASE}"])
    for module, name in ((sys, "excepthook"), (errors.threading, "excepthook"), (errors.warnings, "formatwarning")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(known_secrets, "_known", set())


SENTENCES = (
    f'Invalid bucket name "{LOGIN}:{PASSWORD}@bucket": Bucket name must match the regex',
    f"could not connect to {STORE}/x?versionId=1",
    f"FATAL: the password {PASSWORD} is wrong",
    "GET /x?X-Amz-Signature=do-not/show+this&y=1",
)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_texts_of_libraries_lose_the_login_on_every_way(
    sentence: str, command: None, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def work() -> None:
        warnings.warn(sentence, stacklevel=1)
        logging.getLogger("botocore.hidden").error("%s", sentence)
        logger("tests.hidden").warning(sentence)
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        try:
            fail()
        except RuntimeError:
            logging.getLogger("fsspec.hidden").exception("failed")
        raise UserError(sentence, fix=sentence, code="tried")

    def fail() -> None:
        raise RuntimeError(sentence)

    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger().addHandler(handler)
    warnings.simplefilter("always")
    try:
        with pytest.raises(SystemExit):
            as_command(work)
    finally:
        logging.getLogger().removeHandler(handler)
    try:
        fail()
    except RuntimeError as error:
        errors.print_traceback(type(error), error, error.__traceback__)
    shown = "".join(capfd.readouterr()) + (tmp_path / "log").read_text()
    assert shown.count("RuntimeError") >= 3 and "[tried]" in shown
    assert PASSWORD not in shown and f"{LOGIN}:" not in shown
    with pytest.raises(UserError, check=coded("tried")) as caught:  # as in a notebook
        raise UserError(sentence, fix="try again", code="tried")
    assert PASSWORD not in str(caught.value) and PASSWORD not in caught.value.problem


def test_addresses_that_a_person_is_to_open_keep_their_query() -> None:
    page = "http://host:5000/#/experiments/1?workflowType=machine_learning"
    assert page in str(UserError("see it", fix=f"open {page}"))
