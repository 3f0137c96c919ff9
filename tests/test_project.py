"""The project file agrees with the tree, and the repository with its own rules."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("framework", "components", "kernels", "plugins")


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_package_list_names_every_package():
    found = set()
    for room in ROOMS:
        for init in (ROOT / room).rglob("__init__.py"):
            if "examples" not in init.parts and "build" not in init.parts:
                found.add("workerkit." + ".".join(init.parent.relative_to(ROOT).parts))
    assert set(project()["tool"]["setuptools"]["packages"]) == found


def test_each_package_folder_is_typed_and_linked_for_type_checkers():
    for room in ROOMS:
        assert (ROOT / room / "py.typed").exists()
        assert (ROOT / ".typing" / "workerkit" / room).resolve() == ROOT / room


def test_no_room_imports_itself_by_its_bare_name():
    bare = re.compile(rf"^\s*(from|import) ({'|'.join(ROOMS)})[. ]", re.MULTILINE)
    offenders = [
        str(path.relative_to(ROOT))
        for room in (*ROOMS, "tests")
        for path in (ROOT / room).rglob("*.py")
        if bare.search(path.read_text())
    ]
    assert offenders == []


@pytest.mark.parametrize("name", ["cpu-v1.yaml", "cpu-v2.yaml"])
def test_the_shipped_configs_differ_in_the_runners_line_only(name):
    lines = [(ROOT / "configs" / f).read_text().splitlines() for f in ("cpu-v1.yaml", "cpu-v2.yaml")]
    different = [pair for pair in zip(*lines, strict=True) if pair[0] != pair[1]]
    assert len(different) == 1
    assert "runner:" in different[0][0]


def test_torch_stays_out_of_the_framework_at_run_time():
    """`workerkit check` has two seconds; interfaces name tensors for type checkers only."""
    code = "import sys, workerkit.framework.roles, workerkit.framework.assembly; sys.exit('torch' in sys.modules)"
    import sys

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
