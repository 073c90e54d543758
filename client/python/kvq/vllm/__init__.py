# SPDX-License-Identifier: Apache-2.0
"""kvqd under vLLM on the CPU: the KV cache of an unmodified engine lies in the daemon.

vLLM loads this package through the entry point vllm.general_plugins, in each of its processes.
register() does nothing unless the environment says KVQ_VLLM=1: a plug-in that is installed
changes nobody's vLLM. docs/engines.md says how an engine is started, what is served and what is
refused.
"""
import os

CONNECTOR = "KvqConnector"
BACKEND = "kvq.vllm.backend.KvqBackend"


def asked() -> bool:
    """Whether the environment asks for kvq."""
    return os.environ.get("KVQ_VLLM", "0") not in ("", "0")


def register() -> None:
    """What vLLM calls in each process. Takes the place of the CPU's attention backend, the only
    one that vLLM takes on a CPU, and makes the connector known by its name."""
    if not asked():
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    if CONNECTOR not in KVConnectorFactory._registry:  # vLLM may load a plug-in more than once
        KVConnectorFactory.register_connector(CONNECTOR, "kvq.vllm.connector", CONNECTOR)
