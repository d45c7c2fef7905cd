"""An H100 that is not there: what Inductor and Triton ask of a device before they generate and compile code for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.device_interface import CudaInterface
from torch.utils._triton import has_triton

CAPABILITY = (9, 0)
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=80 << 30,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65_536,
    shared_memory_per_block=49_152,
    shared_memory_per_block_optin=232_448,
    shared_memory_per_multiprocessor=233_472,
    L2_cache_size=50 << 20,
    warp_size=32,
    is_integrated=0,
    is_multi_gpu_board=0,
    gcnArchName="",
    uuid="none",
)
"""Those of the data sheet, with the names of torch.cuda.get_device_properties."""


class _Driver:
    """Triton's driver of the device."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {
            "max_shared_mem": PROPERTIES.shared_memory_per_block_optin,
            "multiprocessor_count": PROPERTIES.multi_processor_count,
            "max_num_regs": PROPERTIES.regs_per_multiprocessor,
            "warpSize": PROPERTIES.warp_size,
        }
    )
    launcher_cls = None

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], PROPERTIES.warp_size)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


class _Answer:
    """A function that always returns one value."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._value


@contextlib.contextmanager
def mocked_h100() -> Iterator[None]:
    """torch and Triton see one H100 within the block, on which nothing can run."""
    import triton

    capability = 10 * CAPABILITY[0] + CAPABILITY[1]
    of_both = {"current_device": 0, "device_count": 1, "get_device_properties": PROPERTIES, "is_available": True}
    of_both |= {"is_bf16_supported": True, "synchronize": None}
    of_torch = {"get_device_capability": CAPABILITY, "get_device_name": PROPERTIES.name, "_lazy_init": None}
    of_torch |= {"get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None}
    of_torch |= {"_exchange_device": 0, "_maybe_exchange_device": 0}
    # Dynamo's interface has taken the functions of torch.cuda when it was imported.
    of_dynamo = {"get_compute_capability": capability, "exchange_device": 0, "maybe_exchange_device": 0}
    of_worker = {"current_device": 0, "get_device_properties": PROPERTIES}
    with contextlib.ExitStack() as stack:
        for owner, values in (
            (torch.cuda, of_both | of_torch),
            (CudaInterface, of_both | of_dynamo),
            (CudaInterface.Worker, of_worker),
        ):
            for name, value in values.items():
                stack.enter_context(patch.object(owner, name, _Answer(value)))
        stack.enter_context(patch("torch._subclasses.fake_tensor.init_gpu_context", _Answer(None)))
        stack.enter_context(patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu", _Answer(None)))
        triton.runtime.driver.set_active(_Driver())  # for good: there is no other here
        has_triton.cache_clear()
        yield
