"""Answers to what anybody may ask, joined or not: Describe, GetManifest, GetPart, GetPublication, Check.

They change nothing. (What a publication is described by is made when it is first asked for, and kept with the version.)
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.coordinator import views
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Model, Version
from tensorhub.coordinator.refusals import held_text
from tensorhub.coordinator.versions import Versions
from tensorhub.errors import VersionUnavailable
from tensorhub.messages import (
    Check,
    Describe,
    Description,
    GetManifest,
    GetPart,
    GetPublication,
    ManifestReply,
    PublicationReply,
)
from tensorhub.types import AVAILABLE, Selector


@dataclass(eq=False, repr=False)
class Answers:
    """Each is sent to the session that asked."""

    _cluster: Cluster
    _versions: Versions

    def describe(self, session: int, message: Describe) -> None:
        """One model, or a part of it, or a page of all."""
        if message.model is None:
            models, more, is_cut = views.page(self._cluster, message.after, message.workers_max)
            self._cluster.send(session, Description(message.request, models, more, is_cut))
            return
        model = self._model(session, message, message.model)
        if model is None:
            return
        if message.version is not None and message.version not in model.versions:
            error = VersionUnavailable(f"version {message.version} of {model.name!r} is not known here; {held_text(model)}")
            self._cluster.answer(session, message.request, error)
            return
        after = None if message.after is None else (message.after, message.incarnation)
        found, is_cut = views.describe(model, self._cluster.now, message.version, after, message.workers_max)
        self._cluster.send(session, Description(message.request, (found,), is_cut=is_cut))

    def _model(self, session: int, message: Describe | GetPublication, name: str) -> Model | None:
        """The model of this name; if there is none, the asker hears which ones there are."""
        model = self._cluster.models.get(name)
        if model is None:
            known = ", ".join(self._cluster.model_names[:20]) or "none yet"
            error = VersionUnavailable(f"no model {name!r} is known here; known models: {known}")
            self._cluster.answer(session, message.request, error)
        return model

    def manifest(self, session: int, message: GetManifest) -> None:
        """That of one shard of a content."""
        model = self._cluster.models.get(message.model)
        for version in model.versions.values() if model is not None else ():
            if version.info.content_id == message.content_id and message.shard in version.manifests:
                self._cluster.send(session, ManifestReply(message.request, version.manifests[message.shard]))
                return
        error = VersionUnavailable(f"no manifest of shard {message.shard} of that content is known")
        self._cluster.answer(session, message.request, error)

    def part(self, session: int, message: GetPart) -> None:
        """What is kept under that id."""
        blob = self._cluster.manifests.find(message.part_id)
        if blob is None:
            error = VersionUnavailable("that part of a layout is not known, or not any more: nobody holds its version")
            self._cluster.answer(session, message.request, error)
        else:
            self._cluster.send(session, ManifestReply(message.request, blob))

    def publication(self, session: int, message: GetPublication) -> None:
        """What was published where, of the version that a selector means now."""
        model = self._model(session, message, message.model)
        if model is None:
            return
        try:
            version = self._resolved(model, message.selector)
        except VersionUnavailable as error:
            self._cluster.answer(session, message.request, error)
            return
        blob = self._cluster.manifests.find(self._cluster.describe(version, version.holdings))
        assert blob is not None
        self._cluster.send(session, PublicationReply(message.request, version.info, version.layout_id, blob))

    def _resolved(self, model: Model, selector: Selector) -> Version:
        """A version that can be described. VersionUnavailable: there is none that the selector means now."""
        version = (
            next((v for v in model.visible if v.copies or self._is_of_classes(v)), None)
            if selector == AVAILABLE
            else self._versions.resolve(model, selector, None)
        )
        if version is None:
            raise VersionUnavailable(self._versions.waiting_text(model, selector, None), retryable=True)
        if not version.holdings.is_described:
            text = f"nobody who is here now has said what is in version {version.number} of {model.name!r}"
            raise VersionUnavailable(f"{text}; {held_text(model)}", retryable=True)
        return version

    @staticmethod
    def _is_of_classes(version: Version) -> bool:
        """Whether each class of shards can be read, though perhaps not each shard."""
        return version.holdings.is_described and version.holdings.can_each_class_be_read()

    def check(self, session: int, message: Check) -> None:
        """Whether a number can still be published."""
        # Not `conflict`: another rank of the asker's own group may be publishing this very number.
        model = self._cluster.models.get(message.model)
        conflict = self._versions.overtaken(model, message.version) if model is not None else None
        self._cluster.answer(session, message.request, conflict)
