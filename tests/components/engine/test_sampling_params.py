"""What SamplingParams ask of the engine: n, log-probabilities, bad words, ends of the text, structured outputs; what is
refused before it is queued; and what the prefix cache has."""

import functools

import attrs
import pytest
from engine_harness import BOS, EOS, Letters, assert_empty, build_engine, drain, logprob, params, text_of

from workerkit.components.engine.resolve import bad_word_ids, of_completion
from workerkit.components.engine.scheduler import ContinuousScheduler
from workerkit.framework.errors import IntegrityError, RequestError, UnsupportedError
from workerkit.framework.interfaces.engine import CacheIdentity, TokenLogprobs
from workerkit.framework.interfaces.request import ModelRunnerOutput
from workerkit.framework.interfaces.sampling_params import StructuredOutputsParams
from workerkit.framework.testing.fakes_text import FakeStructuredOutputs


@pytest.fixture
def make_engine(fakes):
    return functools.partial(build_engine, fakes)


@pytest.fixture(params=[(False, 0), (True, 0), (False, 3), (True, 3)], ids=["sync", "async", "drafts", "async drafts"])
def engine(request, make_engine):
    async_scheduling, num_drafts = request.param
    return make_engine(async_scheduling, num_speculative_tokens=num_drafts)


def alone(fakes, engine, prompt, its_params):
    stop_ids = {*its_params.stop_token_ids, *(() if its_params.ignore_eos else (EOS,))}
    return fakes.reference(prompt, its_params, stop_ids, engine.shape)[0]


# n


def test_n_completions_follow_each_other_and_the_first_is_that_of_n_1(engine, fakes):
    seen = []
    results = engine.generate(["ABC", "", "DE"], params(max_tokens=9, n=3, seed=5), on_progress=seen.append)
    assert [(r.index, r.finish_reason) for r in results] == [
        *((i, "length") for i in range(3)),
        (0, "error"),
        *((i, "length") for i in range(3)),
    ]
    assert sorted(map(id, seen)) == sorted(map(id, results))
    assert len({r.req_id for r in results[:3]}) == len({r.req_id for r in results[4:]}) == 1
    assert len({r.token_ids for r in results}) == 7
    for prompt, three in (((0, 1, 2), results[:3]), ((3, 4), results[4:])):
        for index, result in enumerate(three):
            its_params = of_completion(params(max_tokens=9, seed=5, n=3), index)
            assert result.prompt_token_ids == prompt
            assert result.token_ids == alone(fakes, engine, prompt, its_params)
    assert results[0].token_ids == engine.generate("ABC", params(max_tokens=9, seed=5))[0].token_ids
    assert engine.stats.num_prompt_tokens == 3 * 5 + 3
    assert_empty(engine)


def test_completions_do_not_depend_on_company(engine):
    wanted = params(max_tokens=7, n=2, seed=5)
    first = engine.generate("ABC", wanted)
    engine.add_request("FGH", params(max_tokens=30))
    engine.step()
    again = engine.generate(["X", "ABC"], [params(max_tokens=3, n=3), wanted])[3:]
    assert [r.token_ids for r in again] == [r.token_ids for r in first]


def test_seeds_of_completions_meet_those_of_no_other_request():
    seeds = [of_completion(params(seed=seed, n=4), index).seed for seed in range(500) for index in range(4)]
    assert len(set(seeds)) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[::4] == list(range(500))
    assert set(seeds).isdisjoint(range(500, 10_000))


def test_deltas_say_which_completion_they_are_of(engine):
    engine.add_request("AB", params(max_tokens=4, n=2), "mine")
    deltas = drain(engine)
    assert {delta.req_id for delta in deltas} == {"mine"}
    for index in (0, 1):
        its = [delta for delta in deltas if delta.index == index]
        assert sum(len(delta.token_ids) for delta in its) == 4
        assert [delta.finish_reason for delta in its] == [None] * (len(its) - 1) + ["length"]


def test_a_stream_of_several_ends_with_the_last(engine):
    deltas = list(engine.stream("AB", params(max_tokens=5, n=3)))
    assert sorted(delta.index for delta in deltas if delta.finish_reason) == [0, 1, 2]
    assert sum(len(delta.token_ids) for delta in deltas) == 15
    assert_empty(engine)


def test_abort_ends_every_completion_that_is_left(engine, fakes):
    asked = [of_completion(params(n=3, max_tokens=9), index) for index in range(3)]
    for prompt in ((i, i) for i in range(48)):  # until completion 1 ends with its third token, and no other before
        first, second, third = (alone(fakes, engine, prompt, its) for its in asked)
        if second[2] not in {*first, *second[:2], *third}:
            break
    engine.add_request(prompt, params(max_tokens=30, n=3, stop_token_ids=second[2:3]), "x")
    deltas = []
    while not any(delta.finish_reason for delta in deltas):
        deltas += engine.step()
        with pytest.raises(RequestError, match="request id 'x' is in use"):
            engine.add_request("A", req_id="x")
    engine.abort("x")
    deltas += drain(engine)
    ends = [(delta.index, delta.finish_reason) for delta in deltas if delta.finish_reason]
    assert ends == [(1, "stop"), (0, "abort"), (2, "abort")]


@pytest.mark.parametrize("order", [0, 1])
def test_names_of_completions_meet_no_id_of_a_user(engine, order):
    users = ["x/0", "x/1", "x/1'", "y"]
    if order == 0:
        engine.add_request("AB", params(max_tokens=5, n=2), "x")
    for name in users:
        engine.add_request("CD", params(max_tokens=6), name)
    if order == 1:
        engine.add_request("AB", params(max_tokens=5, n=2), "x")
    engine.add_request("AB", params(max_tokens=4, n=2), "x/0'")
    count = {}
    for delta in drain(engine):
        key = delta.req_id, delta.index
        count[key] = count.get(key, 0) + len(delta.token_ids)
    assert count == {
        **{(name, 0): 6 for name in users},
        **{("x", index): 5 for index in (0, 1)},
        **{("x/0'", index): 4 for index in (0, 1)},
    }


def test_b124_an_error_in_add_request_leaves_nothing(engine, monkeypatch):
    """B124: whatever raises, and wherever, the request is nowhere: not in part either."""
    add, calls = ContinuousScheduler.add, []

    def fail_the_second(self, request):
        calls.append(request.req_id)
        if len(calls) % 2 == 0:
            raise KeyboardInterrupt if len(calls) % 4 else RequestError("no room")
        add(self, request)

    monkeypatch.setattr(ContinuousScheduler, "add", fail_the_second)
    for _ in range(500):
        with pytest.raises((RequestError, KeyboardInterrupt)):
            engine.add_request("AB", params(n=2), "x")
        assert_empty(engine)
    choice = StructuredOutputsParams(choice=("A",))
    with pytest.raises(KeyboardInterrupt):
        [engine.add_request("AB", params(n=2, structured_outputs=choice), "x") for _ in range(2)]
    assert_empty(engine)
    assert engine.stats.num_prompt_tokens == 0


def test_b125_nothing_is_kept_of_1000_requests(engine):
    """B125: with aborts, n = 2, grammars, prompt logprobs and refusals among them."""
    forms = [
        {},
        {"n": 2},
        {"structured_outputs": StructuredOutputsParams(choice=("AB", "ACD"))},
        {"prompt_logprobs": 1, "logprobs": 0, "n": 2},
        {"structured_outputs": StructuredOutputsParams(regex="refused")},
    ]
    for i in range(1000):
        try:
            engine.add_request([i % 50, 3], params(max_tokens=1 + i % 3, **forms[i % 5]), f"{i}")
        except RequestError:
            assert i % 5 == 4
        if i % 7 == 0:
            engine.abort(f"{i - i % 4}")
        if i % 3 == 0:
            engine.step()
    drain(engine)


# Log-probabilities


def entry(token, position=0, top=0, chosen=()):
    return TokenLogprobs(
        token_id=token,
        logprob=logprob(token, position),
        rank=token + 1,
        top=tuple((i, logprob(i, position)) for i in range(top)),
        chosen=tuple((i, logprob(i, position)) for i in chosen),
    )


@pytest.mark.parametrize(
    ("asked", "top", "chosen"),
    [
        ({"logprobs": 0}, 0, ()),
        ({"logprobs": 3}, 3, ()),
        ({"logprobs": 2, "logprob_token_ids": (7, 5)}, 2, (7, 5)),
        ({"logprob_token_ids": (7,)}, 0, (7,)),
    ],
)
def test_one_entry_a_token(engine, asked, top, chosen):
    (result,) = engine.generate("ABC", params(max_tokens=6, **asked))
    assert result.logprobs == tuple(entry(token, top=top, chosen=chosen) for token in result.token_ids)
    assert result.prompt_logprobs is None
    (result,) = engine.generate("ABC", params(max_tokens=6))
    assert result.logprobs is None


def test_b142_logprobs_end_where_the_tokens_end(make_engine, fakes):
    """B142: tokens behind the one that completes a stop string have none; a stop id neither."""
    engine = make_engine(num_speculative_tokens=4)
    tokens = alone(fakes, engine, (7,), params(max_tokens=30))
    for end in range(2, 12):
        stop = text_of(tokens[end - 2 : end])
        (result,) = engine.generate([[7]], params(max_tokens=30, stop=(stop,), logprobs=1))
        assert result.token_ids == tokens[:end]
        assert result.logprobs == tuple(entry(token, top=1) for token in tokens[:end])
        (result,) = engine.generate([[7]], params(max_tokens=30, stop_token_ids=tokens[end : end + 1], logprobs=0))
        assert result.logprobs == tuple(map(entry, result.token_ids))
    assert_empty(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("budget", [10, 9, 5, 3, 1, 16])
def test_b52_prompt_logprobs_are_the_same_for_all_chunk_sizes(make_engine, async_scheduling, budget):
    """B52: one entry a prompt token, the first None; one delta carries them, that of the first token."""
    engine = make_engine(async_scheduling, max_num_batched_tokens=budget)
    prompt = [4, 8, 15, 16, 23, 42, 4, 8, 1, 2]
    for _ in range(2):  # the second time the prefix is in the cache
        engine.add_request(prompt, params(max_tokens=3, prompt_logprobs=1))
        deltas = drain(engine)
        expected = (None, *(entry(token, position, top=1) for position, token in enumerate(prompt) if position))
        assert [delta.prompt_logprobs for delta in deltas] == [expected, None, None]
        assert [len(delta.token_ids) for delta in deltas] == [1, 1, 1]
    (result,) = engine.generate([prompt], params(max_tokens=3, prompt_logprobs=1))
    assert result.prompt_logprobs == expected


def test_prompt_logprobs_of_one_token(engine):
    (result,) = engine.generate([[5]], params(max_tokens=2, prompt_logprobs=0))
    assert result.prompt_logprobs == (None,)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_prompt_logprobs_of_a_prompt_that_is_preempted_in_its_middle(make_engine, fakes, async_scheduling):
    engine = make_engine(async_scheduling, layout=fakes.layout(1 + 13, (1,)), max_num_batched_tokens=2)
    engine.add_request([1, 2], params(max_tokens=9), "first")
    prompt = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    engine.add_request(prompt, params(max_tokens=2, prompt_logprobs=0), "second")
    deltas = [delta for delta in drain(engine) if delta.req_id == "second"]
    preempted = [output for output in engine.fake.outputs if "second" in output.preempted_req_ids]
    assert len(preempted) == 1
    chunks = [output.num_scheduled_tokens.get("second", 0) for output in engine.fake.outputs]
    assert 0 < sum(chunks[: engine.fake.outputs.index(preempted[0])]) < len(prompt)
    expected = (None, *(entry(token, position) for position, token in enumerate(prompt) if position))
    assert [delta.prompt_logprobs for delta in deltas] == [expected, None]


def test_prompt_logprobs_of_an_id_that_is_used_again(engine):
    """B60 for what is still on its way when the first request is aborted."""
    engine.add_request([*range(30)], params(max_tokens=2, prompt_logprobs=0), "x")
    engine.step()
    engine.abort("x")
    engine.add_request([7, 8, 9], params(max_tokens=2, prompt_logprobs=0), "x")
    deltas = drain(engine)
    assert [delta.finish_reason for delta in deltas] == ["abort", None, "length"]
    assert deltas[1].prompt_logprobs == (None, entry(8, 1), entry(9, 2))


def test_missing_logprobs_end_the_request_that_wants_them(make_engine):
    engine = make_engine(tamper=lambda result: attrs.evolve(result, logprobs={}, prompt_logprobs={}))
    asked = [params(max_tokens=3, **more) for more in ({"logprobs": 1}, {"prompt_logprobs": 1}, {})]
    results = engine.generate(["AB", "AB", "AB"], asked)
    assert [result.finish_reason for result in results] == ["error", "error", "length"]
    assert "logprobs of 0 tokens, 1 are needed" in results[0].error
    assert "prompt logprobs of 0 tokens, 1 are needed" in results[1].error
    assert_empty(engine)


# Bad words


class Words(Letters):
    """ "_" is a space, and "_CAT" a token of its own: 40."""

    def encode(self, text, add_special_tokens=True):
        ids = []
        while text:
            word = next((w for w in (" CAT", " DO") if text.startswith(w)), text[0])
            ids.append({" CAT": 40, " DO": 41, " ": 45}.get(word, ord(word[0]) - ord("A")))
            text = text[len(word) :]
        return [BOS, *ids] if add_special_tokens else ids


def test_bad_words_are_meant_with_and_without_a_space_before_them():
    letters = [2, 0, 19]
    assert bad_word_ids(["CAT"], Words()) == (tuple(letters), (40,))
    assert bad_word_ids([" CAT", "CAT"], Words()) == (tuple(letters), (40,))
    assert bad_word_ids(["DOG"], Words()) == ((3, 14, 6), (41, 6))
    assert bad_word_ids([" "], Words()) == ((45,),)


def test_scheduler_and_worker_get_bad_words_as_ids(make_engine):
    engine = make_engine(tokenizer=Words())
    engine.generate("A", params(max_tokens=1, bad_words=("CAT", "A"), bad_words_token_ids=((9, 9), (40,))))
    (new,) = engine.fake.outputs[0].new_requests
    assert new.sampling.bad_words_token_ids == ((9, 9), (40,), (2, 0, 19), (0,), (45, 0))


# The end of the text


def test_b06_a_stop_string_in_text_before_min_tokens_is_not_looked_at(engine, fakes):
    """B06: whatever min_tokens is, there are as many tokens, and the text may hold the stop string."""
    tokens = alone(fakes, engine, (0, 1), params(max_tokens=30))
    text = text_of(tokens)
    stop = text[1]
    for min_tokens in range(31):
        asked = params(max_tokens=30, stop=(stop,), min_tokens=min_tokens)
        (result,) = engine.generate("AB", asked)
        found = text.find(stop, min_tokens)
        assert result.finish_reason == ("stop" if found >= 0 else "length")
        assert result.text == (text[:found] if found >= 0 else text)
        assert len(result.token_ids) == (found + 1 if found >= 0 else 30) >= min_tokens
    assert_empty(engine)


@pytest.mark.parametrize("include", [False, True])
def test_include_stop_str_in_output(engine, fakes, include):
    tokens = alone(fakes, engine, (0, 1), params(max_tokens=9))
    stop = text_of(tokens[3:5])
    (result,) = engine.generate("AB", params(max_tokens=9, stop=(stop,), include_stop_str_in_output=include))
    assert (result.token_ids, result.finish_reason) == (tokens[:5], "stop")
    assert result.text == text_of(tokens[: 5 if include else 3])


@pytest.mark.parametrize("skip", [False, True])
def test_skip_special_tokens(make_engine, fakes, skip):
    class Special(Letters):
        special_token_ids = frozenset(range(25))

    engine = make_engine(tokenizer=Special())
    (result,) = engine.generate("AB", params(max_tokens=20, skip_special_tokens=skip))
    shown = [token for token in result.token_ids if not (skip and token in Special.special_token_ids)]
    assert 0 < len(shown) == len(result.text)
    assert result.text == text_of(shown)
    assert skip == (len(shown) < 20)


# Structured outputs


def choice(*texts, **more):
    return params(structured_outputs=StructuredOutputsParams(choice=texts), **more)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_complete_grammar_ends_the_request(engine, ignore_eos):
    results = engine.generate(["AB", "CD"], [choice("JKL", ignore_eos=ignore_eos), params(max_tokens=7)])
    assert [(r.text, r.finish_reason) for r in results[:1]] == [("JKL", "stop")]
    assert (len(results[1].token_ids), results[1].finish_reason) == (7, "length")
    assert_empty(engine)


@pytest.mark.parametrize("seed", range(5))
def test_a_choice_whose_beginning_is_another(engine, seed):
    """Where more may follow, but need not, the end of the sequence ends it."""
    texts = ("A", "AB", "ABCD")
    results = engine.generate(["AB"] * 3, [choice(*texts, n=2, seed=seed, ignore_eos=False)] * 3)
    assert {r.text for r in results} <= set(texts)
    assert {r.finish_reason for r in results} == {"stop"}
    assert_empty(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_masks_are_those_of_the_tokens_so_far_and_other_requests_go_on(make_engine, fakes, async_scheduling):
    engine = make_engine(async_scheduling, max_num_reqs=8, max_num_batched_tokens=8)
    texts = ["ABCDEFGHIJKL", "BADC", "ABDDDD"]
    prompts = [*(["C", "DEFGHIJKLM", "F"] * 2), "AB"]
    many = [*([choice(*texts, seed=seed) for seed in range(6)]), params(max_tokens=20)]
    results = engine.generate(prompts, many)
    assert all(result.text in texts for result in results[:6])
    assert results[6].token_ids == alone(fakes, engine, (0, 1), many[6])
    assert engine.fake.masks == sum(len(result.token_ids) for result in results[:6])
    assert_empty(engine)


def test_with_async_scheduling_a_step_is_handed_out_at_a_time(make_engine):
    """The step that a mask waits for is collected after the new step's forward was queued, before its sampling."""
    engine = make_engine(async_scheduling=True)
    log = []

    def note(part, name):
        call = getattr(part, name)
        setattr(part, name, lambda *args: (log.append(name), call(*args))[1])

    note(engine.fake, "execute_model")
    note(engine.fake, "sample_tokens")
    note(engine.scheduler, "update")
    engine.add_request("AB", choice("JKLMN"))
    count = 0
    while engine.has_unfinished:
        log.append("step")
        deltas = engine.step()
        assert len(deltas) <= 1
        count += sum(len(delta.token_ids) for delta in deltas)
    assert count == 5
    first = ["step", "execute_model", "sample_tokens", "execute_model", "update", "sample_tokens"]
    following = ["step", "execute_model", "update", "sample_tokens"]
    assert log[:14] == [*first, *following, *following]
    assert_empty(engine)


def test_structured_outputs_are_built_for_the_first_request_that_asks(engine):
    engine.generate(["A", "B"], params(max_tokens=3))
    assert not engine.structured_built
    engine.generate(["A", "B"], choice("AB"))
    assert len(engine.structured_built) == 1


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "a"}, "understands structured_outputs.choice alone"),
        ({"json_object": True}, "structured_outputs: no"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_harms_no_other(make_engine, form, message):
    class Picky(FakeStructuredOutputs):
        def compile(self, wanted):
            if wanted.json_object:
                raise UnsupportedError("no such thing")
            return super().compile(wanted)

    engine = make_engine(structured=Picky(Letters()))
    refused = params(structured_outputs=StructuredOutputsParams(**form), n=2)
    with pytest.raises(RequestError, match=message):
        engine.add_request("A", refused)
    results = engine.generate(["A", "B", "C"], [choice("AB"), refused, params(max_tokens=4)])
    assert [(r.finish_reason, len(r.token_ids)) for r in results] == [("stop", 2), ("error", 0), ("length", 4)]
    assert_empty(engine)


def test_a_token_that_the_grammar_refuses_ends_that_request(make_engine):
    class Deaf(FakeStructuredOutputs):
        """Its masks allow everything."""

        def compile(self, wanted):
            matcher = super().compile(wanted)
            matcher.fill = lambda bitmask, drafts=(): bitmask.fill(-1)
            return matcher

    engine = make_engine(structured=Deaf(Letters()))
    results = engine.generate(["AB", "B"], [choice("JKL"), params(max_tokens=4)])
    assert [r.finish_reason for r in results] == ["error", "length"]
    assert "is not allowed" in results[0].error
    assert "RequestError" not in results[0].error
    assert_empty(engine)


def test_what_ends_a_structured_request(engine):
    """The stop string is looked for in what the grammar has let through."""
    (result,) = engine.generate("AB", choice("JKLMN", stop=("L",)))
    assert (result.text, result.token_ids, result.finish_reason) == ("JK", (9, 10, 11), "stop")
    (result,) = engine.generate("AB", choice("JKLMN", stop=("L",), min_tokens=3))
    assert (result.text, result.finish_reason) == ("JKLMN", "stop")
    (result,) = engine.generate("AB", choice("JKLMN", stop_token_ids=(11,)))
    assert (result.text, result.finish_reason) == ("JK", "stop")
    (result,) = engine.generate("AB", choice("JKLMN", max_tokens=2))
    assert (result.text, result.finish_reason) == ("JK", "length")
    assert_empty(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_structured_request_that_is_preempted_goes_on(make_engine, fakes, async_scheduling):
    engine = make_engine(async_scheduling, layout=fakes.layout(1 + 16, (1,)), max_model_len=16)
    for i in range(3):
        engine.add_request([i], choice("ABCDEFGHIJKLM", "BADCBADCBADC", max_tokens=15), f"{i}")
    texts = {}
    for delta in drain(engine):
        texts[delta.req_id] = texts.get(delta.req_id, "") + delta.text
    assert engine.stats.num_preemptions > 0
    assert set(texts.values()) <= {"ABCDEFGHIJKLM", "BADCBADCBADC"}


def right_up_to(text, num_right):
    """Proposes a text's next letters, of which those from the num_right-th on are wrong."""
    ids = Letters().encode(text)

    def propose(request):
        start = len(request.tokens) - 1  # the prompt is one token
        return tuple((token + (number >= num_right)) % 50 for number, token in enumerate(ids[start : start + 4]))

    return propose


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(("num_right", "num_steps", "num_accepted"), [(0, 12, 0), (1, 7, 6), (2, 5, 8), (4, 4, 9)])
def test_drafts_are_verified_under_the_grammar(
    make_engine, async_scheduling, ignore_eos, num_right, num_steps, num_accepted
):
    """Each draft has a mask of its own, also with asynchronous scheduling: the masks are made when the drafts are
    known. What was accepted behind the end of the grammar does not count."""
    text = "KLMNOPQRSTUV"
    engine = make_engine(async_scheduling, num_speculative_tokens=4)
    engine.fake.propose = right_up_to(text, num_right)
    (result,) = engine.generate("A", choice(text, ignore_eos=ignore_eos, max_tokens=20, logprobs=0))
    assert (result.text, result.finish_reason) == (text, "stop")
    assert len(result.token_ids) == len(result.logprobs) == len(text)
    assert engine.stats.num_steps == num_steps + async_scheduling  # one was on its way when the text was complete
    assert engine.stats.num_accepted_tokens == num_accepted
    assert_empty(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_drafts_behind_the_end_of_a_grammar(make_engine, async_scheduling):
    """The proposer goes on as if nothing were complete; its end of sequence is accepted and does not count."""
    engine = make_engine(async_scheduling, num_speculative_tokens=4)
    engine.fake.propose = lambda request: (11, EOS, EOS, 3)
    results = engine.generate(["A", "B"], [choice("KL", ignore_eos=True), choice("KL", "KLM", ignore_eos=False)])
    assert [r.finish_reason for r in results] == ["stop", "stop"]
    assert results[0].text == "KL"
    assert results[1].text in ("KL", "KLM")
    assert engine.stats.num_accepted_tokens > 0
    assert_empty(engine)


def test_structured_and_other_requests_speculate_in_one_step(make_engine, fakes):
    engine = make_engine(num_speculative_tokens=4, max_num_reqs=8, max_num_batched_tokens=16)
    texts = ["ABCDEFGHIJKL", "BADC", "ABDDDD"]
    many = [params(max_tokens=20) if i % 2 else choice(*texts, seed=i) for i in range(8)]
    results = engine.generate([[i] for i in range(8)], many)
    assert all(result.text in texts for result in results[::2])
    for i in (1, 3, 5, 7):
        assert results[i].token_ids == alone(fakes, engine, (i,), many[i])
    assert_empty(engine)


def test_check_integrity_counts_grammars(engine):
    engine.add_request("A", choice("AB"), "x")
    engine._steps._grammars.remove("x")
    with pytest.raises(IntegrityError, match="1 completions are structured, and 0 grammars"):
        engine.check_integrity()


# Refusals and failures


def test_b10_ids_outside_the_vocabulary(make_engine):
    """B10: the bound is the model's vocabulary, added tokens included, and a refusal concerns one request."""

    class Smaller(Letters):
        vocab_size = 100

    engine = make_engine(tokenizer=Smaller(), vocab_size=103)
    other = engine.add_request("AB", params(max_tokens=5))
    engine.step()
    results = engine.generate(
        ["A", "B", "C"], [params(max_tokens=2, logit_bias=bias) for bias in ({102: 5.0}, {191222: -100.0}, {})]
    )
    assert [r.finish_reason for r in results] == ["length", "error", "length"]
    assert "logit_bias: token id 191222 is not in the model's vocabulary, 0 to 102" in results[1].error
    for field in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "bad_words_token_ids"):
        value = ((1, 103),) if field == "bad_words_token_ids" else (102, 103)
        with pytest.raises(RequestError, match=f"{field}: token id 103"):
            engine.add_request("A", params(**{field: value}))
    deltas = drain(engine)
    assert deltas[-1].req_id == other
    assert deltas[-1].finish_reason == "length"


def test_what_the_sampler_cannot_serve_is_refused_before_it_is_queued(engine):
    with pytest.raises(RequestError, match="no stage knows extra_args"):
        engine.add_request("A", params(extra_args={"mine": 1}))
    assert_empty(engine)


def test_no_possible_token_is_an_error_that_says_so(make_engine):
    """B117 and an emptied row: the sampler yields -1."""

    def fail_the_first(result):
        sampled = zip(result.req_ids, result.sampled_token_ids, strict=True)
        tokens = tuple((-1,) if name == "request-0" else its for name, its in sampled)
        return ModelRunnerOutput(req_ids=result.req_ids, sampled_token_ids=tokens)

    engine = make_engine(tamper=fail_the_first)
    results = engine.generate(["A", "BC"], params(max_tokens=3))
    assert [(r.finish_reason, len(r.token_ids)) for r in results] == [("error", 0), ("length", 3)]
    assert results[0].error == "no token was possible: the logits were not finite, or every token was banned"
    assert_empty(engine)


# The prefix cache


def test_cached_tokens_are_told_once(engine):
    prompt = list(range(13))
    assert engine.generate([prompt], params(max_tokens=2))[0].num_cached_tokens == 0
    engine.add_request(prompt, params(max_tokens=3, n=2))
    deltas = drain(engine)
    for index in (0, 1):
        first, *others = [delta.num_cached_tokens for delta in deltas if delta.index == index]
        assert first == 12
        assert set(others) == {0}
    assert engine.stats.num_cached_tokens == 24
    assert engine.stats.num_prompt_tokens == 39
    assert engine.generate([prompt], params(max_tokens=2))[0].num_cached_tokens == 12
    engine.reset_prefix_cache()
    assert engine.generate([prompt], params(max_tokens=2))[0].num_cached_tokens == 0


def test_a_request_of_another_identity_shares_nothing(engine):
    prompt = list(range(13))
    engine.generate([prompt], params(max_tokens=2))
    engine.fake.identities["x"] = CacheIdentity(salt="s")
    engine.add_request(prompt, params(max_tokens=1), "x", cache_identity=CacheIdentity(salt="s"))
    assert [delta.num_cached_tokens for delta in drain(engine)] == [0]


def test_priorities_reach_the_scheduler(make_engine):
    engine = make_engine(max_num_reqs=1, config={"policy": "priority"})
    for priority in (3, 1, 2):
        engine.add_request("AB", params(max_tokens=1), f"{priority}", priority=priority)
    assert [delta.req_id for delta in drain(engine)] == ["1", "2", "3"]


def test_nothing_is_found_in_a_cache_that_slept(engine):
    """However the worker came to sleep: it says that its cache has lost what was in it."""
    prompt = list(range(13))
    (before,) = engine.generate([prompt], params(max_tokens=2))
    engine.fake.cache.clear()
    engine.fake.cache_generation += 1
    (after,) = engine.generate([prompt], params(max_tokens=2))
    assert (after.num_cached_tokens, after.token_ids) == (0, before.token_ids)
    assert engine.generate([prompt], params(max_tokens=2))[0].num_cached_tokens == 12
