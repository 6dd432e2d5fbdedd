"""The launches of the launchers in `kernels.triton`, recorded and compiled without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from importlib import import_module
from itertools import combinations
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from ligermodels.kernels.launch import Launch, Launches, entries, launch_for

# It sums a row of each program of another kernel, of which there are some thousands.
SMALL = ("column_sums_kernel",)
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.float8_e4m3fnuz: "*fp8e4b8",
    torch.float8_e5m2fnuz: "*fp8e5b16",
}


class Recorded(NamedTuple):
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list]
    options: dict[str, int]

    @property
    def pointers(self) -> set[str]:
        """Return the names of the pointers that are not None."""
        return {name for name, kind in self.signature.items() if kind.startswith("*")}

    def key(self) -> tuple:
        return (
            self.kernel.__name__,
            *(tuple(sorted(d.items())) for d in (self.signature, self.constants, self.options)),
            str(self.attributes),
        )

    def as_torch_compile_passes_it(self) -> Recorded:
        wide = {k: "fp64" if v == "fp32" else v for k, v in self.signature.items()}
        return self._replace(signature=wide, attributes={})

    def features(self) -> dict[str, Any]:
        """Return what the compiler sees of the launch, one entry for each argument and option."""
        known = {**self.signature, **self.constants, **self.options}
        return known | {"divisibility": bool(self.attributes)}

    def describe(self) -> str:
        return f"{self.kernel.__name__} {self.constants} {self.options} {self.signature}"


def sample_of_features(launches: list[Recorded], together: int) -> list[Recorded]:
    """Return launches of one kernel that hold every feature that occurs in any.

    The choice is greedy: each time the launch with the most new features, the first of equals.

    Args: together is 1, or 2 to hold every pair of two features, or more.
    """
    features = [launch.features() for launch in launches]
    names = sorted(set().union(*features))
    varying = [name for name in names if len({str(x.get(name)) for x in features}) > 1]
    groups = [
        # A launch that is alone has no features that vary; it is chosen for this entry.
        {(), *combinations([(name, str(x.get(name))) for name in varying], together)}
        for x in features
    ]
    missing = set().union(*groups)
    chosen = []
    while missing:
        best = max(range(len(launches)), key=lambda i: len(groups[i] & missing))
        chosen.append(launches[best])
        missing -= groups[best]
    return chosen


class _Recorder:
    """A stand-in for a jitted kernel: `kernel[grid](...)` records what would be compiled."""

    def __init__(self, kernel: Any, into: list[Recorded]):
        self.kernel, self.into = kernel, into

    def __getitem__(self, grid: tuple[int, ...]):
        assert all(size > 0 for size in grid)
        assert grid[0] < 2**31 and all(size < 2**16 for size in grid[1:])
        return self.record

    def record(self, *args: Any, **kwargs: Any) -> None:
        options = {key: kwargs.pop(key) for key in ("num_warps", "num_stages")}
        values = dict(zip(self.kernel.arg_names, args)) | kwargs
        constexprs = {p.name for p in self.kernel.params if p.is_constexpr}
        signature, constants, attributes = {}, {}, {}
        for position, name in enumerate(self.kernel.arg_names):
            value = values[name]
            if name in constexprs or value is None or (isinstance(value, int) and value == 1):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = POINTERS[value.dtype]
                attributes[(position,)] = [["tt.divisibility", 16]]
            elif isinstance(value, int):
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0:
                    attributes[(position,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32"
        self.into.append(Recorded(self.kernel, signature, constants, attributes, options))


class Recording(NamedTuple):
    launches: list[Recorded]
    configs: set[tuple[str, int | None]]  # name and largest row length of each config taken


def modules() -> list[ModuleType]:
    """Return every module of launchers, as the package lists them."""
    import ligermodels.kernels.triton as launchers

    found = iter_modules(launchers.__path__, f"{launchers.__name__}.")
    return [import_module(name) for _, name, _ in found]


def kernels_of(module: ModuleType) -> dict[str, Any]:
    """Return the kernels that a module launches; names with a leading _ are parts of others."""
    from triton.runtime import JITFunction

    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and not name.startswith("_")
    }


def launch_configs() -> dict[str, Launches]:
    """Return the launch configs of every module of launchers, found by their type."""
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": value
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, Launches)
    }


def recorder(monkeypatch: Any, vendor: str) -> Recording:
    """Patch every launcher to record instead of launch, with the configs of a vendor."""
    recording = Recording([], set())
    names = {id(value): name for name, value in launch_configs().items()}

    def launch(launches: Launches, length: int) -> Launch:
        table = getattr(launches, vendor)
        fits = (limit for limit, _ in entries(table) if limit is None or length <= limit)
        recording.configs.add((names[id(launches)], next(fits)))
        return launch_for(table, length)

    for module in modules():
        kernels = kernels_of(module)
        for name, kernel in kernels.items():
            monkeypatch.setattr(module, name, _Recorder(kernel, recording.launches))
        if kernels:
            monkeypatch.setattr(module, "launch", launch)
    return recording


_RESULT = re.compile(r"(%\w+)(?::\d+)? = ([\w.]+) ?(.*?)(?: loc\(.*)?$")
_LARGEST_FACTOR = 64  # rows of a tile; offsets in them have more columns


def products_of_32_bits(ttir: str) -> list[str]:
    """Return the products of a kernel in Triton's IR that could be an offset past 2^31.

    Numbers of programs, rows and columns fit in 32 bits, also multiplied by the rows of a tile. A
    program's number times more than that, or two numbers that are known only at run time, may not.
    A remainder is no program's number any more.
    """
    of_program, found = set(), []
    constants = dict(re.findall(r"(%\w+) = arith\.constant (?:dense<)?(-?\d+)>? :", ttir))
    for line in map(str.strip, ttir.splitlines()):
        match = _RESULT.match(line)
        if match is None and not line.startswith("scf.for"):
            continue
        if "scf.for" in line:
            for name, start in re.findall(r"(%\w+) = (%\w+)", line):
                (of_program.add if start in of_program else of_program.discard)(name)
            continue
        result, op, rest = match.groups()
        operands = re.findall(r"%\w+", rest)
        derived = op == "tt.get_program_id" or bool(of_program.intersection(operands))
        derived = derived and op not in ("arith.remsi", "arith.remui", "tt.load", "tt.addptr")
        (of_program.add if derived else of_program.discard)(result)
        if op == "arith.muli" and rest.endswith(("i32", "i32>")):
            factors = [int(constants[x]) for x in operands if x in constants]
            if not factors or (derived and max(factors) > _LARGEST_FACTOR):
                found.append(line)
    return found


class Usage(NamedTuple):
    shared: int
    spilled: int  # registers or bytes of stack; the tests only check that it is 0
    threads: int
    narrow: list[str]  # products that should have 64 bits


def compiled_for(launch: Recorded, backend: str, arch: int | str, warp_size: int) -> Any:
    """Compile a launch for a GPU that may be absent."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ligermodels.kernels.triton import float8_tile

    source = ASTSource(
        fn=launch.kernel,
        signature=launch.signature,
        constexprs=launch.constants,
        attrs=launch.attributes,
    )
    target = GPUTarget(backend, arch, warp_size)
    # The key keeps the constant as it is for the GPU of this machine.
    assert launch.kernel.cache_key
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8_tile, "SATURATES", triton.language.constexpr(backend == "cuda"))
        return triton.compile(source, target=target, options=launch.options)


def compile_for(launch: Recorded, backend: str, arch: int | str, warp_size: int) -> Usage:
    """Compile a launch for a GPU that may be absent, and return what it uses."""
    compiled = compiled_for(launch, backend, arch, warp_size)
    if backend == "hip":
        text = compiled.asm["amdgcn"]
        spilled = sum(
            int(re.search(rf"\.{field}:\s*(\d+)", text)[1])
            for field in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
        )
    else:
        spilled = _cuda_stack(compiled.asm["cubin"])
    threads = compiled.metadata.num_warps * warp_size
    narrow = [] if launch.kernel.__name__ in SMALL else products_of_32_bits(compiled.asm["ttir"])
    return Usage(compiled.metadata.shared, spilled, threads, narrow)


def _cuda_stack(cubin: bytes) -> int:
    """Return the bytes of stack and local memory of a thread, where ptxas spills to."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    assert tool.exists(), f"{tool} is missing; this test reads from it what a kernel spills"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.findall(r"STACK:(\d+).*?LOCAL:(\d+)", text)
    assert found, text
    return sum(int(stack) + int(local) for stack, local in found)
