"""What a server has to bear: clients that go away, crowds, requests that fail, sleep, and processes that are killed.

A text that is expected is what the same server gives for the same prompt alone.
"""

import asyncio
import json
import os
import signal
from pathlib import Path

import openai
import psutil
import pytest
import vllm_client
import vllm_engine
import vllm_plugin
import yaml
from vllm_client import MODEL, metric, until
from vllm_server import vllm_server

SUPPORT = Path(vllm_plugin.__file__).parent
MAX_NUM_SEQS = 32
NUM_TOKENS = 24
LONG = 400  # tokens of streams that something happens to on their way
OPTIONS = (
    "--dtype=float32",
    f"--max-num-seqs={MAX_NUM_SEQS}",
    f"--served-model-name={MODEL}",
    "--enable-sleep-mode",
)
pytestmark = pytest.mark.newest
STAGES = ["min_tokens", "temperature", "top_k_top_p", "poison"]
PROMPTS = vllm_engine.prompts([5, 40, 17, 16, 33, 1, 64, 25, 12, 50] * 4)
ENDLESS = {"extra_body": {"ignore_eos": True}}
UNENDING, ENDLESS_TOKENS = {"max_model_len": 2048, "num_blocks": 300}, 1900
FEW_BLOCKS = 80  # of 16 tokens; a crowd takes up to 32 × 6


def config(folder, runner, num_blocks):
    path = folder / "worker.yaml"
    components = {"runner": runner, "device": "cpu", "worker_extensions": ["tools"]}
    components["sampler"] = {"use": "torch", "stages": STAGES}
    path.write_text(yaml.safe_dump({"cache": {"num_blocks": num_blocks}, "components": components}))
    return path


def faulty_server(model, folder, *arguments, runner="v2", num_blocks=FEW_BLOCKS, max_model_len=512):
    """A server with the plugin of `vllm_plugin`."""
    with vllm_plugin.installed(folder):
        pass  # what it has written there is all that another process needs
    env = {"PYTHONPATH": os.pathsep.join([str(folder), str(SUPPORT)]), "VLLM_SERVER_DEV_MODE": "1"}
    arguments = (*OPTIONS, f"--max-model-len={max_model_len}", *arguments)
    return vllm_server(model, folder / "log", *arguments, config=config(folder, runner, num_blocks), env=env)


@pytest.fixture(scope="module")
def server(tiny_dir, tmp_path_factory):
    with faulty_server(tiny_dir, tmp_path_factory.mktemp("faults"), "--shutdown-timeout=20") as started:
        yield started


def text(server, prompt, max_tokens=NUM_TOKENS):
    wanted = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": max_tokens, **ENDLESS}
    return vllm_client.client(server).completions.create(**wanted).choices[0].text


@pytest.fixture(scope="module")
def texts(server):
    """Of each prompt alone."""
    return [text(server, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def long_texts(server):
    return [text(server, prompt, LONG) for prompt in PROMPTS[:4]]


def nothing_is_left(server):
    vllm_client.idle(server)
    until(lambda: vllm_client.rpc(server, "num_requests") == "0", "the worker holds no request")
    vllm_client.rpc(server, "check_integrity")


def crowd(server, num_streams):
    prompts = [PROMPTS[row % len(PROMPTS)] for row in range(num_streams)]
    return vllm_client.texts_of_streams(server, prompts, max_tokens=NUM_TOKENS, **ENDLESS)


def memory(server):
    """Resident bytes of all its processes."""
    return sum(psutil.Process(pid).memory_info().rss for pid, _ in server.members())


def test_b125_two_hundred_streams_at_once_leave_nothing_behind(server, texts):
    expected = [texts[row % len(PROMPTS)] for row in range(200)]
    assert crowd(server, 200) == expected
    assert metric(server, "num_preemptions_total") > 0, "there was room for all, so nothing was put to the test"
    nothing_is_left(server)
    before = memory(server)
    assert crowd(server, 200) == expected
    nothing_is_left(server)
    assert memory(server) - before < 2**25


def test_clients_that_go_away_harm_nobody(server, long_texts):
    finished = metric(server, "request_success_total")

    async def leave(opened, prompt):
        wanted = {"model": MODEL, "prompt": prompt, "max_tokens": LONG, "stream": True, "n": 2, **ENDLESS}
        chunks = await opened.completions.create(**wanted)
        await anext(aiter(chunks))
        await chunks.close()

    async def run():
        async with vllm_client.async_client(server) as opened:
            staying = asyncio.gather(
                *(vllm_client.stream(opened, prompt, max_tokens=LONG, **ENDLESS) for prompt in PROMPTS[:4])
            )
            await asyncio.gather(*(leave(opened, prompt) for prompt in PROMPTS[4:12]))
            return await staying

    assert [whole.texts[0] for whole in asyncio.run(run())] == long_texts
    nothing_is_left(server)
    assert metric(server, "request_success_total") < finished + 4 + 2 * 8, "all have come to their end"


def test_b124_tasks_cancelled_before_their_first_token(server, texts):
    """One after another a little later: while the client connects, while it writes, while the front end reads. And at
    once, when the answers have begun and an engine that is paused has nothing to send."""

    async def run():
        async with vllm_client.async_client(server) as opened:

            def start(row):
                wanted = vllm_client.stream(opened, PROMPTS[row % len(PROMPTS)], max_tokens=LONG, **ENDLESS)
                return asyncio.create_task(wanted)

            async def begin(row):
                wanted = {"model": MODEL, "prompt": PROMPTS[row % len(PROMPTS)], "max_tokens": LONG, "stream": True}
                return await opened.completions.create(**wanted, **ENDLESS)

            cancelled = []
            for turns in range(50):
                cancelled.append(start(turns))
                for _ in range(turns):
                    await asyncio.sleep(0)
                cancelled[-1].cancel()
            assert (await asyncio.to_thread(vllm_client.post, server, "/pause?mode=keep"))[0] == 200
            begun = await asyncio.gather(*(begin(row) for row in range(50)))
            reading = [asyncio.create_task(anext(aiter(chunks))) for chunks in begun]
            await asyncio.sleep(0)
            for task, chunks in zip(reading, begun, strict=True):
                task.cancel()
                await chunks.close()
            assert (await asyncio.to_thread(vllm_client.post, server, "/resume"))[0] == 200
            return await asyncio.gather(*cancelled, *reading, return_exceptions=True)

    assert {type(result) for result in asyncio.run(run())} == {asyncio.CancelledError}
    nothing_is_left(server)
    assert crowd(server, len(PROMPTS)) == texts


@pytest.mark.parametrize("after", [0, 5])
def test_a_request_that_fails_gets_500_and_harms_nobody(server, texts, after):
    """A stream has its status already: vLLM sends the error as a chunk, and ends it."""
    poisoned = {"max_tokens": NUM_TOKENS, "extra_body": {"vllm_xargs": {"poison": after}, "ignore_eos": True}}
    whole = {"model": MODEL, "prompt": PROMPTS[1], "temperature": 0, **poisoned}

    async def run():
        async with vllm_client.async_client(server) as opened:
            started = asyncio.Event()
            failing = (
                opened.completions.create(**whole),
                vllm_client.stream(opened, PROMPTS[1], started, **poisoned),
            )
            others = (vllm_client.stream(opened, prompt, max_tokens=NUM_TOKENS, **ENDLESS) for prompt in PROMPTS)
            return started, await asyncio.gather(*failing, *others, return_exceptions=True)

    started, (answer, stream, *others) = asyncio.run(run())
    assert [other.texts[0] for other in others] == texts
    assert isinstance(answer, openai.InternalServerError), answer
    assert answer.status_code == 500
    assert type(stream) is openai.APIError, stream
    assert stream.code == "500"
    assert after or not started.is_set()
    assert "the logits were not finite" in server.log()
    nothing_is_left(server)
    assert server.healthy()


@pytest.mark.parametrize("level", [1, 2])
def test_a_server_that_slept_gives_the_same_texts(server, texts, level):
    assert vllm_client.post(server, f"/sleep?level={level}")[0] == 200
    assert json.loads(vllm_client.get(server, "/is_sleeping")) == {"is_sleeping": True}
    assert vllm_client.post(server, "/wake_up")[0] == 200
    assert json.loads(vllm_client.get(server, "/is_sleeping")) == {"is_sleeping": False}
    assert crowd(server, 40) == texts
    nothing_is_left(server)


def streams_beside(server, happening, max_tokens, leaving=False):
    """What becomes of four streams when `happening` comes after their first chunks: Streamed, or exceptions.
    leaving: they are cancelled then."""

    async def run():
        async with vllm_client.async_client(server) as opened:
            events = [asyncio.Event() for _ in range(4)]
            streams = [
                asyncio.create_task(vllm_client.stream(opened, prompt, started, max_tokens=max_tokens, **ENDLESS))
                for prompt, started in zip(PROMPTS, events, strict=False)
            ]
            await asyncio.gather(*(started.wait() for started in events))
            await asyncio.to_thread(happening)
            for stream in streams if leaving else ():
                stream.cancel()
            return await asyncio.gather(*streams, return_exceptions=True)

    return asyncio.run(run())


def test_streams_go_on_after_a_sleep_that_keeps_them(server, long_texts):
    caught = 0

    def sleep():
        nonlocal caught
        assert vllm_client.post(server, "/sleep?level=1&mode=keep")[0] == 200
        assert json.loads(vllm_client.get(server, "/is_sleeping")) == {"is_sleeping": True}
        caught += metric(server, "request_success_total") < finished + 4
        assert vllm_client.post(server, "/wake_up")[0] == 200

    for _ in range(10):  # the engine may be done before the first chunks are here
        finished = metric(server, "request_success_total")
        assert [whole.texts[0] for whole in streams_beside(server, sleep, LONG)] == long_texts
        nothing_is_left(server)
        if caught:
            return
    pytest.fail("no sleep came before the streams' ends")


def test_a_server_that_is_told_to_stop_lets_streams_end(server, long_texts):
    """The last of this server: for `--shutdown-timeout` seconds after SIGTERM it goes on with what it has."""
    assert [whole.texts[0] for whole in streams_beside(server, server.stop, LONG)] == long_texts


# With a model whose streams cannot be at their end before their first chunks are here, as the tiny one's sometimes are.


@pytest.mark.parametrize(("executor", "victim"), [("uni", "VLLM::EngineCore"), ("mp", "VLLM::Worker")])
def test_a_server_whose_worker_is_killed_ends(model_dir, tmp_path, executor, victim):
    """The streams end with an error, /health is no longer 200, and the server exits by itself (with status 0)."""
    executor = f"--distributed-executor-backend={executor}"
    with faulty_server(model_dir, tmp_path, executor, **UNENDING) as server:
        (pid,) = [pid for pid, name in server.members() if name.startswith(victim)]
        ends = streams_beside(server, lambda: os.kill(pid, signal.SIGKILL), ENDLESS_TOKENS)
        assert {type(end) for end in ends} == {openai.APIError}, ends
        assert all("EngineCore encountered an issue" in str(end) for end in ends)
        until(lambda: not server.healthy(), "/health says so")
        until(lambda: not server.members(), "no process is left")


def test_a_server_that_is_told_to_stop_at_once_ends_with_its_clients(model_dir, tmp_path):
    """Without `--shutdown-timeout` vLLM kills its engine at once. Streams end with finish_reason "abort", or, where it
    could not say so any more, with an error or not at all: then the server waits for its clients to go away."""
    with faulty_server(model_dir, tmp_path, runner="v1", **UNENDING) as server:

        def stop():
            server.process.send_signal(signal.SIGTERM)
            until(lambda: not any("EngineCore" in name for _, name in server.members()), "the engine is gone")

        for end in streams_beside(server, stop, ENDLESS_TOKENS, leaving=True):
            aborted = isinstance(end, vllm_client.Streamed) and end.finish_reasons == {0: "abort"}
            assert aborted or isinstance(end, openai.APIError | asyncio.CancelledError), end
        until(lambda: not server.members(), "no process is left")
