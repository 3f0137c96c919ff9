"""Ops bound one by one from an ordered list of libraries."""

import pytest

from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.kernels import OPS, KernelLibrary
from workerkit.kernels import cpu, reference
from workerkit.plugins.builtin_kernels import CpuKernels, ReferenceKernels


class Library(KernelLibrary):
    def __init__(self, name, ops):
        self._name, self._ops = name, ops

    @property
    def name(self):
        return self._name

    @property
    def ops(self):
        return self._ops


def test_the_first_library_that_has_an_op_wins():
    kernels = OrderedKernels((CpuKernels(), ReferenceKernels()))
    assert set(kernels.bindings) == set(OPS)
    assert kernels.bindings["rms_norm"] == "cpu"
    assert kernels.bindings["paged_attention"] == "reference"
    assert kernels.rms_norm is cpu.OPS["rms_norm"]
    assert kernels.paged_attention is reference.OPS["paged_attention"]
    assert set(OrderedKernels((ReferenceKernels(), CpuKernels())).bindings.values()) == {"reference"}


def test_one_op_can_be_replaced_by_name():
    def rms_norm(x, weight, eps):
        return x

    kernels = OrderedKernels((Library("mine", {"rms_norm": rms_norm}), CpuKernels(), ReferenceKernels()))
    assert kernels.rms_norm is rms_norm
    assert kernels.bindings["rms_norm"] == "mine"
    assert kernels.bindings["fused_add_rms_norm"] == "cpu"


def test_missing_and_unknown_ops_are_refused_by_name():
    with pytest.raises(UnsupportedError) as error:
        OrderedKernels((CpuKernels(), Library("typo", {"rms_nrom": print})))
    message = str(error.value)
    assert "'rms_nrom'" in message
    assert "did you mean 'rms_norm'" in message
    assert "'typo'" in message
    assert "no kernel library offers 'silu_and_mul' (libraries: cpu, typo)" in message
    assert "'paged_attention'" in message
    assert "offers 'rms_norm'" not in message


def test_without_libraries_every_op_is_named():
    with pytest.raises(UnsupportedError) as error:
        OrderedKernels(())
    assert all(op in str(error.value) for op in OPS)
