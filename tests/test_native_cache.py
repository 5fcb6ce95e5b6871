"""The compiled C of kernels=native between runs: nothing is loaded that another may have written, or is damaged."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec_kernels.native import compiler
from spec_kernels.native.build import library
from spec_kernels.native.compiler import BuildError, compilers
from spec_kernels.native.folders import held
from spec_kernels.native.kept import keep
from spec_kernels.native.signatures import SIGNATURES

REAL = next(iter(compilers()), "")
pytestmark = pytest.mark.skipif(not REAL, reason="needs a C compiler")

ANOTHER_USER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")

SCRIPT = """#!/bin/sh
PATH=/usr/bin:/bin
case $1 in --version) {version}; exit;; esac
while [ "$1" != -o ]; do shift; done
echo >> {folder}/compilations
{compilation}
"""
LOAD = "from spec_kernels.native.build import library; library().native_has_tiles()"
FILL = "ln -s /dev/full room; exit 1"
"""Leaves no room for what looks whether there is some."""


@dataclass(frozen=True)
class Libraries:
    """Small ones: `whole` has all functions, `lacking` one less, `foreign` leaves a file `trace` when it is loaded."""

    whole: Path
    lacking: Path
    foreign: Path
    trace: Path


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    folder = tmp_path_factory.mktemp("libraries")
    made = Libraries(*(folder / name for name in ("whole.so", "lacking.so", "foreign.so", "trace")))
    functions = [f"int {name}(void) {{ return 0; }}" for name in SIGNATURES]
    leave = f'__attribute__((constructor)) static void leave(void) {{ creat("{made.trace}", 0600); }}'
    for path, lines in ((made.whole, functions), (made.lacking, functions[1:]), (made.foreign, [*functions, leave])):
        text = "\n".join(["#include <fcntl.h>", *lines])
        subprocess.run([REAL, "-shared", "-fPIC", "-xc", "-", "-o", path], input=text, text=True, check=True)
    return made


@dataclass(frozen=True)
class Place:
    """A cache of its own, the folder of temporary files, and the only compiler that there is."""

    root: Path
    libraries: Libraries

    @property
    def cache(self) -> Path:
        return self.root / "cache" / "spec_lab"

    @property
    def temporary(self) -> Path:
        return self.root / "temporary"

    @property
    def record(self) -> Path:
        (found,) = self.cache.glob("native-*.sha256")
        return found

    @property
    def library(self) -> Path:
        (found,) = self.cache.glob("native-*.so")
        return found

    @property
    def key(self) -> str:
        return compiler.key(compilers()[0])

    @property
    def num_compilations(self) -> int:
        notes = self.root / "compilations"
        return len(notes.read_text()) if notes.exists() else 0

    def compile_by(self, compilation: str, version: str = "echo 1") -> None:
        """Have the compiler be a script, which runs this behind `-o`, the name of the library in $2."""
        script = self.root / "compiler"
        script.write_text(SCRIPT.format(folder=self.root, compilation=compilation, version=version))
        script.chmod(0o755)

    def load(self) -> str:
        """Load as a fresh process does, and return what went with it to the temporary folder, if anything."""
        assert library.__wrapped__().native_has_tiles() == 0
        return " ".join(path.name for path in self.temporary.iterdir())


@pytest.fixture
def place(tmp_path: Path, libraries: Libraries, monkeypatch: pytest.MonkeyPatch) -> Place:
    made = Place(tmp_path, libraries)
    made.temporary.mkdir()
    libraries.trace.unlink(missing_ok=True)
    made.compile_by(f'cp {libraries.whole} "$2"')
    environment = {"XDG_CACHE_HOME": made.cache.parent, "TMPDIR": made.temporary, "CC": tmp_path / "compiler"}
    for name, value in {**environment, "PATH": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("tempfile.tempdir", str(made.temporary))
    return made


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_what_is_kept_is_ones_own_alone(place: Place, mask: int) -> None:
    """And nothing else is left, of the compiler's either."""
    place.compile_by(f'touch "$TMPDIR/left"; cp {place.libraries.whole} "$2"')
    with umask(mask):
        assert not place.load() and not place.load()
    assert place.num_compilations == 1
    assert [mode(path) for path in (place.cache.parent, place.cache, place.library, place.record)] == [
        *(0o700, 0o700),
        *(0o600, 0o600),
    ]
    assert sorted(place.cache.iterdir()) == sorted([place.library, place.record])


def rewrite(path: Path, whole: bytes) -> None:
    """Write another file in the place of one: this process has loaded what it was."""
    written = path.with_name("written")
    written.write_bytes(whole)
    written.chmod(0o600)
    written.replace(path)


def cut(place: Place) -> None:
    rewrite(place.library, place.library.read_bytes()[:5000])


def change_a_byte(place: Place) -> None:
    rewrite(place.library, place.library.read_bytes()[:-1] + b"?")


def replace_by_a_pipe(place: Place) -> None:
    """One in which the same bytes wait, as long as it is open here."""
    path, whole = place.library, place.library.read_bytes()
    path.unlink()
    os.mkfifo(path, 0o600)
    os.write(os.open(path, os.O_RDWR), whole)


def open_to_others(place: Place) -> None:
    place.library.chmod(0o660)


def open_the_record(place: Place) -> None:
    place.record.chmod(0o622)


def link_to_it(place: Place) -> None:
    elsewhere = place.root / "elsewhere"
    shutil.move(path := place.library, elsewhere)
    path.symlink_to(elsewhere)


def link_to_the_record(place: Place) -> None:
    elsewhere = place.root / "elsewhere"
    shutil.move(path := place.record, elsewhere)
    path.symlink_to(elsewhere)


def give_away(place: Place) -> None:
    os.chown(place.library, ANOTHER_USER, -1)


def give_the_record_away(place: Place) -> None:
    os.chown(place.record, ANOTHER_USER, -1)


DAMAGES: list[Any] = [
    *(cut, change_a_byte, replace_by_a_pipe, open_to_others, open_the_record, link_to_it, link_to_the_record),
    *(pytest.param(damage, marks=as_root) for damage in (give_away, give_the_record_away)),
    lambda place: rewrite(place.library, b""),
    lambda place: place.library.unlink(),
    lambda place: place.record.unlink(),
    lambda place: place.record.write_text(""),
    lambda place: place.record.write_bytes(b"\xff/../x 3"),
    lambda place: place.record.write_text(place.record.read_text().replace(" ", " 1")),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_hold_is_made_again_and_not_run(
    place: Place, damage: Callable[[Place], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """It was put there as ours is, and would say so, was it loaded."""
    trace = place.libraries.trace
    place.compile_by(f'cp {place.libraries.foreign} "$2"')
    place.load()
    assert trace.exists(), "an unharmed one is run"
    trace.unlink()
    damage(place)
    place.compile_by(f'cp {place.libraries.whole} "$2"')
    assert not place.load() and not trace.exists()
    assert place.num_compilations == 2 and capfd.readouterr() == ("", "")
    assert not place.load() and place.num_compilations == 2, "it holds again"


def test_one_without_a_function_is_made_again(place: Place) -> None:
    place.load()
    moved = place.root / "moved.so"
    shutil.copy(place.libraries.lacking, moved)
    keep(place.cache, place.key, moved)
    assert not place.load() and place.num_compilations == 2
    place.compile_by(f'cp {place.libraries.lacking} "$2"')
    shutil.rmtree(place.cache)
    with pytest.raises(BuildError, match=f"has no {next(iter(SIGNATURES))}") as raised:
        place.load()
    assert "/proc/" not in str(raised.value)


def give_the_folder_away(place: Place) -> None:
    os.chown(place.cache, ANOTHER_USER, -1)


def link_to_the_folder(place: Place) -> None:
    place.cache.rename(place.root / "elsewhere")
    place.cache.symlink_to(place.root / "elsewhere")


def put_a_file_in_its_place(place: Place) -> None:
    shutil.rmtree(place.cache)
    place.cache.write_text("a file")


@pytest.mark.parametrize(
    "harm", [pytest.param(give_the_folder_away, marks=as_root), link_to_the_folder, put_a_file_in_its_place]
)
def test_a_folder_that_is_not_safe_is_left_for_one_of_this_process(place: Place, harm: Callable[[Place], None]) -> None:
    place.compile_by(f'cp {place.libraries.foreign} "$2"')
    place.load()
    place.libraries.trace.unlink()
    harm(place)
    before = sorted(place.root.glob("*/spec_lab/*"))
    place.compile_by(f'cp {place.libraries.whole} "$2"')
    own = place.temporary / place.load()
    assert mode(own) == 0o700 and list(own.glob("native-*.so"))
    assert sorted(place.root.glob("*/spec_lab/*")) == before and not place.libraries.trace.exists()


def test_one_that_others_could_write_to_is_closed(place: Place) -> None:
    place.load()
    place.cache.chmod(0o777)
    assert not place.load() and mode(place.cache) == 0o700 and place.num_compilations == 1


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs a system that names open folders")
def test_one_that_has_been_looked_at_is_the_one_that_is_read(tmp_path: Path) -> None:
    """Where others may write beside it they may put another in its place."""
    folder = tmp_path / "folder"
    folder.mkdir(0o700)
    (folder / "ours").touch()
    with held(folder) as same:
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        assert [path.name for path in same.iterdir()] == ["ours"]


def test_a_folder_from_which_nothing_is_loaded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert place.load() and not list(place.cache.iterdir())


@pytest.mark.parametrize("named", ["relative", ".", ""])
def test_a_relative_place_is_ignored(place: Place, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = place.root / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    monkeypatch.setenv("HOME", str(place.root / "home"))
    assert not place.load() and len(list(place.root.glob("home/.cache/spec_lab/native-*.so"))) == 1
    monkeypatch.setenv("HOME", "home")
    assert place.load() and not list(here.iterdir())

    def has_no_home(_: Path) -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "expanduser", has_no_home)
    assert place.load() and place.num_compilations == 3


def start(*_: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_two_processes_that_compile_at_once(place: Place) -> None:
    """Each waits for the other inside its compiler, and what they compile is not the same, byte for byte."""
    together = 'while [ $(wc -c < {0}/compilations) -lt 2 ]; do sleep 0.01; done; cp {1} "$2"; echo $$ >> "$2"'
    place.compile_by(together.format(place.root, place.libraries.whole))
    started = [start(), start()]
    assert [(process.communicate(timeout=60)[0], process.returncode) for process in started] == [(b"", 0)] * 2
    assert place.num_compilations == 2
    assert not place.load() and place.num_compilations == 2
    assert not [path for path in place.cache.iterdir() if path.is_dir()]


@contextmanager
def compiling(place: Place) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Give a process whose compiler hangs, and the folder that it compiles in."""
    place.compile_by(f"echo $$ > {place.root}/pid; exec sleep 600")
    process = start()
    try:
        wait_until(lambda: (place.root / "pid").exists() and (place.root / "pid").read_text().endswith("\n"))
        (folder,) = [path for path in place.cache.iterdir() if path.is_dir()]
        yield process, folder
    finally:
        process.kill()
        process.communicate()
        os.kill(int((place.root / "pid").read_text()), signal.SIGKILL)
        place.compile_by(f'cp {place.libraries.whole} "$2"')


def make_old(folder: Path) -> None:
    os.utime(folder, (1e9, 1e9))


def test_a_folder_of_a_compiler_that_was_killed_goes_with_a_later_one(place: Place) -> None:
    with compiling(place) as (process, folder):
        process.kill()
    assert not place.load() and folder.exists(), "it may be in use, as far as one can tell"
    make_old(folder)
    place.library.unlink()
    assert not place.load() and not folder.exists() and place.num_compilations == 3


def test_a_folder_that_is_compiled_in_stays(place: Place) -> None:
    with compiling(place) as (_, folder):
        make_old(folder)
        place.compile_by(f'cp {place.libraries.whole} "$2"')
        assert not place.load() and folder.exists()


@as_root
def test_a_folder_of_another_user_stays(place: Place) -> None:
    """Temporary folders lie beside those of others."""
    with compiling(place) as (process, folder):
        process.kill()
    for name, owner in (("others", ANOTHER_USER), ("own", -1)):
        moved = place.temporary / f"{folder.name}{name}"
        shutil.copytree(folder, moved)
        os.chown(moved, owner, -1)
        make_old(moved)
    shutil.rmtree(place.cache)
    place.cache.write_text("a file in its place")
    assert f"{folder.name}others" in place.load() and not (place.temporary / f"{folder.name}own").exists()


@pytest.mark.parametrize("hangs", ["version", "compilation"])
def test_a_compiler_that_hangs_is_ended_and_named(place: Place, hangs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "TIME_LIMIT", 0.5)
    place.compile_by(**{"compilation": "exit 1", hangs: f"sleep 600 & echo $! > {place.root}/pid; wait"})
    with pytest.raises(BuildError, match=f"{place.root}/compiler has not ended within 0.5 s"):
        place.load()
    child = Path("/proc") / (place.root / "pid").read_text().strip()
    wait_until(lambda: not child.exists() or "Z" in (child / "stat").read_text().split()[2])
    assert place.num_compilations == (hangs == "compilation") and not list(place.root.glob("cache/*/*"))


def test_a_full_disk_is_named(place: Place) -> None:
    """That of the cache is passed by; where there is no other, it is not the compiler that is to blame."""
    place.compile_by(f'case $(pwd -P) in {place.cache}*) {FILL};; esac; cp {place.libraries.whole} "$2"')
    assert place.load() and place.num_compilations == 2
    for filled in (FILL, f'ln -s /dev/full record; cp {place.libraries.whole} "$2"'):
        place.compile_by(filled)
        with pytest.raises(BuildError, match=f"the disk of {place.cache} is full: make room there") as raised:
            place.load()
        assert "compiler" not in str(raised.value)
    assert not list(place.cache.iterdir())
    shutil.rmtree(place.cache)
    place.cache.write_text("a file in its place")
    with pytest.raises(BuildError, match=f"the disk of {place.temporary}/.* is full: make room there"):
        place.load()


def test_a_compiler_that_fails_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.compile_by("echo an error of its own >&2; exit 1")
    with pytest.raises(BuildError, match=f"{place.root}/compiler does not compile native.c.*an error of its own"):
        place.load()
    assert not list(place.cache.iterdir())
    (place.root / "compiler").write_text("no program")
    with pytest.raises(BuildError, match=f"{place.root}/compiler cannot be used"):
        place.load()
    monkeypatch.setenv("CC", "/nowhere")
    with pytest.raises(BuildError, match="no C compiler"):
        place.load()


def test_what_the_first_compiler_cannot_the_second_may(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """One named by a way from where one is, too."""
    place.compile_by("exit 1")
    shutil.copy(place.root / "compiler", place.root / "first")
    place.compile_by(f'cp {place.libraries.whole} "$2"')
    (place.root / "compiler").rename(place.root / "cc")
    monkeypatch.chdir(place.root)
    monkeypatch.setenv("CC", "./first")
    assert not place.load() and place.num_compilations == 3


def test_the_libraries_used_last_stay(place: Place) -> None:
    place.load()
    kept = place.library, place.record
    others = [place.cache / f"native-{number}.so" for number in range(12)]
    for age, path in enumerate([*kept, *others]):
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    (place.cache / "of somebody else").touch()
    assert not place.load() and kept[1].stat().st_mtime > 1e9, "it is in use"
    place.compile_by(f'cp {place.libraries.whole} "$2"', version="echo 2")
    place.load()
    left = {path for path in place.cache.iterdir() if path.name != "of somebody else"}
    assert len(left) == 10 and left >= {*kept, *others[:6]}


def test_the_c_is_compiled_without_a_warning_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.__wrapped__()
    (kept,) = (tmp_path / "spec_lab").glob("native-*.so")
    before = kept.stat().st_mtime_ns
    library.__wrapped__()
    assert kept.stat().st_mtime_ns == before, "it was compiled again"
    wall = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    command = [REAL, *compiler.FLAGS, *wall, str(compiler.HERE / "native.c"), "-o", str(tmp_path / "x.so"), "-lm"]
    assert subprocess.run(command, check=False).returncode == 0, "any processor of this kind, and no warning"
    assert ctypes.CDLL(str(tmp_path / "x.so")).native_has_tiles() == 0, "the compiler was asked for none"
