"""The CUDA device: what it says where there is none, its arithmetic, and on a real one that all of it works."""

import contextlib
import subprocess
from types import SimpleNamespace

import pytest
import torch

from workerkit.components.device import cuda
from workerkit.components.device.cpu import CpuDevice
from workerkit.components.device.cuda import CudaDevice, health_of
from workerkit.components.worker.npu import parse_text_output
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.sections import ModelSection

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch sees none")


@pytest.fixture
def device():
    return CudaDevice(ModelSection())


def test_a_gpu_that_is_not_there_is_refused_by_name(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r"GPU 0 is not there, torch .* sees 0; right would be `device: cpu`"):
        device.initialize(0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UnsupportedError, match=r"GPU 2 is not there, torch .* sees 2"):
        device.initialize(2)


@pytest.mark.parametrize(
    ("wanted", "emulates", "dtype"),
    [("auto", True, torch.bfloat16), ("auto", False, torch.float16), ("float32", True, torch.float32)],
)
def test_what_auto_means(monkeypatch, wanted, emulates, dtype):
    for name, value in (
        ("is_available", lambda: True),
        ("device_count", lambda: 2),
        ("set_device", lambda device: None),
        ("is_bf16_supported", lambda including_emulation: emulates and not including_emulation),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    context = CudaDevice(ModelSection(dtype=wanted)).initialize(1)
    assert (context.device, context.dtype, context.local_rank) == (torch.device("cuda", 1), dtype, 1)


def test_work_is_issued_at_once_on_the_devices_stream(device, monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: entered.append(stream) or contextlib.nullcontext())
    device.__dict__["_stream"] = "its stream"
    seen = []
    good = device.submit(lambda: seen.append(1) or 7)
    bad = device.submit(lambda: 1 / 0)
    assert seen == [1], "nobody had to wait for it"
    assert entered == ["its stream"] * 2
    assert good.wait() == 7
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            bad.wait()


def test_the_peak_counts_torchs_tensors_and_what_libraries_took(device, monkeypatch):
    state = {"free": 900, "reserved": 50, "allocated": 40, "peak": 40}
    for name, value in (
        ("synchronize", lambda device: None),
        ("empty_cache", lambda: None),
        ("reset_peak_memory_stats", lambda device: None),
        ("mem_get_info", lambda device: (state["free"], 1000)),
        ("memory_reserved", lambda device: state["reserved"]),
        ("memory_allocated", lambda device: state["allocated"]),
        ("max_memory_allocated", lambda device: state["peak"]),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    device.reset_peak_memory()
    assert (device.memory().free_bytes, device.memory().total_bytes) == (900, 1000)
    state.update(free=760, reserved=180, peak=160)
    assert device.peak_memory_increase() == 120 + 10
    state.update(free=890, reserved=80)
    assert device.peak_memory_increase() == 120, "others gave memory back"


def test_health_is_read_from_nvidia_smi(device, monkeypatch):
    assert health_of("NVIDIA H100, 0\n") == "Device : NVIDIA H100\nHealth : OK"
    parse_text_output(health_of("NVIDIA GeForce RTX 3060, [N/A]\n"))
    with pytest.raises(UnsupportedError, match="3 uncorrectable memory errors"):
        parse_text_output(health_of("NVIDIA H100, 3"))
    monkeypatch.setattr(cuda.shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match="nvidia-smi, which knows the GPU's health, is not on the PATH"):
        device.health_text()
    monkeypatch.setattr(cuda.shutil, "which", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="7"))

    def run(command, **options):
        assert command[:3] == ["nvidia-smi", "-i", "GPU-7"]
        if "slow" in failures:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return SimpleNamespace(stdout="A GPU, 0")

    failures = set()
    monkeypatch.setattr(cuda.subprocess, "run", run)
    parse_text_output(device.health_text())
    failures.add("slow")
    with pytest.raises(UnsupportedError, match=r"nvidia-smi .* timed out"):
        device.health_text()


def test_a_cpu_captures_no_graphs_and_says_so():
    with pytest.raises(UnsupportedError, match=r"'cpu' captures no graphs: right would be `graph: none`"):
        CpuDevice(ModelSection()).graphs()


@needs_cuda
def test_real_steps_run_beside_the_host_and_copies_arrive(device):
    context = device.initialize(0)
    assert device.memory().free_bytes > 0
    device.reset_peak_memory()
    large = device.submit(lambda: torch.ones(2**20, device=context.device)).wait()
    assert device.peak_memory_increase() >= large.nbytes
    copy = device.submit(lambda: device.copy_to_host(large.mul_(3))).wait()
    assert copy.wait().is_pinned()
    assert copy.wait().sum() == 3 * 2**20
    device.synchronize()
    device.shutdown()


@needs_cuda
def test_real_graphs_replay_on_what_lies_at_their_addresses(device):
    context = device.initialize(0)
    graphs = device.graphs()

    def work():
        x, stream = torch.ones(8, device=context.device), graphs.new_stream()
        stream.wait_stream(graphs.current_stream())
        with graphs.use(stream):
            graph = graphs.new_graph()
            graph.capture_begin(pool=graphs.new_pool())
            y = x * 2
            graph.capture_end()
        graphs.current_stream().wait_stream(stream)
        x.fill_(5)
        graph.replay()
        return device.copy_to_host(y)

    assert device.submit(work).wait().wait().tolist() == [10.0] * 8
