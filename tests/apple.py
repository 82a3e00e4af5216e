"""A stand-in for Apple's GPU: tensors that claim to be on `mps`, keep their values on the CPU, and refuse the same.

It refuses float64, tensors of two devices in one operation, `numpy()`, and copies that are not waited for (which give
wrong values on a real one, pytorch issues 139550 and 189690). What it cannot show: how fast a real one is, which
operations it lacks, and how it rounds.

    with apple_gpu():
        vitrail.finetune(...)          # "auto" takes mps
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

APPLE, CPU = torch.device("mps", 0), torch.device("cpu")
NO_DOUBLE = "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
COPIES = (Tensor.copy_, Tensor.__setitem__, Tensor.__getitem__, Tensor.__deepcopy__)
"""What takes tensors of two devices: a copy, and indices on the CPU."""


class AppleTensor(Tensor):
    """A tensor that Python sees on `mps`; `held` has its values. Inside torch it is on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> AppleTensor:
        if held.dtype == torch.float64:
            raise TypeError(NO_DOUBLE)
        size, strides, start = held.size(), held.stride(), held.storage_offset()
        made: Any = Tensor._make_wrapper_subclass(cls, size, strides=strides, storage_offset=start, dtype=held.dtype)
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: APPLE)
    is_cpu = property(lambda self: False)
    is_mps = property(lambda self: True)

    def __repr__(self, **options: Any) -> str:
        return f"AppleTensor({self.held})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return compute(function, args, kwargs or {})


def compute(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation of the stand-in on the CPU, and return its results as tensors of the stand-in."""
    on_apple = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, AppleTensor)]
    if function is torch.ops.aten.copy_.default and not isinstance(args[0], AppleTensor):
        return args[0].copy_(args[1].held)  # to the CPU
    inner_args, inner = tree_map(lambda value: value.held if isinstance(value, AppleTensor) else value, (args, kwargs))
    if inner.get("device") is not None:
        inner["device"] = CPU
    if inner.get("dtype") == torch.float64:
        raise TypeError(NO_DOUBLE)
    result = function(*inner_args, **inner)
    known = {id(value.held): value for value in on_apple}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return known[id(value)] if id(value) in known else AppleTensor(value)

    return tree_map(wrap, result)


class _Operations(TorchDispatchMode):
    """Makes new tensors on the stand-in where that is asked for, and counts its operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_asked_for = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "mps"
        if is_asked_for or any(isinstance(value, AppleTensor) for value in tree_flatten((args, kwargs))[0]):
            self.counts[str(function)] += 1
            return compute(function, args, kwargs)
        return function(*args, **kwargs)


class _Copy(torch.autograd.Function):
    """Copies between the devices."""

    @staticmethod
    def forward(context: Any, values: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        context.kept = values.device, values.dtype
        if torch.float64 in (values.dtype, dtype) and APPLE in (values.device, device):
            raise TypeError(NO_DOUBLE)
        held = (values.held if isinstance(values, AppleTensor) else values).detach().to(dtype, copy=True)
        return AppleTensor(held) if device.type == "mps" else held

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return _Copy.apply(gradient, *context.kept), None, None


class _Calls(TorchFunctionMode):
    """What is decided before an operation is dispatched: copies between devices, and tensors of two devices."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if function in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device).type == "mps":
            return _Copy.apply(function(*args, **{**kwargs, "device": CPU}), APPLE, kwargs.get("dtype"))
        if function in (Tensor.to, Tensor.cpu):
            return self._copy(args[0], *_find_target(function, args, kwargs))
        if function in (Tensor.tolist, Tensor.numpy) and isinstance(args[0], AppleTensor):
            if function is Tensor.numpy:
                raise TypeError("can't convert mps:0 device type tensor to numpy. Use Tensor.cpu() first")
            return args[0].held.tolist()
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        if function is torch._has_compatible_shallow_copy_type:  # asked before a module's weights are replaced
            return type(tensors[0]) is type(tensors[1])
        places = {value.device.type for value in tensors if value.ndim}
        if len(places) > 1 and "mps" in places:
            if function not in COPIES:
                raise RuntimeError(f"{function}: expected all tensors to be on the same device, not on {places}")
            if kwargs.get("non_blocking") or (function is Tensor.copy_ and args[2:3] == (True,)):
                raise AssertionError("a copy to or from Apple's GPU that is not waited for may give wrong values")
        result = function(*args, **kwargs)
        leaves_apple = device is not None and torch.device(device).type != "mps"
        return result.held if leaves_apple and isinstance(result, AppleTensor) else result

    def _copy(
        self, values: Tensor, device: torch.device, dtype: torch.dtype, non_blocking: bool, options: dict[str, Any]
    ) -> Tensor:
        if values.device.type != device.type and "mps" in (values.device.type, device.type):
            if non_blocking:
                raise AssertionError("a copy to or from Apple's GPU that is not waited for may give wrong values")
            return _Copy.apply(values, device, dtype)
        if values.device.type == "mps":  # another type, or nothing to do
            return values.to(dtype, **options)
        return values.to(device, dtype, non_blocking, **options)


def _find_target(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the device, the type, whether the copy is not waited for, and the other options of a copy."""
    values, rest = args[0], {name: kwargs[name] for name in ("copy", "memory_format") if name in kwargs}
    if function is Tensor.cpu:
        return CPU, values.dtype, False, rest
    if len(args) > 1 and isinstance(args[1], Tensor):
        return args[1].device, args[1].dtype, bool(kwargs.get("non_blocking")), rest
    given = {name: value for name, value in kwargs.items() if name not in rest}
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args[1:], **given)
    return device or values.device, dtype or values.dtype, non_blocking, rest


@contextlib.contextmanager
def apple_gpu() -> Iterator[Counter[str]]:
    """Let torch have an Apple GPU while the block runs; yield how often each operation ran on it."""
    operations, before = _Operations(), torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with (
            mock.patch.object(torch.backends.mps, "is_available", return_value=True),
            mock.patch.object(torch.backends.mps, "get_name", return_value="Apple M0"),
            mock.patch.object(torch.mps, "recommended_max_memory", return_value=8 << 30),
            mock.patch.object(torch.mps, "driver_allocated_memory", return_value=0),
            mock.patch.object(torch.mps, "get_rng_state", return_value=torch.zeros(16, dtype=torch.uint8)),
            mock.patch.object(torch.mps, "set_rng_state", return_value=None),
            mock.patch.object(torch.accelerator, "synchronize", return_value=None),
            _Calls(),
            operations,
        ):
            yield operations.counts
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
