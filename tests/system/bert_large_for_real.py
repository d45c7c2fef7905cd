"""A BERT-large that is really trained on two CPU cores, from text to a fine-tuned model: hours, resumable.

    python -m tests.system.bert_large_for_real --corpus pack_small.jsonl.gz --work DIR [--results FILE]

Every step is a command of this project, and `DIR/done/STEP.json` has what it found: the same command skips the steps
that are done, and resumes the run of the one that was cut short. The run of the large model is ended on the way: one
rank by SIGKILL, then all by SIGTERM. It resumes on one rank, and then on two again. `--only STEP` does one step, also
the optional one `medium`, an encoder of 30M parameters. `--report` writes --results of what was measured so far, also
while another process trains. `--steps 60 --set NAME=VALUE ...` with the sizes of a small model shows that the whole way
works.

Memory is the proportional set size (PSS) of each rank, read every few seconds, and its largest resident set (VmHWM).
Bytes written are those that the ranks gave to the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep.base.errors import UserError, run_command
from data_prep.dataset.manifest import read_manifest
from tests.benchmarks import machine, reports
from tests.support.free_ports import free_port
from tests.support.long_runs import FINISHED, KILLED, REPOSITORY, STOPPED, TOLD, Leg, Run, environment, start_until

VOCAB_SIZE, LENGTH, BATCH_TOKENS = 8192, 128, 2048
PATIENT = (
    *("health.heartbeat_timeout_seconds=43200", "health.step_timeout_seconds=43200"),
    *("distributed.timeout_seconds=43200", "distributed.meeting_timeout_seconds=43200"),
)
"""A run that works in the idle time of others may be halted for hours (SIGSTOP), and is no reason to give it up."""
DATA = (f"data.sequence_length={LENGTH}", f"training.global_batch_tokens={BATCH_TOKENS}", "data.num_workers=0")
LARGE = (
    *("model.output_bias=frequencies", "data.mlm_probability=0.3", "zero.stage=2"),
    *("optimizer.learning_rate=1e-4", "schedule={name: warmup_stable_decay, warmup: 10%, decay_duration: 10%}"),
)
"""A rate and a warmup for 1,000 steps of a small batch; the preset's are for 100,000 steps of 512 times the tokens."""
MEDIUM = (
    *("model.hidden_size=512", "model.num_hidden_layers=8", "model.num_attention_heads=8"),
    *("model.intermediate_size=1408", "optimizer.learning_rate=1e-3"),
)
"""30M parameters of the architecture and recipe of `small_cpu`."""
MORE_STEPS, MOST_EXTENSIONS = 0.25, 4


LEGS = (
    Leg("two ranks", 2, 0.3, KILLED),
    Leg("two ranks again", 2, 0.6, STOPPED),
    Leg("one rank", 1, 0.63, TOLD),
    Leg("back on two ranks", 2, 1.0, FINISHED),
)


class Journey:
    """All steps, in order, and what they found."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.work: Path = arguments.work.absolute()
        self.shards, self.tokenizer = self.work / "shards", self.work / "tokenizer"
        self.database = f"sqlite:///{self.work}/mlflow.db"
        self.model = f"models:/{arguments.name}@champion"
        self.large = self._run("large", arguments.preset, *LARGE, *arguments.set, steps=arguments.steps, own_size=False)
        self.small = self._run("small", "small_cpu", steps=arguments.steps)
        self.medium = self._run("medium", "small_cpu", *MEDIUM, *arguments.set_medium, steps=arguments.medium_steps)

    def _run(self, name: str, preset: str, *settings: str, steps: int, own_size: bool = True) -> Run:
        saved = max(1, min(self.arguments.save_every, steps // 4))
        common = (
            *(*DATA, *PATIENT, f"data.shards={self.shards}", f"tracking.uri={self.database}"),
            *(f"tracking.run_name={name}", f"training.max_steps={steps}", "logging.every_steps=1"),
            *(f"training.micro_batch_tokens={BATCH_TOKENS // 2}", f"model.vocab_size={VOCAB_SIZE}"),
            *(f"checkpoint.every_steps={saved}", "checkpoint.keep_last=2"),
            f"evaluation.every_steps={max(1, steps // 5)}",
        )
        return Run(self.work / name, preset, (*common, *settings))

    @property
    def steps(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """The steps by name, in order."""
        legs = {f"train, {leg.name}": lambda leg=leg: self.train_leg(leg) for leg in LEGS}
        return {
            "data": self.prepare,
            "plan": self.plan,
            **legs,
            "export": self.export,
            "evaluate": self.evaluate,
            "register": self.register,
            "pull": self.pull,
            "fine-tune": self.fine_tune,
            "beside": lambda: self.train_whole(self.small),
            "medium": lambda: self.train_whole(self.medium),
        }

    def found(self, step: str) -> dict[str, Any] | None:
        path = self.work / "done" / f"{step}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def go(self, names: Sequence[str]) -> None:
        """Do the steps that are not done."""
        for name in names:
            if self.found(name) is not None:
                print(f"{name}: done before", flush=True)
                continue
            print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
            started_at = time.monotonic()
            found = self.steps[name]() | {"seconds": round(time.monotonic() - started_at, 1)}
            reports.write(self.work / "done" / f"{name}.json", found)
            print(f"{time.strftime('%H:%M:%S')} {name}: {json.dumps(found)[:1000]}", flush=True)
            self.report()

    def prepare(self) -> dict[str, Any]:
        """Tokenizer and verified shards."""
        files = self.arguments.corpus
        self.call("tokenizer", "--input", *files, "--output", self.tokenizer, "--vocab-size", VOCAB_SIZE)
        self.call(
            *("shards", "--input", *files, "--tokenizer", self.tokenizer, "--output", self.shards),
            f"shards.valid_fraction={self.arguments.valid_fraction}",
        )
        self.call("verify", self.shards)
        manifest = read_manifest(str(self.shards))
        return {
            "train_tokens": manifest.train.tokens,
            "valid_tokens": manifest.valid.tokens,
            "unigram_entropy": manifest.valid.unigram_entropy_nats,
        }

    def plan(self) -> dict[str, Any]:
        """What `--dry-run` expects, for two ranks and one."""
        found: dict[str, Any] = {"settings": [*LARGE, *self.arguments.set]}
        for ranks in (2, 1):
            printed = self.call("pretrain", *self.large.arguments(), "--dry-run", "--ranks", ranks)
            heads, line = (
                re.search(pattern, printed, re.MULTILINE)[0].split()
                for pattern in (r"^ZeRO .*total$", r"^ +\d .*(?=<- this run)")
            )
            found[f"ranks_{ranks}"] = dict(zip(heads[1:], map(float, line[1:]), strict=True))
            found["process_gib"] = float(re.search(r"add about ([\d.]+) GiB for the process", printed)[1])
            found["parameters"] = int(re.search(r"^total +([\d,]+)$", printed, re.MULTILINE)[1].replace(",", ""))
        return found

    def train_leg(self, leg: Leg) -> dict[str, Any]:
        """Train until the leg's share of the steps, then end it as the leg says."""
        target = round(leg.until * self.arguments.steps)
        if leg.end != FINISHED:
            return start_until(self.large, leg, target)
        found, wanted = {}, self.found("data")["unigram_entropy"]
        steps = self.arguments.steps
        for extension in range(MOST_EXTENSIONS + 1):
            longer = Run(self.large.folder, self.large.preset, (*self.large.settings, f"training.max_steps={steps}"))
            found[f"to step {steps}"] = start_until(longer, leg, steps)
            loss = self.large.curve("valid/mlm_loss")[-1][1]
            print(f"valid loss {loss:.3f}, unigram entropy {wanted:.3f}", flush=True)
            if loss < wanted:
                return {"steps": steps, "extensions": extension, "valid_loss": loss, **found}
            steps += round(MORE_STEPS * self.arguments.steps)
        raise UserError(
            f"after {steps} steps the valid loss {loss:.3f} is not below the unigram entropy {wanted:.3f}",
            fix="train longer, or with another learning rate",
            code="nothing-learned",
        )

    def train_whole(self, run: Run) -> dict[str, Any]:
        """Train a run to its end, on two ranks, without any fault."""
        found = start_until(run, Leg(run.folder.name, 2, 1.0, FINISHED), 0)
        printed = self.call("pretrain", *run.arguments(), "--dry-run", "--ranks", 2)
        parameters = int(re.search(r"^total +([\d,]+)$", printed, re.MULTILINE)[1].replace(",", ""))
        loss = run.curve("valid/mlm_loss")[-1][1]
        shutil.rmtree(run.output_dir / "checkpoints")
        return {"steps": run.step, "parameters": parameters, "valid_loss": loss, **found}

    def export(self) -> dict[str, Any]:
        """The newest checkpoint, behind the gate."""
        output = self.work / "export"
        shutil.rmtree(output, ignore_errors=True)
        printed = self.call("export", "--checkpoint", self.large.output_dir, "--output", output)
        return {"printed": printed.splitlines()[-4:], "bytes": _size(output)}

    def evaluate(self) -> dict[str, Any]:
        """Minimal pairs, if there are some, and filled masks."""
        masked = self.call("fill-mask", "--model", self.work / "export", "The function [MASK] the value of the field.")
        found: dict[str, Any] = {"fill_mask": masked.splitlines()}
        if self.arguments.minimal_pairs is not None:
            output = self.work / "pairs.json"
            pairs = ["--minimal-pairs", self.arguments.minimal_pairs, "--output", output, "--no-tracking"]
            found["printed"] = self.call("evaluate", "--model", self.work / "export", *pairs).splitlines()[-6:]
        return found

    def register(self) -> dict[str, Any]:
        """In an MLflow server over the database of the run."""
        with self._server() as uri:
            words = ["--model", self.work / "export", "--name", self.arguments.name, "--alias", "champion"]
            printed = self.call("register", *words, "--tracking-uri", uri)
        return {"printed": printed.splitlines()[-6:], "bytes": _size(self.work / "artifacts")}

    def pull(self) -> dict[str, Any]:
        """From the server into an empty cache."""
        cache = self.work / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        with self._server() as uri:
            words = ["--model", self.model, "--tracking-uri", uri, "The [MASK] of the court."]
            printed = self.call("fill-mask", *words, XDG_CACHE_HOME=str(cache))
        return {"printed": printed.splitlines(), "bytes": _size(cache)}

    def fine_tune(self) -> dict[str, Any]:
        """A few steps on 80 examples: words of physics and of law, in rows of six."""
        rows, draw = self.work / "labeled.tsv", random.Random(0)
        words = {"physics": "gravity field star energy quantum", "law": "court section party contract clause"}
        labels = [label for label in words for _ in range(40)]
        lines = [f"{' '.join(draw.choices(words[label].split(), k=6))}\t{label}\n" for label in labels]
        rows.write_text("text\tlabel\n" + "".join(lines), encoding="utf-8")
        output = self.work / "fitted"
        shutil.rmtree(output, ignore_errors=True)
        with self._server() as uri:
            words_of = ["--model", self.model, "--tracking-uri", uri, "--task", "classification", "--train", rows]
            sizes = ["--text-column", "text", "--label-column", "label", "--epochs", 1, "--seeds", 1]
            printed = self.call(
                "finetune", *words_of, *sizes, "--learning-rates", "2e-5", "--batch-size", 16, "--output", output
            )
        return {"printed": printed.splitlines()[-12:], "bytes": _size(output)}

    @contextlib.contextmanager
    def _server(self) -> Iterator[str]:
        """A real MLflow server over the database, while the block runs."""
        import urllib.request

        port, script = free_port(), REPOSITORY / "tests" / "support" / "mlflow_servers.py"
        with (self.work / "server.log").open("ab") as log:
            command = [sys.executable, str(script), self.database, str(port), str(self.work / "artifacts")]
            process = subprocess.Popen(command, cwd=self.work, env=environment(), stdout=log, stderr=log)
        try:
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30).close()
                    break
                except OSError:
                    if process.poll() is not None:
                        raise UserError(
                            "the MLflow server ended", fix=f"read {self.work}/server.log", code="no-mlflow-server"
                        ) from None
                    time.sleep(1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()

    def call(self, *words: Any, **env: str) -> str:
        """Run a command of this project; returns what it printed.

        Raises:
            UserError: it failed.
        """
        command = [sys.executable, "-m", "launch", *map(str, words)]
        every = environment() | env
        done = subprocess.run(
            command, cwd=self.work, env=every, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            printed = done.stdout[-3000:]
            raise UserError(
                f"clozeworks {' '.join(map(str, words[:3]))} failed with status {done.returncode}: {printed}",
                fix="correct what the output names",
                code="command-failed",
            )
        return done.stdout

    def report(self) -> None:
        """Write --results of what is there."""
        if self.arguments.results is None:
            return
        details = {
            "steps_planned": self.arguments.steps,
            "batch_tokens": BATCH_TOKENS,
            "sequence_length": LENGTH,
            "steps": {name: self.found(name) for name in self.steps},
        }
        planned = {"large": self.arguments.steps, "small": self.arguments.steps, "medium": self.arguments.medium_steps}
        for name, run in (("large", self.large), ("small", self.small), ("medium", self.medium)):
            of_step = {"large": "plan", "small": "beside", "medium": "medium"}[name]
            details[name] = {
                "preset": run.preset,
                "parameters": (self.found(of_step) or {}).get("parameters"),
                "step": run.step,
                "planned": planned[name],
                "train_loss": [(step, round(loss, 4)) for step, loss in run.curve("train/mlm_loss")],
                "valid_loss": [(step, round(loss, 4)) for step, loss in run.curve("valid/mlm_loss")],
                "seconds_per_step": run.seconds_per_step(BATCH_TOKENS),
                "starts": run.found_in_starts(),
            }
        described = machine.described("torch", "transformers", "deepspeed")
        described["command"] = re.sub(r" --report\b| --only ('[^']*'|\S+)", "", described["command"])
        reports.save(self.arguments.results, described, details, ())


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    arguments = _parse()
    journey = Journey(arguments)
    if arguments.report:
        journey.report()
        return
    journey.work.mkdir(parents=True, exist_ok=True)
    every = [name for name in journey.steps if name != "medium"]
    journey.go(every if arguments.only is None else [arguments.only])


def _parse() -> argparse.Namespace:
    parser = reports.parser(__doc__)
    parser.add_argument("--corpus", nargs="+", required=True, metavar="FILE", help="text, such as pack_small.jsonl.gz")
    parser.add_argument("--preset", default="bert_large", help="of the large model (default %(default)s)")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the large model")
    parser.add_argument("--set-medium", nargs="+", default=[], metavar="NAME=VALUE", help="of the step `medium`")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps (default %(default)s)")
    parser.add_argument("--medium-steps", type=int, default=1500, help="of the step `medium` (default %(default)s)")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints (default %(default)s)")
    parser.add_argument("--valid-fraction", type=float, default=0.01, help="of the documents (default %(default)s)")
    parser.add_argument("--minimal-pairs", type=Path, metavar="DIR", help="evaluate on these as well")
    parser.add_argument("--name", default="bert-large", help="in the registry (default %(default)s)")
    parser.add_argument("--only", metavar="STEP", help="this step alone, such as 'beside' or 'medium'")
    parser.add_argument("--report", action="store_true", help="write --results of what is there, and end")
    arguments = parser.parse_args()
    if arguments.work is None:
        parser.error("--work is required")
    return arguments


if __name__ == "__main__":
    run_command(main)
