"""Peak rates of accelerators from their makers' datasheets, and the parser for a user's own numbers.

Every rate is a peak, so every time computed from it is a lower bound.
"""

import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

# No datasheet states how long a tiny collective takes. 1 us is about one hop of a TPU's interconnect ("How to Scale
# Your Model", jax-ml.github.io/scaling-book, section 2); GPU libraries take several times that.
LATENCY = 1e-6


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Peak rates of one device. `link` counts one direction, all ports together."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes per second
    link: float  # bytes per second
    latency: float = LATENCY  # seconds that a collective takes, however little it sends
    flops: float = math.inf  # per second, dense bfloat16
    fp8_flops: float = 0.0  # 0: the same as `flops`
    fp4_flops: float = 0.0  # 0: the same as `fp8_flops`
    shared: bool = False  # True: these are the numbers of a whole machine, which all devices share

    def peak(self, dtype: str) -> float:
        """Peak multiplications and additions per second with operands of this dtype."""
        fp8 = self.fp8_flops or self.flops
        return {"fp8": fp8, "nvfp4": self.fp4_flops or fp8}.get(dtype, self.flops)

    def part(self, devices: int) -> "Hardware":
        """One of `devices` devices: an equal part of a shared machine, else this device unchanged."""
        if not self.shared:
            return self
        return replace(
            self,
            memory=self.memory / devices,
            bandwidth=self.bandwidth / devices,
            link=self.link / devices,
            flops=self.flops / devices,
            fp8_flops=self.fp8_flops / devices,
            fp4_flops=self.fp4_flops / devices,
        )


def _host_memory() -> float:
    """Bytes of memory of this machine; infinity if the system does not tell."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return math.inf


HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        # NVIDIA DGX B200 datasheet, an eighth each: 1,440 GB, 64 TB/s, NVLink 14.4 TB/s in both directions,
        # 72 PFLOPS fp8 and 144 PFLOPS fp4 with sparsity, which doubles them.
        "b200": Hardware(
            name="B200", memory=180e9, bandwidth=8e12, link=900e9, flops=2250e12, fp8_flops=4500e12, fp4_flops=9000e12
        ),
        # NVIDIA H200 SXM datasheet: 141 GB, 4.8 TB/s, NVLink 900 GB/s in both directions, 1,979 TFLOPS bf16 and
        # 3,958 fp8 with sparsity.
        "h200": Hardware(name="H200", memory=141e9, bandwidth=4.8e12, link=450e9, flops=989.5e12, fp8_flops=1979e12),
        # NVIDIA H100 SXM datasheet: 80 GB, 3.35 TB/s, the rest as H200.
        "h100": Hardware(name="H100", memory=80e9, bandwidth=3.35e12, link=450e9, flops=989.5e12, fp8_flops=1979e12),
        # AMD Instinct MI300X datasheet: 192 GB, 5.3 TB/s, seven links of 128 GB/s in both directions, 1,307.4 TFLOPS
        # bf16, 2,614.9 fp8.
        "mi300x": Hardware(
            name="MI300X", memory=192e9, bandwidth=5.3e12, link=448e9, flops=1307.4e12, fp8_flops=2614.9e12
        ),
        # cloud.google.com/tpu/docs/v5p: 95 GiB, 2,765 GB/s, interconnect 1,200 GB/s in both directions, 459 TFLOPS.
        "tpu-v5p": Hardware(name="TPU v5p", memory=95 * 2**30, bandwidth=2765e9, link=600e9, flops=459e12),
        # cloud.google.com/tpu/docs/v6e: 32 GB, 1,600 GB/s, interconnect 3,200 Gb/s, 918 TFLOPS bf16.
        "tpu-v6e": Hardware(name="TPU v6e", memory=32e9, bandwidth=1600e9, link=400e9, flops=918e12),
        # Intel, 4th generation Xeon Scalable: eight channels of DDR5-4800 to a socket. Virtual devices share one
        # socket and exchange through its memory.
        "cpu": Hardware(name="virtual CPU", memory=_host_memory(), bandwidth=307.2e9, link=307.2e9, shared=True),
    }
)

_NUMBERS = [field.name for field in fields(Hardware) if field.name not in ("name", "shared")]
_REQUIRED = ("memory", "bandwidth", "link")
_QUANTITY = re.compile(r"([0-9.]+(?:e[+-]?\d+)?)\s*([KMGTP]?)(i?)(B|FLOPS|FLOP)?(?:/s)?", re.IGNORECASE)
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def find_hardware(text: str) -> Hardware:
    """Parse `b200`, `b200,memory=192GB` or `memory=180GB,bandwidth=8TB/s,link=900GB/s`.

    Units of sizes are B, KB ... PB and KiB ... PiB, units of latency s, ms, us and ns; a bare number is in bytes or
    seconds. Raises ValueError for an unknown name, a missing number or one that cannot be read.
    """
    first, *rest = [part.strip() for part in text.split(",")]
    named, settings = (None, [first, *rest]) if "=" in first else (_named(first), rest)
    values: dict[str, Any] = dict(_setting(setting) for setting in settings)
    if named is not None:
        return replace(named, **values) if values else named
    missing = [name for name in _REQUIRED if name not in values]
    if missing:
        raise ValueError(
            f"hardware must have memory, bandwidth and link, but has no {missing[0]}; "
            "use hardware=memory=180GB,bandwidth=8TB/s,link=900GB/s or a name: " + ", ".join(HARDWARE)
        )
    return Hardware(name="device", **values)


def _named(name: str) -> Hardware:
    if name.lower() in HARDWARE:
        return HARDWARE[name.lower()]
    nearest = difflib.get_close_matches(name.lower(), HARDWARE, n=1, cutoff=0.3)
    hint = f"use {nearest[0]} or" if nearest else "use"
    raise ValueError(
        f"hardware must be one of {', '.join(HARDWARE)}, but is {name!r}; "
        f"{hint} memory=180GB,bandwidth=8TB/s,link=900GB/s"
    )


def _setting(text: str) -> tuple[str, float]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or name not in _NUMBERS:
        raise ValueError(f"hardware must be set as NAME=NUMBER with one of {', '.join(_NUMBERS)}, but is {text!r}")
    number = _seconds(value) if name == "latency" else quantity(value)
    if number is None or not math.isfinite(number) or number < 0 or (number == 0 and name != "latency"):
        example = "2us" if name == "latency" else "180GB"
        raise ValueError(f"hardware must have a positive {name} such as {name}={example}, but has {value!r}")
    return name, number


def quantity(text: str) -> float | None:
    """Parse `180GB`, `8TB/s`, `95GiB`, `2250TFLOPS` or a plain number; None for anything else."""
    match = _QUANTITY.fullmatch(text)
    try:
        number = float(match[1]) if match else None
    except ValueError:  # "1.2.3"
        return None
    if match is None or number is None:
        return None
    return number * (1024 if match[3] else 1000) ** _POWERS[match[2].upper()]


def _seconds(text: str) -> float | None:
    match = re.fullmatch(r"([0-9.eE+-]+)\s*(s|ms|us|ns)?", text)
    try:
        return float(match[1]) * _SECONDS[match[2] or "s"] if match else None
    except ValueError:
        return None
