"""`workerkit bench`: numbers, files, the breakdown of a step, traces, two configs side by side, and what it refuses."""

from __future__ import annotations

import itertools
import json
import re
import threading
from multiprocessing import Pipe
from xml.etree import ElementTree

import pytest
import tokenizers

from workerkit.components.attention.reference import ReferenceAttention
from workerkit.components.engine.scheduler import ContinuousScheduler
from workerkit.framework import roles
from workerkit.framework.assembly import Assembly
from workerkit.framework.cli import bench_cases
from workerkit.framework.cli.bench_against import Remote, compare, comparison_lines
from workerkit.framework.cli.bench_cases import DEFAULTS, Case, Sample, parse_case, percentile, run_batch
from workerkit.framework.cli.bench_timing import HOST, STREAM, Recorder, exclusive, record, timed_plan
from workerkit.framework.cli.main import main
from workerkit.framework.errors import WorkerkitError
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.observer import Phase, StepTimings
from workerkit.framework.plan import make_plan
from workerkit.framework.plugins import Plugins, load_plugins
from workerkit.framework.registry import Registry

SMALL = ("--case", "2x6+4", "--case", "3x9+1")
STREAM_NAMES = {*STREAM, "inputs"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tokenizer of bytes; the loader makes the weights up."""
    path = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def document(model, runner="v1", **components):
    return {
        "model": {"source": str(model), "max_model_len": 64},
        "limits": {"max_num_reqs": 4, "max_num_batched_tokens": 16},
        "cache": {"block_size": 4, "num_blocks": 100},
        "components": {"runner": runner, "loader": "random", "kernels": ["reference"], "attention": "reference"}
        | components,
    }


@pytest.fixture
def write(model, tmp_path):
    """Writes a config file and returns its path."""

    def written(name="w.yaml", **options):
        (tmp_path / name).write_text(json.dumps(document(model, **options)))
        return tmp_path / name

    return written


@pytest.fixture
def ticking(monkeypatch):
    """Each look at the bench's clock finds it 10 ms later."""
    ticks = itertools.count()
    monkeypatch.setattr(bench_cases, "_now", lambda: next(ticks) / 100)


# ---- the numbers


def test_throughput_and_latencies_follow_from_the_clock(real_cli, write, tmp_path, ticking, capsys):
    out = tmp_path / "out.json"
    assert real_cli("bench", "-c", write(), *SMALL, "--runs", 2, "--json", out) == 0
    cases = json.loads(out.read_text())["cases"]
    # 12 prompt tokens fit one step: 1 + (output - 1) steps of 10 ms, so 2 * 3 tokens take 3 ticks.
    decode = cases["2x6+4"]
    assert decode["runs"] == pytest.approx([200.0, 200.0])
    assert decode["tokens_per_second"] == pytest.approx({"median": 200.0, "least": 200.0, "greatest": 200.0})
    assert decode["latency_ms"]["first"] == pytest.approx({"p50": 10, "p90": 10, "p99": 10})
    assert decode["latency_ms"]["between"] == pytest.approx({"p50": 10, "p90": 10, "p99": 10})
    assert decode["latency_ms"]["whole"] == pytest.approx({"p50": 40, "p90": 40, "p99": 40})
    # 27 prompt tokens in steps of 16: the first request is done after one step, the others after two.
    prefill = cases["3x9+1"]
    assert prefill["runs"] == pytest.approx([27 / 0.02] * 2)
    assert prefill["latency_ms"]["first"]["p50"] == pytest.approx(20)
    assert "between" not in prefill["latency_ms"]
    table = capsys.readouterr().out
    assert re.search(r"^tokens/s +200\.0 +1350\.0$", table, re.M)
    assert re.search(r"^between tokens, ms, p99 +10\.00 +-$", table, re.M)
    assert re.search(r"^  stream: attention metadata +\d+\.\d{3} +\d+\.\d{3}$", table, re.M)


def test_the_default_cases_are_those_that_peers_are_measured_with():
    sizes = {case.name: (case.batch, case.prompt, case.output) for case in DEFAULTS}
    assert sizes == {"b1": (1, 32, 128), "b8": (8, 32, 128), "b32": (32, 32, 128), "prefill": (8, 512, 1)}
    assert parse_case("b8") == DEFAULTS[1]
    assert parse_case("4x128+64") == Case("4x128+64", 4, 128, 64)


def test_percentiles_lie_between_their_neighbours():
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0], 90) == pytest.approx(1.9)
    assert percentile([7.0], 99) == 7.0


def test_a_decode_that_takes_no_time_is_no_number(real_cli, write, monkeypatch, capsys):
    monkeypatch.setattr(bench_cases, "_now", lambda: 0.0)
    assert real_cli("bench", "-c", write(), "--case", "1x4+2", "--warmup", 0) == 1
    assert "2 tokens took no longer than 1, ask for more of them" in capsys.readouterr().err


# ---- a step, in parts


@pytest.fixture
def recorded(model):
    """Records a batch on a worker: `recorded(document, registry)` -> (recording, observer's phases, built parts)."""

    def run(config, registry=None, batch=2, output=6):
        registry = registry or load_plugins().registry
        config["components"].setdefault("observers", ["timings"])
        recorder = Recorder()
        with Assembly(timed_plan(make_plan(registry, config), recorder), {}, observed=True) as assembly:
            assembly.engine.start()
            (timings,) = (part for part in assembly.get_all(roles.OBSERVERS) if isinstance(part, StepTimings))
            prompts = [[1 + row, 2, 3, 4, 5, 6] for row in range(batch)]
            run_batch(assembly.engine, prompts, 3)  # not recorded, but counted by both sides
            recording = record(
                assembly.engine, timings, recorder, lambda step: run_batch(assembly.engine, prompts, output, step)
            )
            assembly.engine.check_integrity()
            assert not assembly.hooks.failures
        return recording

    return run


def nested(parts):
    """Whether the slices of a thread follow or contain each other."""
    open_slices = []
    for part in sorted(parts, key=lambda part: (part.begin, -part.end)):
        while open_slices and open_slices[-1].end <= part.begin:
            open_slices.pop()
        if open_slices and part.end > open_slices[-1].end:
            return False
        open_slices.append(part)
    return True


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("ahead", [False, True])
def test_each_step_has_each_phase_once_and_slices_nest(recorded, model, runner, ahead):
    recording = recorded(document(model, runner, scheduler={"async_scheduling": ahead}))
    threads = {part.thread for part in recording.slices}
    assert len(threads) == 2
    for thread in threads:
        assert nested([part for part in recording.slices if part.thread == thread]), thread
    steps = list(recording.steps)
    assert steps == list(range(4, 10))  # three were not recorded
    for name in ("schedule", "prepare", "forward", "sample", "commit", "attention", "update", "detokenise"):
        found = [part.step for part in recording.slices if part.name == name and part.step in steps]
        assert sorted(set(found)) == steps, name
        if name in ("forward", "sample", "commit", "attention", "update", "detokenise"):
            assert sorted(found) == steps, name
    assert {part.name for part in recording.slices} <= {*HOST, *STREAM, "step"}
    host = {part.thread for part in recording.slices if part.name in HOST}
    stream = {part.thread for part in recording.slices if part.name in STREAM_NAMES}
    assert len(host) == len(stream) == 1
    assert host != stream
    assert all(part.end >= part.begin for part in recording.slices)


def test_drafts_are_a_phase_of_their_own(recorded, model):
    config = document(model, "v2", speculator={"use": "ngram", "min_n": 1, "max_n": 2})
    config["limits"]["num_speculative_tokens"] = 2
    recording = recorded(config, output=12)
    proposed = [part.step for part in recording.slices if part.name == "propose"]
    assert proposed == [part.step for part in recording.slices if part.name == "sample"]
    assert len(proposed) > 1


def test_time_within_a_slice_is_taken_off_it():
    def part(name, begin, end, thread="host"):
        return Phase(name, 1, begin, end, thread)

    slices = [part("step", 0, 100), part("prepare", 10, 40), part("wait", 20, 30), part("wait", 50, 90)]
    slices += [part("forward", 15, 60, "stream")]
    taken = {name: by_step[1] for name, by_step in exclusive(slices).items()}
    assert taken == {"step": 30, "prepare": 20, "wait": 50, "forward": 45}


def test_with_asynchronous_scheduling_v2_plans_a_step_while_the_one_before_runs(recorded, model):
    """The forward of step 6 waits for step 7 to be planned, and that for the forward to have begun."""
    began, planned, waits = threading.Event(), threading.Event(), []

    class Waiting(ReferenceAttention):
        forwards = 0

        def build(self, batch: InputBatch, *args, **kwargs):
            attend = super().build(batch, *args, **kwargs)
            self.forwards += not batch.is_dummy
            is_the_one = self.forwards == 6 and not batch.is_dummy

            def blocked(*args, **kwargs):
                if is_the_one and not began.is_set():
                    began.set()
                    waits.append(planned.wait(timeout=30))
                return attend(*args, **kwargs)

            return blocked

    class Telling(ContinuousScheduler):
        steps = 0

        def schedule(self):
            if self.steps == 6:
                waits.append(began.wait(timeout=30))
            output = super().schedule()
            self.steps += bool(output.num_scheduled_tokens)
            if self.steps == 7:
                planned.set()
            return output

    registry = load_plugins().registry
    registry.add(roles.ATTENTION, "waiting", Waiting)
    registry.add(roles.SCHEDULER, "telling", Telling)
    scheduler = {"use": "telling", "async_scheduling": True}
    recording = recorded(document(model, "v2", attention="waiting", scheduler=scheduler), registry)
    assert waits == [True, True]
    (forward,) = (part for part in recording.slices if part.name == "forward" and part.step == 6)
    (schedule,) = (part for part in recording.slices if part.name == "schedule" and part.step == 7)
    assert forward.begin < schedule.end
    assert schedule.begin < forward.end
    assert forward.thread != schedule.thread


# ---- files


def test_the_trace_is_one_that_perfetto_reads(real_cli, write, tmp_path, ticking):
    path = tmp_path / "trace.json"
    assert real_cli("bench", "-c", write(runner="v2"), *SMALL, "--runs", 1, "--warmup", 0, "--trace", path) == 0
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    slices = [event for event in events if event["ph"] == "X"]
    assert len(events) == len(names) + len(slices)
    assert set(names) == {event["tid"] for event in slices}
    assert len(names) == len(set(names.values())) == 2
    assert {event["args"]["case"] for event in slices} == {"2x6+4", "3x9+1"}
    for event in slices:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert isinstance(event["args"]["step"], int)
    by_name = {event["name"] for event in slices}
    assert {"schedule", "prepare", "inputs", "attention", "forward", "sample", "detokenise"} <= by_name


def test_the_plot_shows_every_case_and_phase(real_cli, write, tmp_path, ticking):
    path = tmp_path / "p.svg"
    assert real_cli("bench", "-c", write(), *SMALL, "--runs", 1, "--warmup", 0, "--plot", path) == 0
    svg = ElementTree.fromstring(path.read_text())
    texts = ["".join(node.itertext()) for node in svg.iter("{http://www.w3.org/2000/svg}text")]
    for expected in ("2x6+4", "3x9+1", "host", "stream", *HOST, *STREAM):
        assert expected in texts
    width = float(svg.get("width"))
    for rect in svg.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width")) <= width + 0.1


# ---- two configs


class Scripted:
    """A contender whose runs go as fast as the script says."""

    def __init__(self, name, log, rates):
        self.name, self.log, self.rates = name, log, iter(rates)

    def warm_up(self, case):
        self.log.append(f"{self.name} warms {case.name}")

    def measure(self, case):
        self.log.append(f"{self.name} {case.name}")
        return Sample(next(self.rates), None)


def test_runs_alternate_and_the_ratio_is_that_of_medians_with_its_spread():
    log = []
    a, b = Scripted("A", log, [10.0, 30.0, 20.0]), Scripted("B", log, [5.0, 10.0, 20.0])
    ratios = compare(a, b, [Case("b1", 1, 4, 8)], runs=3, warmup=1)
    assert log == ["B warms b1", "A warms b1", "A b1", "B b1", "B b1", "A b1", "A b1", "B b1"]
    assert ratios["b1"].ratio == 2.0
    assert (ratios["b1"].ours, ratios["b1"].other) == (20.0, 10.0)
    assert (ratios["b1"].least, ratios["b1"].greatest) == (1.0, 3.0)
    assert [*comparison_lines(("x", "y"), ratios)][-1].split() == ["b1", "20.0", "10.0", "2.000", "1.000..3.000"]


def test_two_configs_run_in_processes_of_their_own(real_cli, write, tmp_path, capsys):
    out = tmp_path / "out.json"
    a, b = write("a.yaml"), write("b.yaml", runner="v2")
    longer = ["--set", "model.max_model_len=400", "--set", "cache.num_blocks=300"]  # no stall is longer than all of it
    arguments = ["-c", a, "--against", b, *longer, "--case", "2x4+360", "--runs", 1, "--json", out]
    assert real_cli("bench", *arguments) == 0
    its = json.loads(out.read_text())["cases"]["2x4+360"]
    assert its["least"] == its["ratio"] == its["greatest"] == pytest.approx(its["ours"] / its["other"])
    assert its["ours"] > 0
    text = capsys.readouterr().out
    assert f"A: {a}\nB: {b}\n" in text


def test_what_goes_wrong_in_a_contender_is_said_by_its_name():
    near, far = Pipe()
    remote = Remote("b.yaml", near)
    far.send("no such file")
    with pytest.raises(WorkerkitError, match=r"^b\.yaml: no such file$"):
        remote.measure(DEFAULTS[0])
    far.close()
    with pytest.raises(WorkerkitError, match=r"^b\.yaml: its process ended"):
        remote.answer()


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--case", "b9"],
            "--case b9: no such case; known: b1, b32, b8, prefill; or your own, BATCHxPROMPT+OUTPUT, like 4x128+64",
        ),
        (["--case", "0x4+1"], "--case 0x4+1: BATCH, PROMPT and OUTPUT must be >= 1"),
        (["--case", "b1", "--case", "b1"], "--case b1 is given twice"),
        (["--runs", "0"], "--runs must be >= 1, got 0"),
        (["--warmup", "-1"], "--warmup must be >= 0, got -1"),
        (["--json", "/no/such/folder/f.json"], "cannot write /no/such/folder/f.json: "),
        (["--plot", "p.png"], "--plot p.png: the picture is an SVG, so its name must end in .svg"),
        (["--against", "x.yaml", "--trace", "t.json"], "--plot and --trace show one config: leave them out"),
        (["--case", "5x4+2"], "case 5x4+2: 5 requests at once, limits.max_num_reqs is 4"),
        (["--case", "2x60+5"], "case 2x60+5: 60 + 5 tokens, max_model_len is 64"),
    ],
)
def test_bad_input_is_refused_in_one_line(real_cli, write, capsys, arguments, message):
    assert real_cli("bench", "-c", write(), *arguments) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"workerkit: {message}" in last


def test_a_config_without_an_engine_is_refused(capsys):
    registry = Registry()
    assert main(["bench", "--case", "b1"], Plugins(registry, ())) == 1
    assert (
        "workerkit: there is nothing to measure: no installed plugin brings components.engine"
        in capsys.readouterr().err
    )


def test_a_request_that_fails_ends_the_measurement(real_cli, write, monkeypatch, capsys):
    from workerkit.components.engine.live import LiveCompletion

    def broken(self, *args):
        raise OSError("no such letter")

    monkeypatch.setattr(LiveCompletion, "advance", broken)
    assert real_cli("bench", "-c", write(), "--case", "1x4+2") == 1
    assert "a request of the benchmark failed: OSError: no such letter" in capsys.readouterr().err


def test_observers_of_the_config_stay(real_cli, write, tmp_path, ticking):
    out = tmp_path / "out.json"
    arguments = ["--case", "1x4+2", "--warmup", 0, "--runs", 1, "--json", out]
    assert real_cli("bench", "-c", write(observers=["metrics"]), *arguments) == 0
    observers = json.loads(out.read_text())["config"]["components"]["observers"]
    assert [observer["use"] for observer in observers] == ["metrics", "timings"]
    assert real_cli("bench", "-c", write(), "--set", "components.observers=7", "--case", "b1") == 1


def test_the_errors_are_workerkits_own():
    with pytest.raises(WorkerkitError):
        parse_case("nothing")
