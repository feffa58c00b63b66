"""Which instructions the tiles may use, from the best down: "amx" (products of 16 rows and columns at once, beside
float16 and all of avx512), "avx512" (VNNI for u8 x s8 dot products, BF16 for pairs of bfloat16), "vnni256" (VNNI on
256 bits), "avx2", and "portable", vector code that LLVM lowers for any processor."""

import ctypes
import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm
import numba
from numba.core.codegen import get_host_cpu_features

from millpond.errors import ConfigError

PORTABLE, AVX2, VNNI256, AVX512, AMX = range(5)  # what compiled code is literally told
ISAS = {"amx": AMX, "avx512": AVX512, "vnni256": VNNI256, "avx2": AVX2, "portable": PORTABLE}
AVX2_NEEDS = ("avx2", "fma", "f16c")
AVX512_NEEDS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx512bf16")
# A process asks Linux once for the registers of AMX, before any of its threads may use them.
PERMITTED = "amx-permission"
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA = 158, 0x1023, 18
# What each needs, in one of these ways. VNNI on 256 bits came to some processors without AVX512.
NEEDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "amx": ((*AVX512_NEEDS, "avx512fp16", "amx-tile", "amx-bf16", PERMITTED),),
    "avx512": (AVX512_NEEDS,),
    "vnni256": ((*AVX2_NEEDS, "avxvnni"), (*AVX2_NEEDS, "avx512vl", "avx512vnni")),
    "avx2": (AVX2_NEEDS,),
    "portable": ((),),
}
FEATURES = tuple(dict.fromkeys(flag for ways in NEEDS.values() for way in ways for flag in way))


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """The processor's name and the features that LLVM reports for it."""

    name: str
    architecture: str
    flags: frozenset[str]

    def missing(self, isa: str) -> list[str]:
        """What an instruction set needs and this processor lacks, by the way that lacks the least."""
        return min(([flag for flag in way if flag not in self.flags] for way in NEEDS[isa]), key=len)


def detect() -> CpuFeatures:
    """What this processor is and can do."""
    flags = {flag for flag, is_there in compiled_for().items() if is_there}
    if "amx-tile" in flags and permit_tiles():
        flags.add(PERMITTED)
    return CpuFeatures(_processor_name(), platform.machine(), frozenset(flags))


@cache
def permit_tiles() -> bool:
    """Ask the system to let this process, all its threads, use the registers of AMX; False where it does not."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    arch_prctl = ctypes.CDLL(None).syscall
    return int(arch_prctl(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA)) == 0


def compiled_for() -> dict[str, bool]:
    """Which features Numba compiles for: this processor's, or those that NUMBA_CPU_FEATURES leaves of them."""
    features = numba.config.CPU_FEATURES or get_host_cpu_features()
    return {each[1:]: each[0] == "+" for each in features.split(",") if each}


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()} ({llvm.get_host_cpu_name()})"
    return llvm.get_host_cpu_name()


def runnable(features: CpuFeatures | None = None) -> list[str]:
    """The names of all kernels that this processor can run, the best first."""
    features = features or detect()
    return [isa for isa in ISAS if not features.missing(isa)]


def choose(setting: str = "auto", features: CpuFeatures | None = None) -> str:
    """The name of the kernels to use: the best that the processor has, or the one asked for.

    Raises ConfigError for an unknown name, and for kernels that this processor cannot run.
    """
    features = features or detect()
    if setting == "auto":
        return runnable(features)[0]
    if setting not in ISAS:
        raise ConfigError(f"isa must be one of auto, {', '.join(ISAS)}; got {setting!r}")
    missing = features.missing(setting)
    if missing == [PERMITTED]:
        raise ConfigError(
            f"isa {setting} needs AMX's registers, and the system refuses them to this process "
            "(arch_prctl ARCH_REQ_XCOMP_PERM); use --isa auto"
        )
    if missing:
        raise ConfigError(f"isa {setting} needs {', '.join(missing)}, which this processor lacks; use --isa auto")
    return setting


def vectors_of(isa: str) -> int:
    """The instruction set of what is not made of AMX's tiles, as compiled code is told."""
    return min(ISAS[isa], AVX512)


def limits(isa: int) -> dict[str, str]:
    """The LLVM function attributes that keep the code of a 256-bit instruction set to what its processors have; none
    for the others."""
    if isa not in (AVX2, VNNI256):
        return {}
    features = compiled_for()
    if isa == VNNI256 and not features.get("avxvnni"):  # then it is AVX512's own, on 256 bits
        return {"prefer-vector-width": "256", "min-legal-vector-width": "0"}
    for flag in features:
        if "avx512" in flag or flag.startswith("avx10") or (isa == AVX2 and flag in ("avxvnni", "gfni")):
            features[flag] = False
    return {"target-features": ",".join(f"{'+' if on else '-'}{flag}" for flag, on in sorted(features.items()))}
