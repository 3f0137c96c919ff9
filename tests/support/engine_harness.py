"""An engine over the deterministic worker of tests/components/engine/conftest.py, with letters for text."""

import numpy as np

from workerkit.components.engine.scheduler import ContinuousScheduler, SchedulerConfig
from workerkit.components.engine.standalone import EngineConfig, StandaloneEngine
from workerkit.components.sampler.check import out_of_vocabulary
from workerkit.framework.errors import RequestError, UnsupportedError
from workerkit.framework.interfaces.request import Logprobs
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.stages import Later
from workerkit.framework.interfaces.text import ChatTemplate, Detokenizer, Tokenizer
from workerkit.framework.testing.fakes_text import FakeImageProcessor, FakeStructuredOutputs

HALF, BOS, EOS = 47, 48, 49


def text_of(token_ids):
    return "".join(chr(ord("A") + token) for token in token_ids)


class Letters(Tokenizer, Detokenizer, ChatTemplate):
    """Token 0 is "A", 1 is "B", … The detokenizer holds HALF back, and the template joins contents. Special tokens are
    text like others, unless they are skipped."""

    vocab_size = 50
    eos_token_ids = (EOS,)
    bos_token = text_of([BOS])
    eos_token = text_of([EOS])
    chat_template = ""
    special_token_ids = frozenset()

    def __init__(self, adds_bos=False, skipped=()):
        self.adds_bos = adds_bos
        self.skipped = skipped
        self.held = ""

    def encode(self, text, add_special_tokens=True):
        bos = [BOS] if add_special_tokens and self.adds_bos else []
        return bos + [ord(letter) - ord("A") for letter in text]

    def decode(self, token_ids, skip_special_tokens=True):
        return text_of(token_ids)

    def detokenizer(self, prompt_token_ids, skip_special_tokens=True):
        return Letters(skipped=self.special_token_ids if skip_special_tokens else ())

    def token_bytes(self, token_id):
        return text_of([token_id]).encode()

    def push(self, token_ids):
        text = self.held + text_of(token for token in token_ids if token not in self.skipped)
        self.held = text[-1:] if text.endswith(text_of([HALF])) else ""
        return text.removesuffix(self.held)

    def flush(self):
        return self.held

    def render(self, messages, add_generation_prompt=True):
        if not messages:
            raise UnsupportedError("no messages")
        return "".join(message["content"] for message in messages)


def logprob(token, position=0):
    """Of the token at a position, in the prompt or (always 0) sampled."""
    return -float(token) - position / 128


class Reporting:
    """Mixin of a worker that reports log-probabilities too, samples under grammars, and refuses `extra_args`."""

    cache_generation = 0
    masks = 0

    def check_request(self, params):
        if params.extra_args:
            raise RequestError(f"no stage knows extra_args {list(params.extra_args)}")
        for problem in out_of_vocabulary(params, self.shape.vocab_size):
            raise RequestError(problem)

    def execute_model(self, output):
        self.told = getattr(self, "told", {}) | {new.req_id: new for new in output.new_requests}
        before = {r.req_id: r.num_computed_tokens for r in (*output.new_requests, *output.cached_requests)}
        self.prompts = {}
        for name, count in output.num_scheduled_tokens.items():
            new = self.told[name]
            positions = range(before[name] + 1, min(before[name] + count + 1, new.prompt_len))
            if new.sampling.prompt_logprobs is not None and positions:
                tokens = [new.token_ids[position] for position in positions]
                self.prompts[name] = self._logprobs(tokens, positions, new.sampling.prompt_logprobs, ())
        return super().execute_model(output)

    @staticmethod
    def _logprobs(tokens, positions, num_top, chosen):
        rows = [[token, *range(num_top), *chosen] for token in tokens]
        values = [[logprob(i, position) for i in row] for row, position in zip(rows, positions, strict=True)]
        return Logprobs(
            token_ids=np.array(rows, dtype=np.int64),
            logprobs=np.array(values, dtype=np.float32),
            ranks=np.array(tokens) + 1,
            num_top=num_top,
        )

    def report(self, sampled):
        wanted = {name: self.told[name].sampling for name in sampled}
        return {
            "logprobs": {
                name: self._logprobs(tokens, [0] * len(tokens), wanted[name].logprobs, wanted[name].logprob_token_ids)
                for name, tokens in sampled.items()
                if wanted[name].logprobs is not None and tokens
            },
            "prompt_logprobs": self.prompts,
        }

    def sample_tokens(self, grammar=None):
        if grammar is not None:  # one mask a logits row
            counts = [1 + self.pending[name][1] for name in grammar.req_ids]
            assert len(grammar.bitmask) == sum(counts)
            self.first_rows = dict(zip(grammar.req_ids, np.cumsum([0, *counts]), strict=False))
        return super().sample_tokens(grammar)

    def pick(self, req_id, token, row, grammar):
        """The token itself when the mask allows it, else the first allowed one; -1 without a mask or without any."""
        if self.told[req_id].sampling.structured_outputs is None:
            return token
        if grammar is None or req_id not in grammar.req_ids:
            return -1
        self.masks += 1
        bits = grammar.bitmask[self.first_rows[req_id] + row].view(np.uint32)
        allowed = [token for token in range(self.shape.vocab_size) if bits[token // 32] >> np.uint32(token % 32) & 1]
        return token if token in allowed else allowed[0] if allowed else -1


def build_engine(
    fakes,
    async_scheduling=False,
    tokenizer=None,
    layout=None,
    shape=None,
    fault=None,
    tamper=None,
    seed=None,
    structured=None,
    config=None,
    **shape_args,
):
    """A started engine; `fake`, `scheduler` and `structured_built` are what tests look at."""
    shape = shape or fakes.shape(**shape_args)
    layout = layout or fakes.layout()
    worker = type("ReportingWorker", (Reporting, fakes.Worker), {})(shape, layout, fault, tamper)
    scheduler_config = SchedulerConfig(async_scheduling=async_scheduling, **(config or {}))
    scheduler = ContinuousScheduler(scheduler_config, shape, layout)
    letters = tokenizer or Letters()
    built = []

    def get_structured():
        if not built:
            built.append(structured or FakeStructuredOutputs(letters))
        return built[0]

    engine = StandaloneEngine(
        EngineConfig(seed=seed),
        worker,
        Later(lambda: scheduler),
        Later(lambda: letters),
        Later(lambda: letters),
        Later(get_structured),
        Later(FakeImageProcessor),
    )
    engine.start()
    engine.fake, engine.scheduler, engine.structured_built = worker, scheduler, built
    return engine


def params(**values):
    return SamplingParams(**{"seed": 0, "ignore_eos": True, **values})


def assert_empty(engine):
    """No request, block or dict entry is left anywhere, and the worker has heard of it."""
    engine.check_integrity()
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == engine.layout.num_blocks - 1
    assert not engine.fake.requests
    assert not engine.fake.uncollected
    assert not engine.has_unfinished
    steps, scheduler = engine._steps, engine.scheduler
    grammars = steps._grammars
    kept = (steps.live._completions, steps.live._requests, grammars._matchers, grammars._drafts, steps._in_flight)
    assert not any((*kept, scheduler._requests, scheduler._finished_ids, scheduler._leaving))


def drain(engine):
    deltas = []
    while engine.has_unfinished:
        deltas += engine.step()
        engine.check_integrity()
    assert_empty(engine)
    return deltas
