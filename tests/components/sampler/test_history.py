"""The text of a request on the device, against a list on the host."""

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workerkit.components.buffers.history import TokenHistory
from workerkit.framework.errors import IntegrityError
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.sampling import SamplerOutput, SamplerStage
from workerkit.framework.interfaces.sampling_params import SamplingParams


class Reader(SamplerStage):
    """Keeps the text that it was shown."""

    parameters = ("read",)
    reads_text = True

    def applies_to(self, params):
        return bool(params.extra_args.get("read"))

    def apply(self, logits, context):
        self.seen = dict(
            zip(zip(context.host_slots.tolist(), context.positions.tolist(), strict=True), context.text(), strict=True)
        )
        return logits


REQUEST = NewRequest(req_id="r", token_ids=(1,), prompt_len=1, sampling=SamplingParams(), block_ids=((1,),))
READ = {"extra_args": {"read": True}}


def output_of(tokens):
    counts = torch.tensor([len(ids) for ids in tokens], dtype=torch.int32)
    return SamplerOutput(token_ids=torch.tensor(tokens), num_sampled=counts, num_rejected=counts * 0)


def texts_of(reader, slot):
    """Rows of a slot: the text without what stands behind it."""
    result = []
    for (seen, position), text in sorted(reader.seen.items()):
        if seen == slot:
            assert (text[position + 1 :] == -1).all()
            result.append(text[: position + 1].tolist())
    return result


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_text_is_what_was_prefilled_sampled_and_drafted(new_bench, data):
    """Random chunks, drafts, acceptance, preemption and slot changes, beside rows that do not read."""
    reader = Reader()
    bench = new_bench(rows=4, max_model_len=40, extra=(reader,))
    token = st.integers(0, 15)
    tokens = st.lists(token, min_size=1, max_size=6)
    bench.admit(0, data.draw(tokens), computed=0, **READ)
    bench.admit(1, data.draw(tokens), computed=0)
    bench.admit(2, data.draw(tokens), computed=0, **READ)
    for _ in range(8):
        rows, chunks, finals = [], [], []
        for slot in data.draw(st.permutations(sorted(bench.live))):
            live = bench.live[slot]
            left = len(live.prompt) + len(live.output) - live.computed
            chunk = data.draw(st.integers(1, left))
            drafts = data.draw(st.lists(token, max_size=3)) if left == 1 else []
            rows.append((slot, drafts))
            chunks.append(chunk)
            accepted = data.draw(st.integers(0, len(drafts)))
            finals.append([*drafts[:accepted], data.draw(token)] if chunk == left else [])
        batch = bench.batch(rows, chunks)
        reader.seen = {}
        bench.process(torch.zeros(batch.num_logits, 16), batch)
        for (slot, drafts), final in zip(rows, finals, strict=True):
            known = [*bench.live[slot].prompt, *bench.live[slot].output]
            right = [known + drafts[:have] for have in range(len(drafts) + 1)]
            assert texts_of(reader, slot) == (right if final and slot != 1 else [])
        bench.commit(batch, *finals)
        if data.draw(st.booleans()) and 2 in bench.live:  # preempted, and resumed in another slot
            live = bench.live[2]
            bench.drop(2)
            bench.admit(3, live.prompt, live.output, computed=0, **READ)


def test_slots_that_nobody_reads_are_let_be(new_bench):
    bench = new_bench()
    history = TokenHistory(bench.shape, torch.device("cpu"))
    bench.admit(0, (1, 2))
    bench.admit(1, (3, 4))
    history.add(1, attrs.evolve(REQUEST, token_ids=(3, 4), prompt_len=2))
    history.commit(bench.decode(0, 1), output_of([[5], [6]]))
    bench.commit(bench.decode(0, 1), [5], [6])
    rows = torch.tensor([0, 1])
    text = history.text(bench.decode(0, 1), rows.numpy(), rows, torch.tensor([2, 2]))
    assert text.tolist() == [[0, 0, 0], [3, 4, 6]]


def test_a_stage_that_does_not_say_that_it_reads_text_gets_none(new_bench):
    class Undeclared(Reader):
        reads_text = False

    for stages in ((), ("penalties",)):
        bench = new_bench(stages=stages, extra=(Undeclared(),))
        bench.admit(0, **READ)
        with pytest.raises(IntegrityError, match="reads_text"):
            bench.process(torch.zeros(1, 16), bench.decode(0))


def test_the_last_step_of_a_full_context_may_sample_past_it(new_bench):
    bench = new_bench(max_model_len=4, drafts=2)
    bench.admit(0, (1,), (2,), frequency_penalty=1.0)
    bench.admit(1, (1,), (2,), frequency_penalty=1.0)
    bench.commit(bench.decode((0, (3, 4)), 1), [3, 4, 5], [6])
    rows = bench.process(torch.zeros(1, 16), bench.decode(1))
    assert rows.nonzero().tolist() == [[0, 2], [0, 6]]
