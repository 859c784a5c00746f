"""Take the guards of the bookkeeping out, one at a time: each time a test must fail.

Run ``python -m tests.blocks.manager_mutations`` in the project's root, with a part of a fault's
name to try only some. Every mutant is made in a copy.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.mutants import Mutant, apply

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("test_prefix_digest", "test_swap", "test_prefix_cache", "test_block_manager")

FAULTS = (
    Mutant(
        "double free: a request can be freed twice",
        "blocks/ledger.py",
        "        del where[request]\n",
        "",
    ),
    Mutant(
        "stale digest: an evicted block is still found by its old content",
        "blocks/prefix_cache.py",
        "popitem(last=False)\n        self.unpublish(block)\n",
        "popitem(last=False)\n",
    ),
    Mutant(
        "stale digest: a block is found though its last owner writes into it",
        "blocks/ledger.py",
        "self.stock.prefix.unpublish(source)  # full for another owner, who has left",
        "pass",
    ),
    Mutant(
        "stale digest: what a truncate has cut is still found",
        "blocks/ledger.py",
        "            if self.stock.counts[block] == 1:\n"
        "                self.stock.prefix.unpublish(block)\n",
        "            pass\n",
    ),
    Mutant(
        "leak on failure: hits are held before the call is refused",
        "blocks/books.py",
        "                ledger.refuse_admission(prompt, hit_blocks)\n",
        "                ledger.stock.share(ledger.hits(prompt, hit_blocks))\n"
        "                ledger.refuse_admission(prompt, hit_blocks)\n",
    ),
    Mutant(
        "idle hits count as free: more is promised than there is",
        "blocks/ledger.py",
        "        free = self.stock.num_free - idle\n",
        "        free = self.stock.num_free\n",
    ),
    Mutant(
        "eviction of what is in use: hits are held after blocks were evicted",
        "blocks/ledger.py",
        "        self.stock.share(hits)\n"
        "        fresh = self.stock.take(self.blocks_for(prompt.num_tokens) - hit_blocks)\n",
        "        fresh = self.stock.take(self.blocks_for(prompt.num_tokens) - hit_blocks)\n"
        "        self.stock.share(hits)\n",
    ),
    Mutant(
        "eviction of the beginning of a chain before its end",
        "blocks/stock.py",
        "        for block in reversed(blocks):\n",
        "        for block in blocks:\n",
    ),
    Mutant(
        "two adapters of one name: only the first part of an extra key counts",
        "blocks/digest.py",
        'b"".join(map(_encoded, value))',
        'b"".join(map(_encoded, value[:1]))',
    ),
    Mutant(
        "extra keys of different kinds meet",
        "blocks/digest.py",
        "_encoded(tuple(key))",
        "_encoded(tuple(key)[1:])",
    ),
    Mutant(
        "twins: when the one that is found goes, the others are not found",
        "blocks/prefix_cache.py",
        "            if twins:\n                heir",
        "            if False:\n                heir",
    ),
    Mutant(
        "twins: only the first is listed",
        "blocks/prefix_cache.py",
        "        self._twins.setdefault(digest, {})[block] = None\n",
        "        return None\n",
    ),
    Mutant(
        "bytes are taken for the memory of 64-bit integers",
        "blocks/digest.py",
        'tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)',
        "tokens",
    ),
    Mutant(
        "blocks in flight: the source of a copy is released at once",
        "blocks/swap.py",
        "hold(source, transfer, leaving)",
        "hold(source, transfer, [])",
    ),
    Mutant(
        "blocks in flight: the destination of an aborted copy is released at once",
        "blocks/arrival.py",
        "hold(ledger, owner, newcomers.values(), newcomers)",
        "hold(ledger, owner, [], newcomers)",
    ),
    Mutant(
        "flush: what lived on is published again",
        "blocks/ledger.py",
        " and held.generation == self.generation",
        "",
    ),
    Mutant(
        "flush: what was computed before takes the blocks of the new weights for its own",
        "blocks/arrival.py",
        "        if held.generation != ledger.generation:\n            continue\n",
        "",
    ),
    Mutant(
        "a full hit leaves nothing to compute",
        "blocks/books.py",
        "max(0, prompt.num_tokens - 1) // self.block_size",
        "prompt.num_tokens // self.block_size",
    ),
    Mutant(
        "a shared block is written without a copy",
        "blocks/ledger.py",
        "                if self.stock.counts[source] > 1:\n",
        "                if self.stock.counts[source] > 99:\n",
    ),
    Mutant(
        "a request that grows twice in one call",
        "blocks/ledger.py",
        "        if len(held) > 1 and len(set(requests)) != len(held):\n",
        "        if False:\n",
    ),
)

NOTES = {
    "an admission": ("ledger", "self, self.requests.pop, request, None"),
    "a fork": ("ledger", "self, self.requests.pop, child, None"),
    "a growth": ("ledger", "self, held.shrink, *was"),
    "a cut": ("ledger", "self, held.regrow, held.num_tokens, held.num_committed, *tails"),
    "blocks that a window has left": ("ledger", "self, held.reclaim, start, released"),
    "a flush": ("ledger", 'self, setattr, self, "generation", self.generation'),
    "an end": ("ledger", "self, where.__setitem__, request, held"),
    "a preemption": ("ledger", 'self, setattr, self, "preemptions", self.preemptions'),
    "a hit": ("ledger", 'self, setattr, self, "hit_tokens", self.hit_tokens'),
    "blocks of an arrival": ("arrival", "ledger, ledger.rebuild"),
    "a flight": ("arrival", "ledger, ledger.flights.pop, owner, None"),
    "the request of a flight": ("arrival", "ledger, ledger.arriving.pop, request, None"),
    "a landing": ("arrival", "ledger, ledger.arriving.__setitem__, request, held"),
    "what has landed": ("arrival", "ledger, ledger.requests.pop, request, None"),
    "the end of a flight": ("arrival", "ledger, ledger.flights.__setitem__, owner, flight"),
}

BROKEN_OFF = (
    *(
        Mutant(
            f"broken off: nobody notes how to undo {what}",
            f"blocks/{module}.py",
            f"{note.split(',')[0]}.note(({note}))",
            "pass",
        )
        for what, (module, note) in NOTES.items()
    ),
    Mutant(
        "broken off: nobody notes that something is published",
        "blocks/ledger.py",
        "self.note((self, self.rebuild))  # a content is there, or is forgotten",
        "pass",
    ),
    Mutant(
        "broken off: what was noted is not carried out",
        "blocks/ledger.py",
        "            if kind is None:\n",
        "            if True:\n",
    ),
    Mutant(
        "broken off: an undoing that was broken off as well is not taken up again",
        "blocks/ledger.py",
        "if self.journal.notes:  # of a change that was broken off, and its undoing as well",
        "if False:",
    ),
    Mutant(
        "broken off: the first step is undone first",
        "blocks/journal.py",
        "in reversed(self.notes):",
        "in self.notes:",
    ),
    Mutant(
        "broken off: notes are dropped before all is made anew",
        "blocks/journal.py",
        "        for ledger in {note[0] for note in self.notes}:\n"
        "            ledger.rebuild()\n"
        "        self.notes.clear()\n",
        "        ledgers = {note[0] for note in self.notes}\n"
        "        self.notes.clear()\n"
        "        for ledger in ledgers:\n"
        "            ledger.rebuild()\n",
    ),
    Mutant(
        "broken off: counts are not made anew",
        "blocks/stock.py",
        "        self.counts = [owners[block] for block in range(num_handed_out)]\n",
        "",
    ),
    Mutant(
        "broken off: free blocks are not made anew",
        "blocks/stock.py",
        "            if not self.counts[block] and self.prefix.digest(block) is None\n",
        "            if block in self.free\n",
    ),
    Mutant(
        "broken off: followers miss what was undone",
        "blocks/prefix_cache.py",
        "                stream.start_over()\n",
        "                pass\n",
    ),
    Mutant(
        "broken off: a transfer whose call is gone holds its blocks for ever",
        "blocks/ledger.py",
        "        if self.orphans:\n",
        "        if False:\n",
    ),
)


def survives(mutant: Mutant, tests: tuple[str, ...], folder: Path) -> bool:
    """Say whether all tests pass without a guard."""
    shutil.copytree(ROOT / "paged_ops", folder / "paged_ops")
    shutil.copytree(ROOT / "tests", folder / "tests")
    apply(mutant, folder / "paged_ops")
    files = [f"tests/blocks/{name}.py" for name in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0


def main() -> None:
    """Try every mutant, and fail if one survives."""
    surviving = 0
    for mutants, tests in ((FAULTS, TESTS), (BROKEN_OFF, ("test_broken_off",))):
        for mutant in mutants:
            if sys.argv[1:] and not any(part in mutant.fault for part in sys.argv[1:]):
                continue
            with tempfile.TemporaryDirectory() as folder:
                alive = survives(mutant, tests, Path(folder))
            surviving += alive
            print(f"{'SURVIVES' if alive else 'killed':9} {mutant.fault}", flush=True)
    sys.exit(surviving)


if __name__ == "__main__":
    main()
