"""The CPU's stream: order, errors, shutting down; its memory figures; and the pool that gives memory back."""

import threading
import time

import pytest
import torch

from workerkit.components.device.cpu import CpuDevice
from workerkit.components.device.memory_pool import StoragePool
from workerkit.framework.errors import StageError
from workerkit.framework.interfaces.sections import ModelSection


@pytest.fixture
def device():
    device = CpuDevice(ModelSection())
    yield device
    device.shutdown()


def test_work_runs_in_order_on_one_other_thread_and_the_caller_does_not_wait(device):
    gate, seen = threading.Event(), []
    first = device.submit(lambda: (gate.wait(5), seen.append(threading.get_ident())))
    later = [device.submit(lambda number=number: seen.append(number)) for number in range(20)]
    assert seen == []  # nothing ran while the first was held
    gate.set()
    for pending in (first, *later):
        pending.wait()
    assert seen[0] != threading.get_ident()
    assert seen[1:] == list(range(20))


def test_an_error_reaches_who_waits_each_time_and_harms_no_other(device):
    def fail():
        raise ValueError("broken")

    bad, good = device.submit(fail), device.submit(lambda: 7)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            bad.wait()
    assert good.wait() == 7
    device.synchronize()  # raises nothing of it


def test_shutting_down_finishes_what_is_queued_and_the_device_can_be_used_again(device):
    slow = device.submit(lambda: time.sleep(0.05) or "done")
    device.shutdown()
    assert slow.wait() == "done"
    assert device.submit(lambda: 1).wait() == 1


def test_submitting_and_shutting_down_at_once_loses_nothing(device):
    done = []

    def submit():
        done.extend(device.submit(lambda: 1).wait() for _ in range(200))

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        device.shutdown()
    for thread in threads:
        thread.join(30)
    assert len(done) == 800


def test_a_copy_to_the_host_is_a_copy(device):
    tensor = torch.arange(3)
    copy = device.copy_to_host(tensor)
    tensor.zero_()
    assert copy.wait().tolist() == [0, 1, 2]


def test_the_peak_is_of_what_happened_since_the_reset(device):
    memory = device.memory()
    assert 0 < memory.free_bytes <= memory.total_bytes
    device.reset_peak_memory()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    del block
    assert 48 * 2**20 < device.peak_memory_increase() < 512 * 2**20


def test_the_pool_frees_a_shared_storage_once_and_gives_zeros_back():
    pool, weight = StoragePool(), torch.ones(1000)
    pool.track("weights", (weight, weight.view(10, 100)))
    assert pool.discard("weights") == 4000
    with pytest.raises(StageError, match="already"):
        pool.discard("weights")
    assert weight.untyped_storage().nbytes() == 0
    pool.restore("weights")
    assert weight.tolist() == [0.0] * 1000
    with pytest.raises(StageError, match="not given back"):
        pool.restore("weights")


def test_what_is_tracked_adds_up_until_the_pool_is_told_to_forget_it():
    pool, tried, one, other = StoragePool(), torch.ones(10), torch.ones(100), torch.ones(1000)
    pool.track("kv_cache", (tried,))
    pool.forget("kv_cache")
    pool.track("kv_cache", (one,))
    pool.track("kv_cache", (other, one.view(10, 10)))
    assert pool.discard("kv_cache") == 4400
    assert [tensor.untyped_storage().nbytes() for tensor in (tried, one, other)] == [40, 0, 0]
    pool.restore("kv_cache")
    assert not one.any()
    assert not other.any()
