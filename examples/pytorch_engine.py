#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An engine in PyTorch: its own CUDA tensors go to the daemon as they are, in the order of
PyTorch's current stream. Needs torch with CUDA, and a kvqd that has the same GPU.
"""
import sys

import kvq

LAYERS, Q_HEADS, KV_HEADS, DIM, PROMPT, TOKENS = 2, 8, 2, 128, 5, 40


def main():
    try:
        import torch
    except ImportError:
        return "this example needs PyTorch"
    if not torch.cuda.is_available():
        return "this example needs a GPU"
    torch.manual_seed(1)
    # Tensors that stay where they are: one allocation, imported once.
    # (Not with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which cannot be shared.)
    pool = torch.zeros(1 << 20, dtype=torch.bfloat16, device="cuda")

    def tensor(at, tokens, heads):
        return pool[at:at + tokens * heads * DIM].view(tokens, heads, DIM)

    with kvq.Client() as client, client.queue() as queue:
        gpus = client.gpus()
        if not gpus:
            return "this kvqd has no GPU"
        buffer = client.import_tensor(pool)
        queue.prepare_streams()
        layers = [kvq.Layer(Q_HEADS, KV_HEADS, DIM, repeat=LAYERS)]
        with client.session(layers, "oscar2", dtype="bf16", place=gpus[0]["place"]) as session:
            for step_number in range(TOKENS):
                n = PROMPT if step_number == 0 else 1
                k, v = tensor(0, n, KV_HEADS), tensor(1 << 16, n, KV_HEADS)
                q, out = tensor(1 << 17, n, Q_HEADS), tensor(1 << 18, n, Q_HEADS)
                with queue.step([session], tokens=n) as step:
                    for layer in range(LAYERS):
                        for t in (k, v, q):  # stands for your model
                            t.copy_(torch.randn_like(t))
                        stream = torch.cuda.current_stream().cuda_stream
                        step.on_stream("append_attend", layer, stream, k=k, v=v, q=q, out=out)
                        total = out.float().sum()  # behind the daemon's work, on the same stream
            print(f"{session.tokens} tokens on {gpus[0]['name']}, sum {total.item():.4f}, streams "
                  f"ordered by {queue.order()}")
        buffer.close()
    return None


if __name__ == "__main__":
    sys.exit(main())
