#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The smallest engine in Python: one session, a prompt, then token by token."""
import kvq
import numpy as np

LAYERS, Q_HEADS, KV_HEADS, DIM, PROMPT = 2, 8, 2, 128, 40
random = np.random.default_rng(1)


def compute(n):
    """Stands for your model: K, V and Q of n new tokens of one layer."""
    return (random.standard_normal((n, heads, DIM), np.float32)
            for heads in (KV_HEADS, KV_HEADS, Q_HEADS))


with kvq.Client() as client, client.queue() as queue:
    layers = [kvq.Layer(Q_HEADS, KV_HEADS, DIM, repeat=LAYERS)]
    with client.session(layers, "kvq2") as session:
        for n in [PROMPT] + [1] * 200:
            with queue.step([session], n) as step:
                for layer in range(LAYERS):
                    k, v, q = compute(n)
                    out, lse = step.append_attend(layer, k, v, q)
        info = session.info()
        print(f"{session.tokens} tokens, {info['bits_per_value']} bits per packed value, "
              f"output {out[-1, 0, 0]:.4f}")
