"""What is in the compiled library, how it is chosen from, and how it refuses to load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paged_ops

ROOT = Path(__file__).parent.parent
ISAS = paged_ops.backend_info().cpu_isas


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process of this interpreter, from the root of the tree."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def isa_objects() -> list[Path]:
    return sorted((ROOT / "build").glob("release-*/cpu.*.isa.*.o"))


needs_objects = pytest.mark.skipif(
    not isa_objects(),
    reason="no object files of an ISA variant in build/: not built from this tree",
)


def nm(path: Path) -> list[str]:
    return subprocess.check_output(["nm", "-C", str(path)], text=True).splitlines()


@needs_objects
@pytest.mark.parametrize("path", isa_objects(), ids=lambda path: path.stem)
def test_a_unit_of_one_isa_exports_nothing_that_another_could_replace(path: Path) -> None:
    # A weak symbol stands under one name in every variant, and the linker keeps any one of them.
    assert [line for line in nm(path) if " W " in line or " V " in line or " u " in line] == []


@needs_objects
@pytest.mark.parametrize("path", isa_objects(), ids=lambda path: path.stem)
def test_a_unit_of_one_isa_runs_nothing_when_it_is_loaded(path: Path) -> None:
    # A static initialiser would run before anyone asked whether the machine has its instructions.
    assert [line for line in nm(path) if "_GLOBAL__sub_I" in line] == []


@needs_objects
def test_the_variants_differ_in_the_instructions_they_use() -> None:
    text = {
        path.name.split(".isa.")[1].removesuffix(".o"): subprocess.check_output(
            ["objdump", "-d", "--no-show-raw-insn", str(path)], text=True
        )
        for path in isa_objects()
        if path.name.startswith("cpu.attention.")
    }
    assert set(text) == set(ISAS)
    if "avx2" in text:
        assert "%zmm" not in text["avx2"]
        assert "%ymm" in text["avx2"]
        assert "%ymm" not in text["generic"]
        assert "%zmm" in text["avx512"]
        assert "vdpbf16ps" not in text["avx512"]
        assert "vdpbf16ps" in text["avx512bf16"]


def test_the_library_needs_neither_python_nor_a_second_openmp() -> None:
    needed = subprocess.check_output(["readelf", "-d", paged_ops.backend_info().library], text=True)
    assert "libtorch_cpu" in needed
    for unwanted in ("libpython", "libgomp", "libomp", "RPATH", "RUNPATH"):
        assert unwanted not in needed


def test_backend_info_says_what_was_built_and_chosen() -> None:
    info = paged_ops.backend_info()
    assert info.torch == torch.__version__
    assert info.torch_target == "2.10"
    assert info.cpu_isas[0] == "generic"
    assert info.cpu_isa in info.cpu_isas
    assert info.npu.startswith("not built: ")
    assert info.npu_attention == "mixed"


def test_npu_attention_kernel_says_which_kernel_a_cache_takes() -> None:
    assert paged_ops.npu_attention_kernel(torch.float16, 128) == "mixed"
    assert paged_ops.npu_attention_kernel(torch.bfloat16, 576, 512) == "mixed"
    assert paged_ops.npu_attention_kernel(torch.float32, 128) == "vector"
    assert paged_ops.npu_attention_kernel(torch.bfloat16, 128, tree_mask=True) == "vector"
    int8 = torch.int8
    assert paged_ops.npu_attention_kernel(torch.bfloat16, 576, 512, cache_dtype=int8) == "vector"
    with pytest.raises(RuntimeError, match=r"cache_dtype is torch.float8_e5m2"):
        paged_ops.npu_attention_kernel(torch.float16, 128, cache_dtype=torch.float8_e5m2)
    with pytest.raises(RuntimeError, match="head_dim is 100, expected a multiple of 16"):
        paged_ops.npu_attention_kernel(torch.float16, 100)
    with pytest.raises(RuntimeError, match="dtype is int8, expected float16"):
        paged_ops.npu_attention_kernel(torch.int8, 128)


def test_paged_npu_kernel_asks_for_a_kernel() -> None:
    ask = "import torch, paged_ops; print(paged_ops.npu_attention_kernel(torch.float16, 128))"
    assert run_python(ask, PAGED_NPU_KERNEL="vector").stdout.strip() == "vector"
    assert run_python(ask, PAGED_NPU_KERNEL="mixed").stdout.strip() == "mixed"
    refused = run_python(ask, PAGED_NPU_KERNEL="cube")
    assert 'PAGED_NPU_KERNEL is "cube", expected "vector" or "mixed"' in refused.stderr


@pytest.mark.parametrize("isa", ISAS)
def test_paged_cpu_isa_caps_the_variant(isa: str) -> None:
    ask = "import paged_ops; print(paged_ops.backend_info().cpu_isa)"
    result = run_python(ask, PAGED_CPU_ISA=isa)
    assert result.returncode == 0, result.stderr
    best = run_python(ask, PAGED_CPU_ISA="").stdout.strip()
    assert ISAS.index(result.stdout.strip()) == min(ISAS.index(isa), ISAS.index(best))


def test_an_unknown_isa_is_refused_with_the_ones_there_are() -> None:
    result = run_python("import paged_ops", PAGED_CPU_ISA="sse9")
    assert result.returncode != 0
    assert "ImportError" in result.stderr
    assert f"PAGED_CPU_ISA is 'sse9', expected one of {', '.join(ISAS)}" in result.stderr


def test_a_library_that_cannot_be_loaded_is_an_import_error_with_both_versions(
    tmp_path: Path,
) -> None:
    broken = tmp_path / "_C.abi3.so"
    broken.write_bytes(b"\x7fELF and nothing more")
    (tmp_path / "_build.json").write_text('{"torch_built_with": "2.99.0"}')
    result = run_python("import paged_ops", PAGED_LIBRARY=str(broken))
    assert result.returncode != 0
    assert "ImportError" in result.stderr
    assert "built with torch 2.99.0" in result.stderr
    assert f"this is torch {torch.__version__}" in result.stderr


def test_a_missing_library_is_an_import_error_that_says_how_to_build_it(tmp_path: Path) -> None:
    result = run_python("import paged_ops", PAGED_LIBRARY=str(tmp_path / "absent.so"))
    assert result.returncode != 0
    assert "ImportError" in result.stderr
    assert "pip install --no-build-isolation" in result.stderr
