"""The pytest plugin: harmless to projects that only have workerkit installed, and tidy to those that use it."""

import subprocess
import sys

pytest_plugins = ("pytester",)


def test_starting_pytest_imports_no_torch_and_nothing_of_ours_but_the_plugin():
    code = (
        "import sys, pytest; import workerkit.framework.testing.pytest_plugin; "
        "print([m for m in ('torch', 'attrs', 'workerkit.framework.assembly') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]" or "'torch'" not in out.stdout
    assert "assembly" not in out.stdout


def test_workers_of_the_factory_are_shut_down_after_the_test(pytester):
    pytester.makepyfile(
        """
        import pytest

        LOG = []

        def test_one(fake_config, assembly_factory, workerkit_registry):
            assembly = assembly_factory(fake_config("v2"), {"limits.max_num_reqs": 2})
            assembly.worker.start()
            assert assembly.worker.shape.max_num_reqs == 2
            assembly.worker.shutdown = lambda: LOG.append("down")

        def test_two():
            assert LOG == ["down"]
        """
    )
    assert pytester.runpytest("-q").parseoutcomes() == {"passed": 2}
