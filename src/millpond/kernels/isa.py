"""Which instructions the tiles may use: "avx512" (VNNI for u8 x s8 dot products, BF16 for pairs of bfloat16), or
"portable", plain vector code that LLVM lowers for any processor."""

import platform
from dataclasses import dataclass
from pathlib import Path

import llvmlite.binding as llvm

from millpond.errors import ConfigError

ISAS = ("avx512", "portable")
AVX512_NEEDS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx512bf16")


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """The processor's name and the features that LLVM reports for it."""

    name: str
    architecture: str
    flags: frozenset[str]

    def missing(self, needs: tuple[str, ...]) -> list[str]:
        return [flag for flag in needs if flag not in self.flags]


def detect() -> CpuFeatures:
    """What this processor is and can do."""
    flags = frozenset(flag for flag, present in llvm.get_host_cpu_features().items() if present)
    return CpuFeatures(_processor_name(), platform.machine(), flags)


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()} ({llvm.get_host_cpu_name()})"
    return llvm.get_host_cpu_name()


def choose(setting: str = "auto", features: CpuFeatures | None = None) -> str:
    """The name of the kernels to use: the best that the processor has, or the one asked for.

    Raises ConfigError for an unknown name, and for kernels that this processor cannot run.
    """
    features = features or detect()
    if setting == "auto":
        return "portable" if features.missing(AVX512_NEEDS) else "avx512"
    if setting not in ISAS:
        raise ConfigError(f"isa must be one of auto, {', '.join(ISAS)}; got {setting!r}")
    missing = features.missing(AVX512_NEEDS) if setting == "avx512" else []
    if missing:
        raise ConfigError(f"isa avx512 needs {', '.join(missing)}, which this processor lacks; use --isa auto")
    return setting
