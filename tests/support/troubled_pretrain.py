"""`launch/pretrain.py` with a fault that really happens at a chosen place: the environment's TROUBLE, a JSON object.

    {"kill": {"rank": 1, "step": 9}}                  SIGKILL before the second micro-batch of that step; without a rank
                                                      of every rank
    {"kill": {"rank": 1, "step": 9, "worker": true}}  the same, of one of the rank's data workers
    {"kill": {"rank": 1, "writing": "step-00000009/rank-00001"}}   half of a file whose path holds this is on disk
    {"hang": {"rank": 0, "writing": "step-00000009/"}}              the disk never answers
    {"full": {"rank": 0, "writing": "rank-00000"}}                  there is no space for it
    {"signal": {"rank": 1, "number": 15, "doing": "evaluating after step 12: micro-batch 1"}}
        the rank gets this signal once its watchdog hears of an operation that begins so; every rank takes "seconds" for
        each micro-batch of an evaluation, and lists them as lines of `evaluated-RANK` in the folder TROUBLE_ROWS
    {"bad": {"9": "nan", "11": "gradient", "13": "spike"}}         what the model says in these steps
    {"memory": 268435456}                             bytes that may be allocated once the model stands
    {"nvml": true}                                    the machine's figures are those of a GPU, and NVML refuses all
    {"half": true}                                    fp16 on the CPU, which is refused otherwise; it overflows
    {"compiler": {"backend": "aot_eager", "slow_rank": 1, "seconds": 9}}
        blocks are compiled by this backend; on that rank its first graph for training and its first for evaluation take
        so long. Says how many compilations the set-up and the whole run made.
    {"can_compile": [0]}                              these ranks find all that compilation needs

The rows of a bad step are kept as `step-N.pt` in the folder of the environment's TROUBLE_ROWS, if it is set.
"""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import lookup_backend
from torch._dynamo.callback import callback_handler

import trainer.engine.engine
import trainer.loop.reporter
import trainer.loop.setup
import trainer.loop.step
import trainer.loop.train
import trainer.loop.training_loop
import trainer.model.numerics
import trainer.preflight.machine_checks
from data_prep.storage import storage
from trainer.distributed.watchdog import Watchdog
from trainer.objectives.pretraining import PretrainingModel

TROUBLE = json.loads(os.environ.get("TROUBLE", "{}"))
RANK = int(os.environ.get("RANK", "0"))


def wrap(place: Any, name: str, around: Callable[..., Any]) -> None:
    """Have `around(original, ...)` called in place of a function."""
    original = getattr(place, name)
    setattr(place, name, lambda *args, **kwargs: around(original, *args, **kwargs))


def die_in_step(original: Callable[..., Any], seed: int, step: int, slice_number: int) -> None:
    original(seed, step, slice_number)
    if step + 1 == TROUBLE["kill"].get("step") and slice_number % 2:
        is_meant_for_worker = TROUBLE["kill"].get("worker", False)
        victim = multiprocessing.active_children()[0].pid if is_meant_for_worker else os.getpid()
        assert victim is not None
        os.kill(victim, signal.SIGKILL)


def trouble_in_writing(original: Callable[..., Any], url: object) -> Any:
    @contextlib.contextmanager
    def write() -> Iterator[Path]:
        with original(url) as partial:
            yield partial
            if is_meant("kill", url):
                os.truncate(partial, partial.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            if is_meant("full", url):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if is_meant("hang", url):
                (Path(os.environ["TROUBLE_ROWS"]) / "hanging").touch()
                while True:
                    time.sleep(1)

    return write()


def is_meant(kind: str, url: object) -> bool:
    trouble = TROUBLE.get(kind, {})
    return "writing" in trouble and trouble["rank"] == RANK and trouble["writing"] in str(url)


def signal_while(original: Callable[..., Any], watchdog: Any, doing: str, *rest: Any) -> None:
    original(watchdog, doing, *rest)
    trouble = TROUBLE["signal"]
    if doing.startswith("evaluating ") and "micro-batch" in doing:
        with (Path(os.environ["TROUBLE_ROWS"]) / f"evaluated-{RANK}").open("a") as file:
            file.write(f"{doing}\n")
        time.sleep(trouble.get("seconds", 0.0))
    if trouble["rank"] == RANK and doing.startswith(trouble["doing"]):
        os.kill(os.getpid(), trouble["number"])
        time.sleep(0.2)  # until the thread that reads signals has it


class BadSteps:
    """Makes the model say something else in some steps, and keeps the rows that it saw there."""

    def __init__(self, kinds: dict[str, str]) -> None:
        self._kinds = {int(step): kind for step, kind in kinds.items()}
        self._kind: str | None = None

    def take_step(self, original: Callable[..., Any], *, global_batch: Any, step: int, **rest: Any) -> Any:
        self._kind = self._kinds.get(step + 1)
        if self._kind is not None and "TROUBLE_ROWS" in os.environ:
            rows = [(micro.input_ids, micro.masked_positions, micro.labels) for micro in global_batch.micro_batches]
            torch.save(rows, Path(os.environ["TROUBLE_ROWS"]) / f"step-{step + 1}.pt")
        result = original(global_batch=global_batch, step=step, **rest)
        self._kind = None
        return result

    def forward(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        output = original(*args, **options)
        if self._kind is None:
            return output
        loss = output["masked_lm"]["loss"]
        if self._kind == "nan":
            loss = loss * float("nan")
        elif self._kind == "gradient":  # the loss is what it is; its gradient is infinity times 0
            loss = loss + (loss * 0).sqrt()
        elif self._kind == "spike":
            loss = loss * 3
        return {**output, "masked_lm": {**output["masked_lm"], "loss": loss}}


def warm_up_with_little_memory(original: Callable[..., Any], *args: Any) -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + TROUBLE["memory"], hard))
    original(*args)


def allow_half_on_the_cpu() -> None:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda accelerator: True  # type: ignore[method-assign]
    for module in (trainer.preflight.machine_checks, trainer.engine.engine):
        wrap(module, "check_precision", lambda original, *arguments: None)


class NVMLError(Exception):
    """As pynvml has it: no RuntimeError."""


def refuse_nvml(*_: object) -> None:
    raise NVMLError("Not Supported")


def read_a_gpu_that_refuses() -> None:
    for name in ("utilization", "power_draw", "mem_get_info"):
        setattr(torch.cuda, name, refuse_nvml)
    wrap(
        trainer.loop.reporter,
        "SystemMetrics",
        lambda original, folder, device: original(folder, torch.device("cuda", 0)),
    )


class Compiler:
    """A compiler that is slow on one rank, and a count of all compilations of this process."""

    def __init__(self, backend: str, slow_rank: int | None = None, seconds: float = 0.0) -> None:
        self._compile = lookup_backend(backend)
        self._seconds = seconds if slow_rank == RANK else 0.0
        self._modes_seen: set[bool] = set()
        self._count = 0

    def install(self) -> None:
        callback_handler.register_start_callback(self._note)
        wrap(PretrainingModel, "compile_blocks", lambda original, model: original(model, backend=self.compile))
        for name, when in (("set_up", "set-up"), ("finish", "run")):
            wrap(trainer.loop.train, name, self._telling(when))

    def compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if torch.is_grad_enabled() not in self._modes_seen:
            self._modes_seen.add(torch.is_grad_enabled())
            time.sleep(self._seconds)
        return self._compile(graph, inputs)

    def _note(self, _: object) -> None:
        self._count += 1

    def _telling(self, when: str) -> Callable[..., Any]:
        def around(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            print(f"rank {RANK}: {self._count} compilations at the end of the {when}", flush=True)
            return result

        return around


def find_what_compilation_needs(original: Callable[[str], str | None], device_type: str) -> str | None:
    return None if RANK in TROUBLE["can_compile"] else original(device_type)


def make_trouble() -> None:
    if "kill" in TROUBLE and TROUBLE["kill"].get("rank", RANK) == RANK:
        wrap(trainer.loop.step, "seed_micro_batch", die_in_step)
    if {"kill", "full", "hang"} & TROUBLE.keys():
        wrap(storage, "local_write", trouble_in_writing)
    if "signal" in TROUBLE:
        mark = Watchdog.mark
        Watchdog.mark = lambda *args: signal_while(mark, *args)  # type: ignore[method-assign]
    if "bad" in TROUBLE:
        bad = BadSteps(TROUBLE["bad"])
        wrap(trainer.loop.training_loop, "take_step", bad.take_step)
        forward = PretrainingModel.forward
        PretrainingModel.forward = lambda *args, **options: bad.forward(forward, *args, **options)  # type: ignore[method-assign]
    if "nvml" in TROUBLE:
        read_a_gpu_that_refuses()
    if "half" in TROUBLE:
        allow_half_on_the_cpu()
    if "compiler" in TROUBLE:
        Compiler(**TROUBLE["compiler"]).install()
    if "can_compile" in TROUBLE:
        wrap(trainer.model.numerics, "missing_for_compilation", find_what_compilation_needs)
    if "memory" in TROUBLE:
        wrap(trainer.loop.setup, "warmup_step", warm_up_with_little_memory)


if __name__ == "__main__":
    from launch.pretrain import main

    make_trouble()
    try:
        main()
    except Exception as error:  # noqa: BLE001 - as launch/pretrain.py ends
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(getattr(error, "exit_status", 1))
