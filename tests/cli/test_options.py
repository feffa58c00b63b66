from __future__ import annotations

import pytest
import typer

from millpond.cli.options import format_memory, parse_counts, parse_lengths, parse_memory
from millpond.lab.lengths import Lengths


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
    assert parse_counts("1,4, 16") == (1, 4, 16)
    assert parse_counts("") == ()


@pytest.mark.parametrize("text", ["0", "1,-4", "a", "1;2", "1.5"])
def test_counts_below_one_and_other_things_are_refused(text):
    with pytest.raises(typer.BadParameter):
        parse_counts(text)


def test_counts_may_begin_at_zero_and_an_error_names_the_option():
    assert parse_counts("0,3", least=0) == (0, 3)
    with pytest.raises(typer.BadParameter, match="holds a number below 0") as caught:
        parse_counts("-1", 0, "'--reserves'")
    assert caught.value.param_hint == "'--reserves'"


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("6", Lengths((6,))),
        ("4, 10", Lengths((4, 10))),
        (" 4 - 16 ", Lengths(range(4, 17), drawn=True)),
        ("5-5", Lengths(range(5, 6), drawn=True)),
    ],
)
def test_lengths_are_one_number_several_or_a_range(text, lengths):
    assert parse_lengths(text) == lengths
    assert parse_lengths(lengths) == lengths


@pytest.mark.parametrize("text", ["", "0", "0-4", "9-3", "-4", "4-", "a", "1-2-3", "4.5"])
def test_other_lengths_are_refused(text):
    with pytest.raises(typer.BadParameter):
        parse_lengths(text)


def test_more_memory_than_a_number_holds_is_refused():
    with pytest.raises(typer.BadParameter, match="is more memory than there can be"):
        parse_memory("9" * 400)
