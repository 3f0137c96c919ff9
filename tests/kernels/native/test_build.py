"""When native kernels can be used, and how they come to be built."""

import shutil

import pytest

from workerkit.kernels.cpu.native import build

WHOLE = {*build.NEEDED, "sse2"}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """An x86 with everything, an empty cache, and one source file to compile."""
    monkeypatch.setattr(build, "_cpu_flags", lambda: WHOLE)
    monkeypatch.setattr(build, "_FLAGS", ("-fPIC",))
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(build.SWITCH, raising=False)
    monkeypatch.delenv("CXX", raising=False)
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "_sources", lambda: [source])
    return source


def test_it_says_what_is_missing(machine, monkeypatch):
    monkeypatch.setattr(build, "_compiler", lambda: "c++")
    assert build.unavailable() is None
    with monkeypatch.context() as m:
        m.setenv(build.SWITCH, "0")
        assert build.unavailable() == "WORKERKIT_NATIVE=0 switches native kernels off"
    with monkeypatch.context() as m:
        m.setattr(build, "_cpu_flags", lambda: WHOLE - {"avx512_bf16"})
        assert build.unavailable() == "the processor lacks avx512_bf16"
    with monkeypatch.context() as m:
        m.setattr("platform.machine", lambda: "aarch64")
        assert "x86-64, this is Linux on aarch64" in build.unavailable()


def test_no_compiler(machine, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.unavailable() == "there is no C++ compiler (g++, clang++ or $CXX)"
    with pytest.raises(RuntimeError, match="there is no C\\+\\+ compiler"):
        build.build()


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
class TestCompiling:
    def test_it_is_built_once_and_needs_no_compiler_afterwards(self, machine, monkeypatch):
        heard = []
        library = build.build(lambda done, total: heard.append((done, total)))
        assert library.is_file()
        assert heard == [(1, 1)]
        monkeypatch.setenv("CXX", "no-such-compiler")
        assert build.unavailable() is None
        assert build.build() == library

    def test_another_source_is_another_library(self, machine):
        before = build.build()
        machine.write_text('extern "C" int one() { return 2; }\n')
        assert build.build() != before

    def test_the_compilers_words_are_passed_on(self, machine):
        machine.write_text("int one( { return 1; }\n")
        with pytest.raises(RuntimeError, match=r"one\.cpp(.|\n)*error"):
            build.build()
        assert not list(machine.parent.glob("cache/workerkit/native/*.so"))
