"""Answers to what anybody may ask, joined or not: Describe, GetManifest, Check. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.coordinator import views
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.versions import Versions
from tensorhub.errors import VersionUnavailable
from tensorhub.messages import Check, Describe, Description, GetManifest, ManifestReply


@dataclass(eq=False, repr=False)
class Answers:
    """Each is sent to the session that asked."""

    _cluster: Cluster
    _versions: Versions

    def describe(self, session: int, message: Describe) -> None:
        """One model, or a page of all."""
        cluster = self._cluster
        if message.model is None:
            models, more = views.page(cluster, message.after)
        elif message.model in cluster.models:
            models, more = (views.describe(cluster.models[message.model]),), False
        else:
            known = ", ".join(cluster.model_names[:20]) or "none yet"
            error = VersionUnavailable(f"no model {message.model!r} is known here; known models: {known}")
            cluster.answer(session, message.request, error)
            return
        cluster.send(session, Description(message.request, models, more))

    def manifest(self, session: int, message: GetManifest) -> None:
        """That of one shard of a content."""
        model = self._cluster.models.get(message.model)
        for version in model.versions.values() if model is not None else ():
            if version.info.content_id == message.content_id and message.shard in version.manifests:
                self._cluster.send(session, ManifestReply(message.request, version.manifests[message.shard]))
                return
        error = VersionUnavailable(f"no manifest of shard {message.shard} of that content is known")
        self._cluster.answer(session, message.request, error)

    def check(self, session: int, message: Check) -> None:
        """Whether a number can still be published."""
        # Not `conflict`: another rank of the asker's own group may be publishing this very number.
        model = self._cluster.models.get(message.model)
        conflict = self._versions.overtaken(model, message.version) if model is not None else None
        self._cluster.answer(session, message.request, conflict)
