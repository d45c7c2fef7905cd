"""Whatever another library says, no command shows a login: not its own lines, its errors, its tracebacks, its files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from data_prep.base import errors, known_secrets
from data_prep.base.errors import UserError, run_command
from data_prep.base.logs import logger
from launch.command_table import COMMANDS
from tests.support import fork_server
from tests.support.error_codes import coded

REPOSITORY = Path(__file__).resolve().parents[2]
LOGIN, PASSWORD = "AKIALOGIN", "do-not/show+this"
STORE = f"s3://{LOGIN}:{PASSWORD}@bucket/shards"
SERVER = f"http://{LOGIN}:{PASSWORD}@127.0.0.1:9"
DATABASE = f"postgresql://{LOGIN}:{PASSWORD}@127.0.0.1:9/runs"

ARGUMENTS: dict[str, list[list[str]]] = {
    "tokenizer": [["--input", STORE, "--output", "out"], ["--input", "text.txt", "--output", STORE]],
    "shards": [
        ["--input", STORE, "--tokenizer", "tok", "--output", "out"],
        ["--input", "text.txt", "--tokenizer", STORE, "--output", "out"],
        ["--input", "text.txt", "--tokenizer", STORE, "--output", STORE],
        ["--add-to", STORE, "--input", "text.txt"],
    ],
    "merge": [["--input", "text.txt", "--tokenizer", STORE, "--output", STORE]],
    "verify": [[STORE], [STORE, "--config", STORE]],
    "inspect": [[STORE], ["--tokenizer", STORE, "--text", "x"]],
    "stats": [[STORE]],
    "remove": [[STORE, "--purge"], [STORE, "--urls", STORE]],
    "docstrings": [["--output", STORE]],
    "pretrain": [
        ["--config", "tiny_cpu", f"data.shards={STORE}", "output_dir=run"],
        ["--config", "tiny_cpu", f"output_dir={STORE}"],
        ["--config", "tiny_cpu", "output_dir=run", f"tracking.uri=ftp{SERVER[4:]}"],
        ["--config", STORE],
    ],
    "finetune": [["--model", STORE, "--task", "classification", "--train", STORE, "--output", "out"]],
    "status": [[STORE]],
    "show-batch": [["--config", "tiny_cpu", f"data.shards={STORE}"]],
    "held-out": [[STORE], ["--shards", STORE]],
    "attention": [["--model", STORE, "x", "--output", "a.png"]],
    "evaluate": [["--model", STORE, "--minimal-pairs", STORE]],
    "export": [["--checkpoint", STORE, "--output", "out"], ["--run", STORE, "--output", "out"]],
    "average": [["--run", STORE, "--output", "out"]],
    "register": [["--model", STORE, "--name", "birds", "--tracking-uri", f"ftp{SERVER[4:]}"]],
    "fill-mask": [["--model", STORE, "x [MASK]"]],
    "next-sentence": [["--model", STORE, "x", "y"]],
    "embed": [["--model", STORE, "x"]],
    "predict": [["--model", STORE, "--input", STORE, "--output", "out.csv"]],
    "doctor": [["--config", "tiny_cpu", f"data.shards={STORE}", "output_dir=run"]],
    "benchmark": [["--config", STORE]],
    "nodes": [["--hostfile", STORE, "--", "--config", "tiny_cpu", f"data.shards={STORE}"]],
    "ranks": [["--nproc-per-node", STORE]],
    "train-job": [["--config", "tiny_cpu", f"data.shards={STORE}", "--image", STORE]],
    "sync-tracking": [[STORE], ["run", "--tracking-uri", f"ftp{SERVER[4:]}"]],
}


def test_the_table_has_every_command() -> None:
    assert ARGUMENTS.keys() == COMMANDS.keys()


@pytest.mark.parametrize(("name", "words"), [(name, words) for name, cases in ARGUMENTS.items() for words in cases])
def test_no_command_shows_a_login(name: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A bird.\n")
    environment = {**os.environ, "CLOZEWORKS_RETRY_SECONDS": "0", "PYTHONPATH": str(REPOSITORY)}
    done = fork_server.run(["-c", "from launch.__main__ import main; main()", name, *words], tmp_path, environment)
    assert done.returncode != 0
    shown = done.stdout + done.stderr
    written = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
    for secret in (LOGIN, PASSWORD, "show+this"):
        assert secret not in shown and secret not in written
    assert shown and "Traceback" not in shown


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
    import logging
    import threading
    import warnings

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
            run_command(work)
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
