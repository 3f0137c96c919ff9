"""The standalone engine: whole requests, steps by hand, streams, interrupts, failures, life cycle."""

import functools
import random
import signal
import threading

import numpy as np
import pytest
from engine_harness import BOS, EOS, HALF, Letters, assert_empty, build_engine, drain, params, text_of

from workerkit.components.engine.scheduler import ContinuousScheduler
from workerkit.components.engine.standalone import EngineConfig, StandaloneEngine
from workerkit.framework.errors import IntegrityError, RequestError, StageError, UnsupportedError
from workerkit.framework.interfaces.request import ModelRunnerOutput
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.stages import Later


class Interrupting(Letters):
    """Its detokenizer presses Ctrl-C in the middle of the n-th step's text."""

    presses = 0
    at = 0

    def detokenizer(self, prompt_token_ids, skip_special_tokens=True):
        return self

    def push(self, token_ids):
        Interrupting.presses += 1
        if Interrupting.presses == self.at:
            signal.raise_signal(signal.SIGINT)
        return text_of(token_ids)

    def flush(self):
        return ""


@pytest.fixture
def make_engine(fakes):
    return functools.partial(build_engine, fakes)


@pytest.fixture(params=[(False, 0), (True, 0), (False, 3), (True, 3)], ids=["sync", "async", "drafts", "async drafts"])
def engine(request, make_engine):
    async_scheduling, num_drafts = request.param
    return make_engine(async_scheduling, num_speculative_tokens=num_drafts)


def expected(fakes, engine, prompt, its_params):
    """Reference tokens, its text, and why it ended; stop strings included."""
    stop_ids = {*its_params.stop_token_ids, *(() if its_params.ignore_eos else (EOS,))}
    tokens, reason = fakes.reference(prompt, its_params, stop_ids, engine.shape)
    for end in range(1, len(tokens) + 1):
        text = text_of(tokens[:end])
        certain = text.removesuffix(text_of([HALF])) if end < len(tokens) else text
        for stop in its_params.stop:
            position = certain.find(stop)
            if position >= 0:
                return tokens[:end], text_of(tokens)[:position], "stop"
    return tokens, text_of(tokens), reason


# Whole requests


def test_generate_equals_the_requests_alone(engine, fakes):
    prompts = ["ABC", "DE", "A", "FGHIJKLMNOPQRSTU", "ABC"]
    many = [params(max_tokens=n, seed=n % 3) for n in (5, 1, 20, 7, 5)]
    results = engine.generate(prompts, many)
    for prompt, its_params, result in zip(prompts, many, results, strict=True):
        ids = tuple(Letters().encode(prompt))
        assert result.prompt_token_ids == ids
        assert (result.token_ids, result.text, result.finish_reason) == expected(fakes, engine, ids, its_params)
    assert engine.stats.num_prompt_tokens == 25
    assert engine.stats.num_generated_tokens == 38
    assert engine.stats.num_steps == len([o for o in engine.fake.outputs if o.num_scheduled_tokens])
    assert_empty(engine)


@pytest.mark.parametrize(
    ("prompts", "ids"),
    [
        ("BC", [(1, 2)]),
        ([1, 2], [(1, 2)]),
        ((1, 2), [(1, 2)]),
        (np.array([1, 2]), [(1, 2)]),
        (["BC", "D"], [(1, 2), (3,)]),
        ([[1, 2], (3,), "E"], [(1, 2), (3,), (4,)]),
        ([np.array([1, 2])], [(1, 2)]),
        ([], []),
    ],
)
def test_one_prompt_or_many(engine, prompts, ids):
    results = engine.generate(prompts, params(max_tokens=2))
    assert [result.prompt_token_ids for result in results] == ids
    assert all(type(token) is int for result in results for token in result.prompt_token_ids)
    assert_empty(engine)


def test_params_that_do_not_match_the_prompts(engine):
    with pytest.raises(RequestError, match="3 prompts came with 2 sampling params"):
        engine.generate(["A", "B", "C"], [params(), params()])
    assert_empty(engine)


def test_a_refused_prompt_harms_no_other(engine, fakes):
    seen = []
    prompts = ["A", "", [1, 99], [1.5], 7, None, "B" * 64, "CC"]
    results = engine.generate(prompts, params(max_tokens=4), on_progress=seen.append)
    reasons = [result.finish_reason for result in results]
    assert reasons == ["length", *["error"] * 6, "length"]
    for result, message in zip(
        results[1:7], ["empty", "token 99", "float", "int", "NoneType", "64 tokens.* 64 "], strict=True
    ):
        assert result.token_ids == ()
        with pytest.raises(RequestError, match=message):
            raise RequestError(result.error)
    assert results[7].token_ids == expected(fakes, engine, (2, 2), params(max_tokens=4))[0]
    assert sorted(map(id, seen)) == sorted(map(id, results))
    assert_empty(engine)


@pytest.mark.parametrize("seed", range(12))
def test_random_requests_equal_the_requests_alone(make_engine, fakes, seed):
    """Tiny cache, stop strings, stop ids, speculation, both modes: each completion is the one of the request alone."""
    rng = random.Random(seed)
    engine = make_engine(
        async_scheduling=seed % 2 == 1,
        layout=fakes.layout(1 + 40, rng.choice([(2,), (3, 5)])),
        max_model_len=40,
        max_num_batched_tokens=rng.choice([1, 5, 64]),
        num_speculative_tokens=rng.choice([0, 3]),
    )
    prompts = [[rng.randrange(48) for _ in range(rng.randint(1, 20))] for _ in range(15)]
    many = [
        SamplingParams(
            seed=i,
            max_tokens=rng.choice([None, 1, 20]),
            stop=tuple(text_of(rng.choices(range(50), k=n)) for n in (1, 2, 2)) if i % 2 else (),
            stop_token_ids=(rng.randrange(50),) if i % 3 == 0 else (),
            ignore_eos=i % 5 == 0,
        )
        for i in range(15)
    ]
    results = engine.generate(prompts, many)
    for prompt, its_params, result in zip(prompts, many, results, strict=True):
        assert (result.token_ids, result.text, result.finish_reason) == expected(fakes, engine, prompt, its_params)
    assert_empty(engine)


# Steps by hand


def test_add_request_and_step(engine, fakes):
    assert engine.add_request("ABC", params(max_tokens=5), "mine") == "mine"
    other = engine.add_request([4, 5], params(max_tokens=1))
    with pytest.raises(RequestError, match="'mine' is in use"):
        engine.add_request("A", req_id="mine")
    assert engine.has_unfinished
    deltas = drain(engine)
    mine = [delta for delta in deltas if delta.req_id == "mine"]
    tokens, text, _ = expected(fakes, engine, (0, 1, 2), params(max_tokens=5))
    assert tuple(token for delta in mine for token in delta.token_ids) == tokens
    assert "".join(delta.text for delta in mine) == text
    assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + ["length"]
    assert all(delta.token_ids for delta in mine)
    assert [delta.finish_reason for delta in deltas if delta.req_id == other] == ["length"]
    assert engine.step() == []


def test_generated_ids_avoid_those_in_use(engine):
    engine.add_request("A", params(max_tokens=1), "request-0")
    assert engine.add_request("A", params(max_tokens=1)) == "request-1"
    drain(engine)


def test_abort_ends_with_a_last_delta(engine):
    running = engine.add_request("ABC", params(max_tokens=30))
    waiting = engine.add_request("B" * 40, params(max_tokens=3))
    engine.step()
    engine.abort(running)
    engine.abort(waiting)
    engine.abort("never heard of")
    ends = [(delta.req_id, delta.finish_reason) for delta in drain(engine) if delta.finish_reason]
    assert ends == [(running, "abort"), (waiting, "abort")]


def test_b60_an_id_can_be_used_again_at_once(engine, fakes):
    engine.add_request("ABC", params(max_tokens=30), "x")
    engine.step()
    engine.abort("x")
    engine.add_request("DE", params(max_tokens=3), "x")
    deltas = drain(engine)
    ended = [delta.finish_reason for delta in deltas].index("abort")
    tokens = tuple(token for delta in deltas[ended + 1 :] for token in delta.token_ids)
    assert tokens == expected(fakes, engine, (3, 4), params(max_tokens=3))[0]


def test_b125_requests_and_aborts_leave_nothing(engine):
    for i in range(300):
        engine.add_request([i % 50], params(max_tokens=1 + i % 3), f"{i}")
        if i % 4 == 0:
            engine.abort(f"{i - i % 8}")
        if i % 3 == 0:
            engine.step()
    drain(engine)


def test_eos_ends_a_request_and_is_neither_token_nor_text(engine, fakes):
    """Prompts are searched until one's third token is eos."""
    seed = next(s for s in range(10_000) if _third_is_eos(fakes, s))
    (result,) = engine.generate([[1, 2]], SamplingParams(seed=seed, max_tokens=9))
    assert (len(result.token_ids), result.finish_reason) == (2, "stop")
    assert result.text == text_of(result.token_ids)
    (result,) = engine.generate([[1, 2]], SamplingParams(seed=seed, max_tokens=3, ignore_eos=True))
    assert (result.token_ids[2], result.finish_reason) == (EOS, "length")


def _third_is_eos(fakes, seed):
    tokens = [1, 2]
    for _ in range(3):
        tokens.append(fakes.next_token(tokens, seed, 50))
    return tokens[4] == EOS and EOS not in tokens[2:4]


def test_b142_tokens_past_a_stop_string_do_not_count(make_engine, fakes):
    """Speculation yields several tokens a step; those after the one that completes the stop are cut."""
    engine = make_engine(num_speculative_tokens=4)
    alone = fakes.reference((7,), params(max_tokens=30), (), engine.shape)[0]
    results = []
    for end in range(2, 12):
        stop = text_of(alone[end - 2 : end])
        (result,) = engine.generate([[7]], params(max_tokens=30, stop=("never", stop)))
        results.append((result.token_ids, result.text, result.finish_reason))
        assert_empty(engine)
    assert results == [(alone[:end], text_of(alone[: end - 2]), "stop") for end in range(2, 12)]


def test_b144_a_stop_string_in_the_first_of_many_tokens_is_found(make_engine, fakes):
    """B144: all five tokens of a step are looked at."""
    engine = make_engine(num_speculative_tokens=4)
    engine.fake.propose = lambda request: right_drafts(fakes, request, 4)
    tokens = fakes.reference((7,), params(max_tokens=11), (), engine.shape)[0]
    for end in range(1, 11):
        if tokens[end] in tokens[:end]:
            continue
        stop = text_of(tokens[end : end + 1])
        (result,) = engine.generate([[7]], params(max_tokens=11, stop=(stop,)))
        assert (result.token_ids, result.text) == (tokens[: end + 1], text_of(tokens[:end]))
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 20
    assert_empty(engine)


def right_drafts(fakes, request, count):
    tokens = list(request.tokens)
    for _ in range(count):
        tokens.append(fakes.next_token(tokens, request.seed, 50))
    return tuple(tokens[len(request.tokens) :])


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_drafts_that_are_right_save_steps(make_engine, fakes, async_scheduling):
    """K = 4: a prompt's step yields one token, each further one five, until max_tokens cuts."""
    engine = make_engine(async_scheduling, num_speculative_tokens=4)
    engine.fake.propose = lambda request: right_drafts(fakes, request, 4)
    (result,) = engine.generate([[7]], params(max_tokens=13))
    assert result.token_ids == fakes.reference((7,), params(max_tokens=13), (), engine.shape)[0]
    stats = engine.stats
    assert stats.num_steps == 4
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 9, 9)


def test_accepted_tokens_are_found_by_others(make_engine):
    """Those that came as drafts are in the prefix cache like any, and what was proposed behind the text is not."""
    engine = make_engine(num_speculative_tokens=4)
    (first,) = engine.generate([[1, 2, 3]], params(max_tokens=29))
    assert engine.stats.num_accepted_tokens > 5
    prompt = (1, 2, 3, *first.token_ids)
    (second,) = engine.generate([prompt], params(max_tokens=3))
    assert second.num_cached_tokens == 28  # 31 were computed: seven blocks are full
    (third,) = engine.generate([[1, 2, 3]], params(max_tokens=32))
    assert third.token_ids == (*first.token_ids, *second.token_ids)


def test_a_preempted_request_keeps_its_seed(make_engine, fakes):
    engine = make_engine(layout=fakes.layout(1 + 16, (1,)), max_model_len=16)
    for i in range(3):
        engine.add_request([i], SamplingParams(max_tokens=15, ignore_eos=True), f"{i}")
    drain(engine)
    assert engine.stats.num_preemptions > 0
    new = [new for output in engine.fake.outputs for new in output.new_requests]
    seeds = {(r.req_id, r.sampling.seed) for r in new}
    assert len(new) > 3
    assert len(seeds) == 3
    assert all(isinstance(seed, int) for _, seed in seeds)


def test_seeds_of_requests_without_one(make_engine):
    def tokens(seed):
        many = make_engine(seed=seed).generate(["A", "A"], SamplingParams(max_tokens=8, ignore_eos=True))
        assert many[0].token_ids != many[1].token_ids
        return [result.token_ids for result in many]

    assert tokens(3) == tokens(3)
    assert tokens(3) != tokens(4)
    assert tokens(None) != tokens(None)


def test_two_steps_are_in_flight(make_engine):
    engine = make_engine(async_scheduling=True)
    engine.add_request("A", params(max_tokens=6))
    engine.step()
    assert len(engine.fake.outputs) == 2
    assert len(engine.fake.uncollected) == 1
    drain(engine)


# Streams


def test_stream_and_chat(engine, fakes):
    deltas = list(engine.stream("ABC", params(max_tokens=6)))
    tokens, text, _ = expected(fakes, engine, (0, 1, 2), params(max_tokens=6))
    assert "".join(delta.text for delta in deltas) == text
    assert tuple(token for delta in deltas for token in delta.token_ids) == tokens
    assert [delta.finish_reason is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    messages = [{"role": "user", "content": "AB"}, {"role": "user", "content": "C"}]
    assert "".join(delta.text for delta in engine.chat(messages, params(max_tokens=6))) == text
    with pytest.raises(UnsupportedError):
        engine.chat([])
    assert_empty(engine)


def test_streams_and_steps_can_be_mixed(engine, fakes):
    mine = engine.add_request("ABC", params(max_tokens=9))
    texts = {"AB": "", "CD": ""}
    streams = {prompt: engine.stream(prompt, params(max_tokens=9)) for prompt in texts}
    while streams:
        for prompt in list(streams):
            delta = next(streams[prompt], None)
            if delta is None:
                del streams[prompt]
            else:
                texts[prompt] += delta.text
    for prompt, text in texts.items():
        assert text == expected(fakes, engine, Letters().encode(prompt), params(max_tokens=9))[1]
    deltas = drain(engine)
    assert {delta.req_id for delta in deltas} == {mine}
    assert "".join(delta.text for delta in deltas) == expected(fakes, engine, (0, 1, 2), params(max_tokens=9))[1]


def test_closing_a_stream_aborts_it(engine):
    for taken in range(4):
        stream = engine.stream("ABC", params(max_tokens=30))
        for _ in range(taken):
            next(stream)
        stream.close()
        assert_empty(engine)


def test_a_stream_ends_when_its_request_is_aborted(engine):
    stream = engine.stream("ABC", params(max_tokens=30))
    engine.abort(next(stream).req_id)
    assert [delta.finish_reason for delta in stream][-1] == "abort"
    assert_empty(engine)


def test_a_refused_stream(engine):
    with pytest.raises(RequestError, match="empty"):
        next(engine.stream(""))
    assert_empty(engine)


@pytest.mark.parametrize(
    ("adds_bos", "content", "expected_ids"),
    [
        (True, "A", (BOS, 0)),
        (True, text_of([BOS, 0]), (BOS, 0)),
        (False, text_of([BOS, 0]), (BOS, 0)),
        (False, "A", (0,)),
    ],
)
def test_b107_one_beginning_of_text(make_engine, adds_bos, content, expected_ids):
    engine = make_engine(tokenizer=Letters(adds_bos))
    list(engine.chat([{"role": "user", "content": content}], params(max_tokens=1)))
    assert engine.fake.outputs[0].new_requests[0].token_ids == expected_ids


# Interrupts


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_of_the_caller_aborts_its_requests(engine, error):
    def stop(completion):
        raise error

    others = engine.add_request("A", params(max_tokens=20))
    with pytest.raises(error):
        engine.generate(["A"] * 9, params(max_tokens=4), on_progress=stop)
    engine.check_integrity()
    stats = engine.stats
    assert stats.num_running + stats.num_waiting == 1
    assert not engine.fake.uncollected, "a step is still in flight, and blocks of the aborted requests with it"
    deltas = drain(engine)
    assert {delta.req_id for delta in deltas} == {others}
    assert sum(len(delta.token_ids) for delta in deltas) == 20


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("at", [1, 2, 7, 20])
def test_ctrl_c_in_the_middle_of_a_step(make_engine, monkeypatch, async_scheduling, at):
    monkeypatch.setattr(Interrupting, "presses", 0)
    monkeypatch.setattr(Interrupting, "at", at)
    handler = signal.getsignal(signal.SIGINT)
    engine = make_engine(async_scheduling, tokenizer=Interrupting())
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["A", "BC", "DEF"] * 3, params(max_tokens=9))
    assert signal.getsignal(signal.SIGINT) is handler
    assert Interrupting.presses >= at
    assert_empty(engine)
    assert [r.finish_reason for r in engine.generate(["A"], params(max_tokens=3))] == ["length"]


def test_ctrl_c_in_a_step_by_hand_loses_no_delta(make_engine, monkeypatch):
    monkeypatch.setattr(Interrupting, "presses", 0)
    monkeypatch.setattr(Interrupting, "at", 2)
    engine = make_engine(tokenizer=Interrupting())
    engine.add_request("A", params(max_tokens=4))
    deltas = engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    deltas += drain(engine)
    assert sum(len(delta.token_ids) for delta in deltas) == 4


def test_a_second_ctrl_c_is_not_held_back(make_engine):
    def press_twice(output):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second one was held back")

    engine = make_engine(fault=press_twice)
    with pytest.raises(KeyboardInterrupt):
        engine.generate("A", params(max_tokens=3))
    with pytest.raises(StageError, match="KeyboardInterrupt"):
        engine.add_request("A")


def test_another_thread_may_drive_the_engine(engine):
    results = []
    thread = threading.Thread(target=lambda: results.extend(engine.generate("A", params(max_tokens=3))))
    thread.start()
    thread.join()
    assert len(results[0].token_ids) == 3


# Failures


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_error_of_the_worker_ends_all_requests_and_the_engine(make_engine, async_scheduling):
    def break_down(output):
        if len(engine.fake.outputs) == 4:
            raise RuntimeError("boom")

    engine = make_engine(async_scheduling, fault=break_down)
    free = engine.stats.num_free_blocks
    mine = engine.add_request("A", params(max_tokens=9))
    results = engine.generate(["AB"] * 6, params(max_tokens=9))
    assert {result.finish_reason for result in results} == {"error"}
    assert {result.error for result in results} == {"RuntimeError: boom"}
    assert any(result.token_ids for result in results), "what was there before stays"
    deltas = engine.step()
    assert (deltas[-1].req_id, deltas[-1].finish_reason) == (mine, "error")
    assert not engine.has_unfinished
    assert engine.stats.num_free_blocks == free
    assert not len(engine._live)
    for call in (
        engine.step,
        lambda: engine.add_request("A"),
        lambda: engine.generate("A"),
        lambda: next(engine.stream("A")),
    ):
        with pytest.raises(StageError, match="boom") as caught:
            call()
        assert isinstance(caught.value.__cause__, RuntimeError)
    engine.shutdown()


def test_an_answer_that_contradicts_the_step_stops_the_engine(make_engine):
    def lose_a_token(result):
        return ModelRunnerOutput(req_ids=result.req_ids, sampled_token_ids=((),) * len(result.req_ids))

    engine = make_engine(tamper=lose_a_token)
    (result,) = engine.generate("A", params(max_tokens=3))
    assert result.finish_reason == "error"
    assert "IntegrityError" in result.error
    assert engine.stats.num_free_blocks == engine.layout.num_blocks - 1


def test_a_token_outside_the_vocabulary_ends_one_request(make_engine):
    """B117: the others go on."""

    def spoil_the_first(result):
        first, *rest = result.sampled_token_ids
        spoilt = result.req_ids[0] == "request-0" and first
        return ModelRunnerOutput(req_ids=result.req_ids, sampled_token_ids=((50,) if spoilt else first, *rest))

    engine = make_engine(tamper=spoil_the_first)
    results = engine.generate(["A", "BC"], params(max_tokens=3))
    assert [(r.finish_reason, len(r.token_ids)) for r in results] == [("error", 0), ("length", 3)]
    assert "outside the vocabulary" in results[0].error
    assert_empty(engine)


def test_an_error_of_the_text_ends_one_request(make_engine):
    class Failing(Letters):
        def detokenizer(self, prompt_token_ids, skip_special_tokens=True):
            return self if list(prompt_token_ids) == [0] else Letters()

        def push(self, token_ids):
            raise UnicodeError("bad bytes")

    engine = make_engine(tokenizer=Failing())
    results = engine.generate(["A", "BC"], params(max_tokens=3))
    assert [r.finish_reason for r in results] == ["error", "length"]
    assert results[0].error == "UnicodeError: bad bytes"
    assert_empty(engine)


def test_a_scheduler_that_is_stuck_is_reported(make_engine, monkeypatch):
    monkeypatch.setattr(ContinuousScheduler, "_plan_waiting", lambda self, plan: None)
    (result,) = make_engine().generate("A", params(max_tokens=1))
    assert "schedules nothing and waits for nothing" in result.error


# Life cycle


def test_start_and_shutdown(make_engine, capsys):
    engine = make_engine()
    assert engine.fake.calls == ["start"]
    unfinished = engine.add_request("A", params(max_tokens=9))
    engine.step()
    engine.shutdown()
    engine.shutdown()
    assert engine.fake.calls == ["start", "shutdown", "shutdown"]
    assert [(d.req_id, d.finish_reason) for d in engine.step()] == [(unfinished, "abort")]
    assert not engine.has_unfinished
    with pytest.raises(StageError, match="shut down"):
        engine.generate("A")
    assert capsys.readouterr().err == ""


def test_parts_are_asked_for_only_after_the_worker_has_started(fakes, capsys):
    worker = fakes.Worker(fakes.shape(), fakes.layout())
    asked = []

    def later(name):
        def get():
            asked.append((name, list(worker.calls)))

        return Later(get)

    names = ("scheduler", "tokenizer", "chat template", "structured outputs", "image processor")
    engine = StandaloneEngine(EngineConfig(), worker, *map(later, names))
    engine.shutdown()
    worker.calls.clear()
    assert asked == []
    engine.start(progress=True)
    assert asked == [(name, ["start"]) for name in ("scheduler", "tokenizer", "chat template")]
    assert "starting" in capsys.readouterr().err


def test_check_integrity_compares_engine_and_scheduler(make_engine):
    engine = make_engine()
    engine.add_request("A", params(max_tokens=9), "x")
    engine._live.remove(engine._live["x"])
    with pytest.raises(IntegrityError, match="the engine has 0 completions"):
        engine.check_integrity()


def test_config_refuses_a_negative_seed():
    with pytest.raises(ValueError, match="'seed' must be >= 0 or null: -1"):
        EngineConfig(seed=-1)
