"""Native products with dense weights: against the reference and float64, and a row's bits against any other batch."""

import pytest
import torch

from workerkit.kernels import reference
from workerkit.kernels.cpu.native.linear import embedding, linear

DTYPES = [torch.float32, torch.bfloat16]
# outputs and inputs that fill panels of 32 and pairs, and that do not
SIZES = [(1, 1), (1, 2), (5, 3), (16, 16), (31, 7), (32, 64), (33, 65), (48, 31), (100, 129), (96, 576), (65, 1537)]
ROWS = [1, 2, 7, 14, 15, 29, 130]


def rand(*size, dtype=torch.float32, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x, weight, bias):
    """The product in float64, and what an error may be measured by: the sum of its terms' magnitudes."""
    product, terms = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    return (product, terms) if bias is None else (product + bias.double(), terms + bias.double().abs())


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_products(runtime, size, dtype, with_bias):
    weight = rand(*size, dtype=dtype, seed=1)
    bias = rand(size[0], dtype=dtype, seed=2) if with_bias else None
    matrix = linear(runtime, weight, bias)
    for rows in ROWS:
        x = rand(rows, size[1], dtype=dtype)
        expected, terms = exact(x, weight, bias)
        got, logits = matrix(x), matrix.logits(x)
        assert (got.dtype, logits.dtype, got.shape) == (dtype, torch.float32, (rows, size[0]))
        assert ((logits - expected).abs() <= 2e-6 * terms).all()  # sums in float32
        assert torch.equal(got, logits.to(dtype))  # and one rounding
        torch.testing.assert_close(logits, reference.linear(weight, bias).logits(x), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_wider_tensor_and_columns_that_are_not_contiguous(runtime, dtype):
    weight, wide = rand(40, 33, dtype=dtype, seed=1), rand(20, 101, dtype=dtype)
    matrix = linear(runtime, weight, None)
    for x in (wide[:, 7:40], wide[::3, 3:36], rand(33, 20, dtype=dtype).T):
        assert torch.equal(matrix(x), matrix(x.clone(memory_format=torch.contiguous_format)))
    assert matrix(wide[:0, :33]).shape == (0, 40)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_beyond_a_row_is_not_used(runtime, dtype):
    weight, wide = rand(40, 33, dtype=dtype, seed=1), torch.full((3, 64), float("nan"), dtype=dtype)
    wide[:, :33] = rand(3, 33, dtype=dtype)
    assert torch.equal(linear(runtime, weight, None)(wide[:, :33]), linear(runtime, weight, None)(wide[:, :33].clone()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_depend_on_no_other_row_nor_on_threads(runtime, dtype, threads):
    weight, bias, x = (rand(*size, dtype=dtype, seed=i) for i, size in enumerate([(80, 259), (80,), (512, 259)]))
    matrix = linear(runtime, weight, bias)
    threads(1)
    alone = torch.cat([matrix(x[i : i + 1]) for i in range(len(x))])
    logits = torch.cat([matrix.logits(x[i : i + 1]) for i in range(len(x))])
    for number in (1, 2):
        threads(number)
        for rows in (*range(1, 71), 512):
            for start in {0, 512 - rows}:
                part = slice(start, start + rows)
                assert torch.equal(matrix(x[part]), alone[part]), (number, rows)
                assert torch.equal(matrix.logits(x[part]), logits[part]), (number, rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_the_weight(runtime, dtype):
    for size in SIZES:
        weight = rand(*size, dtype=dtype)
        matrix = embedding(runtime, weight)
        for id_dtype in (torch.int32, torch.int64):
            ids = torch.randint(size[0], (37,), generator=torch.Generator().manual_seed(0)).to(id_dtype)
            assert torch.equal(matrix.rows(ids), weight[ids])
            wrong = torch.tensor([-1, size[0], torch.iinfo(id_dtype).min, torch.iinfo(id_dtype).max], dtype=id_dtype)
            assert torch.equal(matrix.rows(wrong), weight[[0, -1, 0, -1]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_products_of_other_numbers_of_rows(runtime, dtype):
    table = embedding(runtime, rand(50, 30, dtype=dtype))
    up, down = (linear(runtime, rand(*size, dtype=dtype, seed=1), None) for size in ((70, 30), (20, 35)))
    ids = torch.randint(50, (300,), generator=torch.Generator().manual_seed(0))

    def forward(ids):
        return down.logits(up(table.rows(ids))[:, 35:])

    program, logits = runtime.record(lambda: forward(ids[:3]), 3, 300)
    for rows in (1, 3, 20, 300):
        program.run(rows)
        assert torch.equal(logits[:rows], forward(ids[:rows]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_memory_is_the_only_copy(runtime, dtype):
    weight, bias = rand(64, 96, dtype=dtype), rand(64, dtype=dtype, seed=1)
    matrix, x = linear(runtime, weight, bias), rand(4, 96, dtype=dtype)
    assert sum(tensor.nbytes for tensor in matrix.tensors) == weight.nbytes + bias.nbytes
    before = matrix(x)
    weight.zero_()
    assert torch.equal(matrix(x), before)
    for tensor in matrix.tensors:
        tensor.zero_()
    assert not matrix(x).any()
    assert not matrix.rows(torch.tensor([3])).any()


def test_float16_goes_the_way_of_torch(runtime):
    weight, x = rand(8, 16, dtype=torch.float16), rand(3, 16, dtype=torch.float16, seed=1)
    assert torch.equal(linear(runtime, weight, None)(x), torch.nn.functional.linear(x, weight))
    assert torch.equal(embedding(runtime, weight).rows(torch.tensor([5, 0])), weight[[5, 0]])


@pytest.mark.parametrize(
    ("size", "dtype"),
    [((2, 7), torch.float32), ((2, 8), torch.bfloat16), ((8,), torch.float32), ((1, 2, 8), torch.float32)],
)
def test_what_does_not_fit_is_refused(runtime, size, dtype):
    matrix, x = linear(runtime, torch.ones(3, 8), None), torch.zeros(size, dtype=dtype)
    for product in (matrix, matrix.logits):
        with pytest.raises(ValueError, match=r"must be torch.float32 \[T, 8\]"):
            product(x)


def test_ids_of_another_type_are_refused(runtime):
    with pytest.raises(ValueError, match="must be int32 or int64"):
        embedding(runtime, torch.ones(3, 8)).rows(torch.tensor([1.0]))
