#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Engines of vLLM in a process of their own, for vllm_test.py.

    vllm_engine.py      reads one line of JSON for each engine: its arguments and its jobs

Answers each job with a line "RESULT" of JSON. An engine that cannot start is a line "REFUSED".
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

counted = {"preempted": 0, "found": 0, "steps": 0, "longest": 0}


def count():
    """Watches the scheduler: of engines in this process."""
    preempt, schedule = Scheduler._preempt_request, Scheduler.schedule

    def counting(self, *arguments, **options):
        counted["preempted"] += 1
        return preempt(self, *arguments, **options)

    def scheduling(self, *arguments, **options):
        output = schedule(self, *arguments, **options)
        counted["steps"] += 1
        counted["longest"] = max(counted["longest"], *output.num_scheduled_tokens.values(), 0)
        counted["found"] += sum(r.num_computed_tokens for r in output.scheduled_new_reqs)
        return output

    Scheduler._preempt_request, Scheduler.schedule = counting, scheduling


def do(engine, job):
    counted.update(dict.fromkeys(counted, 0))
    ask = SamplingParams(temperature=0, max_tokens=job["count"], detokenize=False,
                         ignore_eos=True, logprobs=2)
    done = engine.generate([{"prompt_token_ids": p} for p in job["prompts"]], ask, use_tqdm=False)
    return {"tokens": [list(r.outputs[0].token_ids) for r in done],
            "nearly": [[next_best(p) for p in r.outputs[0].logprobs] for r in done], **counted}


def next_best(probabilities):
    """The second token of a place, and by how much the first one's logit is above its own."""
    (_, best), (token, second) = sorted(((t, p.logprob) for t, p in probabilities.items()),
                                        key=lambda pair: -pair[1])[:2]
    return token, best - second


def main():
    count()
    for line in sys.stdin:
        told = json.loads(line)
        try:
            engine = LLM(skip_tokenizer_init=True, enforce_eager=True, **told["engine"])
        except Exception as error:  # whatever vLLM makes of a refusal
            parts = []
            while error is not None:
                parts.append(str(error))
                error = error.__cause__ or error.__context__
            print("REFUSED", json.dumps(" / ".join(parts)), flush=True)
            continue
        for job in told["jobs"]:
            print("RESULT", json.dumps(do(engine, job)), flush=True)
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        from vllm.distributed import cleanup_dist_env_and_memory
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
