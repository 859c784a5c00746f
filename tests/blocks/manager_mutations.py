"""Take the guards of the bookkeeping out, one at a time: each time a test must fail.

Run ``python -m tests.blocks.manager_mutations`` in the project's root. Every mutant is made in a
copy.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("test_block_manager", "test_prefix_cache", "test_prefix_digest", "test_swap")


class Mutant(NamedTuple):
    """A fault, and the text in a file that keeps it out."""

    fault: str
    file: str
    guard: str
    without: str


MUTANTS = (
    Mutant(
        "double free: a request can be freed twice",
        "manager.py",
        "            held = self._find(request)\n            del self._requests[request]\n",
        "            held = self._find(request)\n",
    ),
    Mutant(
        "stale digest: an evicted block is still found by its old content",
        "prefix_cache.py",
        "popitem(last=False)\n        self.unpublish(block)\n",
        "popitem(last=False)\n",
    ),
    Mutant(
        "stale digest: a block is found though its last owner writes into it",
        "manager.py",
        "                self._prefix.unpublish(source)  # full for another owner, who has left\n",
        "                pass\n",
    ),
    Mutant(
        "stale digest: what a truncate has cut is still found",
        "manager.py",
        "            if self._ref_counts[block] == 1:\n"
        "                self._prefix.unpublish(block)\n",
        "            pass\n",
    ),
    Mutant(
        "leak on failure: hits are held before the call is refused",
        "manager.py",
        "            self._refuse_admission(prompt, hit_blocks)\n            return",
        "            self._share(self._hits(prompt, hit_blocks)[0])\n"
        "            self._refuse_admission(prompt, hit_blocks)\n            return",
    ),
    Mutant(
        "idle hits count as free: more is promised than there is",
        "manager.py",
        "        free = self._count_free() - shared_idle\n",
        "        free = self._count_free()\n",
    ),
    Mutant(
        "eviction of what is in use: hits are held after blocks were evicted",
        "manager.py",
        "        self._share(hits)\n"
        "        fresh = self._take(self._blocks_for(prompt.num_tokens) - hit_blocks)\n",
        "        fresh = self._take(self._blocks_for(prompt.num_tokens) - hit_blocks)\n"
        "        self._share(hits)\n",
    ),
    Mutant(
        "eviction of the beginning of a chain before its end",
        "manager.py",
        "        for block in reversed(blocks):\n",
        "        for block in blocks:\n",
    ),
    Mutant(
        "two adapters of one name: only the first part of an extra key counts",
        "digest.py",
        'b"".join(map(_encoded, value))',
        'b"".join(map(_encoded, value[:1]))',
    ),
    Mutant(
        "extra keys of different kinds meet",
        "digest.py",
        "_encoded(tuple(key))",
        "_encoded(tuple(key)[1:])",
    ),
    Mutant(
        "blocks in flight: the source of a copy is released at once",
        "swap.py",
        "        source._holds[transfer] = leaving\n",
        "        for held in leaving:\n            source._release(held.blocks)\n",
    ),
    Mutant(
        "blocks in flight: the destination of an aborted copy is released at once",
        "swap.py",
        "            destination._holds[transfer].append(arriving.fork())\n"
        "            destination._share(arriving.blocks * 2)\n",
        "            destination._share(arriving.blocks)\n",
    ),
    Mutant(
        "flush: what lived on is published again",
        "manager.py",
        " or held.generation != self._generation",
        "",
    ),
    Mutant(
        "a full hit leaves nothing to compute",
        "manager.py",
        "max(0, prompt.num_tokens - 1) // self._block_size",
        "prompt.num_tokens // self._block_size",
    ),
    Mutant(
        "a shared block is written without a copy",
        "manager.py",
        "            if self._ref_counts[source] > 1:\n",
        "            if self._ref_counts[source] > 99:\n",
    ),
)


def survives(mutant: Mutant, folder: Path) -> bool:
    """Say whether all tests pass without a guard."""
    shutil.copytree(ROOT / "paged_ops", folder / "paged_ops")
    shutil.copytree(ROOT / "tests", folder / "tests")
    path = folder / "paged_ops" / "blocks" / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.guard) != 1:
        raise SystemExit(f"{mutant.fault}: the guard is {text.count(mutant.guard)} times there")
    path.write_text(text.replace(mutant.guard, mutant.without), encoding="utf-8")
    files = [f"tests/blocks/{name}.py" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0


def main() -> None:
    """Try every mutant, and fail if one survives."""
    surviving = 0
    for mutant in MUTANTS:
        with tempfile.TemporaryDirectory() as folder:
            alive = survives(mutant, Path(folder))
        surviving += alive
        print(f"{'SURVIVES' if alive else 'killed':9} {mutant.fault}", flush=True)
    sys.exit(surviving)


if __name__ == "__main__":
    main()
