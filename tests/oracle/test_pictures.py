"""Prompts with pictures through the whole worker: logits are Hugging Face's within 1e-4 on both runners, however the
prompt is cut, whatever else is in the batch, with a cache that is too small, and when a picture was seen before."""

import json

import pytest
import torch
from hf_oracle import random_prompts, serve
from picture_model import END, FAMILIES, IMAGE, START, make_model, next_logits, picture, save

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.cli.main import main
from workerkit.framework.interfaces.engine import CacheIdentity, EngineRequest, MultimodalSpan
from workerkit.framework.interfaces.request import ImageInput, SchedulerOutput
from workerkit.framework.interfaces.sampling_params import SamplingParams


@pytest.fixture(scope="module", params=FAMILIES)
def hf(request):
    return make_model(request.param)


@pytest.fixture(scope="module")
def config(hf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    save(hf, folder)
    return {
        "model": {"source": str(folder), "dtype": "float32", "max_model_len": 128},
        "limits": {"max_num_reqs": 8, "max_num_batched_tokens": 100},
        "cache": {"block_size": 8, "num_blocks": 300},
    }


class Case:
    """A prompt with pictures in it; `lengths`: tokens of text before, between and behind them."""

    def __init__(self, assembly, files, lengths, seed=3):
        texts = [[token % IMAGE for token in text] for text in random_prompts(lengths, seed=seed)]
        self.ids, self.images = list(texts[0]), []
        for file, text in zip(files, texts[1:], strict=True):
            made = assembly.get(roles.IMAGE_PROCESSOR).process(file)
            self.ids.append(START)
            self.images.append(
                ImageInput(
                    start=len(self.ids),
                    num_tokens=made.num_tokens,
                    digest=made.digest,
                    pixels=made.pixels,
                    grid=made.grid,
                )
            )
            self.ids += [*[IMAGE] * made.num_tokens, END, *text]

    def logits(self, hf, tokens):
        """Of Hugging Face's model, for each of the tokens that followed."""
        pixels, grids = [image.pixels for image in self.images], [image.grid for image in self.images]
        return next_logits(hf, self.ids, tokens, pixels, grids)


def assert_served(hf, cases, served):
    for case, (tokens, logits) in zip(cases, served, strict=True):
        expected = case.logits(hf, tokens)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert tokens == expected.argmax(-1).tolist()


def serve_cases(assembly, cases, count):
    return serve(assembly, [case.ids for case in cases], count, images=[case.images for case in cases])


def make_cases(assembly):
    one, other = picture(24, 16), picture(40, 32, seed=1)
    return [
        Case(assembly, [one], [5, 4]),
        Case(assembly, [], [9]),
        Case(assembly, [other, one], [0, 3, 6]),
        Case(assembly, [one], [5, 4]),  # as the first
        Case(assembly, [picture(24, 16, seed=2)], [5, 4]),  # but for the picture
    ]


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("tokens", [100, 7])
def test_prompts_with_pictures_are_served_as_by_hugging_face(hf, config, runner, tokens):
    assembly = assemble(config, {"components.runner": runner, "limits.max_num_batched_tokens": tokens})
    cases = make_cases(assembly)
    served = serve_cases(assembly, cases, 8)
    assert_served(hf, cases, served)
    assert served[0][0] == served[3][0] != served[4][0]  # another picture, another text


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_preemption_and_a_small_encoder_cache_change_nothing(hf, config, runner):
    overrides = {"cache.num_blocks": 18, "components.encoder.cache_tokens": 4, "limits.max_num_batched_tokens": 20}
    assembly = assemble(config, {"components.runner": runner, **overrides})
    cases = make_cases(assembly)
    assert_served(hf, cases, serve_cases(assembly, cases, 24))


@pytest.mark.parametrize("graph", ["none", {"use": "token_budget", "budgets": [4, 8], "max_pictures": 1}])
def test_packing_pictures_changes_nothing(hf, config, graph):
    assembly = assemble(config, {"components.encoder_graph": graph})
    cases = make_cases(assembly)
    assert_served(hf, cases, serve_cases(assembly, cases, 3))


def test_sleep_forgets_what_was_encoded(hf, config):
    with assemble(config) as assembly:
        worker = assembly.worker
        worker.start()
        cases = make_cases(assembly)[:1]
        first = run(assembly, cases, 4)
        worker.execute_model(SchedulerOutput(finished_req_ids=frozenset({"0"})))
        encoder = assembly.get(roles.ENCODER)
        assert encoder.num_held_tokens == cases[0].images[0].num_tokens
        worker.sleep(2)
        assert encoder.num_held_tokens == 0
        worker.wake_up()
        assembly.get(roles.SCHEDULER).reset_prefix_cache()
        assert run(assembly, cases, 4) == first
        assert encoder.num_held_tokens == cases[0].images[0].num_tokens


def test_drafts_behind_pictures_change_no_token(hf, config):
    plain = assemble(config)
    cases = make_cases(plain)
    expected = [tokens for tokens, _ in serve_cases(plain, cases, 12)]
    speculative = {"components.speculator": "ngram", "limits.num_speculative_tokens": 3}
    with assemble(config, speculative | {"components.sampler.temperature": 0.0}) as assembly:
        assembly.worker.start()
        tokens = run(assembly, cases, 12)
    assert tokens == expected


def run(assembly, cases, count):
    scheduler, tokens = assembly.get(roles.SCHEDULER), {str(number): [] for number in range(len(cases))}
    for req_id, case in zip(tokens, cases, strict=True):
        spans = tuple(MultimodalSpan(start=i.start, length=i.num_tokens, digest=i.digest) for i in case.images)
        request = EngineRequest(
            req_id=req_id,
            prompt_token_ids=tuple(case.ids),
            params=SamplingParams(max_tokens=count, temperature=0.0),
            cache_identity=CacheIdentity(multimodal=spans),
            images=tuple(case.images),
        )
        scheduler.add(request)
    while scheduler.has_work:
        output = scheduler.schedule()
        if assembly.worker.execute_model(output) is None:
            for req_id, progress in scheduler.update(output, assembly.worker.sample_tokens().get()).items():
                tokens[req_id].extend(progress.token_ids)
    return list(tokens.values())


def greedy(hf, assembly, ids, files, count):
    """What Hugging Face says behind ids with one placeholder a picture."""
    made = [assembly.get(roles.IMAGE_PROCESSOR).process(file) for file in files]
    counts = iter(one.num_tokens for one in made)
    ids = [token for id_ in ids for token in ([IMAGE] * next(counts) if id_ == IMAGE else [id_])]
    tokens = []
    for _ in range(count):
        logits = next_logits(hf, [*ids, *tokens], [], [one.pixels for one in made], [one.grid for one in made])
        logits[-1, IMAGE] = -torch.inf  # Hugging Face would want a picture for it
        tokens.append(int(logits[-1].argmax()))
    return tokens


BANNED = "--logit-bias", f"{IMAGE}=-100"


def arguments(config):
    limits = ("model.dtype=float32", "model.max_model_len=128", "cache.num_blocks=100", "cache.block_size=8")
    sets = [text for limit in limits for text in ("--set", limit)]
    return [
        "--model",
        config["model"]["source"],
        *sets,
        "--temperature",
        "0",
        "--max-tokens",
        "8",
        "--ignore-eos",
        *BANNED,
    ]


@pytest.mark.parametrize("chat", [True, False])
def test_a_picture_in_and_text_out_on_the_command_line(hf, config, chat, tmp_path, capsys):
    texts = []
    for number, file in enumerate([picture(24, 16), picture(24, 16, seed=2)]):
        path = tmp_path / f"{number}.png"
        path.write_bytes(file)
        prompt, ids = ("w5 w80", [START, IMAGE, END, 5, 80]) if chat else ("w3<image>", [3, IMAGE])
        how = ["--chat"] if chat else []
        assert main(["generate", *how, "--image", str(path), prompt, *arguments(config)]) == 0
        expected = greedy(hf, assemble(config), ids, [file], 8)
        texts.append(capsys.readouterr().out.strip())
        assert texts[-1] == assemble(config).get(roles.TOKENIZER).decode(expected).strip()
    if chat:  # with pictures in front, two models and two prompts tell them apart; the logits always do
        assert texts[0] != texts[1]


def test_json_lines_have_their_pictures_too(hf, config, tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(file := picture(40, 32))
    prompts = ["w9<image> w80", "<image> w3"]
    assert main(["generate", *prompts, "--image", str(tmp_path / "a.png"), *arguments(config)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = [greedy(hf, assemble(config), ids, [file], 8) for ids in ([9, IMAGE, 80], [IMAGE, 3])]
    assert [line["token_ids"] for line in lines] == expected


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        ("w9 w80", ["a.png"], "1 pictures for 0 places: token 124"),
        ("<image> w9<image>", ["a.png"], "1 pictures for 2 places"),
        ("<image><image> w9", ["a.png"], "picture 0 takes 24 tokens, and the prompt has 2 placeholders in a row"),
        ("<image> w9", ["bad.png"], "the picture cannot be read"),
        ("<image> w9", ["none.png"], "cannot read"),
    ],
)
def test_pictures_without_a_place_and_files_that_are_none_are_refused(
    config, tmp_path, capsys, prompt, images, message
):
    (tmp_path / "a.png").write_bytes(picture(48, 32))
    (tmp_path / "bad.png").write_bytes(b"no picture")
    options = [text for name in images for text in ("--image", str(tmp_path / name))]
    assert main(["generate", *options, prompt, *arguments(config)]) != 0
    assert message in capsys.readouterr().err


def test_a_conversation_may_have_pictures_anywhere(hf, config):
    files = [picture(24, 16), picture(40, 32, seed=1)]
    parts = [
        {"type": "image", "image": files[0]},
        {"type": "text", "text": " w7 "},
        {"type": "image", "image": files[1]},
    ]
    with assemble(config) as assembly:
        engine = assembly.engine
        engine.start()
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logit_bias={IMAGE: -100.0})
        deltas = engine.chat([{"role": "user", "content": parts}], params)
        tokens = [token for delta in deltas for token in delta.token_ids]
    assert tokens == greedy(hf, assemble(config), [START, IMAGE, END, 7, START, IMAGE, END], files, 6)
