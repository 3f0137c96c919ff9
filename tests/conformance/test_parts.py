"""Our own parts, through the suites that a third party's parts go through too."""

from typing import ClassVar

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
from workerkit.framework.testing.conformance_speculation import SpeculatorConformance
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


BLOCK = {"block_size": 9, "dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, 2]}}


def draft(architecture, **options):
    """A random one: whatever it proposes, the output must not change."""
    return {"use": "random", "architecture": architecture, **options}


class TestSpeculator(SpeculatorConformance):
    options: ClassVar = {
        "suffix": {"speculator": {"use": "suffix", "global_tree": False}},
        "composite": {
            "speculator": {"use": "composite", "proposers": ["eagle3", "ngram"]},
            "draft": draft("Eagle3Speculator"),
        },
        "draft_model": {"draft": draft("LlamaForCausalLM")},
        "eagle": {"draft": draft("EagleLlamaForCausalLM")},
        "eagle3": {"draft": draft("Eagle3LlamaForCausalLM", draft_vocab_size=20)},
        "mtp": {"draft": draft("Qwen3NextMTP")},
        "medusa": {"draft": draft("MedusaModel", fields={"medusa_num_heads": 8})},
        "dflash": {"draft": draft("DFlashDraftModel", fields=BLOCK)},
        "dspark": {"draft": draft("DSparkDraftModel", fields={**BLOCK, "markov_rank": 4})},
    }


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


BREAKS = """
    import pytest
    import torch
    from workerkit.framework import roles
    from workerkit.framework.interfaces.runner import WorkerShape
    from workerkit.framework.interfaces.speculation import Drafts, Speculator
    from workerkit.framework.testing.conformance_speculation import SpeculatorConformance
    from workerkit.framework.testing.registry import fake_registry

    class Breaks(Speculator):
        def __init__(self, shape: WorkerShape) -> None:
            self.count, self.vocab_size, self.last = shape.num_speculative_tokens, shape.vocab_size, 0

        num_speculative_tokens = property(lambda self: self.count)

        def propose(self, inputs):
            tokens = inputs.next_tokens[:, None].repeat(1, self.count)
            {breaks}
            return Drafts(token_ids=tokens)

    class TestBreaks(SpeculatorConformance):
        names = ("breaks",)

        @pytest.fixture
        def registry(self):
            registry = fake_registry()
            registry.add(roles.SPECULATOR, "breaks", Breaks)
            return registry
"""


@pytest.mark.parametrize(
    ("breaks", "test"),
    [
        ("tokens[:, 0] = -1", "the_right_form"),
        ("tokens[:] = self.vocab_size", "the_right_form"),
        ("tokens = tokens.int()", "the_right_form"),
        ("tokens[:] = tokens.shape[0]", "alone_and_among_others"),
        ("self.last = (self.last + 1) % self.vocab_size; tokens[:] = self.last", "forgets_an_aborted_request"),
        ("pass", "the_number_of_drafts"),  # it does not mind K = 0
    ],
)
def test_a_proposer_that_breaks_its_interface_fails_the_suite(pytester, breaks, test):
    pytester.makepyfile(BREAKS.replace("{breaks}", breaks))
    outcomes = pytester.runpytest("-q", "-k", test).parseoutcomes()
    assert outcomes["failed"] == (2 if "forgets" in test else 1)  # of both runners
    assert "passed" not in outcomes
