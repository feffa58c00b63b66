from __future__ import annotations

from pathlib import Path

import pytest
import typer

from millpond.cli import options
from millpond.cli.options import check_plot, check_target, format_memory, parse_counts, parse_memory


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1000", 1000), ("512M", 512 * 2**20), ("2G", 2 * 2**30), ("1.5gib", 3 * 2**29), ("64 KB", 2**16), ("1T", 2**40)],
)
def test_memory_is_read_in_powers_of_1024(text, num_bytes):
    assert parse_memory(text) == num_bytes


@pytest.mark.parametrize("text", ["", "M", "-1", "2X", "1e9", "two", "1 2"])
def test_what_is_not_an_amount_of_memory_is_refused_by_its_text(text):
    with pytest.raises(typer.BadParameter, match="is not an amount of memory"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(512, "0.5 KiB"), (2**20, "1.0 MiB"), (512 * 2**20, "512.0 MiB"), (3 * 2**29, "1.50 GiB")]
)
def test_memory_is_printed_with_its_unit(num_bytes, text):
    assert format_memory(num_bytes) == text


def test_counts_are_read_from_a_list_with_commas():
    assert parse_counts("1,4, 16", "--n") == (1, 4, 16)
    assert parse_counts("", "--n") == ()
    assert parse_counts("0,3", "--n", least=0) == (0, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "'0' holds a number below 1"),
        ("1,-4", "holds a number below 1"),
        ("a", "'a' is not a list of numbers"),
        ("1;2", "is not a list of numbers"),
        ("1.5", "is not a list of numbers"),
        ("nan", "is not a list of numbers"),
        ("1048577", "holds a number above 1048576"),
        ("9" * 5000, r"'9{40}' is not a list of numbers"),
    ],
)
def test_other_counts_are_refused_by_the_name_of_the_option(text, message):
    with pytest.raises(typer.BadParameter, match=message) as caught:
        parse_counts(text, "--n")
    assert caught.value.param_hint == "'--n'"


class TestWhatIsWritten:
    def test_a_picture_has_a_name_that_says_its_format(self, tmp_path):
        assert check_plot(tmp_path / "a.SVG") == tmp_path / "a.SVG"
        for name in ("a.txt", "a", ".png"):
            with pytest.raises(typer.BadParameter, match=r"a picture is one of .png, .svg, .pdf, got"):
                check_plot(tmp_path / name)

    def test_its_folder_is_there(self, tmp_path, monkeypatch):
        with pytest.raises(typer.BadParameter, match=r"there is no folder .*nowhere to write a.png into"):
            check_plot(tmp_path / "nowhere" / "a.png")
        monkeypatch.chdir(tmp_path)
        assert check_plot(Path("a.png")) == Path("a.png")

    def test_a_folder_or_a_device_is_not_written_over(self, tmp_path):
        (tmp_path / "a.png").mkdir()
        for path in (tmp_path / "a.png", Path("/dev/null")):
            with pytest.raises(typer.BadParameter, match="is there and is not a file"):
                check_target(path)

    def test_a_place_without_permission_is_refused_and_nothing_is_made(self, tmp_path, monkeypatch):
        monkeypatch.setattr(options.os, "access", lambda path, mode: path != tmp_path)
        with pytest.raises(typer.BadParameter, match="cannot be written for want of permission"):
            check_target(tmp_path / "steps.jsonl")
        assert list(tmp_path.iterdir()) == []

    def test_nothing_is_asked_of_an_option_that_was_not_given(self):
        assert check_plot(None) is check_target(None) is None


def test_more_memory_than_a_number_holds_is_refused():
    with pytest.raises(typer.BadParameter, match="is more memory than there can be"):
        parse_memory("9" * 400)
