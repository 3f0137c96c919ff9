"""`workerkit new-plugin`: what it writes passes its own tests, for every role that it says it can."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from workerkit.framework import roles
from workerkit.framework.cli import skeletons


def run_tests(folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("role", [*skeletons.EXAMPLES])
def test_an_example_passes_its_own_tests(real_cli, tmp_path, role):
    folder = tmp_path / "new"
    assert real_cli("new-plugin", role, "my_part", "--dir", folder) == 0
    done = run_tests(folder)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split(" passed")[0].split()[-1]) >= 2


def test_every_other_role_starts_from_an_installed_part(real_cli, installed, tmp_path, capsys):
    """All in one run of pytest, in packages of different names."""
    written = []
    for role in roles.ROLES:
        name = f"my_{role.name}"
        if real_cli("new-plugin", role.name, name, "--dir", tmp_path / name) == 0:
            written.append(role.name)
    refused = {role.name for role in roles.ROLES} - set(written)
    nothing_yet = {role.name for role in roles.ROLES if not installed.registry.offers[role.name]}
    assert refused == nothing_yet - set(skeletons.EXAMPLES)
    able = capsys.readouterr().err.split("roles that can: ")[1].split("\n")[0].split(", ")
    assert sorted(written) == sorted(able)
    folders = [str(tmp_path / f"my_{role}") for role in written]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "--import-mode=importlib", *folders],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split(" passed")[0].split()[-1]) >= len(written)


def test_base_chooses_what_to_start_from_and_names_what_goes_with_it(real_cli, tmp_path):
    folder = tmp_path / "new"
    assert real_cli("new-plugin", "block_table", "mine", "--base", "multi_group", "--dir", folder) == 0
    module = (folder / "workerkit_mine" / "__init__.py").read_text()
    assert "class Mine(MultiGroupBlockTable):" in module
    assert "return super().gather(batch)" in module
    assert "NotImplementedError" not in module
    assert "runner: v1" in (folder / "README.md").read_text()
    assert run_tests(folder).returncode == 0


def test_the_package_is_complete(real_cli, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert real_cli("new-plugin", "observers", "token_count") == 0
    assert capsys.readouterr().out.startswith("workerkit-token-count: pip install -e workerkit-token-count")
    files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert files == [
        "workerkit-token-count/README.md",
        "workerkit-token-count/pyproject.toml",
        "workerkit-token-count/tests/test_token_count.py",
        "workerkit-token-count/workerkit_token_count/__init__.py",
    ]
    project = (tmp_path / files[1]).read_text()
    assert '[project.entry-points.workerkit]\ntoken_count = "workerkit_token_count"' in project
    module = (tmp_path / files[3]).read_text()
    assert "WORKERKIT_API = 1" in module
    assert 'registry.add(roles.OBSERVERS, "token_count", TokenCount)\n' in module


def test_a_derived_part_is_registered_like_the_one_it_starts_from(real_cli, tmp_path):
    """Else a runner would lose the parts that go with it, and a list its default members."""
    expected = {
        "runner": 'defaults={"request_state": ',
        "kernels": 'parts={"libraries": "auto"}',
        "sampler": 'parts={"stages": (',
    }
    for role, text in expected.items():
        assert real_cli("new-plugin", role, "mine", "--dir", tmp_path / role) == 0
        assert text in (tmp_path / role / "workerkit_mine" / "__init__.py").read_text()


@pytest.mark.parametrize(
    ("role", "name", "messages"),
    [
        ("sampler_stag", "x", ["no role 'sampler_stag'; did you mean 'sampler_stage'?"]),
        ("observers", "My-Part", ["name 'My-Part'", "did you mean 'my_part'?"]),
        ("observers", "1x", ["name '1x'", "did you mean 'x'?"]),
        ("observers", "class", ["name 'class'"]),
        ("observers", "auto", ["name 'auto'"]),
        ("observers", "../../x", ["name '../../x'"]),
        ("observers", "metrics", ["observers 'metrics' is already registered by builtin"]),
        ("nope", "a b", ["no role 'nope'", "name 'a b'"]),
    ],
)
def test_role_and_name_are_checked_both_at_once(real_cli, tmp_path, monkeypatch, capsys, role, name, messages):
    monkeypatch.chdir(tmp_path)
    assert real_cli("new-plugin", role, name) == 1
    error = capsys.readouterr().err
    for message in messages:
        assert message in error
    assert [*tmp_path.iterdir()] == []


def test_a_base_that_is_not_there_or_needs_options_is_refused(real_cli, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for base in ("tapp", "tap"):
        assert real_cli("new-plugin", "observers", "mine", "--base", base) == 1
    assert "no observers that can be imported and needs no options" in capsys.readouterr().err


def test_nothing_is_overwritten(real_cli, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("precious")
    for place in (tmp_path, tmp_path / "mine.txt"):
        assert real_cli("new-plugin", "observers", "x", "--dir", place) == 1
    assert "is there already" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
