"""What vLLM's interface looks like: the fields and signatures that plugins/vllm reads, builds or answers to.

Read from the source text and not from the objects: annotations that vLLM makes for type checkers only are `object` at
run time, and the rendering of types differs between Python versions. `python tests/support/vllm_drift.py --write`
writes the snapshot of the installed version, and prints what changed since the newest one before it.
"""

import ast
import importlib
import inspect
import json
import sys
import textwrap
from pathlib import Path

SNAPSHOTS = Path(__file__).resolve().parents[1] / "vllm" / "snapshots"

# class -> how closely: "fields" with types and whether they have a default, "names" of the fields only (of configs,
# which the adapter reads here and there), all its "methods", or the named ones
_OUTPUT = ("SchedulerOutput", "NewRequestData", "CachedRequestData", "GrammarOutput")
_CACHE = ("KVCacheConfig", "KVCacheTensor", "KVCacheGroupSpec", "FullAttentionSpec", "SlidingWindowSpec")
_PICTURES = ("MultiModalFeatureSpec", "MultiModalFieldElem", "PlaceholderRange")
_CONFIGS = ("Vllm", "Model", "Cache", "Scheduler", "Parallel", "Speculative", "Load", "Compilation", "Profiler")
_CONFIGS += ("Attention", "Offload", "UVAOffload", "MultiModal", "EncoderCacheManager", "LoRA")
_PLATFORM = ("check_and_update_config", "validate_request", "update_block_size_for_backend", "get_device_name")
_PLATFORM += ("is_sleep_mode_available",)
WATCHED = {
    **{f"vllm.v1.core.sched.output:{name}": "fields" for name in _OUTPUT},
    **{f"vllm.v1.kv_cache_interface:{name}": "fields" for name in _CACHE},
    "vllm.v1.core.kv_cache_utils:KVCacheBlockCopy": "fields",
    "vllm.lora.request:LoRARequest": "fields",
    **{f"vllm.multimodal.inputs:{name}": "fields" for name in _PICTURES},
    "vllm.v1.outputs:ModelRunnerOutput": "fields",
    "vllm.v1.outputs:LogprobsLists": "fields",
    "vllm.v1.outputs:LogprobsTensors": "fields",
    "vllm.v1.outputs:DraftTokenIds": "fields",
    "vllm.v1.outputs:AsyncModelRunnerOutput": ("get_output",),
    "vllm.v1.engine:EngineCoreOutput": "fields",
    "vllm.v1.engine:EngineCoreOutputs": "fields",
    "vllm.v1.worker.worker_base:CompilationTimes": "fields",
    "vllm.sampling_params:SamplingParams": "fields",
    "vllm.sampling_params:StructuredOutputsParams": "fields",
    **{f"vllm.config:{name}Config": "names" for name in _CONFIGS},
    "vllm.v1.worker.worker_base:WorkerBase": "methods",
    "vllm.v1.worker.worker_base:WorkerWrapperBase": "methods",
    "vllm.platforms.cpu:CpuPlatform": _PLATFORM,
    "vllm.v1.core.sched.scheduler:Scheduler": ("schedule", "update_from_output", "finish_requests"),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": ("schedule", "update_from_output", "finish_requests"),
    "vllm.v1.request:Request": ("get_finished_reason", "take_events"),
}


def version():
    """Major and minor of the installed vLLM: patch releases share a snapshot."""
    from vllm import __version__

    return ".".join(__version__.split(".")[:2])


def snapshot_path(of):
    return SNAPSHOTS / f"{of}.json"


def known():
    """Versions with a snapshot, oldest first."""
    return sorted((path.stem for path in SNAPSHOTS.glob("*.json")), key=_number)


def _number(of):
    return [int(part) for part in of.split(".")]


def read(of):
    return json.loads(snapshot_path(of).read_text())


def observe():
    """Of the installed version: {class or "class.method": {field or parameter: its text}}."""
    found = {}
    for where, what in WATCHED.items():
        module, name = where.split(":")
        owner = getattr(importlib.import_module(module), name, None)
        if owner is None:
            continue  # `differences` reports a class that is gone
        nodes = [node for base in reversed(owner.__mro__) for node in _body(base)]
        if what in ("fields", "names"):
            declared = {node.target.id: _text(node) for node in nodes if isinstance(node, ast.AnnAssign)}
            found[name] = {
                field: text if what == "fields" else ""
                for field, text in declared.items()
                if not text.startswith("ClassVar")
            }
        else:
            methods = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
            for method in methods if what == "methods" else set(what) & methods.keys():
                found[f"{name}.{method}"] = _signature(methods[method])
    return dict(sorted(found.items()))


def differences(old, new):
    """One line per difference, by name."""
    lines = [f"{name} is gone" for name in old.keys() - new.keys()]
    lines += [f"{name} is new" for name in new.keys() - old.keys()]
    for name in old.keys() & new.keys():
        was, now = old[name], new[name]
        lines += [f"{name}: {field} is gone" for field in was.keys() - now.keys()]
        lines += [f"{name}: {field} is new: {now[field]}".rstrip(": ") for field in now.keys() - was.keys()]
        lines += [
            f"{name}: {field} was {was[field]}, is {now[field]}"
            for field in was.keys() & now.keys()
            if was[field] != now[field]
        ]
        orders = zip((field for field in was if field in now), (field for field in now if field in was), strict=True)
        if moved := next((pair for pair in orders if pair[0] != pair[1]), None):
            lines.append(f"{name}: the order has changed, {moved[1]} stands where {moved[0]} was")
    return sorted(lines)


def _body(base):
    """Statements of the class as vLLM wrote it; nothing for foreign bases, some of which have no source."""
    if not base.__module__.startswith("vllm."):
        return []
    return ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body


def _signature(function):
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    found = {
        argument.arg: _annotated(argument.annotation, default)
        for argument, default in zip(positional, defaults, strict=True)
        if argument.arg not in ("self", "cls")
    }
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found[argument.arg] = f"keyword only, {_annotated(argument.annotation, default)}"
    for argument, star in ((arguments.vararg, "*"), (arguments.kwarg, "**")):
        if argument is not None:
            found[star + argument.arg] = _annotated(argument.annotation, None)
    return {**found, "return": _annotated(function.returns, None)}


def _text(field):
    return _annotated(field.annotation, field.value)


def _annotated(annotation, default):
    if annotation is None:
        text = "untyped"
    elif isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        text = annotation.value
    else:
        text = ast.unparse(annotation)
    return " ".join(text.split()) + ("" if default is None else " = ...")


def _write():
    installed, new = version(), observe()
    before = [of for of in known() if _number(of) < _number(installed)]
    snapshot_path(installed).write_text(json.dumps(new, indent=1) + "\n")
    print(f"{snapshot_path(installed)} written")
    if before:
        print(f"since {before[-1]}:", *differences(read(before[-1]), new), sep="\n  ")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: vllm_drift.py --write")
    _write()
