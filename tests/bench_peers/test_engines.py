import pytest

from bench.peers.engines import ENGINES, parse_contenders


def test_an_engine_alone_is_its_first_variant():
    (contender,) = parse_contenders("openvino")
    assert contender.name == "openvino"
    assert contender.variant == next(iter(ENGINES["openvino"].variants))


def test_a_variant_is_a_contender_of_its_own():
    contenders = parse_contenders("openvino, openvino:q8_0")
    assert [(each.name, each.variant) for each in contenders][1] == ("openvino:q8_0", "q8_0")
    assert len(contenders) == 2


def test_an_engine_that_is_not_known_is_refused_with_what_there_is():
    with pytest.raises(ValueError, match=r"'olama'.*millpond, llamacpp, openvino, vllm"):
        parse_contenders("millpond,olama")


def test_a_variant_that_is_not_known_is_refused_with_what_there_is():
    with pytest.raises(ValueError, match=r"openvino has no variant 'q9'.*q8_0"):
        parse_contenders("openvino:q9")


def test_no_engine_at_all_is_refused():
    with pytest.raises(ValueError, match="no engine"):
        parse_contenders(" , ")


def test_every_engine_has_a_name_that_it_is_found_by():
    assert {name: engine.name for name, engine in ENGINES.items()} == {name: name for name in ENGINES}
