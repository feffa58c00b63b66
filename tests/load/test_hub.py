import pytest

from hub_stand_in import Hub, serve
from millpond.errors import DownloadError, ModelNotFoundError
from millpond.load.hub import parse
from millpond.load.store import Sources, find, pull, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 2000


@pytest.fixture
def hub():
    with serve(Hub("org/repo", {"README.md": b"hello", "model.gguf": CONTENT})) as hub:
        yield hub


@pytest.fixture
def sources(hub, tmp_path):
    return Sources(hub_endpoint=hub.endpoint, hub_cache=tmp_path / "hub")


def bodies(hub):
    return [path for method, path in hub.requests if method == "GET" and "/resolve/" in path]


@pytest.mark.parametrize("model", ["org/repo", "org/repo:model.gguf"])
def test_the_only_gguf_file_or_the_named_one_is_fetched_with_progress(hub, sources, model):
    seen = []
    path = pull(model, progress=lambda *step: seen.append(step), sources=sources)
    assert path.read_bytes() == CONTENT
    assert path.name == "model.gguf"
    assert seen[0] == (0, len(CONTENT), "downloading model.gguf")
    assert seen[-1] == (len(CONTENT), len(CONTENT), "downloading model.gguf")


def test_a_second_pull_downloads_nothing(hub, sources):
    first = pull("org/repo", sources=sources)
    seen = []
    assert pull("org/repo", progress=lambda *step: seen.append(step), sources=sources) == first
    assert bodies(hub) == ["/org/repo/resolve/main/model.gguf"]
    assert seen == []


def test_a_named_file_that_is_there_asks_nobody(hub, sources):
    assert find("org/repo:model.gguf", sources=sources) is None
    first = pull("org/repo:model.gguf", sources=sources)
    before = list(hub.requests)
    assert resolve("org/repo:model.gguf", sources=sources) == first
    assert find("org/repo:model.gguf", sources=sources) == first
    assert hub.requests == before


def test_several_files_are_listed_with_sizes_and_the_form_that_names_one(hub, sources):
    hub.files["sub/other.gguf"] = bytes(3_000_000)
    with pytest.raises(ModelNotFoundError) as caught:
        pull("org/repo", sources=sources)
    assert str(caught.value).splitlines() == [
        "org/repo has 2 GGUF files; name one of them:",
        "    org/repo:model.gguf  (1 MB)",
        "    org/repo:sub/other.gguf  (3 MB)",
    ]
    assert pull("org/repo:sub/other.gguf", sources=sources).read_bytes() == bytes(3_000_000)


def test_a_repository_without_gguf_files_says_so(hub, sources):
    del hub.files["model.gguf"]
    with pytest.raises(ModelNotFoundError, match="org/repo has no GGUF file"):
        pull("org/repo", sources=sources)


def test_a_file_that_is_not_there_is_refused_with_those_that_are(hub, sources):
    with pytest.raises(
        ModelNotFoundError, match=r"has no file absent\.gguf; its GGUF files are:\n    org/repo:model\.gguf"
    ):
        pull("org/repo:absent.gguf", sources=sources)
    assert bodies(hub) == []


def test_a_repository_that_is_not_there_is_not_found(hub, sources):
    with pytest.raises(ModelNotFoundError, match="org/wrong is not on the hub, or is private"):
        pull("org/wrong", sources=sources)


def test_a_gated_repository_says_what_to_do(hub, sources):
    hub.status, hub.error_code = 403, "GatedRepo"
    with pytest.raises(DownloadError, match="org/repo is gated: accept its terms"):
        pull("org/repo", sources=sources)


@pytest.mark.parametrize("model", ["org/repo", "org/repo:q/m-00002-of-00002.gguf"])
def test_all_parts_of_a_split_model_are_fetched_and_the_first_is_given(hub, sources, model):
    del hub.files["model.gguf"]
    names = ["q/m-00001-of-00002.gguf", "q/m-00002-of-00002.gguf"]
    hub.files |= {name: name.encode() * 1000 for name in names}
    assert find("org/repo:q/m-00001-of-00002.gguf", sources=sources) is None
    path = pull(model, sources=sources)
    assert path.name == "m-00001-of-00002.gguf"
    assert bodies(hub) == [f"/org/repo/resolve/main/{name}" for name in names]
    assert path.with_name("m-00002-of-00002.gguf").read_bytes() == hub.files[names[1]]
    assert find("org/repo:q/m-00002-of-00002.gguf", sources=sources) == path
    path.with_name("m-00002-of-00002.gguf").unlink()
    assert find("org/repo:q/m-00001-of-00002.gguf", sources=sources) is None


def test_a_split_model_is_listed_as_one_and_a_missing_part_is_named(hub, sources):
    hub.files |= {f"m-0000{part}-of-00002.gguf": bytes(2_000_000) for part in (1, 2)}
    with pytest.raises(ModelNotFoundError, match=r"has 2 GGUF files; .*\n    .*:m-00001-of-00002\.gguf  \(4 MB\)\n"):
        pull("org/repo", sources=sources)
    del hub.files["m-00002-of-00002.gguf"]
    with pytest.raises(ModelNotFoundError, match=r"has no file m-00002-of-00002\.gguf"):
        pull("org/repo:m-00001-of-00002.gguf", sources=sources)
    assert bodies(hub) == []


def test_a_file_name_from_the_hub_that_leaves_its_folder_is_never_used(hub, sources):
    hub.files = {"../outside.gguf": CONTENT, "/etc/x.gguf": CONTENT, "a/../../x.gguf": CONTENT}
    with pytest.raises(ModelNotFoundError, match="org/repo has no GGUF file"):
        pull("org/repo", sources=sources)


def test_an_interrupted_pull_leaves_no_file_and_the_next_succeeds(hub, sources, tmp_path):
    def interrupt(done, total, what):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("org/repo", progress=interrupt, sources=sources)
    assert list(tmp_path.rglob("*.gguf")) == []
    assert find("org/repo:model.gguf", sources=sources) is None
    assert pull("org/repo", sources=sources).read_bytes() == CONTENT


def test_a_connection_that_drops_is_taken_up_where_it_stopped(hub, sources):
    hub.files["model.gguf"] = CONTENT * 25  # more than the 10 MiB that the hub's client takes at a time
    hub.cut_after = 11 * 2**20
    assert pull("org/repo", sources=sources).read_bytes() == CONTENT * 25
    assert hub.ranges == [None, f"bytes={10 * 2**20}-"]


def test_without_the_hub_the_file_fetched_before_is_used_and_said_so(hub, sources):
    first = pull("org/repo", sources=sources)
    hub.status = 500
    seen = []
    assert pull("org/repo", progress=lambda *step: seen.append(step[2]), sources=sources) == first
    assert seen == ["the hub cannot be reached; using model.gguf from its cache"]


def test_a_hub_in_trouble_is_an_error_of_the_download(hub, sources):
    hub.status = 500
    with pytest.raises(DownloadError, match=r"org/repo could not be fetched from the hub: .*500"):
        pull("org/repo", sources=sources)


def test_a_hub_that_cannot_be_reached_is_an_error_of_the_download(tmp_path):
    with serve(Hub("org/repo", {})) as hub:
        closed = hub.endpoint
    with pytest.raises(DownloadError, match=r"org/repo could not be fetched from the hub: .*refused"):
        pull("org/repo", sources=Sources(hub_endpoint=closed, hub_cache=tmp_path))


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("org/repo", ("org/repo", None)),
        ("Org-1/My_Model-1.5B.v2", ("Org-1/My_Model-1.5B.v2", None)),
        ("org/repo:a-b_c.Q4_0.gguf", ("org/repo", "a-b_c.Q4_0.gguf")),
        ("org/repo:sub/dir/x.gguf", ("org/repo", "sub/dir/x.gguf")),
    ],
)
def test_names_of_repositories_and_their_files_are_taken_apart(model, parts):
    assert parse(model) == parts
