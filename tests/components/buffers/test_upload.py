"""One copy for several arrays."""

import numpy as np
import torch

from workerkit.components.buffers.upload import upload


def test_upload_splits_and_shares_nothing():
    first, second = np.array([1, 2, 3], np.int32), np.array([], np.int64)
    sent = upload(torch.device("cpu"), first, second, first)
    assert [tensor.tolist() for tensor in sent] == [[1, 2, 3], [], [1, 2, 3]]
    assert all(tensor.dtype == torch.int64 for tensor in sent)
    first[0] = 9
    assert sent[0].tolist() == [1, 2, 3]
