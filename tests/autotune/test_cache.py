"""The file of choices: who reads it, who writes it, and what may befall it."""

import contextlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from precpass.autotune import cache
from precpass.autotune.cache import FORMAT, Cache, file_name
from precpass.autotune.compiled import Choice, _parsed

LOW = Choice("products", (("float32", 1.0, 9.0), ("products", 0.5, 9.0)))
WIDE = Choice("float32", (("float32", 1.0, 9.0), ("products", 2.0, 9.0)))


def made(folder: Path, device: str = "gpu Quux", version: str = "1.2.3") -> Cache[Choice]:
    return Cache(folder / file_name(device, version), device, version, _parsed)


def test_what_one_process_kept_another_one_knows(tmp_path: Path):
    here = made(tmp_path / "new" / "folder")
    assert here.get("a") is None
    assert here.put("a", LOW) == LOW
    there = made(tmp_path / "new" / "folder")
    assert there.get("a") == LOW
    assert there.get("b") is None
    assert here.new_warnings() == there.new_warnings() == ()
    assert sorted(path.suffix for path in here.path.parent.iterdir()) == [".json", ".lock"]


def test_what_is_written_later_is_seen_without_reading_what_did_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here, there = made(tmp_path), made(tmp_path)
    assert here.get("a") is None
    there.put("a", LOW)
    assert here.get("a") == LOW
    read = Path.read_text
    times = []
    monkeypatch.setattr(Path, "read_text", lambda *a, **k: times.append(1) or read(*a, **k))
    assert here.get("b") is None
    assert not times


def test_the_first_choice_that_was_written_counts_for_all(tmp_path: Path):
    here, there = made(tmp_path), made(tmp_path)
    here.put("a", LOW)
    # which had not read it before it compiled
    assert there.put("a", WIDE) == LOW
    assert there.get("a") == here.get("a") == LOW


def test_kinds_and_versions_have_files_of_their_own():
    names = {
        file_name(device, version)
        for device in ("NVIDIA H200", "NVIDIA-H200", "TPU v4", "x" * 500, "x" * 501)
        for version in ("0.10.2", "0.12.0.1")
    }
    assert len(names) == 10
    assert all(len(name) < 150 and "/" not in name and " " not in name for name in names)


WRITER = """
import sys
from pathlib import Path
from precpass.autotune.cache import Cache
from precpass.autotune.compiled import Choice, _parsed
path, who = Path(sys.argv[1]), int(sys.argv[2])
own = Cache(path, "gpu Quux", "1.2.3", _parsed)
for i in range(25):
    own.put(f"{who} {i}", Choice("products", (("products", 1.0, 2.0),)))
    own.put(f"shared {i}", Choice("products", (("products", 1.0 + who, 2.0),)))
assert own.new_warnings() == (), own.new_warnings()
"""


@pytest.mark.release
def test_processes_that_write_at_once_lose_nothing(tmp_path: Path):
    path = made(tmp_path).path
    command = [sys.executable, "-c", WRITER, str(path)]
    running = [subprocess.Popen([*command, str(who)]) for who in range(4)]
    assert [process.wait(120) for process in running] == [0] * 4
    found = json.loads(path.read_text())["products"]
    assert set(found) == {f"{who} {i}" for who in (0, 1, 2, 3, "shared") for i in range(25)}
    assert sorted(os.listdir(tmp_path)) == [path.name, f"{path.name}.lock"]


def test_threads_that_share_one_lose_nothing(tmp_path: Path):
    own = made(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: own.put(str(i % 50), LOW), range(200)))
    assert len(json.loads(own.path.read_text())["products"]) == 50


DAMAGED = {
    "cut off": lambda whole: json.dumps(whole)[:-20],
    "no JSON": lambda whole: "\x00\xff nothing",
    "empty": lambda whole: "",
    "another program's": lambda whole: json.dumps({"theme": "dark"}),
    "a list": lambda whole: "[]",
    "another format": lambda whole: json.dumps({**whole, "format": FORMAT + 1}),
    "another device": lambda whole: json.dumps({**whole, "device": "gpu Other"}),
    "another JAX": lambda whole: json.dumps({**whole, "jax": "9.9.9"}),
    "no form": lambda whole: json.dumps({**whole, "products": {"a": ["fast", [["fast", 1, 9]]]}}),
    "no costs": lambda whole: json.dumps({**whole, "products": {"a": ["products"]}}),
    "no cost of its own": lambda whole: json.dumps({**whole, "products": {"a": ["products", []]}}),
    "not a number": lambda whole: json.dumps(
        {**whole, "products": {"a": ["products", [["products", "low", 9]]]}}
    ),
    "deep": lambda whole: "[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_file_that_is_damaged_or_foreign_is_rebuilt_and_named(tmp_path: Path, damage):
    made(tmp_path).put("a", LOW)
    path = made(tmp_path).path
    path.write_text(damage(json.loads(path.read_text())))
    own = made(tmp_path)
    assert own.get("a") is None
    (said,) = own.new_warnings()
    assert str(path) in said and "rebuilt" in said
    assert own.get("a") is None
    assert own.new_warnings() == ()
    own.put("a", WIDE)
    again = made(tmp_path)
    assert again.get("a") == WIDE
    assert again.new_warnings() == ()


def test_a_folder_that_cannot_be_written_is_said_once_and_memory_goes_on(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    own = made(blocked)
    assert own.put("a", LOW) == LOW
    (said,) = own.new_warnings()
    assert str(own.path) in said and "PRECPASS_CACHE_DIR" in said
    own.put("b", WIDE)
    assert own.new_warnings() == ()
    assert (own.get("a"), own.get("b")) == (LOW, WIDE)


def test_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    own = made(tmp_path)
    own.put("a", LOW)
    before = own.path.read_text()

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    own.put("b", WIDE)
    assert own.path.read_text() == before
    assert sorted(os.listdir(tmp_path)) == [own.path.name, lock_of(own).name]
    (said,) = own.new_warnings()
    assert "No space left" in said


HOLDS_THE_LOCK = """
import sys, time, filelock
with filelock.FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def held_by_another_process(lock: Path):
    command = [sys.executable, "-c", HOLDS_THE_LOCK, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield
        finally:
            process.kill()


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path):
    own = made(tmp_path)
    with held_by_another_process(lock_of(own)):
        pass
    own.put("a", LOW)
    assert own.new_warnings() == ()
    assert made(tmp_path).get("a") == LOW


def test_a_lock_that_is_held_is_waited_for_no_longer_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cache, "WAIT", 0.05)
    own = made(tmp_path)
    with held_by_another_process(lock_of(own)):
        own.put("a", LOW)
        assert made(tmp_path).get("a") == LOW


def test_a_folder_in_the_place_of_the_lock_is_named_and_not_waited_for(tmp_path: Path):
    own = made(tmp_path)
    lock = lock_of(own)
    lock.mkdir()
    assert own.put("a", LOW) == LOW
    (said,) = own.new_warnings()
    assert str(lock) in said and "PRECPASS_CACHE_DIR" in said
    assert lock.is_dir()


def lock_of(own: Cache[Choice]) -> Path:
    return own.path.with_name(own.path.name + ".lock")
