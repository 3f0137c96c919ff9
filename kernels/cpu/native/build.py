"""Compiling the native kernels on first use: what processor and compiler there are, and the cache of what was built."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16")
SWITCH = "WORKERKIT_NATIVE"  # 0: as if there were no compiler
_FLAGS = (
    "-ffp-contract=off",  # else a product and a sum are one rounding here and not there, and bits depend on the path
    *("-std=c++20", "-O3", "-fPIC", "-pthread", "-Wall", "-Wextra", "-mtune=native", "-mfma", "-mf16c"),
    *(f"-m{flag.replace('_', '')}" for flag in NEEDED),
)


def unavailable() -> str | None:
    """Why native kernels cannot be used here, None when they can. Runs no compiler."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 switches native kernels off"
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"native kernels are for Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    if missing := [flag for flag in NEEDED if flag not in _cpu_flags()]:
        return f"the processor lacks {', '.join(missing)}"
    if not _library().exists() and _compiler() is None:
        return "there is no C++ compiler (g++, clang++ or $CXX)"
    return None


def build(progress: Callable[[int, int], None] | None = None) -> Path:
    """The shared library, compiled unless it was before. `progress` hears of (done, total) source files.

    Raises RuntimeError with the compiler's words.
    """
    library = _library()
    if library.exists():
        return library
    compiler = _compiler()
    if compiler is None:
        raise RuntimeError(str(unavailable()))
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:

        def compile_one(source: Path) -> Path:
            kept = library.parent / f"{source.stem}-{_key(source)}.o"
            if not kept.exists():
                result = Path(folder) / kept.name
                _run([compiler, *_FLAGS, "-c", str(source), "-o", str(result)])
                result.replace(kept)
            return kept

        sources = [path for path in _sources() if path.suffix == ".cpp"]
        objects = []
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for done, built in enumerate(pool.map(compile_one, sources)):
                objects.append(built)
                if progress is not None:
                    progress(done + 1, len(sources))
        linked = Path(folder) / library.name
        _run([compiler, *_FLAGS, "-shared", *map(str, objects), "-o", str(linked)])
        linked.replace(library)  # another process may have been faster: what it made is the same
    return library


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-4000:]}")


def _compiler() -> str | None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def _cpu_flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return set()
    line = next((line for line in path.read_text().splitlines() if line.startswith("flags")), "")
    return set(line.partition(":")[2].split())


def _sources() -> list[Path]:
    folder = Path(__file__).parent
    return sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".h"))


def _library() -> Path:
    """Where it is kept: named after all that it is made from."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "workerkit" / "native" / f"workerkit-{_key(*_sources())}.so"


def _key(*sources: Path) -> str:
    """Of what is made from some sources, with the flags and processor of now."""
    key = hashlib.sha256(" ".join((*_FLAGS, *sorted(_cpu_flags()))).encode())
    headers = [path for path in _sources() if path.suffix == ".h"]
    for path in sorted({*sources, *headers}):
        key.update(path.name.encode() + path.read_bytes())
    return key.hexdigest()[:16]
