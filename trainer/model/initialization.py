"""Initial weights as published: normal with deviation 0.02 cut at two deviations, zero biases, unit norms."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

from trainer.config.model_settings import ModelSettings

_RESIDUAL = (".attention.output", ".feed_forward.output")
_HEAD = "mlm_head.dense"


def initialize(model: nn.Module, seed: int, config: ModelSettings) -> None:
    """Set every parameter of `model` from `seed` (Devlin et al. 2018: `truncated_normal_initializer(0.02)`).

    With `depth_scaled` initialization the matrices that write into the residual stream, of which there are two a
    block, have 1 / sqrt(2 num_hidden_layers) of the deviation, so that the stream does not grow with the depth
    (Radford et al. 2019, section 2.3; Warner et al. 2024). The dense layer of the MLM head has this deviation too, as
    in transformers' ModernBERT: a norm follows it, so that a smaller matrix gives the same outputs and turns faster.

    Each parameter draws on the CPU from a generator of its own, seeded by (seed, name): the weights depend
    neither on the device nor on what other parameters the model has.
    """
    is_scaled = config.initialization == "depth_scaled"
    residual_range = config.initializer_range / math.sqrt(2.0 * config.num_hidden_layers if is_scaled else 1.0)
    with torch.no_grad():
        for module_name, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if name == "bias":
                    parameter.zero_()
                elif isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)):
                    parameter.fill_(1.0)
                else:
                    is_small = module_name.endswith(_RESIDUAL) or module_name == _HEAD
                    deviation = residual_range if is_small else config.initializer_range
                    parameter.copy_(_truncated_normal(f"{module_name}.{name}", parameter.shape, seed, deviation))


def _truncated_normal(name: str, shape: torch.Size, seed: int, deviation: float) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    # Drawn again where cut: the same distribution as nn.init.trunc_normal_ in a third of its time.
    values = torch.randn(shape, generator=generator, dtype=torch.float32).flatten()
    while (cut := (values.abs() > 2.0).nonzero().squeeze(1)).numel():
        values[cut] = torch.randn(cut.shape, generator=generator, dtype=torch.float32)
    return values.mul_(deviation).view(shape)
