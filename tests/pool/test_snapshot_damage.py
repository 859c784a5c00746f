"""Snapshots that are damaged, forged or half written: refused, and nothing has changed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged_ops.blocks.digest import chain_digests
from paged_ops.blocks.manager import BlockManager
from paged_ops.pool.kv_cache import PagedKVCache
from paged_ops.pool.snapshot import restore_snapshot, save_snapshot
from tests.support.broken_off import break_off, state_of

safetensors = pytest.importorskip("safetensors.torch", reason="snapshots need safetensors")

FILES = ("books.json", "blocks.safetensors")
A = [3, 1, 4, 1, 5, 9, 2, 6, 5]
B = [2, 7, 1, 8, 2]


class Target:
    """A pool with a request and a cached block, into which something is to be restored."""

    def __init__(self, **options: Any) -> None:
        self.manager = BlockManager(12, 4, **options)
        self.cache = PagedKVCache(2, 12, 4, 1, 2)
        for layer in range(2):
            self.cache.kv_blocks(layer).normal_()
        self.manager.allocate("cached", B)
        self.manager.commit("cached")
        self.manager.free("cached")
        self.manager.allocate("z", [6] * 5)
        self.manager.commit("z")
        self.before = self.state()

    def state(self) -> Any:
        self.manager.check()
        found = sorted((e.digest, e.block) for e in self.manager.ledger.stock.prefix.stored())
        return state_of(self.manager.ledger), self.manager.stats(), found, self.bits()

    def bits(self) -> list[bytes]:
        layers = [self.cache.kv_blocks(layer) for layer in range(2)]
        return [layer.contiguous().numpy().tobytes() for layer in layers]

    def refuses(self, folder: Path, *errors: type[Exception]) -> Exception:
        """Refuse a snapshot, with nothing changed; return the error."""
        with pytest.raises(errors or ValueError) as refusal:
            restore_snapshot(folder, self.manager, self.cache)
        assert self.state() == self.before
        return refusal.value


def save(folder: Path, tokens: list[int] = A, **options: Any) -> None:
    """Save two requests with a common block, one of them with extra keys, and a cached block."""
    manager, cache = BlockManager(12, 4, **options), PagedKVCache(2, 12, 4, 1, 2)
    for layer in range(2):
        cache.kv_blocks(layer).normal_(
            generator=torch.Generator().manual_seed(tokens[0] * 10 + tokens[-1])
        )
    manager.allocate("a", tokens)
    manager.commit("a")
    manager.fork("a", 7)
    manager.append(7, [1])
    manager.allocate("keyed", tokens[:4], [("salt", "x")])
    manager.allocate("gone", tokens[::-1])
    manager.commit("gone")
    manager.free("gone")
    save_snapshot(folder, manager, cache)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(folder)
    return folder


@pytest.fixture(scope="module")
def target() -> Target:
    return Target()


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_snapshot_is_two_files_and_is_restored_as_a_whole(saved: Path) -> None:
    assert sorted(os.listdir(saved)) == sorted(FILES)
    target = Target()
    assert restore_snapshot(saved, target.manager, target.cache) == ["a", 7, "keyed"]
    target.manager.check()
    assert target.manager.lookup(A) == 8
    assert target.manager.lookup(A[::-1]) == 8


# ------------------------------------------------------------------ any byte


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("flip", [0x01, 0x20, 0xFF])
def test_a_byte_that_was_flipped_is_noticed(
    copy: Path, target: Target, name: str, flip: int
) -> None:
    content = bytearray((copy / name).read_bytes())
    for index in range(flip % 3, len(content), 3):
        content[index] ^= flip
        (copy / name).write_bytes(content)
        target.refuses(copy)
        content[index] ^= flip
    (copy / name).write_bytes(content)
    other = Target()
    restore_snapshot(copy, other.manager, other.cache)


@pytest.mark.parametrize("name", FILES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_other_content_of_a_file_is_refused(
    copy: Path, target: Target, name: str, data: st.DataObject
) -> None:
    whole = (copy / name).read_bytes()
    at = st.integers(0, len(whole))
    start, stop = sorted((data.draw(at), data.draw(at)))
    put = data.draw(st.binary(max_size=8) | st.just(whole[: stop - start]) | st.just(b" "))
    other = whole[:start] + put + whole[stop:]
    if other != whole:
        (copy / name).write_bytes(other)
        target.refuses(copy)
        (copy / name).write_bytes(whole)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_cut_off_or_emptied_is_refused(
    copy: Path, target: Target, name: str
) -> None:
    whole = (copy / name).read_bytes()
    for length in (0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 40, len(whole) - 1):
        (copy / name).write_bytes(whole[:length])
        target.refuses(copy)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_is_not_there(copy: Path, target: Target, name: str) -> None:
    (copy / name).unlink()
    target.refuses(copy, FileNotFoundError)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("other", [A, [*A[:8], 6], A[::-1]], ids=["same", "one token", "other"])
def test_files_of_two_snapshots_are_refused_unless_they_are_the_same(
    copy: Path, tmp_path: Path, target: Target, name: str, other: list[int]
) -> None:
    save(tmp_path / "other", other)
    shutil.copy(tmp_path / "other" / name, copy / name)
    if other != A:
        target.refuses(copy)


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b"3", b"[" * 100_000, b'{"format":1}', b"\xff", b"NaN"]
)
def test_books_that_are_none_are_refused(copy: Path, target: Target, content: bytes) -> None:
    (copy / "books.json").write_bytes(content)
    assert "snapshot " in str(target.refuses(copy))


# ------------------------------------------------------------------ forged: the digests are right


def forge(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Any:
    """Change the books, and let them vouch for themselves and for the blocks that are there."""
    from paged_ops.pool.snapshot_files import _sha256, sealed

    books = json.loads((folder / "books.json").read_text())
    del books["sha256"]
    books["blocks_sha256"] = _sha256(folder / "blocks.safetensors")
    result = change(books)
    (folder / "books.json").write_text(sealed(books))
    return result


VALUES: list[Any] = [None, True, -1, 0, 1, 2**31, 2**63, 1.0, "", "x", "00", [], [0], [[]], {}]


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """List the way to every field of the books, whatever its depth."""
    if path:
        yield path
    if not isinstance(value, (dict, list)):
        return
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield from fields(each, (*path, key))


def test_a_forged_field_of_the_books_is_refused_or_makes_books_that_are_whole(
    copy: Path, saved: Path
) -> None:
    """Who vouches for what he writes may say that it is another prompt, and no more."""
    books = json.loads((saved / "books.json").read_text())
    accepted, target = set(), Target()
    for *way, last in fields(books):
        for value in (*VALUES, "delete"):
            shutil.copy(saved / "books.json", copy / "books.json")
            same = forge(copy, lambda b: put(b, way, last, value))  # noqa: B023
            try:
                names = restore_snapshot(copy, target.manager, target.cache)
            except (ValueError, FileNotFoundError):
                assert target.state() == target.before
                continue
            target.manager.check()
            if not same:
                accepted.add(next(key for key in (last, *way[::-1]) if isinstance(key, str)))
            for name in names:
                go_on(target.manager, name)
            target = Target()
    assert accepted <= {"name", "tokens", "keys", "published", "requests"}


def put(books: dict[str, Any], way: list[Any], last: Any, value: Any) -> bool:
    """Put a value into the books or something out of them; say if it was there."""
    inner: Any = books
    for key in way:
        inner = inner.get(key) if isinstance(inner, dict) else inner[key]
    if inner is None or (isinstance(inner, dict) and last not in inner):
        return True  # forging takes the seal out
    if value == "delete":
        del inner[last]
        return False
    same = repr(inner[last]) == repr(value)
    inner[last] = value
    return same


def go_on(manager: BlockManager, name: Any) -> None:
    """Do with a request what one does with requests; the books stay in order."""
    manager.append(name, [1, 2])
    manager.commit(name)
    manager.truncate(name, 1)
    manager.check()
    manager.free(name)
    manager.check()


def request_of(books: dict[str, Any], name: Any = "a") -> dict[str, Any]:
    return next(each for each in books["requests"] if each["name"] == name)


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "more ids than tokens": (lambda b: request_of(b)["tokens"].extend([8] * 3), "12 ids of 9 tok"),
    "released without a window": (
        lambda b: request_of(b).update(num_released=1, table=[-1, 1, 2]),
        "num_released is 1, expected 0 to 0",
    ),
    "negative length": (
        lambda b: request_of(b).update(num_tokens=-3, table=[], tokens=[]),
        "num_tokens is -3",
    ),
    "a block twice": (lambda b: request_of(b).update(table=[0, 0, 2]), "lists a block twice"),
    "the same name": (lambda b: request_of(b).update(name=7), "has the request 7 twice"),
    "no name": (lambda b: request_of(b).update(name=None), "request None is no str or int"),
    "a field more": (lambda b: request_of(b).update(more=1), "a request is"),
    "shifted rows": (
        lambda b: request_of(b, "keyed").update(table=[2]),
        "is block 2 of one request and 0 of 'keyed'",
    ),
    "other tokens": (
        lambda b: request_of(b)["tokens"].__setitem__(0, 4),
        "row 0 is not what",
    ),
    "id of 65 bits": (lambda b: request_of(b)["tokens"].__setitem__(0, 2**64), "no 64-bit integer"),
    "id that is true": (
        lambda b: request_of(b)["tokens"].__setitem__(1, True),
        "no 64-bit integer",
    ),
    "short digest": (lambda b: b["published"][0].__setitem__(0, "00"), "expected 32 bytes"),
    "digest in capitals": (
        lambda b: b["published"][0].__setitem__(0, b["published"][0][0].upper()),
        "expected 32 bytes",
    ),
    "a row twice": (lambda b: b["published"].append(b["published"][0]), "row 0 is published twice"),
    "a row too many": (lambda b: b["published"].append(["00" * 32, 99]), "it names row 99"),
    "a row without use": (lambda b: b["published"].pop(), "its tensor key.0"),
    "a cached block twice": (
        lambda b: b["published"][-1].__setitem__(0, b["published"][-2][0]),
        "a cached block twice",
    ),
    "keys in disorder": (
        lambda b: request_of(b, "keyed").update(keys=[[0, None, "ff"], [0, None, "00"]]),
        "in disorder",
    ),
    "empty range of a key": (
        lambda b: request_of(b, "keyed").update(keys=[[3, 3, "ff"]]),
        "stop is 3, expected 4 or more",
    ),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_what_contradicts_itself_is_refused_whoever_vouches_for_it(
    copy: Path, target: Target, kind: str
) -> None:
    change, message = FORGERIES[kind]
    forge(copy, change)
    error = str(target.refuses(copy))
    assert error.startswith("snapshot is damaged: ")
    assert message in error


TENSORS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "missing": lambda t: t.pop("value.1"),
    "more": lambda t: t.update({"value.2": t["value.1"].clone()}),
    "scales": lambda t: t.update({"key_scale.0": torch.ones(1)}),
    "narrow": lambda t: t.update({"value.1": t["value.1"][..., :1].clone()}),
    "short block": lambda t: t.update({"key.0": t["key.0"][:, :2].clone()}),
    "flat": lambda t: t.update({"key.0": t["key.0"].flatten().clone()}),
    "int32": lambda t: t.update({"value.1": t["value.1"].view(torch.int32).clone()}),
    "float16": lambda t: t.update({"value.1": t["value.1"].half()}),
    "a row less": lambda t: t.update({"key.1": t["key.1"][1:].clone()}),
    "a row more": lambda t: t.update({n: torch.cat([x, x[:1]]) for n, x in t.items()}),
    "no rows": lambda t: t.update({name: x[:0].clone() for name, x in t.items()}),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_the_pool_has_not_are_refused_whoever_vouches_for_them(
    copy: Path, target: Target, kind: str
) -> None:
    tensors = safetensors.load_file(copy / "blocks.safetensors")
    TENSORS[kind](tensors)
    safetensors.save_file(tensors, copy / "blocks.safetensors")
    assert "is not what books.json is about" in str(target.refuses(copy))
    forge(copy, lambda books: None)
    assert str(target.refuses(copy)).startswith("snapshot is damaged: its tensor ")


@pytest.mark.parametrize("size", [0, 2**20, 2**62, 2**64 - 1])
def test_a_size_that_lies_is_refused(copy: Path, target: Target, size: int) -> None:
    content = (copy / "blocks.safetensors").read_bytes()
    (copy / "blocks.safetensors").write_bytes(size.to_bytes(8, "little") + content[8:])
    forge(copy, lambda books: None)
    assert str(target.refuses(copy)).startswith("snapshot is damaged: ")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "", ".", None, 3])
def test_blocks_are_read_in_the_folder_only(copy: Path, target: Target, name: Any) -> None:
    forge(copy, lambda books: books.update(blocks=name))
    assert "snapshot is damaged: blocks is" in str(target.refuses(copy))


@pytest.mark.parametrize("released", [0, 2, 3])
def test_blocks_are_released_only_where_the_window_has_left_them(
    tmp_path: Path, released: int
) -> None:
    save(tmp_path, sliding_window=6)

    def release(books: dict[str, Any]) -> None:
        table = request_of(books)["table"]
        assert table == [-1, 0, 1]
        table[:released] = [-1] * released
        request_of(books)["num_released"] = released

    forge(tmp_path, release)
    assert "snapshot is damaged" in str(Target(sliding_window=6).refuses(tmp_path))


# ------------------------------------------------------------------ saves that come to no end


def restored(folder: Path) -> int:
    """Return how many tokens of A can be found in a snapshot, which is whole."""
    target = Target()
    restore_snapshot(folder, target.manager, target.cache)
    target.manager.check()
    return target.manager.lookup([*A, 0])


# A file whose ``with`` is broken off just before its end is closed when it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_save_that_is_broken_off_anywhere_leaves_the_earlier_snapshot_or_the_new_one(
    tmp_path: Path,
) -> None:
    found, point = [], 0
    while True:
        folder = tmp_path / str(point)
        save(folder, B + B)
        if not break_off(lambda: save(folder), point):  # noqa: B023
            break
        found.append(restored(folder))
        save(folder)
        assert restored(folder) == 8
        assert sorted(os.listdir(folder)) == sorted(FILES)
        shutil.rmtree(folder)
        point += 11
    assert set(found) == {0, 8}
    assert found == sorted(found)


@pytest.mark.parametrize("step", ["save_file", "write_text", "fsync", "replace", "unlink"])
def test_a_save_that_fails_leaves_the_earlier_snapshot_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    owner = {"save_file": safetensors, "fsync": os}.get(step, Path)
    real, later = getattr(owner, step), 0
    while True:
        folder = tmp_path / str(later)
        save(folder, B + B)
        calls = 0

        def failing(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > later:  # noqa: B023
                raise OSError("no space left on device")
            return real(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, step, failing)
            try:
                save(folder)
            except OSError:
                assert restored(folder) in (0, 8)
            else:
                assert restored(folder) == 8
        if calls <= later:
            break
        save(folder)
        assert sorted(os.listdir(folder)) == sorted(FILES)
        later += 1
    assert later or step == "unlink"


def test_a_process_that_is_killed_in_a_save_leaves_a_snapshot(tmp_path: Path) -> None:
    program = """
        import sys
        from pathlib import Path
        from tests.pool.test_snapshot_damage import A, B, save
        folder = Path(sys.argv[1])
        save(folder, B + B)
        print("saved", flush=True)
        while True:
            save(folder, A)
            save(folder, B + B)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(random.uniform(0.02, 0.1))
        process.send_signal(signal.SIGKILL)
    assert restored(tmp_path) in (0, 8)


def test_what_a_killed_save_has_left_is_used_or_removed(tmp_path: Path) -> None:
    """It was killed just behind its one step, or just before it."""
    save(tmp_path)
    name = json.loads((tmp_path / "books.json").read_text())["blocks"]
    (tmp_path / "blocks.safetensors").rename(tmp_path / name)
    save(tmp_path / "other", B + B)
    shutil.copy(tmp_path / "other" / "blocks.safetensors", tmp_path)
    (tmp_path / "books-0.json").write_text("{")
    assert restored(tmp_path) == 8
    with pytest.raises(TypeError):
        save_of_a_tuple(tmp_path)
    assert restored(tmp_path) == 8
    shutil.rmtree(tmp_path / "other")
    save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(FILES)


def save_of_a_tuple(folder: Path) -> None:
    manager, cache = BlockManager(2, 4), PagedKVCache(1, 2, 4, 1, 2)
    manager.allocate(("a", 1), 1)
    save_snapshot(folder, manager, cache)


def test_digests_name_what_is_saved(saved: Path) -> None:
    books = json.loads((saved / "books.json").read_text())
    published = {digest for digest, _ in books["published"]}
    expected = {digest.hex() for t in (A, A[::-1]) for digest in chain_digests(t, 4)}
    assert published == expected
