"""The device to compute on, and what its hardware supports."""

import torch
import torch.nn.functional as F

from contextready.errors import ContextReadyError, nearest
from contextready.formats.limits import shown


def find_device(name: str) -> torch.device:
    """Return the device of this name; `auto` is the best one available."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
        # torch accepts numbered CPUs, but then their tensors do not match those of the CPU.
        available = device.type != "cpu" or name == "cpu"
    # Some backends raise an ImportError, because they come as packages of their own.
    except (RuntimeError, AssertionError, NotImplementedError, ImportError, ValueError):
        available = False
    if not available:
        raise ContextReadyError(
            f"device={shown(name)} is not available on this machine; choose cpu, cuda, mps or auto."
        )
    return device


PRECISIONS = ("auto", "fp32", "bf16")


def means_bf16(precision: str, device: torch.device) -> bool:
    """Whether this precision is bf16; `auto` is, if the device multiplies it natively."""
    return precision == "bf16" or (precision == "auto" and multiplies_bf16(device))


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse a precision that is unknown, or that the device cannot compute in at all."""
    if precision not in PRECISIONS:
        raise ContextReadyError(f"Unknown precision '{shown(precision)}'; {nearest(precision, PRECISIONS)}")
    if precision == "bf16":
        one_11 = torch.ones(1, 1, dtype=torch.bfloat16, device=device)
        try:
            F.linear(one_11, one_11).item()
        except (RuntimeError, TypeError, NotImplementedError):
            raise ContextReadyError(f"device={device} cannot compute in bf16; choose precision=fp32.") from None


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 natively; emulated bf16 is many times slower than fp32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        checks = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
        return any(check() for check in checks if check is not None)
    return False
