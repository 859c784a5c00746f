"""Build the compiled library of paged_ops.

Metadata is in pyproject.toml; this file only adds the one library, ``paged_ops/_C.abi3.so``,
through a ``build_ext`` that writes a ``build.ninja`` and runs it. The library uses torch's stable
ABI and no Python.h: one file serves every CPython from 3.10 and every torch from 2.10 on.

Environment variables
---------------------
CXX, CXXFLAGS
    The compiler and extra flags for every unit.
PAGED_SANITIZE
    "1" builds with AddressSanitizer and UndefinedBehaviorSanitizer (see ``make sanitize``).
PAGED_GLIBC
    A version of the C library, as "2.28": the library then loads on every Linux that has this or a
    later one. It is linked by ziglang, which knows the symbols of each version, with the compiler's
    C++ library inside. For another machine than this one, ``_PYTHON_HOST_PLATFORM`` names it
    ("linux-aarch64"; it is Python's own variable for that) and CXX is a compiler for it.
ASCEND_HOME_PATH, PAGED_SOC
    Where CANN is, 8.5 or later, and the chip to compile the Ascend kernels for (by default
    Ascend910B1). Without the first, everything is built but these kernels.
ASCENDC_CMAKE_DIR
    CANN's folder with ascendc.cmake: the kernels are then built by that, and not by commands that
    are written here.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "paged_ops" / "csrc"
OP_KERNEL = ROOT / "op_kernel"
OP_HOST = ROOT / "op_host"

# The oldest torch whose stable ABI has what the library calls (parallel_for, optional arguments).
TORCH_TARGET = "2.10"

# The one list of ISA variants, least capable first, each with the flags that make a source one of
# them. The names are those PAGED_CPU_ISA takes. C++ gets them as PAGED_EACH_ISA, and asks the
# compiler, not the name, what a variant may use; csrc/cpu/dispatch.cpp adds how to tell whether the
# machine runs it.
X86_ISAS = {
    "generic": [],
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4"],
    "avx512bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi"],
}
ARM_ISAS = {
    "generic": [],
    "neon": ["-march=armv8.2-a+fp16"],
}
# Elsewhere nothing asks the system for the matrix unit's registers, or whether there is bfmmla. Its
# loops fill the registers: GCC's first scheduler would load so many keys ahead that sums spill.
if sys.platform == "linux":
    X86_ISAS["amx"] = [*X86_ISAS["avx512bf16"], "-mamx-tile", "-mamx-bf16", "-mamx-int8"]
    ARM_ISAS["neonbf16"] = ["-march=armv8.2-a+fp16+bf16", "-fno-schedule-insns"]
ISAS_BY_MACHINE = {
    "x86_64": X86_ISAS,
    "AMD64": X86_ISAS,
    "aarch64": ARM_ISAS,
    "arm64": ARM_ISAS,
}


# No contraction: a product and a sum are fused where the source says fma and nowhere else, so every
# instance of a template gives the same bits. No exceptions: nothing there throws, and where GCC
# doesn't see that, a unit would get the runtime's handler of them as a weak symbol. The warning is
# a false alarm of GCC 12 inside its own AVX-512 headers (_mm512_undefined_ps).
KERNEL_FLAGS = ["-ffp-contract=off", "-fno-exceptions", "-Wno-maybe-uninitialized"]


# The architecture of the 910B and 910_93 chips. The flags behind it are CANN's own for kernels; so
# is the macro, without which every tensor of a kernel carries its shape on a core's small stack.
NPU_ARCH = "dav-2201"
KERNEL_FLAGS_NPU = [
    *("-std=c++17", "-O3", "-x asc", "--aicore-only", f"--npu-arch={NPU_ARCH}"),
    "-DK_MAX_SHAPE_DIM=0",
    "-mllvm -cce-aicore-stack-size=0x8000",
    "-mllvm -cce-aicore-function-stack-size=0x8000",
    "-mllvm -cce-aicore-record-overflow=true",
    "-mllvm -cce-aicore-addr-transform",
    "-mllvm -cce-aicore-dcci-insert-for-scalar=false",
]


def load_module(path: Path) -> ModuleType:
    """Return a module of the package, which as a whole can't be imported before it is built."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ASCEND = ROOT / "paged_ops" / "ascend"
cann = load_module(ASCEND / "cann.py")


@dataclass(frozen=True)
class Unit:
    """One object file: its name, its source and the flags that only it gets."""

    name: str
    source: Path
    flags: list[str]


def machine() -> str:
    """Return the machine that the library is for: this one, if the environment names no other."""
    named = os.environ.get("_PYTHON_HOST_PLATFORM")
    return named.rpartition("-")[2] if named else platform.machine()


def isas() -> dict[str, list[str]]:
    """Return the ISA variants to build, the portable one for an unknown machine."""
    return ISAS_BY_MACHINE.get(machine(), {"generic": []})


def compiler() -> str:
    """Return the C++ compiler."""
    return os.environ.get("CXX", "g++")


def require_compiler() -> None:
    """Leave with a message where the compiler can't be found."""
    name = compiler().split()[0]
    if shutil.which(name) is None:
        sys.exit(
            f"paged_ops is compiled from C++20, and there is no {name} here: install g++ (12 is "
            "tested; Debian: `apt-get install g++`), or name another in CXX, or take a wheel"
        )


def torch_directory() -> Path:
    """Return torch's package directory without importing torch (which would take seconds)."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit(
            "paged_ops is compiled against the torch of this environment, and there is none here: "
            "install torch first, then paged_ops with `pip install --no-build-isolation .`"
        )
    return Path(spec.origin).parent


def common_flags() -> list[str]:
    """Return the compiler flags of every unit."""
    flags = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", f"-I{CSRC}"]
    if os.environ.get("PAGED_SANITIZE") == "1":
        flags += ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
        flags += ["-fno-sanitize-recover=undefined"]
    else:
        flags += ["-O3", "-DNDEBUG"]
    return [*flags, *os.environ.get("CXXFLAGS", "").split()]


def units(torch_dir: Path) -> list[Unit]:
    """List the object files of the library."""
    major, minor = (int(part) for part in TORCH_TARGET.split("."))
    torch_flags = [
        f"-DTORCH_TARGET_VERSION=0x{major:02x}{minor:02x}000000000000",
        f"-isystem {torch_dir / 'include'}",
    ]
    each_isa = f"'-DPAGED_EACH_ISA(f)={' '.join(f'f({isa})' for isa in isas())}'"
    found = [Unit("library", CSRC / "library.cpp", torch_flags)]
    backends = [CSRC / device / "backend.cpp" for device in ("cpu", "npu")]
    for source in backends:
        flags = [*torch_flags, f"-I{ROOT}"]
        found.append(Unit(f"backend.{source.parent.name}", source, flags))
    for source in sorted({*(CSRC / "cpu").rglob("*.cpp")} - {*backends}):
        if not source.name.endswith(".isa.cpp"):
            found.append(Unit(f"cpu.{source.stem}", source, [each_isa]))
            continue
        stem = source.name.removesuffix(".isa.cpp")
        for isa, isa_flags in isas().items():
            flags = [f"-DPAGED_ISA={isa}", *KERNEL_FLAGS, *isa_flags]
            found.append(Unit(f"cpu.{stem}.isa.{isa}", source, flags))
    for source in sorted({*(CSRC / "npu").glob("*.cpp"), *OP_HOST.glob("*.cpp")} - {*backends}):
        found.append(Unit(f"{source.parent.name}.{source.stem}", source, [f"-I{ROOT}"]))
    return found


def kernel_lines(folder: Path) -> list[str]:
    """Return the lines of build.ninja that make a device's object of each source of op_kernel.

    Each is compiled, linked and looked at: an object of the wrong kind is an error of the build.
    """
    sources = sorted(OP_KERNEL.glob("*.cpp"))
    by_cmake = "ASCENDC_CMAKE_DIR" in os.environ
    lines = [
        "rule kernel_check",
        f"  command = {sys.executable} {ASCEND / 'objects.py'} $in $out",
        *(cmake_lines(sources) if by_cmake else compiler_lines(sources)),
    ]
    made = "cmake/fatbin/{0}/{0}.o" if by_cmake else "{0}.o"
    return lines + [
        f"build {folder / source.stem}.o: kernel_check {made.format(source.stem)}"
        for source in sources
    ]


def compiler_lines(sources: list[Path]) -> list[str]:
    """Return the lines that call CANN's compiler and its linker."""
    home = cann.home()
    includes = " ".join(f"-I{folder}" for folder in (OP_KERNEL, *cann.header_folders(home)))
    lines = [
        "rule kernel",
        f"  command = {cann.find_tool(home, 'bisheng')} {' '.join(KERNEL_FLAGS_NPU)} {includes}"
        " -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule kernel_link",
        f"  command = {cann.find_tool(home, 'ld.lld')} -m aicorelinux -Ttext=0 $in -static -o $out",
    ]
    for source in sources:
        lines += [
            f"build {source.stem}.obj: kernel {source}",
            f"build {source.stem}.o: kernel_link {source.stem}.obj",
        ]
    return lines


def cmake_lines(sources: list[Path]) -> list[str]:
    """Return the lines that leave compiling and linking to CANN's CMake functions."""
    objects = " ".join(f"cmake/fatbin/{source.stem}/{source.stem}.o" for source in sources)
    headers = " ".join(str(path) for path in sorted(OP_KERNEL.rglob("*.h")))
    return [
        "rule kernel_cmake",
        "  command = cmake -S cmake -B cmake/build && cmake --build cmake/build"
        " && cmake --install cmake/build",
        f"build {objects}: kernel_cmake cmake/CMakeLists.txt"
        f" | {' '.join(map(str, sources))} {headers}",
    ]


def cmake_text() -> str:
    """Return a CMakeLists.txt that makes the objects where CANN's functions put them: fatbin/."""
    lines = [
        "cmake_minimum_required(VERSION 3.16)",
        "project(paged_ops_kernels)",
        'set(RUN_MODE "npu" CACHE STRING "")',
        f'set(SOC_VERSION "{soc()}" CACHE STRING "")',
        f'set(ASCEND_CANN_PACKAGE_PATH "{cann.home()}" CACHE PATH "")',
        f'set(ASCENDC_CMAKE_DIR "{os.environ["ASCENDC_CMAKE_DIR"]}")',
        'set(CMAKE_BUILD_TYPE "Release" CACHE STRING "" FORCE)',
        'set(CMAKE_INSTALL_PREFIX "${CMAKE_CURRENT_SOURCE_DIR}" CACHE PATH "" FORCE)',
        "include(${ASCENDC_CMAKE_DIR}/ascendc.cmake)",
    ]
    for source in sorted(OP_KERNEL.glob("*.cpp")):
        lines += [
            f'ascendc_fatbin_library({source.stem} "{source}")',
            f"ascendc_compile_definitions({source.stem} PRIVATE -DK_MAX_SHAPE_DIM=0)",
            f'ascendc_include_directories({source.stem} PRIVATE "{OP_KERNEL}")',
        ]
    return "\n".join(lines) + "\n"


def link_lines(objects: str, library: Path, torch_dir: Path) -> list[str]:
    """Return the lines of build.ninja that link the library for the machine of the build."""
    sanitize = "-fsanitize=address,undefined" if os.environ.get("PAGED_SANITIZE") == "1" else ""
    undefined = "-undefined dynamic_lookup" if sys.platform == "darwin" else ""
    return [
        "rule link",
        f"  command = $cxx -shared {sanitize} {undefined} $in -o $out"
        f" -L{torch_dir / 'lib'} -ltorch_cpu",
        f"build {library}: link {objects}",
    ]


def portable_link_lines(objects: str, library: Path, glibc: str) -> list[str]:
    """Return the lines of build.ninja that link the library for any Linux from a glibc on.

    The compiler's own libraries come before zig's, which would else put its own memcpy, logf and
    tests of the processor in. The torch linked against is a stub with the names that the objects
    ask for: torch's library is needed for no more, and is for one machine. Only libgcc's unwinder
    stays outside, since exceptions cross from this library into torch.
    """
    names = r"s/^ *U \(\(aoti_\)\?torch_[a-z0-9_]*\)$$/void \1(void) {}/p"
    zig = f"{sys.executable} -m ziglang cc -target {machine()}-linux-gnu.{glibc} -nostdlib -shared"
    hide = "-s -Wl,--gc-sections -Wl,--version-script=nothing_exported.txt"
    inside = "`$cxx -print-file-name=libstdc++.a` `$cxx -print-file-name=libgcc_s.so.1`"
    behind = "-lc -lm -ldl -lpthread `$cxx -print-libgcc-file-name`"
    return [
        "rule torch_stub",
        "  command = `$cxx -print-prog-name=nm` -u $in"
        f" | sed -n '{names}' | sort -u > torch_stub.c"
        " && $cxx -x c -shared -fPIC -Wl,-soname,libtorch_cpu.so torch_stub.c -o $out",
        "rule link",
        f"  command = {zig} {hide} -Wl,-z,defs $in {inside} -L. -ltorch_cpu {behind} -o $out",
        f"build glibc.o: compile {CSRC / 'glibc.cpp'}",
        f"build libtorch_cpu.so: torch_stub {objects}",
        f"build {library}: link {objects} glibc.o | libtorch_cpu.so nothing_exported.txt",
    ]


def ninja_file(found: list[Unit], library: Path, torch_dir: Path) -> str:
    """Return the text of build.ninja: rules to compile and to link, and one for Ascend kernels."""
    lines = [
        f"cxx = {compiler()}",
        f"flags = {' '.join(common_flags())}",
        "rule compile",
        "  command = $cxx $flags $extra -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
    ]
    for unit in found:
        lines += [
            f"build {unit.name}.o: compile {unit.source}",
            f"  extra = {' '.join(unit.flags)}",
        ]
    objects = " ".join(f"{unit.name}.o" for unit in found)
    glibc = os.environ.get("PAGED_GLIBC")
    if glibc is None:
        lines += link_lines(objects, library, torch_dir)
    else:
        lines += portable_link_lines(objects, library, glibc)
    if cann.why_not() is None:
        lines += kernel_lines(library.parent / "kernels" / soc())
    return "\n".join(lines) + "\n"


def write_if_changed(path: Path, text: str) -> None:
    """Write a file, whose time stays where its contents do."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def soc() -> str:
    """Return the chip that the Ascend kernels are compiled for."""
    return os.environ.get("PAGED_SOC", "Ascend910B1")


def npu_status() -> str:
    """Say whether the Ascend kernels are built, in one line."""
    reason = cann.why_not()
    if reason is not None:
        return f"not built: {reason}"
    home = cann.home()
    by = "CANN's CMake functions" if "ASCENDC_CMAKE_DIR" in os.environ else "bisheng"
    return f"built for {soc()} by {by} of CANN {cann.version(home) or '(unknown)'} in {home}"


def compiler_version() -> str:
    """Return what the compiler calls itself, in one line."""
    command = [*compiler().split(), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0] or compiler()


def build_record() -> dict[str, object]:
    """Describe the build for the loader's error message and for ``backend_info()``."""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = "unknown"
    return {
        "torch_built_with": torch_version,
        "torch_target": TORCH_TARGET,
        "machine": machine(),
        "compiler": compiler_version(),
        "glibc": os.environ.get("PAGED_GLIBC"),
        "cpu_isas": list(isas()),
        "npu": npu_status(),
        "sanitized": os.environ.get("PAGED_SANITIZE") == "1",
    }


class NinjaBuild(build_ext):
    """Build the library with ninja inside build/, then record how it was built beside it."""

    def build_extension(self, ext: Extension) -> None:
        """Write build.ninja for the one library and run it."""
        torch_dir = torch_directory()
        require_compiler()
        library = Path(self.get_ext_fullpath(ext.name)).resolve()
        library.parent.mkdir(parents=True, exist_ok=True)
        kind = "sanitize" if os.environ.get("PAGED_SANITIZE") == "1" else "release"
        work = ROOT / "build" / f"{kind}-{sysconfig.get_platform()}"
        work.mkdir(parents=True, exist_ok=True)
        if "ASCENDC_CMAKE_DIR" in os.environ and cann.why_not() is None:
            (work / "cmake").mkdir(exist_ok=True)
            write_if_changed(work / "cmake" / "CMakeLists.txt", cmake_text())
        write_if_changed(work / "nothing_exported.txt", "{ local: *; };\n")
        (work / "build.ninja").write_text(ninja_file(units(torch_dir), library, torch_dir))
        verbose = ["-v"] if os.environ.get("VERBOSE") else ["--quiet"]
        ninja = [sys.executable, "-m", "ninja", "-C", str(work), *verbose]
        if subprocess.run(ninja, check=False).returncode != 0:
            sys.exit("paged_ops: the compiled library could not be built, see the messages above")
        record = build_record()
        library.with_name("_build.json").write_text(json.dumps(record, indent=2) + "\n")
        print(f"paged_ops: CPU kernels {', '.join(isas())}; NPU kernels {record['npu']}")

    def copy_extensions_to_source(self) -> None:
        """Copy what lies beside the library too, in an editable or in-place build."""
        super().copy_extensions_to_source()
        built = Path(self.build_lib) / "paged_ops"
        self.copy_file(str(built / "_build.json"), str(ROOT / "paged_ops"))
        if (built / "kernels").exists():
            self.copy_tree(str(built / "kernels"), str(ROOT / "paged_ops" / "kernels"))

    def get_ext_filename(self, fullname: str) -> str:
        """Name the library without a Python version: it holds no Python code."""
        return fullname.replace(".", "/") + ".abi3.so"


class TorchFirst(dist_info):
    """Ask for torch when pip asks for the metadata, before it downloads what these require."""

    def run(self) -> None:
        """Write the metadata."""
        torch_directory()
        super().run()


class AnyPythonWheel(bdist_wheel):
    """Name the wheel for any Python 3 of this platform: the library is for no Python in particular.

    Which versions are served is in the metadata (requires-python).
    """

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag of the wheel: Python, ABI, platform."""
        glibc = os.environ.get("PAGED_GLIBC")
        if glibc is None:
            return "py3", "none", super().get_tag()[2]
        return "py3", "none", f"manylinux_{glibc.replace('.', '_')}_{machine()}"


setup(
    ext_modules=[Extension("paged_ops._C", sources=[])],
    cmdclass={"build_ext": NinjaBuild, "bdist_wheel": AnyPythonWheel, "dist_info": TorchFirst},
)
