#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Engines of vLLM in a process of their own, for vllm_test.py.

    vllm_engine.py      reads one line of JSON for each engine: its arguments and its jobs

All of an engine runs in this process unless VLLM_ENABLE_V1_MULTIPROCESSING=1. Answers each job
with a line "RESULT" of JSON; one that fails is what was said, and the engine's last. An engine that
cannot start is a line "REFUSED".
"""
import gc
import json
import os
import sys

os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
                  VLLM_LOGGING_LEVEL="WARNING", OMP_NUM_THREADS="1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

METRICS = {"preempted": "vllm:num_preemptions", "found": "vllm:external_prefix_cache_hits"}
longest = [0]  # tokens of a step; of engines in this process


def watch():
    """Watches the scheduler's steps."""
    schedule = Scheduler.schedule

    def scheduling(self, *arguments, **options):
        output = schedule(self, *arguments, **options)
        longest[0] = max(longest[0], *output.num_scheduled_tokens.values(), 0)
        return output

    Scheduler.schedule = scheduling


def counted(engine):
    """What vLLM counts, since the process began."""
    values = {}
    for metric in engine.get_metrics():
        values[metric.name] = values.get(metric.name, 0) + getattr(metric, "value", 0)
    return {name: values.get(metric, 0) for name, metric in METRICS.items()}


def do(engine, job):
    before, longest[0] = counted(engine), 0
    ask = SamplingParams(temperature=0, max_tokens=job["count"], detokenize=False,
                         ignore_eos=True, logprobs=2)
    done = engine.generate([{"prompt_token_ids": p} for p in job["prompts"]], ask, use_tqdm=False)
    after = counted(engine)
    return {"tokens": [list(r.outputs[0].token_ids) for r in done],
            "ends": [r.outputs[0].finish_reason for r in done],
            "nearly": [[next_best(p) for p in r.outputs[0].logprobs] for r in done],
            "longest": longest[0], **{name: after[name] - before[name] for name in after}}


def next_best(probabilities):
    """The second token of a place, and by how much the first one's logit is above its own."""
    (_, best), (token, second) = sorted(((t, p.logprob) for t, p in probabilities.items()),
                                        key=lambda pair: -pair[1])[:2]
    return token, best - second


def sentences(error):
    """What an error says, and those that led to it."""
    parts = []
    while error is not None:
        parts.append(str(error))
        error = error.__cause__ or error.__context__
    return parts


def tried(engine, job):
    """The job's answer, or how it failed."""
    try:
        return do(engine, job)
    except Exception as error:  # whatever vLLM makes of it
        return {"failed": sentences(error)}


def main():
    watch()
    for line in sys.stdin:
        told = json.loads(line)
        try:
            engine = LLM(skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=False,
                         **told["engine"])
        except Exception as error:  # whatever vLLM makes of a refusal
            print("REFUSED", json.dumps(" / ".join(sentences(error))), flush=True)
            continue
        for job in told["jobs"]:
            print("RESULT", json.dumps(tried(engine, job)), flush=True)
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        from vllm.distributed import cleanup_dist_env_and_memory
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
