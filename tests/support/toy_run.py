"""A run's folder as a training leaves it, with checkpoints of two ranks, made without training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from data_prep.storage import storage
from tests.support.living_data_sets import FileRecord
from tests.support.preparations import trained
from trainer import load_config
from trainer.checkpoint.format import DataIdentity, Marker, SavedState, TrainState, step_folder
from trainer.checkpoint.tensors import write_tensors
from trainer.config.batch_arithmetic import StageShape
from trainer.config.data_settings import DataSettings
from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.objectives.pretraining import PretrainingModel

TINY = Path(__file__).with_name("tiny.yaml")


def tiny_config(output_dir: str | Path = "elsewhere", **sections: Mapping[str, Any]) -> RunConfig:
    """The smallest run there is; sections replace single settings of it, such as data={"sequence_length": 16}."""
    changes = {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
    return load_config(TINY, {"output_dir": str(output_dir), **changes})


def stage_of(shape: StageShape, data: DataSettings, first_step: int = 0) -> Stage:
    """A stage of that shape on those data; everything else is that of `tiny_config`."""
    (stage,) = tiny_config().stages
    return replace(stage, **vars(shape), data=data, data_sets=(*range(len(data.components)),), first_step=first_step)


def preset_config(
    *overrides: str, preset: str = "tiny_cpu", shards: str | Path = "none", output_dir: str | Path = "run"
) -> RunConfig:
    """A preset on these shards; overrides are settings as they are typed."""
    return load_config(preset, [f"data.shards={shards}", f"output_dir={output_dir}", *overrides])


CONFIG = tiny_config()


def make_tokenizer(folder: Path) -> Path:
    """A tokenizer of 370 pieces, most of them bytes."""
    trained(["a river and a city, a city and a river"] * 3, folder, vocab_size=370)
    return folder


def make_weights() -> dict[str, torch.Tensor]:
    model = PretrainingModel(CONFIG.model)
    model.initialize(3)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def write_checkpoint(output_dir: Path, step: int, fingerprint: str, weights: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of two ranks, each holding a half of every weight."""
    folder = step_folder(output_dir, step)
    records = []
    for rank in (0, 1):
        parts = []
        for name, weight in weights.items():
            half = weight.numel() // 2
            start, stop = (0, half) if rank == 0 else (half, weight.numel())
            parts.append((f"weight:{start}:{name}", stop - start, lambda w=weight, a=start, b=stop: w.view(-1)[a:b]))
        records.append(write_tensors(folder / f"rank-0000{rank}-of-00002.safetensors", parts))
    saved = SavedState(
        format_version=1,
        state=TrainState(step=step, tokens_seen=step * 32, mlflow_run_id="abc"),
        config=CONFIG.model_dump(mode="json"),
        data=DataIdentity(manifest_digests=("d" * 64,), tokenizer_fingerprint=fingerprint),
        world_size=2,
        zero_stage=1,
        shapes={name: tuple(weight.shape) for name, weight in weights.items()},
        optimizer_steps=step,
        loss_scaler=None,
        versions={},
    )
    path = folder / "state.json"
    storage.write_bytes(path, saved.model_dump_json().encode())
    records.append(FileRecord(name=path.name, bytes=storage.size(path), sha256=storage.sha256_of(path)))
    marker = Marker(format_version=1, step=step, files=tuple(records))
    storage.write_bytes(folder / "checkpoint.json", marker.model_dump_json().encode())
    return folder


def make_run(output_dir: Path, tokenizer_folder: Path) -> Path:
    """A run with checkpoints after steps 10 and 20."""
    for path in tokenizer_folder.iterdir():
        storage.write_bytes(output_dir / "tokenizer" / path.name, path.read_bytes())
    fingerprint = json.loads((tokenizer_folder / "tokenizer_info.json").read_text())["fingerprint"]
    weights = make_weights()
    write_checkpoint(output_dir, 10, fingerprint, {name: weight * 2 for name, weight in weights.items()})
    write_checkpoint(output_dir, 20, fingerprint, weights)
    return output_dir
