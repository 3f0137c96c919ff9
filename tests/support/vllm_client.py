"""What tests ask vLLM's server for: the official client, streams put together again, metrics, and waiting."""

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request

import attrs
from prometheus_client.parser import text_string_to_metric_families

MODEL = "model"  # every server of the tests calls it so


def client(server):
    import openai

    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=120)


@contextlib.asynccontextmanager
async def async_client(server):
    import openai

    async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


@attrs.define
class Streamed:
    """What the chunks of a stream come to, by choice."""

    texts: dict = attrs.field(factory=dict)
    arguments: dict = attrs.field(factory=dict)  # of the choice's tool call
    finish_reasons: dict = attrs.field(factory=dict)
    usage: object = None

    def add(self, chunk):
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            delta = getattr(choice, "delta", None)
            text = choice.text if delta is None else delta.content
            self.texts[choice.index] = self.texts.get(choice.index, "") + (text or "")
            for call in getattr(delta, "tool_calls", None) or ():
                self.arguments[choice.index] = self.arguments.get(choice.index, "") + (call.function.arguments or "")
            if choice.finish_reason:
                self.finish_reasons[choice.index] = choice.finish_reason


def joined(stream):
    whole = Streamed()
    for chunk in stream:
        whole.add(chunk)
    return whole


async def stream(opened, prompt, started=None, **fields):
    """One completion, greedy. started: an asyncio.Event that is set with the first chunk."""
    whole = Streamed()
    wanted = {"model": MODEL, "prompt": prompt, "temperature": 0, "stream": True, **fields}
    async for chunk in await opened.completions.create(**wanted):
        whole.add(chunk)
        if started is not None:
            started.set()
    return whole


def texts_of_streams(server, prompts, **fields):
    """The texts of completions that are all streamed at once."""

    async def run():
        async with async_client(server) as opened:
            return await asyncio.gather(*(stream(opened, prompt, **fields) for prompt in prompts))

    return [whole.texts[0] for whole in asyncio.run(run())]


def post(server, path, body=b"", content_type="application/json"):
    """(status, JSON) of a request that the openai client cannot make; paths begin at the server's root."""
    url = f"http://127.0.0.1:{server.port}{path}"
    request = urllib.request.Request(url, body, {"Content-Type": content_type}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def rpc(server, method):
    """The worker's answer to /collective_rpc, as text."""
    status, answer = post(server, "/collective_rpc", json.dumps({"method": method}).encode())
    assert status == 200, answer
    return answer and answer["results"][0]


def get(server, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=60) as answer:
        return answer.read().decode()


def metric(server, name, **labels):
    """The sum of a metric's samples with these labels; counters end in _total."""
    families = text_string_to_metric_families(get(server, "/metrics"))
    found = [sample for family in families for sample in family.samples if sample.name == f"vllm:{name}"]
    assert found, f"/metrics has no vllm:{name}"
    return sum(sample.value for sample in found if labels.items() <= sample.labels.items())


def until(condition, what, patience=30):
    """Wait for a condition; `what` names it where it does not come."""
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, f"not within {patience} s: {what}"
        time.sleep(0.02)


def idle(server):
    """Wait until the server runs and queues nothing."""
    gauges = ("num_requests_running", "num_requests_waiting")
    until(lambda: not any(metric(server, name) for name in gauges), "no request runs or waits")
