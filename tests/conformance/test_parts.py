"""Our own parts, through the suites that a third party's parts go through too."""

import pytest
import torch

from workerkit.framework.testing.conformance import (
    KernelLibraryConformance,
    ObserverConformance,
    SamplerConformance,
    SamplerStageConformance,
)
from workerkit.framework.testing.conformance_cache import (
    AttentionConformance,
    BlockTablesConformance,
    RequestStatesConformance,
    SchedulerConformance,
)
from workerkit.framework.testing.registry import fake_registry
from workerkit.plugins.builtin_kernels import CpuKernels, ReferenceKernels

pytest_plugins = ("pytester",)


class TestSampler(SamplerConformance):
    pass


class TestSamplerStage(SamplerStageConformance):
    pass


class TestObserver(ObserverConformance):
    pass


class TestRequestStates(RequestStatesConformance):
    pass


class TestBlockTables(BlockTablesConformance):
    pass


class TestAttention(AttentionConformance):
    pass


class TestScheduler(SchedulerConformance):
    pass


class TestKernels(KernelLibraryConformance):
    """The CPU's kernels against the reference's."""

    @pytest.mark.parametrize("op", sorted({"rms_norm", "fused_add_rms_norm"} & set(CpuKernels().ops)))
    def test_norms(self, op):
        generator = torch.Generator().manual_seed(0)
        x, residual = (torch.randn(5, 16, generator=generator) for _ in range(2))
        weight = torch.rand(16, generator=generator)
        args = (x, weight, 1e-6) if op == "rms_norm" else (x, residual, weight, 1e-6)
        self.assert_matches(CpuKernels(), ReferenceKernels(), op, *args)

    @pytest.mark.parametrize("op", sorted({"reshape_and_cache"} & set(CpuKernels().ops)))
    def test_cache(self, op):
        key, value = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
        slots = torch.tensor([3, -1, 0, 15, -1])
        caches = torch.zeros(4, 4, 2, 8), torch.zeros(4, 4, 2, 8)
        self.assert_matches(CpuKernels(), ReferenceKernels(), op, key, value, *caches, slots)

    def test_a_wrong_kernel_is_found(self):
        class Wrong(CpuKernels):
            @property
            def ops(self):
                return {"rms_norm": lambda x, weight, eps: x}

        with pytest.raises(AssertionError, match="rms_norm"):
            self.assert_matches(Wrong(), ReferenceKernels(), "rms_norm", torch.randn(2, 8), torch.ones(8), 1e-6)


def test_suites_run_over_every_implementation_but_fakes(pytester):
    registry = fake_registry()
    expected = [name for name in registry.offers["sampler"] if not name.startswith("fake")]
    assert expected
    pytester.makepyfile(
        """
        from workerkit.framework.testing.conformance import SamplerConformance

        class TestSampler(SamplerConformance):
            pass
        """
    )
    result = pytester.runpytest("--collect-only", "-q")
    for name in expected:
        result.stdout.fnmatch_lines([f"*test_seed_and_position_decide?{name}?"])


def test_an_implementation_whose_package_is_absent_is_skipped_by_name(pytester):
    pytester.makepyfile(
        """
        import pytest
        from workerkit.framework import roles
        from workerkit.framework.testing.conformance import SamplerConformance
        from workerkit.framework.testing.registry import fake_registry

        class TestSampler(SamplerConformance):
            names = ("elsewhere",)

            @pytest.fixture
            def registry(self):
                registry = fake_registry()
                registry.add(roles.SAMPLER, "elsewhere", "no_such:Sampler", requires=("no_such_module", "extra"))
                return registry
        """
    )
    result = pytester.runpytest("-rs", "-q")
    assert result.parseoutcomes() == {"skipped": 5}
    result.stdout.fnmatch_lines(["*sampler: 'elsewhere' needs the package no_such_module*"])


def test_a_part_that_breaks_its_interface_fails_the_suite(pytester):
    """FakeSampler is greedy whatever is asked: the suite must notice."""
    pytester.makepyfile(
        """
        from workerkit.framework.testing.conformance import SamplerConformance

        class TestSampler(SamplerConformance):
            names = ("fake",)
        """
    )
    result = pytester.runpytest("-q")
    assert result.parseoutcomes()["failed"] == 1
