"""Level 2 drops what the kernels made of the weights, too."""

import gc
import weakref

from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.model import LoadedModel


def test_packed_copies_go_with_the_weights():
    config = {
        "model": {"source": "random", "max_model_len": 64, "dtype": "bfloat16"},
        "cache": {"block_size": 4, "num_blocks": 40},
        "limits": {"max_num_reqs": 2},
        "components": {"loader": "random"},
    }
    with assemble(config) as assembly:
        worker = assembly.worker
        worker.start()
        network = assembly.value(LoadedModel).network
        packed = [weakref.ref(network.head_product), *(weakref.ref(linear.product) for linear in network._linears())]
        worker.sleep(2)
        gc.collect()
        assert [ref() for ref in packed] == [None] * len(packed)
        worker.wake_up()
        worker.execute_dummy_batch()
