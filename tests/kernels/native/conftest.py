import pytest

from workerkit.kernels.cpu.native.build import unavailable
from workerkit.kernels.cpu.native.runtime import Runtime


@pytest.fixture(scope="module")
def runtime():
    if reason := unavailable():
        pytest.skip(f"no native kernels here: {reason}")
    return Runtime()
