"""The conformance suite of rejection samplers: what comes out is the target's, and as many tokens as are accounted for.

`conformance` says how suites are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from workerkit.framework import roles
from workerkit.framework.assembly import Assembly
from workerkit.framework.interfaces.batch import BatchPlan, InputBatch
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.sampling import Sampler, SamplerOutput
from workerkit.framework.interfaces.speculation import Drafts
from workerkit.framework.registry import Registry
from workerkit.framework.testing.conformance import Conformance, request
from workerkit.framework.testing.fakes_batch import make_batch
from workerkit.framework.testing.fakes_model import FAKE_VOCAB
from workerkit.framework.testing.registry import fake_config, fake_registry

_K = 3  # drafts of each request
_ROWS, _ROUNDS, _TOKENS = 200, 50, 6


def verify_batch(drafts: Sequence[Sequence[int]], slots: Sequence[int], positions: Sequence[int]) -> InputBatch:
    """Requests with a newest token at a position each, and drafts behind it; -1 is one that was never proposed."""
    counts = np.array([len(ids) for ids in drafts], dtype=np.int32)
    ones = np.ones_like(counts)
    plan = BatchPlan(
        req_ids=tuple(f"r{slot}" for slot in slots),
        slots=np.array(slots, dtype=np.int64),
        num_scheduled_tokens=counts + 1,
        num_computed_tokens=np.array(positions, dtype=np.int32),
        num_draft_tokens=counts,
        prefill_lens=ones * 4,
        prompt_lens=ones * 4,
    )
    desc = BatchDescriptor(num_tokens=int(counts.sum()) + len(slots), num_reqs=len(slots))
    return make_batch(plan, positions, [[7, *ids] for ids in drafts], desc, torch.device("cpu"))


def yielded(output: SamplerOutput) -> list[list[int]]:
    """The tokens of each row."""
    pairs = zip(output.token_ids.tolist(), output.num_sampled.tolist(), strict=True)
    return [tokens[:count] for tokens, count in pairs]


class RejectionConformance(Conformance):
    """Tests with `exact` ask for the target's own output: they leave out what changes it on purpose."""

    role = roles.REJECTION
    lossy: ClassVar[tuple[str, ...]] = ("synthetic",)
    options: ClassVar[dict[str, dict[str, Any]]] = {"synthetic": {"rates": [0.9, 0.6, 0.3]}}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Once for each implementation that verifies anything."""
        if "implementation" not in metafunc.fixturenames:
            return
        names = self.names or [n for n in fake_registry().offers[self.role.name] if n not in ("fake", "none")]
        left_out = self.lossy if "exact" in metafunc.fixturenames else ()
        metafunc.parametrize("implementation", [name for name in names if name not in left_out])

    def make_config(self, name: str, registry: Registry) -> dict[str, Any]:
        """A real sampler over real kernels."""
        rejection = {"use": name, **self.options.get(name, {})}
        config = fake_config("v1", kernels="ordered", sampler="torch", rejection=rejection)
        config["limits"].update(max_num_reqs=_ROWS, num_speculative_tokens=_K)
        return config

    @pytest.fixture
    def exact(self, part: Any) -> Any:
        """The part under test, which must not change the output."""
        return part

    @pytest.fixture
    def sampler(self, assembly: Assembly) -> Sampler:
        """Of the worker."""
        return assembly.get(roles.SAMPLER)

    def admit(self, part: Any, sampler: Sampler, slot: int, **sampling: Any) -> None:
        """A request of four tokens in a slot."""
        new = request(f"r{slot}", **{"seed": slot, **sampling})
        part.add(slot, new)
        sampler.add(slot, new)

    def _verify(
        self,
        part: Any,
        sampler: Sampler,
        logits: torch.Tensor,
        batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """One step; `draft_logits` [num_reqs, K, V] were remembered by the one before it."""
        tokens = torch.full((batch.num_reqs, _K), -1)
        part.remember(batch, Drafts(token_ids=tokens, logits=draft_logits))
        output: SamplerOutput = part.verify(sampler.process(logits.clone(), batch), batch, sampler)
        return output

    @pytest.mark.parametrize("drawn", [False, True])
    def test_greedy_requests_get_what_is_likeliest(self, exact: Any, sampler: Sampler, drawn: bool) -> None:
        logits = _randn(4 * (_K + 1)).round()  # of equally likely tokens the lowest id
        best = [row.index(max(row)) for row in logits.tolist()]
        drafts = [best[row * (_K + 1) : row * (_K + 1) + _K] for row in range(4)]
        for row in range(4):
            self.admit(exact, sampler, row, temperature=0.0)
            drafts[row][row:] = [token + 1 for token in drafts[row][row:]]
        batch = verify_batch(drafts, range(4), [4] * 4)
        draft_logits = _randn(4 * _K, seed=1).view(4, _K, -1) if drawn else None
        output = self._verify(exact, sampler, logits, batch, draft_logits)
        assert yielded(output) == [best[row * (_K + 1) : row * (_K + 1) + row + 1] for row in range(4)]

    @pytest.mark.parametrize("drawn", [False, True])
    def test_outputs_are_distributed_like_the_target(self, exact: Any, sampler: Sampler, drawn: bool) -> None:
        """Two tokens of 10 000 texts, over as many steps as they take; the target looks at the previous token."""
        generator = torch.Generator().manual_seed(0)
        target, draft = (_randn(_TOKENS, seed=seed, tokens=_TOKENS) for seed in (0, 1))
        for slot in range(_ROWS):
            self.admit(exact, sampler, slot, temperature=1.0)
        seen = torch.zeros(_TOKENS, _TOKENS)
        for turn in range(_ROUNDS):
            texts: list[list[int]] = [[] for _ in range(_ROWS)]
            while min(map(len, texts)) < 2:
                tokens = torch.tensor([[text[-1] if text else 0] for text in texts])
                for _ in range(_K):
                    probs = draft[tokens[:, -1]].softmax(-1)
                    drafted = torch.multinomial(probs, 1, generator=generator) if drawn else probs.argmax(-1, True)
                    tokens = torch.cat([tokens, drafted], 1)
                draft_logits = draft[tokens[:, :-1]] if drawn else None
                # Positions are what random numbers differ by.
                positions = [4 + 20 * turn + len(text) for text in texts]
                batch = verify_batch(tokens[:, 1:].tolist(), range(_ROWS), positions)
                output = self._verify(exact, sampler, target[tokens.flatten()], batch, draft_logits)
                for text, more in zip(texts, yielded(output), strict=True):
                    text += more
            for first, second, *_ in texts:
                seen[first, second] += 1
        one = target[0, :_TOKENS].softmax(-1)
        expected = _ROWS * _ROUNDS * one[:, None] * target[:, :_TOKENS].softmax(-1)
        distance = ((seen - expected) ** 2 / expected).sum() - (_TOKENS**2 - 1)
        assert distance / np.sqrt(2 * (_TOKENS**2 - 1)) < 4

    def test_every_draft_is_accounted_for(self, part: Any, sampler: Sampler) -> None:
        """Accepted ones come first, unchanged; ragged rows, and rows without drafts."""
        drafts = [[1, 2, 3], [4], [], [5, 6], [1, 1, 1], [2, 0]]
        for slot in range(len(drafts)):
            self.admit(part, sampler, slot, temperature=1.0)
        for position in range(4, 24):
            batch = verify_batch(drafts, range(len(drafts)), [position] * len(drafts))
            logits = _randn(batch.num_logits, seed=position, tokens=8)
            output = self._verify(part, sampler, logits, batch)
            assert output.token_ids.shape == (len(drafts), _K + 1)
            assert output.token_ids.dtype == torch.int64
            assert output.num_sampled.dtype == output.num_rejected.dtype == torch.int32
            for row, (ids, tokens) in enumerate(zip(drafts, yielded(output), strict=True)):
                assert 1 <= len(tokens) <= len(ids) + 1
                assert tokens[:-1] == ids[: len(tokens) - 1]
                assert 0 <= tokens[-1] < 8
                assert int(output.num_rejected[row]) == len(ids) + 1 - len(tokens)

    @pytest.mark.parametrize("drawn", [False, True])
    def test_placeholders_are_never_accepted(self, part: Any, sampler: Sampler, drawn: bool) -> None:
        for slot in range(2):
            self.admit(part, sampler, slot, temperature=1.0)
        for position in range(4, 24):
            batch = verify_batch([[-1, -1, -1], [3, -1, 3]], [0, 1], [position] * 2)
            draft_logits = torch.zeros(2, _K, FAKE_VOCAB) if drawn else None
            output = self._verify(part, sampler, _randn(8, seed=position, tokens=8), batch, draft_logits)
            first, second = yielded(output)
            assert len(first) == 1
            assert len(second) <= 2
            assert min(first + second) >= 0

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_row_without_a_possible_token_ends_what_the_request_yields(
        self, part: Any, sampler: Sampler, temperature: float
    ) -> None:
        self.admit(part, sampler, 0, temperature=temperature)
        for position in range(4, 24):
            logits = torch.full((_K + 1, FAKE_VOCAB), -torch.inf)
            logits[[0, 2, 3], 3] = 0.0
            (tokens,) = yielded(self._verify(part, sampler, logits, verify_batch([[3, 3, 3]], [0], [position])))
            assert tokens in ([3], [3, -1])

    @pytest.mark.parametrize("drawn", [False, True])
    def test_a_request_is_the_same_alone_and_in_any_batch(self, part: Any, sampler: Sampler, drawn: bool) -> None:
        """B16, B118, B140: whatever the others' drafts are, and when the slot was used before."""
        drafts = [[1, 2, 3], [4, 5], [6, 7, -1], [1]]
        logits = [_randn(len(ids) + 1, seed=row, tokens=8) for row, ids in enumerate(drafts)]
        draft_logits = _randn(4 * _K, seed=9, tokens=8).view(4, _K, -1)

        def run(rows: list[int]) -> dict[int, list[int]]:
            for row in range(4):
                part.clear(row)
                sampler.clear(row)
                self.admit(part, sampler, row, temperature=1.0)
            batch = verify_batch([drafts[row] for row in rows], rows, [4 + row for row in rows])
            rest = torch.cat([logits[row] for row in rows])
            given = draft_logits[rows] if drawn else None
            return dict(zip(rows, yielded(self._verify(part, sampler, rest, batch, given)), strict=True))

        whole = run([0, 1, 2, 3])
        assert run([3, 1, 0, 2]) == whole
        for row in range(4):
            assert run([row]) == {row: whole[row]}

    @pytest.mark.parametrize("how", ["clear", "add", "remember"])
    def test_a_slot_forgets_the_drafts_before(self, part: Any, sampler: Sampler, how: str) -> None:
        """What is verified next was never drawn from the distribution that was remembered."""
        logits = _randn(_K + 1, tokens=8)
        batch = verify_batch([[1, 2, 3]], [0], [4])
        self.admit(part, sampler, 0, temperature=1.0)
        right = yielded(part.verify(logits, batch, sampler))
        tokens = torch.tensor([[1, 2, 3]])
        for seed in range(20):
            part.remember(batch, Drafts(token_ids=tokens, logits=_randn(_K, seed=seed, tokens=8)[None]))
            if how == "clear":
                part.clear(0)
            elif how == "add":
                self.admit(part, sampler, 0, temperature=1.0)
            else:
                part.remember(batch, Drafts(token_ids=tokens))
            assert yielded(part.verify(logits, batch, sampler)) == right


def _randn(rows: int, seed: int = 0, tokens: int = FAKE_VOCAB) -> torch.Tensor:
    """[rows, V] logits; of the first `tokens` ids only."""
    logits = torch.full((rows, FAKE_VOCAB), -torch.inf)
    logits[:, :tokens] = torch.randn(rows, tokens, generator=torch.Generator().manual_seed(seed)) * 1.5
    return logits
