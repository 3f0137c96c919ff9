"""vLLM's interface is the one that plugins/vllm was written for; what moved is reported by name."""

import copy

import vllm_drift


def test_the_installed_version_is_the_one_in_the_snapshot():
    installed = vllm_drift.version()
    refresh = "`python tests/support/vllm_drift.py --write` in its environment writes its snapshot"
    known = vllm_drift.known()
    assert installed in known, (
        f"vLLM {installed} has no snapshot, known are {', '.join(known)}; {refresh}. Since {known[-1]}:\n  "
        + "\n  ".join(vllm_drift.differences(vllm_drift.read(known[-1]), vllm_drift.observe()))
    )
    found = vllm_drift.differences(vllm_drift.read(installed), vllm_drift.observe())
    assert not found, f"vLLM {installed} differs from its snapshot:\n  " + "\n  ".join(found) + f"\n{refresh}"


def test_snapshots_have_all_that_is_watched():
    for version in vllm_drift.known():
        snapshot = vllm_drift.read(version)
        for where, what in vllm_drift.WATCHED.items():
            name = where.partition(":")[2]
            wanted = {"fields": [name], "names": [name], "methods": [f"{name}.__init__"]}.get(what) or [
                f"{name}.{method}" for method in what
            ]
            assert set(wanted) <= snapshot.keys(), f"{version}: {name}"


def test_a_difference_is_reported_by_name():
    old = vllm_drift.observe()
    new = copy.deepcopy(old)
    new["SchedulerOutput"]["urgency"] = "int = ..."
    del new["SchedulerOutput"]["finished_req_ids"]
    new["DraftTokenIds"]["req_ids"] = "tuple[str, ...]"
    new["WorkerBase.load_model"]["quietly"] = "keyword only, bool = ..."
    new["LogprobsLists"] = dict(reversed(new["LogprobsLists"].items()))
    new["WorkerBase.dance"] = {"return": "None"}
    del new["GrammarOutput"]
    assert vllm_drift.differences(old, new) == [
        "DraftTokenIds: req_ids was list[str], is tuple[str, ...]",
        "GrammarOutput is gone",
        "LogprobsLists: the order has changed, cu_num_generated_tokens stands where logprob_token_ids was",
        "SchedulerOutput: finished_req_ids is gone",
        "SchedulerOutput: urgency is new: int = ...",
        "WorkerBase.dance is new",
        "WorkerBase.load_model: quietly is new: keyword only, bool = ...",
    ]
