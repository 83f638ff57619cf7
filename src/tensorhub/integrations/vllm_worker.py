"""vLLM: weights of TensorHub's in any release that takes a `worker_extension_cls`.

    LLM(model, worker_extension_cls="tensorhub.integrations.vllm_worker.WorkerExtension")

Its methods are called by `collective_rpc`: of `LLM`, of `AsyncLLM`, or of the HTTP server. They
take and return what JSON can say. `vllm_session.ExtensionClient` calls them for a trainer.

Responsible for these methods. Not responsible for an update itself (`vllm_updater`), nor for
pausing the engine, which its caller does.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from tensorhub.errors import StateError, TensorHubError
from tensorhub.integrations import vllm_draft, vllm_first_load, vllm_sleep, vllm_start
from tensorhub.integrations.environment import URL
from tensorhub.integrations.vllm import new_updater
from tensorhub.integrations.vllm_ranks import Outcome
from tensorhub.integrations.vllm_session import INTACT, TORN

if TYPE_CHECKING:
    from tensorhub.integrations.vllm_updater import Updater

# vLLM imports this module before it loads a model
vllm_first_load.watch()
vllm_sleep.watch()
vllm_start.watch()


class WorkerExtension:
    """What vLLM adds to each of its workers.

    Of several workers the last one raises for all of them, and the others return: they must not go
    on, for each step waits for all workers. Each error ends with "[the engine's
    weights are intact]" or "[the engine's weights are torn]": torn ones must not be used for
    generation, and the next update repairs them.
    """

    # vLLM's worker
    vllm_config: Any
    get_model: Any
    execute_model: Any

    def tensorhub_join(
        self,
        address: str | list[str],
        model: str = "actor",
        replica: str | None = None,
        host_memory_bytes: int = 0,
        timeout_s: float = 300.0,
        ignored: Sequence[str] = (),
    ) -> None:
        """Join a cluster. `replica`: a word for this engine, that no other one has. With
        `host_memory_bytes` for this worker's shard, updates are staged. `ignored`: patterns of
        published names that the engine leaves alone (`*mtp*`).
        """
        if self._is_alone():
            self._has_joined(
                replica,
                address=address,
                model=model,
                host_memory_bytes=host_memory_bytes,
                timeout_s=timeout_s,
                ignored=ignored,
            )

    def _has_joined(self, replica: str | None = None, **settings: Any) -> bool:
        updater = _updater(self)
        group = replica or f"vllm-{updater.ranks.share(secrets.token_hex(8))[0]}"
        return _is_done(updater, updater.join(group=group, **settings))

    def tensorhub_prepare(self, version: int) -> None:
        """Get ready for a version while the engine generates: check it, register, and read it into
        host memory where updates are staged.
        """
        if self._is_alone():
            updater = _updater(self)
            _is_done(updater, updater.prepare(version))

    def tensorhub_update(self, version: int | None = None) -> dict[str, Any]:
        """Have the model hold a version; None: the newest one. Nothing may be generated meanwhile.
        Returns the state.

        Raises ManifestMismatch (names that are missing, unexpected or misspelt, all listed),
        VersionUnavailable, VersionConflict (an older version), and what else `Weights.update`
        raises.
        """
        updater = _updater(self)
        if not self._is_alone():
            return updater.state()
        if version is None:
            outcome, version = updater.newest()
            if not _is_done(updater, outcome):
                return updater.state()
        _is_done(updater, updater.update(version))
        return updater.state()

    def tensorhub_start(self, address: str, model: str) -> dict[str, Any]:
        """Join, and take the newest version if one was published; `vllm_start` calls it."""
        updater = _updater(self)
        if self._has_joined(address=address, model=model):
            outcome, is_published = updater.is_published()
            if _is_done(updater, outcome) and is_published:
                return self.tensorhub_update()
        return updater.state()

    def tensorhub_one_version(
        self,
        address: str | list[str],
        model: str = "actor",
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        lease_s: float = 3.0,
        timeout_s: float = 300.0,
    ) -> dict[str, Any]:
        """Join a fleet with one version on all engines, or on none (`one_version`): from now on the
        engine generates with no other version, and `OneVersion` updates it. `host`, `port`,
        `token`: see `one_version_engine.Engine`. A step waits for a version for `timeout_s`; then
        vLLM ends the engine. Returns the URL for `OneVersion`, on rank 0.
        """
        from tensorhub.integrations.one_version_ranks import PREFIXES
        from tensorhub.integrations.vllm_one_version import Member

        nothing: dict[str, Any] = {"url": None}
        updater = _updater(self)
        joins = self._is_alone()
        if not joins or not self._has_joined(address=address, model=model, timeout_s=timeout_s):
            return nothing
        made: list[Member] = []

        def make() -> None:
            config = self.vllm_config
            sizes = config.parallel_config
            if sizes.world_size != sizes.tensor_parallel_size:
                raise StateError("an engine that is not only tensor-parallel cannot join a fleet")
            if config.cache_config.enable_prefix_caching:
                raise StateError(f"{PREFIXES}--no-enable-prefix-caching")
            device = next(self.get_model().parameters()).device
            points = device.type == "cpu" and config.model_config.enforce_eager
            its = {"host": host, "port": port, "token": token, "lease_s": lease_s}
            called = os.environ.get(URL, "")
            made.append(
                Member(updater, device, points=points, wait_s=timeout_s, called=called, **its)
            )

        if not _is_done(updater, updater.together(make)):
            return nothing
        (member,) = made
        execute = self.execute_model

        def execute_model(*given: Any, **named: Any) -> Any:
            with member.step():
                return execute(*given, **named)

        self.execute_model, self.__dict__["_tensorhub_member"] = execute_model, member
        engine = member.engine
        _is_done(updater, updater.together(lambda: engine and engine.start(timeout_s)))
        return nothing if engine is None else {"url": engine.url}

    def _is_alone(self) -> bool:
        if "_tensorhub_member" not in self.__dict__:
            return True
        if _updater(self).ranks.speaks:
            raise StateError("this engine is one of a fleet, and has its versions by `OneVersion`")
        return False

    def tensorhub_check(
        self, model: str | None = None, version: int | None = None
    ) -> dict[str, Any]:
        """Compare the model with what vLLM's own loader makes of the served version, which has to
        be published, or of another publication of the same weights. Returns the state. Raises
        IntegrityError, with the names that differ.
        """
        updater, member = _updater(self), self.__dict__.get("_tensorhub_member")
        try:
            with nullcontext() if member is None else member.step():
                outcome = updater.check(model, version)
                if member is not None and any(outcome.are_torn):
                    member.distrust()
        except StateError:  # no version may be served, on all workers
            if updater.ranks.speaks:
                raise
            return updater.state()
        _is_done(updater, outcome)
        return updater.state()

    def tensorhub_state(self) -> dict[str, Any]:
        """The version in place, and how it gets there."""
        return _updater(self).state()

    def tensorhub_leave(self) -> None:
        """Leave the cluster; trainers find this engine no more. The model stays as it is."""
        if self._is_alone():
            vllm_start.withdraw(self)
            _updater(self).close()


def _updater(worker: WorkerExtension) -> Updater:
    found: Updater | None = worker.__dict__.get("_tensorhub_updater")
    if found is None:
        found = new_updater(worker.get_model(), worker.vllm_config, vllm_draft.draft_of(worker))
        worker.__dict__["_tensorhub_updater"] = found
    return found


def _is_done(updater: Updater, outcome: Outcome) -> bool:
    """False: a call has failed on some worker, and another worker than this one raises the
    error.
    """
    error = outcome.error
    if isinstance(error, TensorHubError):
        error.args = (f"{error} [{TORN if updater.is_torn else INTACT}]",)
        raise error
    return not outcome.has_failed
