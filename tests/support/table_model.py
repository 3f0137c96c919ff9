"""A model whose logits are a table put down in a test: those after token t are row t, whatever came before."""

import attrs
import torch

from workerkit.framework import roles
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.model import LoadedModel, Model
from workerkit.framework.testing.fakes_model import FAKE_MODEL, FakeLoader, FakeNetwork


class TableNetwork(FakeNetwork):
    """Its hidden states hold the token id in column 0."""

    def __init__(self, config, device, table):
        super().__init__(config, device)
        self.table = table

    def compute_logits(self, hidden):
        return self.table[hidden[:, 0].long()].clone()


def add_table_model(registry, table):
    """Register `model: table` and `loader: table`; table [V, V] float32."""

    class TableLoader(FakeLoader):
        def read_config(self):
            return attrs.evolve(FAKE_MODEL, vocab_size=len(table))

    class TableModel(Model):
        def __init__(self, context: DeviceContext) -> None:
            self._context = context

        def load(self):
            config = TableLoader().read_config()
            return LoadedModel(
                network=TableNetwork(config, self._context.device, torch.as_tensor(table, dtype=torch.float32)),
                config=config,
                weight_bytes=4,
            )

        def reload_weights(self, loaded):
            """There are none."""

    registry.add(roles.LOADER, "table", TableLoader)
    registry.add(roles.MODEL, "table", TableModel)
    return registry
