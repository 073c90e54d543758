# SPDX-License-Identifier: Apache-2.0
"""Rows of bench-peers.py over the ggml of ik_llama.cpp: those of of_ggml.py."""
from of_ggml import OfGgml


class Ik(OfGgml):
    """Rows."""
    package, distribution, variable = "ik_llama_cpp", "ik-llama-cpp-python", "KVQ_BENCH_IK"


make = Ik
