"""launch/slurm/prepare.sh against a stand-in for sbatch that runs the jobs at once and honors dependencies."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.preparations import inputs_of

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "launch" / "slurm" / "prepare.sh"

# As sbatch does, it copies the script away before it runs it, and tells its job's id alone with --parsable.
_SBATCH = textwrap.dedent(
    """\
    #!/usr/bin/env python3
    import os, shutil, subprocess, sys
    from pathlib import Path

    state = Path(os.environ["STUB_STATE"])
    words = sys.argv[1:]
    options = []
    while words[0].startswith("--"):
        options.append(words.pop(0))
    number = 100 + len(list(state.glob("job-*")))
    job = state / f"job-{number}"
    job.mkdir()
    (job / "options").write_text("\\n".join(options))
    (job / "words").write_text("\\0".join(words[1:]))
    script = shutil.copy(words[0], job / "slurm_script")
    if spoiled := os.environ.get("STUB_SPOILS"):  # a file that is damaged while the job waits
        with open(spoiled, "a") as file:
            file.write('{"text": 5}\\n')
    given = dict(option.removeprefix("--").partition("=")[::2] for option in options)
    first, _, last = given.get("array", "0-0").partition("-")
    dependency = given.get("dependency", "").removeprefix("afterok:")
    if dependency and (state / f"job-{dependency}" / "failed").exists():
        (job / "failed").write_text("DependencyNeverSatisfied")
    else:
        def start(task):
            environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(task), "SLURM_CPUS_PER_TASK": "1"}
            with open(job / f"log-{task}", "w") as log:
                return subprocess.Popen(
                    ["bash", script, *words[1:]], env=environment, stdout=log, stderr=subprocess.STDOUT
                )
        if any([process.wait() for process in map(start, range(int(first), int(last) + 1))]):
            (job / "failed").touch()
    print(f"{number};cluster")
    """
)


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with the stand-in, whose jobs lie in STUB_STATE."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "state").mkdir()
    stub = tmp_path / "bin" / "sbatch"
    stub.write_text(_SBATCH)
    stub.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{stub.parent}:{os.environ['PATH']}",
        "STUB_STATE": str(tmp_path / "state"),
        "CLOZEWORKS_VENV": str(Path(sys.executable).parent.parent),
    }


def prepare(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    words = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.long
@pytest.mark.spawn
def test_an_array_and_its_merge_make_the_shards_and_failed_ranges_stop_it(
    slurm: dict[str, str], small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "a folder with 'quotes' $HOME"
    folder.mkdir()
    corpus = folder / "it's one*.jsonl"
    good = small_corpus.read_bytes()
    corpus.write_bytes(good)
    output = folder / "shards"
    arguments = ("--ranges", 2, "--sbatch", "--comment=two words", "--", "--input", corpus, "--tokenizer")
    arguments += (small_tokenizer, "--output", output, "shards.min_shards=2", "shards.unit_bytes=30000")

    state = Path(slurm["STUB_STATE"])
    corpus.write_bytes(good + b'{"text": 5}\n')
    refused = prepare(slurm, *arguments)
    assert refused.returncode == 1 and "has a number for 'text'" in refused.stderr and not [*state.iterdir()]
    corpus.write_bytes(good)
    failed = prepare(slurm | {"STUB_SPOILS": str(corpus)}, *arguments)
    assert failed.returncode == 0, failed.stderr
    assert "has a number for 'text'" in "".join(path.read_text() for path in (state / "job-100").glob("log-*"))
    assert (state / "job-101" / "failed").read_text() == "DependencyNeverSatisfied"
    assert not (output / "manifest.json").exists()

    corpus.write_bytes(good)
    subprocess.run(["rm", "-r", output], check=True)
    made = prepare(slurm, *arguments)
    assert made.returncode == 0 and "job 102" in made.stdout and "job 103," in made.stdout
    assert inputs_of(output)[0].url == str(corpus), (state / "job-103" / "log-0").read_text()
    assert (state / "job-102" / "words").read_text().split("\0")[-7:][0] == str(corpus)
    options = (state / "job-103" / "options").read_text().split("\n")
    assert "--dependency=afterok:102" in options and "--comment=two words" in options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranges", "0", "--", "--input", "x"], "--ranges must be a number from 1"),
        (["--input", "x"], "unknown option '--input'"),
        (["--ranges", "2"], "give them after --"),
        (["--sbatch"], "--sbatch needs a value"),
        (["--ranges", "2", "--ranges", "3", "--", "--input", "x"], "--ranges is given twice"),
    ],
)
def test_mistakes_are_reported_before_anything_is_submitted(
    slurm: dict[str, str], arguments: list[str], message: str
) -> None:
    result = prepare(slurm, *arguments)
    assert result.returncode == 2 and message in result.stderr
    assert not list(Path(slurm["STUB_STATE"]).iterdir())


@pytest.mark.long
def test_help_shows_an_example_and_a_dry_run_the_jobs(slurm: dict[str, str], tmp_path: Path) -> None:
    shown = prepare(slurm, "--help")
    assert shown.returncode == 0 and "--ranges 16" in shown.stdout and "set -euo" not in shown.stdout
    planned = prepare(slurm, "--dry-run", "--", "--input", tmp_path / "it's missing.jsonl", "--tokenizer", "x")
    assert r"--array=1-8" in planned.stdout and r"it\'s\ missing.jsonl" in planned.stdout
    assert planned.returncode == 2 and not list(Path(slurm["STUB_STATE"]).iterdir())
