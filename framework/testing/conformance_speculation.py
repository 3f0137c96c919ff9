"""The conformance suite of proposers, and what a proposer gets in a step, made by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch

from workerkit.framework import roles
from workerkit.framework.assembly import Assembly, assemble
from workerkit.framework.errors import ConfigError, UnsupportedError
from workerkit.framework.interfaces.batch import BatchPlan
from workerkit.framework.interfaces.engine import Engine
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.kv_cache import BatchTables
from workerkit.framework.interfaces.sampling import DrawKeys, SamplerOutput
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.speculation import DraftInputs, Drafts, Speculator
from workerkit.framework.registry import Registry
from workerkit.framework.testing.conformance import Conformance
from workerkit.framework.testing.fakes_batch import make_batch

Build = Callable[..., Assembly]
_VOCAB, _MAX_LEN = 24, 48  # so few tokens that a random model repeats itself


class SpeculatorConformance(Conformance):
    """Drafts have the right form, and whoever proposes them, the output is what the target would write without them.

    Everything runs in whole workers around a small random model. `options` is what `components` must say for an
    implementation besides its name: the draft that it needs, say. It must be given nothing that lets one request learn
    from another.
    """

    role = roles.SPECULATOR
    besides: ClassVar[tuple[str, ...]] = ("none",)
    options: ClassVar[dict[str, dict[str, Any]]] = {}
    prompts: ClassVar[dict[str, list[int]]] = {
        "one token": [3],
        "repeats itself": [5, 6, 7, 8] * 4,
        "longer than a step": [(i * i) % _VOCAB for i in range(33)],
        "fills the context": [i % 7 for i in range(_MAX_LEN - 1)],
        "waits for a slot": [11, 12, 13] * 5,
    }

    _written: ClassVar[dict[tuple[str, int | None], dict[str, list[int]]]]

    def __init_subclass__(cls) -> None:
        cls._written = {}

    def make_config(self, name: str, registry: Registry) -> dict[str, Any]:
        """Real parts but for text; `none` decodes without drafts."""
        limits = {"max_num_reqs": 3, "max_num_batched_tokens": 16, "num_speculative_tokens": 0 if name == "none" else 3}
        loader = {"use": "random", "vocab_size": _VOCAB, "hidden_size": 32, "intermediate_size": 32}
        text = {"tokenizer": "fake", "chat_template": "fake"}
        return {
            "model": {"source": "random", "max_model_len": _MAX_LEN},
            "limits": limits,
            "cache": {"block_size": 4, "num_blocks": 80},
            "components": {
                **text,
                "loader": {**loader, "num_hidden_layers": 4},
                "speculator": name,
                "rejection": "none" if name == "none" else "standard",
                **self.options.get(name, {}),
            },
        }

    @pytest.fixture
    def build(self, implementation: str, registry: Registry) -> Iterator[Build]:
        """Started workers with the part, or with `none` in its place."""
        if missing := registry.missing_requirement(self.role.name, implementation):
            pytest.skip(f"{self.role.name}: {missing}")
        with contextlib.ExitStack() as stack:

            def built(runner: str, name: str = implementation, ahead: bool = False, **limits: int) -> Assembly:
                config = self.make_config(name, registry)
                config["limits"].update(limits)
                config["components"]["runner"] = runner
                config["components"]["scheduler"] = {"use": "continuous", "async_scheduling": ahead}
                assembly = stack.enter_context(assemble(config, registry=registry))
                assembly.engine.start()
                return assembly

            yield built

    def _seen(self, assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> list[Proposal]:
        """What comes out of the part, from now on."""
        part = assembly.get(self.role)
        seen: list[Proposal] = []
        original = type(part).propose

        def propose(self: Speculator, inputs: DraftInputs) -> Drafts:
            drafts = original(self, inputs)
            if self is part:
                seen.append(Proposal.of(inputs, drafts))
            return drafts

        monkeypatch.setattr(type(part), "propose", propose)
        return seen

    def _plain(self, build: Build, runner: str, params: SamplingParams) -> dict[str, list[int]]:
        """What is written without drafts; the same for every implementation."""
        key = runner, params.seed
        if key not in self._written:
            self._written[key] = write(build(runner, "none").engine, self.prompts, params)
        return self._written[key]

    def test_drafts_have_the_right_form(self, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also where all rows of a step are parts of prefills, or some are; and up to the end of the context."""
        assembly = build("v2")
        seen = self._seen(assembly, monkeypatch)
        for prompts in ({"alone": self.prompts["longer than a step"]}, self.prompts):
            write(assembly.engine, prompts)
        count = assembly.worker.shape.num_speculative_tokens
        kinds = {frozenset(proposal.is_partial.tolist()) for proposal in seen}
        assert len(kinds) == 3, "all, some and none of a step's rows were parts of prefills"
        for proposal in seen:
            drafts, shape = proposal.drafts, (len(proposal.is_partial), count)
            assert (drafts.token_ids.shape, drafts.token_ids.dtype) == (shape, torch.int64)
            for row in drafts.token_ids[~proposal.is_partial].tolist():
                real = row.index(-1) if -1 in row else count
                assert all(0 <= token < _VOCAB for token in row[:real])
                assert row[real:] == [-1] * (count - real), "behind a -1 there is nothing but -1"
            if drafts.logits is not None:
                assert (drafts.logits.shape, drafts.logits.dtype) == ((*shape, _VOCAB), torch.float32)
            if drafts.confidence is not None:
                assert (drafts.confidence.shape, drafts.confidence.dtype) == (shape, torch.float32)
                assert ((drafts.confidence >= 0) & (drafts.confidence <= 1)).all()

    @pytest.mark.parametrize(("runner", "count"), [("v1", 4), ("v2", 1), ("v2", 8)])
    def test_greedy_output_is_that_of_plain_decoding(self, build: Build, runner: str, count: int) -> None:
        """Up to the end of the context, through prefills in parts, with slots that are used again."""
        plain = self._plain(build, runner, GREEDY)
        assert all(len(plain[name]) == _MAX_LEN - len(prompt) for name, prompt in self.prompts.items())
        assert write(build(runner, num_speculative_tokens=count).engine, self.prompts) == plain

    def test_steps_may_be_planned_before_tokens_are_known(self, build: Build) -> None:
        """Unless the part says that it reads tokens on the host: then such a worker is refused."""
        try:
            assembly = build("v2", ahead=True)
        except ConfigError as error:
            assert "reads sampled tokens on the host" in str(error)  # noqa: PT017
            return
        assert write(assembly.engine, self.prompts) == self._plain(build, "v2", GREEDY)

    @pytest.mark.parametrize("runner", ["v1", "v2"])
    def test_seeded_output_is_that_of_plain_sampling(
        self, build: Build, runner: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Unless drafts were drawn themselves: then it is distributed alike, as the rejection sampler's suite tests."""
        params = SamplingParams(temperature=0.7, seed=5)
        assembly = build(runner)
        seen = self._seen(assembly, monkeypatch)
        got = write(assembly.engine, self.prompts, params)
        if all(proposal.drafts.logits is None for proposal in seen):
            assert got == self._plain(build, runner, params)

    def test_a_request_gets_its_drafts_alone_and_among_others(
        self, build: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        together = build("v2")
        seen = self._seen(together, monkeypatch)
        write(together.engine, self.prompts)
        among = drafts_by_length(seen)
        for name in ("repeats itself", "longer than a step"):
            alone = build("v2")
            seen = self._seen(alone, monkeypatch)
            write(alone.engine, {name: self.prompts[name]})
            mine = drafts_by_length(seen)
            common = mine.keys() & among.keys()
            assert len(common) > 5
            assert {key: mine[key] for key in common} == {key: among[key] for key in common}

    @pytest.mark.parametrize("runner", ["v1", "v2"])
    def test_a_slot_forgets_an_aborted_request(
        self, build: Build, runner: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = "repeats itself"
        used, fresh = (build(runner, max_num_reqs=1) for _ in range(2))
        for num_steps in (1, 6):  # in the middle of its prefill, and of its output
            used.engine.add_request(self.prompts["longer than a step"], GREEDY, "aborted")
            for _ in range(num_steps):
                used.engine.step()
            used.engine.abort("aborted")
            used.engine.step()  # it is told, and the worker too
        results = []
        for assembly in (used, fresh):
            seen = self._seen(assembly, monkeypatch)
            results.append((write(assembly.engine, {name: self.prompts[name]}), drafts_by_length(seen)))
        assert results[0] == results[1]

    def test_the_number_of_drafts_is_the_limits(self, build: Build) -> None:
        for count in (1, 5):
            assert 1 <= build("v2", num_speculative_tokens=count).get(self.role).num_speculative_tokens <= count
        with pytest.raises(UnsupportedError, match=r"limits\.num_speculative_tokens"):
            build("v2", num_speculative_tokens=0)


GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def write(
    engine: Engine, prompts: Mapping[str, Sequence[int]], params: SamplingParams = GREEDY
) -> dict[str, list[int]]:
    """What an engine writes after the prompts, up to the end of the context, all at once."""
    tokens: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        room = engine.shape.max_model_len - len(prompt)
        engine.add_request(prompt, attrs.evolve(params, max_tokens=room, ignore_eos=True), name)
        tokens[name] = []
    while engine.has_unfinished:
        for delta in engine.step():
            tokens[delta.req_id].extend(delta.token_ids)
    engine.check_integrity()
    return tokens


@attrs.frozen(kw_only=True, eq=False)
class Proposal:
    """What a part proposed in one step; inputs are gone by the next."""

    req_ids: tuple[str, ...]
    is_partial: np.ndarray  # [num_reqs] bool
    lengths: list[int]  # of each request's text, the newest token included
    drafts: Drafts

    @staticmethod
    def of(inputs: DraftInputs, drafts: Drafts) -> Proposal:
        """Copies what will not stay."""
        batch = inputs.batch
        return Proposal(
            req_ids=batch.req_ids,
            is_partial=batch.plan.is_partial,
            lengths=(batch.seq_lens[: batch.num_reqs] - inputs.sampled.num_rejected + 1).tolist(),
            drafts=attrs.evolve(drafts, token_ids=drafts.token_ids.cpu().clone()),
        )


def drafts_by_length(seen: Sequence[Proposal]) -> dict[tuple[str, int], list[int]]:
    """(request, length of its text) -> its drafts at that point."""
    return {
        (proposal.req_ids[row], proposal.lengths[row]): proposal.drafts.token_ids[row].tolist()
        for proposal in seen
        for row in np.flatnonzero(~proposal.is_partial)
    }


@attrs.frozen(kw_only=True)
class Row:
    """What one request did in a step: a decode, a step that verified drafts, a part of a prefill or its end."""

    slot: int
    computed: int  # tokens before the step
    tokens: Sequence[int]  # of the step, drafts included
    drafts: int = 0  # how many of them
    sampled: Sequence[int] = ()  # (): the prefill goes on
    next_token: int = 0  # of the prompt, where the prefill goes on
    prompt_len: int = 4


def draft_inputs(rows: Sequence[Row], hidden_size: int = 4, device: str = "cpu") -> DraftInputs:
    """What a proposer gets after such a step, for proposers that look at tokens only: hidden states are zeros."""
    counts = np.array([len(row.tokens) for row in rows], dtype=np.int32)
    known = [row.prompt_len if row.sampled else row.computed + len(row.tokens) + 1 for row in rows]
    plan = BatchPlan(
        req_ids=tuple(f"r{row.slot}" for row in rows),
        slots=np.array([row.slot for row in rows], dtype=np.int64),
        num_scheduled_tokens=counts,
        num_computed_tokens=np.array([row.computed for row in rows], dtype=np.int32),
        num_draft_tokens=np.array([row.drafts for row in rows], dtype=np.int32),
        prefill_lens=np.array(known, dtype=np.int32),
        prompt_lens=np.array(known, dtype=np.int32),
    )
    desc = BatchDescriptor(num_tokens=int(counts.sum()), num_reqs=len(rows))
    where = torch.device(device)
    batch = make_batch(plan, [row.computed for row in rows], [row.tokens for row in rows], desc, where)
    width = max(row.drafts for row in rows) + 1
    sampled = torch.full((len(rows), width), -7, dtype=torch.int64)  # undefined behind what was sampled
    for line, row in enumerate(rows):
        sampled[line, : len(row.sampled)] = torch.tensor(row.sampled, dtype=torch.int64)
    return DraftInputs(
        batch=batch,
        tables=BatchTables(block_tables=(), slot_mappings=()),
        hidden=torch.zeros(desc.num_tokens, hidden_size, device=where),
        taps={},
        sampled=SamplerOutput(
            token_ids=sampled.to(where),
            num_sampled=torch.tensor([len(row.sampled) for row in rows], dtype=torch.int32, device=where),
            num_rejected=torch.tensor(
                [row.drafts + 1 - len(row.sampled) if row.sampled else 0 for row in rows],
                dtype=torch.int32,
                device=where,
            ),
        ),
        next_tokens=torch.tensor([row.sampled[-1] if row.sampled else row.next_token for row in rows], device=where),
        keys=DrawKeys(
            seeds=torch.zeros(len(rows), dtype=torch.int64, device=where),
            temperatures=torch.zeros(len(rows), device=where),
        ),
    )
