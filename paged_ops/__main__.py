"""``python -m paged_ops``: what is installed, and whether its ops give what they should."""

from __future__ import annotations

import argparse
import platform
import sys

import paged_ops
from paged_ops.self_test import self_test


def main() -> None:
    """Print the versions and the backends, run the self-test, and exit with 1 if it fails."""
    argparse.ArgumentParser(prog="python -m paged_ops", description=__doc__).parse_args()
    info = paged_ops.backend_info()
    print(f"paged_ops {paged_ops.__version__}, {info.library}")
    print(f"python    {platform.python_version()} on {platform.machine()}")
    print(f"torch     {info.torch}; built with {info.torch_built_with}, for {info.torch_target} on")
    print(f"wheel     {info.wheel}; glibc {info.glibc}; {info.compiler}")
    print(f"CPU       {info.cpu_isa} of {', '.join(info.cpu_isas)}")
    print(f"NPU       {info.npu}")
    findings = list(self_test())
    failed = [finding for finding in findings if not finding.passed]
    for finding in failed:
        print(f"FAILED    {finding.name}: error {finding.error:.1e}, expected {finding.bound:.1e}")
    print(f"self-test {len(findings) - len(failed)} of {len(findings)} checks passed, on the CPU")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
