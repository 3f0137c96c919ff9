"""Native products with quantised weights: against the reference, within the errors that their docstrings name, and a
row's bits against any other batch."""

import pytest
import torch

from workerkit.kernels import reference
from workerkit.kernels.cpu.native.quantized import linear_q4, linear_q8, linear_w8, linear_w8a8

NATIVE = {"linear_q4": linear_q4, "linear_q8": linear_q8, "linear_w8": linear_w8, "linear_w8a8": linear_w8a8}
# two kinds of linear_q4: with minima, and with those of Q4_0, which are not stored
KINDS = ["q4_1", "q4_0", "q8", "w8", "w8a8"]
GROUPED = KINDS[:3]
DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(7, 32), (32, 64), (33, 96), (96, 576)]
ODD_SIZES = [(1, 1), (5, 3), (40, 33), (31, 130)]
ROWS = [1, 2, 5, 6, 7, 8, 9, 17, 250]


def rand(*size, dtype=torch.float32, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(low, high, *size, dtype):
    return torch.randint(low, high, size, generator=torch.Generator().manual_seed(5), dtype=dtype)


def weight(kind, num_outputs, size, half=True):
    """(op, its codes, scales and minima): scales that fp16 holds exactly, as GGUF's, or not."""
    scales, minima = (rand(num_outputs, size // 32, seed=s) * 0.01 for s in (1, 2))
    minima = minima - 8 * scales
    if half:
        scales, minima = scales.half().float(), minima.half().float()
    if kind == "q4_1":
        return "linear_q4", integers(0, 256, num_outputs, size // 2, dtype=torch.uint8), scales, minima
    if kind == "q4_0":
        return "linear_q4", integers(0, 256, num_outputs, size // 2, dtype=torch.uint8), scales, scales * -8
    codes = integers(-128, 128, num_outputs, size, dtype=torch.int8)
    if kind == "q8":
        return "linear_q8", codes, scales
    return f"linear_{kind}", codes, rand(num_outputs, seed=3).abs()


def matrices(runtime, kind, num_outputs, size, dtype, bias=None, half=True):
    """The native one and the reference."""
    op, *args = weight(kind, num_outputs, size, half)
    return NATIVE[op](runtime, *args, bias, dtype), reference.OPS[op](*args, bias, dtype)


def error(got, expected):
    """Of each row, relative to the norm of the row."""
    return (got.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", GROUPED)
def test_products_are_exact_for_activations_that_int8_holds(runtime, kind, size, dtype, half):
    native, expected = matrices(runtime, kind, *size, dtype, rand(size[0]), half)
    for rows in ROWS:
        x = integers(-127, 128, rows, size[1], dtype=torch.int32).to(dtype)
        x[:, ::32] = 127  # so that each group's scale is a power of two, and nothing is rounded
        x[rows // 2] /= 4
        torch.testing.assert_close(native.logits(x), expected.logits(x), atol=1e-2, rtol=2e-6)
        assert torch.equal(native(x), native.logits(x).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", GROUPED)
def test_error_from_rounding_activations(runtime, kind, dtype):
    native, expected = matrices(runtime, kind, 960, 576, dtype)
    x = rand(40, 576, dtype=dtype)
    assert error(native.logits(x), expected.logits(x)).max() < 0.008
    x[:, 7::96] *= 1000  # in every third group the others vanish beside it
    assert error(native.logits(x), expected.logits(x)).max() < 0.023


@pytest.mark.parametrize("kind", GROUPED)
def test_rounding_is_to_the_nearest_code_of_each_group(runtime, kind):
    native, expected = matrices(runtime, kind, 96, 128, torch.float32)
    x = rand(9, 128) * torch.tensor([1e-3, 1.0, 50.0, 0.0]).repeat_interleave(32)
    groups = x.view(9, 4, 32)
    step = groups.abs().amax(-1, keepdim=True) / 127
    rounded = ((groups / step.clamp(min=1e-30)).round() * step).view(9, 128)
    assert error(native(x), expected(rounded)).max() < 1e-5
    assert ((x - rounded).norm(dim=1) <= 32**0.5 / 254 * x.norm(dim=1)).all()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES + ODD_SIZES)
def test_w8(runtime, size, dtype, with_bias):
    bias = rand(size[0], seed=4) if with_bias else None
    native, _ = matrices(runtime, "w8", *size, dtype, bias)
    _, codes, scales = weight("w8", *size)
    for rows in ROWS:
        x = rand(rows, size[1], dtype=dtype)
        wide = x.double() @ codes.double().T * scales.double() + (0 if bias is None else bias.double())
        terms = x.double().abs() @ codes.double().abs().T * scales.double() + 1
        assert ((native.logits(x) - wide).abs() <= 1e-6 * terms).all()
        assert torch.equal(native(x), native.logits(x).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES + ODD_SIZES)
def test_w8a8_has_the_bits_of_the_reference(runtime, size, dtype):
    native, expected = matrices(runtime, "w8a8", *size, dtype)
    for rows in ROWS:
        x = rand(rows, size[1], dtype=dtype)
        x[0] = 0
        assert torch.equal(native.logits(x), expected.logits(x))
        assert torch.equal(native(x), expected(x))


def test_w8a8_adds_the_bias(runtime):
    native, expected = matrices(runtime, "w8a8", 33, 96, torch.float32, rand(33))
    torch.testing.assert_close(native(rand(7, 96)), expected(rand(7, 96)), atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_batch(runtime, kind, dtype, threads):
    native, _ = matrices(runtime, kind, 100, 576, dtype, rand(100))
    x = rand(500, 576, dtype=dtype)
    together = native(x)
    for first, rows in [(0, 1), (499, 1), (3, 2), (17, 5), (235, 9), (100, 64), (0, 240), (1, 499)]:
        for count in (1, 2):
            threads(count)
            assert torch.equal(native(x[first : first + rows]), together[first : first + rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_products_have_the_bits_of_called_ones(runtime, kind, dtype):
    native, _ = matrices(runtime, kind, 96, 96, dtype)
    x, ids = rand(40, 96, dtype=dtype), torch.arange(40)
    program, (logits, rows) = runtime.record(lambda: (native.logits(native(x[:2])), native.rows(ids[:2])), 2, 40)
    for count in (40, 1, 13):
        program.run(count)
        assert torch.equal(logits[:count], native.logits(native(x[:count])))
        assert torch.equal(rows[:count], native.rows(ids[:count]))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_activations_may_lie_apart(runtime, kind):
    native, _ = matrices(runtime, kind, 33, 64, torch.bfloat16)
    wide = rand(9, 200, dtype=torch.bfloat16)
    assert torch.equal(native(wide[:, 3:67]), native(wide[:, 3:67].contiguous()))
    assert torch.equal(native(wide[:, 3:131:2]), native(wide[:, 3:131:2].contiguous()))
    assert native(wide[:0, :64]).shape == (0, 33)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows(runtime, kind, dtype, half):
    for size in [*SIZES, *([] if kind in GROUPED else ODD_SIZES)]:
        native, expected = matrices(runtime, kind, *size, dtype, half=half)
        ids = torch.arange(size[0]).flip(0)
        # Where a scale needs more than fp16, code * scale is rounded by one and not by the other.
        exact = {"atol": 0, "rtol": 0} if half else {"atol": 1e-7, "rtol": 1e-2 if dtype == torch.bfloat16 else 1e-5}
        torch.testing.assert_close(native.rows(ids), expected.rows(ids), **exact)
        assert torch.equal(native.rows(ids.int()), native.rows(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_there_are_not_are_nan(runtime, kind):
    native, _ = matrices(runtime, kind, 33, 64, torch.float32)
    rows = native.rows(torch.tensor([-1, 32, 33, 1 << 40]))
    assert rows[[0, 2, 3]].isnan().all()
    assert rows[1].isfinite().all()
    with pytest.raises(ValueError, match="they must be int32 or int64"):
        native.rows(torch.zeros(1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_seen_in_its_row_alone(runtime, kind, bad):
    native, _ = matrices(runtime, kind, 64, 96, torch.float32)
    x = rand(9, 96)
    x[4, 40] = bad
    finite = native(x).isfinite().all(dim=1)
    assert not native(x)[4].isfinite().any()
    assert finite.tolist() == [True] * 4 + [False] + [True] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_tiny_numbers(runtime, kind):
    native, _ = matrices(runtime, kind, 64, 96, torch.float32, rand(64))
    assert torch.equal(native(torch.zeros(3, 96)), rand(64).expand(3, 64))
    torch.testing.assert_close(native(torch.full((3, 96), 1e-38)), rand(64).expand(3, 64))


@pytest.mark.parametrize(
    ("kind", "half", "bytes_of_32"),
    [
        ("q4_1", True, 20),
        ("q4_0", True, 18),
        ("q8", True, 34),
        ("q4_1", False, 24),
        ("w8", True, 32),
        ("w8a8", True, 32),
    ],
)
def test_memory_is_what_a_file_takes(runtime, kind, half, bytes_of_32):
    native, _ = matrices(runtime, kind, 64, 576, torch.bfloat16, half=half)
    per_channel = 0 if kind in GROUPED else 4 * 64
    assert sum(t.numel() * t.element_size() for t in native.tensors) == 64 * 18 * bytes_of_32 + per_channel


def test_refusals_name_what_is_wrong(runtime):
    codes, scales = torch.zeros(4, 24, dtype=torch.uint8), torch.ones(4, 1)
    with pytest.raises(ValueError, match="linear_q4: the weight has 48 inputs, which is no multiple of 32"):
        linear_q4(runtime, codes, scales, scales, None, torch.float32)
    with pytest.raises(ValueError, match="linear_q8: the weight has 24 inputs, which is no multiple of 32"):
        linear_q8(runtime, codes.view(torch.int8), scales, None, torch.float32)
    with pytest.raises(ValueError, match=r"linear_q8: \[4, 1\] scales or minima for 2 groups"):
        linear_q8(runtime, torch.zeros(4, 64, dtype=torch.int8), scales, None, torch.float32)
    native, _ = matrices(runtime, "q8", 33, 64, torch.float32)
    for x in (rand(2, 63), rand(64), rand(2, 64).half()):
        with pytest.raises(ValueError, match=r"must be float32 or bfloat16 \[T, 64\]"):
            native(x)


@pytest.mark.parametrize("kind", KINDS)
def test_float16_has_the_reference(runtime, kind):
    native, expected = matrices(runtime, kind, 33, 64, torch.float16)
    assert torch.equal(native(rand(3, 64).half()), expected(rand(3, 64).half()))
