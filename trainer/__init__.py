"""Pretrain BERT-style encoders with DeepSpeed ZeRO, and use them.

    from trainer import load_config, train, export, FillMask

    config = load_config("tiny_cpu", {"data.shards": "shards", "output_dir": "run"})
    train(config)
    export("run", "encoder")
    FillMask("encoder")("Paris is the [MASK] of France.")

`python -m trainer` lists the functions. Each is imported on first use, so that `import trainer` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.api import TrainResult, open_loader, train
    from trainer.config.run_config import load_config
    from trainer.finetuning.finetune import finetune
    from trainer.hf_export.export import export_checkpoint as export
    from trainer.inference.embedding import Embedder
    from trainer.inference.fill_mask import FillMask
    from trainer.registry.registration import register

__all__ = [
    "Embedder",
    "FillMask",
    "TrainResult",
    "export",
    "finetune",
    "load_config",
    "open_loader",
    "register",
    "train",
]

_SOURCES = {
    "load_config": "trainer.config.run_config:load_config",
    "train": "trainer.api:train",
    "TrainResult": "trainer.api:TrainResult",
    "open_loader": "trainer.api:open_loader",
    "export": "trainer.hf_export.export:export_checkpoint",
    "register": "trainer.registry.registration:register",
    "FillMask": "trainer.inference.fill_mask:FillMask",
    "Embedder": "trainer.inference.embedding:Embedder",
    "finetune": "trainer.finetuning.finetune:finetune",
}
"""Where each name comes from. No package bears one of them: importing a package would replace the function."""
_USED_BY_COMMANDS = ("export", "register")
"""Functions whose errors name the options of a command; here they name the parameters."""


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    module, _, attribute = _SOURCES[name].partition(":")
    value = getattr(import_module(module), attribute)
    if name in _USED_BY_COMMANDS:
        from data_prep.base.errors import options_as_parameters

        value = options_as_parameters()(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_SOURCES})
