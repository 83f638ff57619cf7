"""What runs in OpenRLHF's actors in the tests."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tensorhub.errors import StateError
from tensorhub.integrations import openrlhf
from tensorhub.integrations.engine_feed import EngineFeed
from tests.frameworks.openrlhf_cpu import digests, weights_of
from tests.frameworks.test_vllm_worker import expected

NOTES = "TENSORHUB_TEST_NOTES"  # the environment's variable with the path of a file
LEFT_OUT = "model.norm.weight"


class CheckedPolicy(openrlhf.Policy):
    """After each update rank 0 writes down what the engine has, and what it ought to have. The
    first time it offers weights without a parameter before.
    """

    updates = 0

    def broadcast_to_vllm(self) -> None:
        whole, refused = {name: each.clone() for name, each in self._whole()}, None
        if self._feed is not None and self.updates == 0:
            refused = self._offer_less(whole)
        self.updates += 1
        super().broadcast_to_vllm()
        if self._feed is None:
            return
        self._call("tensorhub_check")
        (state,), (has,) = self._call("tensorhub_state"), self._call(weights_of)
        wanted = digests(expected(SimpleNamespace(state_dict=lambda: whole), turned=False))
        note = {"version": state["version"], "has": has, "wanted": wanted, "refused": refused}
        with Path(os.environ[NOTES]).open("a") as file:
            file.write(f"{json.dumps(note)}\n")

    def _call(self, method: Any) -> Any:
        return self._clients[0].collective_rpc(method, {})

    def _offer_less(self, whole: Mapping[str, torch.Tensor]) -> str:
        """What the engine says, under another name, and whether it keeps its weights."""
        feed, before = EngineFeed(self._clients, model="less"), self._call(weights_of)
        try:
            feed.send((name, each) for name, each in whole.items() if name != LEFT_OUT)
        except StateError as error:
            return f"{error}; intact: {self._call(weights_of) == before}"
        finally:
            feed.close()
        return "it was taken"
