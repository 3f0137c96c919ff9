"""Lists by slot that grow."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workerkit.components.sampler.tables import SlotTable


@settings(max_examples=60, deadline=None)
@given(
    writes=st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(1, 99), max_size=9)), max_size=12),
    slots=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    pad=st.sampled_from([None, -1]),
)
def test_a_slot_holds_its_newest_list_however_the_table_grew(writes, slots, pad):
    table, lists = SlotTable(4, torch.device("cpu"), torch.int64, pad), {slot: [] for slot in range(4)}
    for slot, values in writes:
        table.write(slot, values)
        lists[slot] = values
    shown = [lists[slot] for slot in slots]
    width = max(map(len, shown))
    rows = table.gather(torch.tensor(slots), torch.tensor(slots).numpy()).tolist()
    for row, values in zip(rows, shown, strict=True):
        behind = pad if pad is not None else (values or [0])[0]
        assert row == [*values, *[behind] * (width - len(values))]
