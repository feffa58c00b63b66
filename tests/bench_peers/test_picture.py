from bench.peers.picture import OUR_COLOUR, colours, draw
from bench.peers.report import Row
from bench.peers.stats import summarize


def test_millpond_has_a_colour_of_its_own_and_no_two_peers_share_one():
    chosen = colours(["vllm", "millpond", "openvino", "llamacpp"])
    assert chosen["millpond"] == OUR_COLOUR
    assert len(set(chosen.values())) == 4


def test_a_picture_of_any_number_of_rows_is_written(tmp_path):
    cells = {"millpond": summarize([2.0, 3.0]), "vllm": summarize([1.0])}
    some = [Row(f"decode/{n}", f"decode, {n} sequences", "tok/s", True, cells, {}, 0.0) for n in range(5)]
    draw(some, ["millpond", "vllm"], "a title", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
