"""Where vLLM isn't installed, these tests aren't there: see `make test-vllm`."""

from __future__ import annotations

import os
from importlib.util import find_spec

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py", "engines.py"]
else:
    os.environ["PAGED_VLLM"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
