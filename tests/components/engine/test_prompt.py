"""Prompts with adapters and pictures: what the worker is given, what shares cached blocks, and what is refused."""

import pytest
from engine_harness import build_engine, params

from workerkit.components.engine.prompt import without_pictures
from workerkit.framework.errors import RequestError
from workerkit.framework.interfaces.engine import CacheIdentity, PromptInputs


def entered(engine, prompt, **more):
    """What the worker is told of a request."""
    engine.add_request(prompt, params(max_tokens=1), **more)
    engine.step()
    [new] = engine.fake.outputs[-1].new_requests
    while engine.has_unfinished:
        engine.step()
    return new


def test_a_request_names_its_adapter_and_shares_blocks_with_its_like_only(fakes):
    engine = build_engine(fakes)
    tokens = list(range(1, 13))
    names = [None, "calm", "calm", "loud", None]
    found = [entered(engine, PromptInputs(prompt=tokens, lora=name)) for name in names]
    assert [new.lora for new in found] == names
    assert [new.num_computed_tokens > 0 for new in found] == [False, False, True, False, True]


def test_what_the_caller_says_of_the_cache_is_kept_beside_the_adapter(fakes):
    engine = build_engine(fakes)
    tokens = list(range(1, 13))
    found = [
        entered(engine, PromptInputs(prompt=tokens, lora="calm"), cache_identity=CacheIdentity(salt=salt))
        for salt in ("a", "b", "a")
    ]
    assert [new.num_computed_tokens > 0 for new in found] == [False, False, True]


def test_an_adapter_that_is_not_loaded_is_refused(fakes):
    engine = build_engine(fakes)
    with pytest.raises(RequestError, match="adapter 'clam' is not loaded; did you mean 'calm'"):
        engine.add_request(PromptInputs(prompt=[1, 2], lora="clam"), params())
    [result] = engine.generate(PromptInputs(prompt=[1, 2], lora="clam"), params())
    assert result.finish_reason == "error"


def test_placeholders_become_as_many_as_their_pictures_take(fakes):
    engine = build_engine(fakes)
    new = entered(engine, PromptInputs(prompt=[5, 0, 6, 0, 0, 7], images=(b"abc", b"xy")))
    assert new.token_ids == (5, 0, 0, 0, 6, 0, 0, 7)  # two in a row are right for the second
    assert [(one.start, one.num_tokens, one.grid) for one in new.images] == [(1, 3, (1, 1, 3)), (5, 2, (1, 1, 2))]
    assert new.images[0].pixels[:, 0].tolist() == [97, 98, 99]


def test_another_picture_in_the_same_place_shares_nothing_behind_it(fakes):
    engine = build_engine(fakes)
    ids = [1, 2, 3, 4, 5, 0, 6, 7, 8, 9, 10, 11, 12]
    first, other, same = (
        entered(engine, PromptInputs(prompt=ids, images=(file,))) for file in (b"abc", b"abd", b"abc")
    )
    assert (first.num_computed_tokens, other.num_computed_tokens) == (0, 4)  # the block before the picture
    assert same.num_computed_tokens > 4


@pytest.mark.parametrize(
    ("ids", "images", "message"),
    [
        ([1, 2], (b"a",), "1 pictures for 0 places: token 0 says"),
        ([1, 0, 2, 0], (b"a",), "1 pictures for 2 places"),
        ([1, 0, 0, 2], (b"abc",), "picture 0 takes 3 tokens, and the prompt has 2 placeholders in a row"),
    ],
)
def test_pictures_and_places_must_agree(fakes, ids, images, message):
    with pytest.raises(RequestError, match=message):
        build_engine(fakes).add_request(PromptInputs(prompt=ids, images=images), params())


def test_a_model_of_text_alone_refuses_pictures(fakes):
    engine = build_engine(fakes)
    engine.fake.accepts_images = False
    with pytest.raises(RequestError, match="the model sees no pictures"):
        engine.add_request(PromptInputs(prompt=[0], images=(b"a",)), params())


def test_pictures_of_messages_are_taken_out_in_their_order():
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "image", "image": b"1"}, {"type": "text", "text": "t"}]},
        {"role": "user", "content": [{"type": "image", "image": b"2"}]},
    ]
    plain, pictures = without_pictures(messages)
    assert pictures == (b"1", b"2")
    assert plain[1]["content"] == [{"type": "image"}, {"type": "text", "text": "t"}]
    assert messages[1]["content"][0] == {"type": "image", "image": b"1"}  # the caller's stay as they are
    for part in ({"type": "image", "image": "file.png"}, {"type": "image_url", "image_url": {"url": "u"}}):
        with pytest.raises(RequestError, match=r"messages\[0\]: a picture is"):
            without_pictures([{"role": "user", "content": [part]}])
