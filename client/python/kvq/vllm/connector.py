# SPDX-License-Identifier: Apache-2.0
"""The connector: which request's tokens a forward has.

vLLM makes one where it plans (the scheduler) and one where the model runs (the worker), in
processes of their own. The planning one finds what kvqd already has of a prompt and says, with each
step, which sessions end and begin and what tokens each of them gets; the other one has the
sessions.
"""
import logging
import os
import sys

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1, KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorRole,
    KVConnectorWorkerMetadata)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from . import BACKEND
from .checks import check_config, model_name, options, overcommitted, refuse
from .plan import Layers, Plan, Planner, Report

_log = logging.getLogger("vllm.kvq")

KVConnectorMetadata.register(Plan)
KVConnectorHandshakeMetadata.register(Layers)
KVConnectorWorkerMetadata.register(Report)


class KvqConnector(KVConnectorBase_V1):
    """Made by vLLM, from kv_transfer_config."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        check_config(vllm_config)
        if AttentionBackendEnum.CPU_ATTN.get_path() != BACKEND:
            refuse("the connector without kvq's attention", "vLLM's own would find nothing in the "
                   "pages", "set KVQ_VLLM=1 in the environment of all processes")
        self.pages = kv_cache_config
        if len(kv_cache_config.kv_cache_groups) != 1:
            refuse(f"a cache of {len(kv_cache_config.kv_cache_groups)} groups of layers",
                   "one whose layers all attend to everything is served",
                   "serve this model without KVQ_VLLM")
        self.asked = options(vllm_config)
        self.planner = self.worker = None
        if role == KVConnectorRole.SCHEDULER:
            self.planner = Planner(self.asked, model_name(vllm_config, self.asked.model))
        else:
            from .worker import Worker
            policy = vllm_config.kv_transfer_config.kv_load_failure_policy
            self.worker = Worker(vllm_config, self.asked, policy == "recompute")

    @property
    def requires_kv_delivery(self):
        return False  # nobody waits for what a preempted request had

    # ---- The worker's side ----

    def register_kv_caches(self, kv_caches):
        self.worker.understand(kv_caches)

    def get_handshake_metadata(self):
        return Layers(self.worker.table.rows(), self.worker.options())

    def bind_connector_metadata(self, connector_metadata):
        super().bind_connector_metadata(connector_metadata)
        self.worker.prepare(connector_metadata)

    def begin(self, metadata, dtype):
        """A forward's step; called by the first layer's attention."""
        return self.worker.begin(self._get_connector_metadata(), metadata, dtype)

    def start_load_kv(self, forward_context, **_):
        """Nothing is to be loaded: sessions begin with what is there."""

    def wait_for_layer_load(self, layer_name):
        """As start_load_kv."""

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **_):
        """The attention has handed K and V over."""

    def wait_for_save(self):
        # vLLM also calls this while the exception of a failed forward passes through it. An error
        # raised here would hide that exception.
        if sys.exc_info()[0] is not None:
            self.worker.abort()
            return
        self.worker.finished(self._get_connector_metadata())

    def get_block_ids_with_load_errors(self):
        return self.worker.failures(self._get_connector_metadata())

    def build_connector_worker_meta(self):
        return Report(True) if self.worker.full else None

    def shutdown(self):
        for side in (self.planner, self.worker):
            if side is not None:
                side.close()

    # ---- The scheduler's side ----

    def set_xfer_handshake_metadata(self, metadata):
        (self.planner.layers,) = metadata.values()
        (group,) = self.pages.kv_cache_groups
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        warning = overcommitted(self.pages.num_blocks, group.kv_cache_spec.block_size,
                                self.planner.layers.rows, memory)
        if warning:
            _log.warning(warning)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if num_computed_tokens:
            raise RuntimeError(f"kvq: vLLM has {num_computed_tokens} tokens of request "
                               f"{request.request_id} in pages of its own, in which nothing is")
        return self.planner.matched(request), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.planner.placed(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return self.planner.plan(scheduler_output)

    def update_connector_output(self, connector_output):
        report = connector_output.kv_connector_worker_meta
        if report is not None:
            self.planner.heard(report)

    def reset_cache(self):
        """What reset_prefix_cache(reset_connector=True) asks for."""
        self.planner.reset()
        return True

    def request_finished(self, request, block_ids):
        self.planner.over(request)
        return False, None
