import pytest

from wheel_stand_in import CONTENT, MEMBER, write_wheel


@pytest.fixture
def registry(tmp_path):
    write_wheel(tmp_path / "registry", {MEMBER: CONTENT})
    return tmp_path / "registry"


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"
