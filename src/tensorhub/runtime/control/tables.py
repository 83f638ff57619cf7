"""What a coordinator must not forget, as tables of SQLite: how an entry changes them, and how they
are read.

Responsible for what the rows mean, and for refusing damaged ones. Not responsible for where the
tables are: `store` has them in a file, `etcd_store` in memory.
"""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import assert_never

from tensorhub.coordinator import (
    Decision,
    Described,
    Digested,
    Durable,
    Entry,
    Forgotten,
    ModelRecord,
    Pinned,
    Publication,
    Restoration,
    Retention,
    Rollback,
    Unpinned,
)
from tensorhub.coordinator.actions import IDENTS_CHARS_MAX, STAND_IN, bounded
from tensorhub.errors import ProtocolError, StateError, shown
from tensorhub.layouts.published import Published
from tensorhub.model.manifest import ID_BYTES, id_of
from tensorhub.protocol.forms import Violation, brief, record_of
from tensorhub.types import OpKey

PUBLICATIONS_READ_MAX = 64  # newest of each model, at the start, besides retained and pinned ones
PUBLICATIONS_KEPT_MAX = (
    # newest of each model, that a rollback may make the newest again; besides retained and pinned
    # ones
    4096
)
PRUNED_AT = 256  # deleted at once, so that not every publish deletes
SCHEMA = """
CREATE TABLE IF NOT EXISTS cluster (
    id TEXT NOT NULL, epoch INTEGER NOT NULL, format INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS publications (
    model TEXT NOT NULL, lineage INTEGER NOT NULL, number INTEGER NOT NULL,
    content_id TEXT NOT NULL, nbytes INTEGER NOT NULL, world_size INTEGER NOT NULL,
    layout_id TEXT NOT NULL,
    "group" TEXT NOT NULL, epoch INTEGER NOT NULL, sequence INTEGER NOT NULL,
    manifest_ids BLOB NOT NULL,
    PRIMARY KEY (model, lineage, number));
CREATE TABLE IF NOT EXISTS decisions (
    model TEXT NOT NULL, "group" TEXT NOT NULL, epoch INTEGER NOT NULL, sequence INTEGER NOT NULL,
    number INTEGER NOT NULL, content_id TEXT NOT NULL, nbytes INTEGER NOT NULL,
    world_size INTEGER NOT NULL, PRIMARY KEY (model, "group"));
CREATE TABLE IF NOT EXISTS models (
    model TEXT NOT NULL PRIMARY KEY, lineage INTEGER NOT NULL DEFAULT 0, mark INTEGER,
    rollback TEXT NOT NULL DEFAULT '', retain INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS pins (
    pin TEXT NOT NULL PRIMARY KEY, incarnation TEXT NOT NULL, model TEXT NOT NULL,
    number INTEGER NOT NULL, content_id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS digested (
    model TEXT NOT NULL, number INTEGER NOT NULL, content_id TEXT NOT NULL, roots BLOB NOT NULL,
    PRIMARY KEY (model, number));
CREATE TABLE IF NOT EXISTS described (
    model TEXT NOT NULL, number INTEGER NOT NULL, content_id TEXT NOT NULL, layout TEXT NOT NULL,
    PRIMARY KEY (model, number));
CREATE TABLE IF NOT EXISTS layouts (
    id TEXT NOT NULL, place INTEGER NOT NULL, blob BLOB NOT NULL, PRIMARY KEY (id, place));
CREATE TABLE IF NOT EXISTS pruned (model TEXT NOT NULL PRIMARY KEY, up_to INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS bounds (
    model TEXT NOT NULL, lineage INTEGER NOT NULL, number INTEGER NOT NULL,
    PRIMARY KEY (model, lineage));
CREATE TABLE IF NOT EXISTS origins (
    model TEXT NOT NULL PRIMARY KEY, cluster TEXT NOT NULL, mark INTEGER NOT NULL);
"""
_OF_VERSIONS = ("publications", "digested", "described")
FORMAT = 4
# By format: what makes the next one of it, besides the new tables of SCHEMA.
MIGRATIONS: Mapping[int, Sequence[str]] = {
    2: (
        "CREATE TABLE IF NOT EXISTS described (model, number, content_id, manifest_ids)",
        "ALTER TABLE publications ADD COLUMN manifest_ids BLOB NOT NULL DEFAULT x''",
        """UPDATE publications AS p SET manifest_ids = d.manifest_ids FROM described AS d
           WHERE (d.model, d.number, d.content_id) = (p.model, p.number, p.content_id)""",
        "DROP TABLE described",
    ),
    3: (),  # it had no layouts
}
_RECORDS: tuple[tuple[type, Callable[[Durable], Sequence[object]]], ...] = (
    (Publication, lambda durable: durable.publications),
    (Decision, lambda durable: durable.decisions),
    (ModelRecord, lambda durable: durable.models),
    (Pinned, lambda durable: durable.pins),
    (Digested, lambda durable: durable.digested),
)  # and Described: `_layout` checks each layout once, and all else is of a Publication
# the latter where SQLite's own words repeat what it has read
UNREADABLE = (sqlite3.Error, UnicodeDecodeError)


def identity(cluster: object, epoch: object, format_: object) -> tuple[str, int]:
    """A state's own record, checked: its cluster and the newest epoch. StateError if it is no such
    record, or of a format that cannot be migrated.
    """
    if type(format_) is not int or format_ not in (FORMAT, *MIGRATIONS):
        raise StateError(
            f"its format is {brief(format_)}, this version writes {FORMAT}: run the release that "
            f"wrote it, or restore what was there before"
        )
    if (
        type(cluster) is not str
        or not 0 < len(cluster) <= 64
        or type(epoch) is not int
        or not 0 <= epoch < 2**31
    ):
        raise StateError(
            f"it is damaged: its cluster is called {brief(cluster)}, its epoch is {brief(epoch)}"
        )
    return cluster, epoch


class Tables:
    """The tables in one database. `where`: its name in errors, such as "the state_dir /x"."""

    def __init__(self, db: sqlite3.Connection, where: str) -> None:
        self._db = db
        self._where = where

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All that its body writes, or nothing."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk has ended it already
                self._db.execute("ROLLBACK")
            raise

    def make(self, format_: int) -> None:
        """Bring tables of this format to the present one, and make those that are missing; in a
        transaction.
        """
        steps = [statement for each in range(format_, FORMAT) for statement in MIGRATIONS[each]]
        for statement in (*steps, *SCHEMA.split(";")):
            self._db.execute(statement)
        self._db.execute("UPDATE cluster SET format = ?", (FORMAT,))

    def read(self) -> Durable:
        """All entries that still count. StateError if the stored records are damaged."""
        try:
            found = self._read()
            for kind, records in _RECORDS:
                for record in records(found):
                    record_of(kind).encode(record)
        except UNREADABLE as error:
            raise self.damaged(shown(str(error), 200)) from error
        except Violation as error:
            raise self.damaged(f"{'.'.join(error.where)}: {error.what}") from error
        models = {model.model: model for model in found.models}
        for each in found.publications:
            model = models.get(each.model, ModelRecord(each.model))
            if model.mark is None or each.number > model.mark or each.lineage > model.lineage:
                raise self.damaged(
                    f"version {each.number} of {each.model!r} is beyond its model's mark"
                )
            # all who hold it would be turned away
            if len(each.manifest_ids) not in (0, 2 * ID_BYTES * each.world_size):
                raise self.damaged(
                    f"the ids of the manifests of version {each.number} of {each.model!r} are cut"
                )
        return found

    def damaged(self, what: str) -> StateError:
        return StateError(
            f"{self._where} is damaged ({what}): restore it from a copy, or begin with another one"
        )

    def _read(self) -> Durable:
        lost = self._db.execute(
            "SELECT model FROM publications WHERE model NOT IN (SELECT model FROM models)"
        ).fetchone()
        if lost is not None:
            raise self.damaged(f"of {lost[0]!r} only versions are there")
        publications = self._db.execute(
            "SELECT model, lineage, number, content_id, nbytes, world_size, layout_id, "
            '"group", epoch, sequence, manifest_ids FROM (SELECT *, row_number() OVER '
            "(PARTITION BY model ORDER BY lineage DESC, number DESC) AS "
            "age FROM publications) AS p "
            "WHERE age <= max(?, (SELECT retain FROM models WHERE model = p.model)) "
            "OR content_id IN (SELECT content_id FROM pins) ORDER BY model, number",
            (PUBLICATIONS_READ_MAX,),
        ).fetchall()
        decisions = self._db.execute(
            'SELECT model, "group", epoch, sequence, number, content_id, nbytes, world_size FROM '
            "decisions "
            'ORDER BY model, "group"'
        )
        models = self._db.execute(
            "SELECT model, lineage, models.mark, rollback, retain, coalesce(cluster, ''), "
            "coalesce(origins.mark, 0) FROM models LEFT JOIN origins USING (model) ORDER BY model"
        )
        bounds: dict[str, list[tuple[int, int]]] = {}
        for model, *bound in self._db.execute("SELECT * FROM bounds ORDER BY model, lineage"):
            bounds.setdefault(model, []).append((bound[0], bound[1]))
        known = "(SELECT model, number, content_id FROM publications)"
        of_publications = f"WHERE (model, number, content_id) IN {known} ORDER BY model, number"
        digested = self._db.execute(
            f"SELECT model, number, content_id, roots FROM digested {of_publications}"
        )
        described = self._db.execute(
            f"SELECT model, number, content_id, layout FROM described {of_publications}"
        ).fetchall()
        layouts = {layout: self._layout(layout) for layout in {row[-1] for row in described}}
        pins = self._db.execute(
            "SELECT pin, incarnation, model, number, content_id FROM pins ORDER BY pin"
        )
        return Durable(
            publications=tuple(
                Publication(
                    model,
                    lineage,
                    number,
                    content_id,
                    nbytes,
                    world_size,
                    layout_id,
                    OpKey(model, *key),
                    ids,
                )
                for (
                    model,
                    lineage,
                    number,
                    content_id,
                    nbytes,
                    world_size,
                    layout_id,
                    *key,
                    ids,
                ) in publications
            ),
            decisions=tuple(
                Decision(OpKey(model, group, epoch, sequence), model, *content)
                for model, group, epoch, sequence, *content in decisions.fetchall()
            ),
            models=tuple(
                ModelRecord(
                    model, lineage, mark, ended, retain, tuple(bounds.get(model, ())), origin, most
                )
                for model, lineage, mark, ended, retain, origin, most in models.fetchall()
            ),
            pins=tuple(Pinned(*row) for row in pins.fetchall()),
            digested=tuple(Digested(*row) for row in digested.fetchall()),
            described=tuple(
                Described(model, number, ident, *layouts[layout])
                for model, number, ident, layout in described
            ),
        )

    def _layout(self, ident: str) -> tuple[bytes, tuple[bytes, ...]]:
        """A description, and all that the description names. Versions of one layout share them."""
        rows = self._db.execute(
            "SELECT blob FROM layouts WHERE id = ? ORDER BY place", (ident,)
        ).fetchall()
        blobs = [blob for (blob,) in rows if type(blob) is bytes]
        try:
            named = Published.decode(blobs[0] if blobs else b"").part_ids
        except ProtocolError as error:
            raise self.damaged(f"layout {brief(ident)}: {error}") from error
        if id_of(blobs[0]) != ident or tuple(map(id_of, blobs[1:])) != named:
            raise self.damaged(f"layout {brief(ident)}: its parts are not those that it names")
        return blobs[0], tuple(blobs[1:])

    def write(self, entry: Entry) -> None:
        """Change the rows, in a transaction of the caller's."""
        match entry:
            case Publication():
                self._publish(entry)
                self._change(entry.model, "mark = ?", entry.number)
                self.write(entry.decision())
                self._prune(entry.model)
            case Decision():
                row = (
                    entry.model,
                    *_key(entry.key),
                    entry.number,
                    entry.content_id,
                    entry.nbytes,
                    entry.world_size,
                )
                self._db.execute("INSERT OR REPLACE INTO decisions VALUES (?,?,?,?,?,?,?,?)", row)
            case Rollback():
                changed = "lineage = ?, mark = ?, rollback = substr(? || rollback, 1, ?)"
                self._change(
                    entry.model,
                    changed,
                    entry.lineage,
                    entry.to,
                    f"{entry.ident}\n",
                    IDENTS_CHARS_MAX,
                )
                for table in _OF_VERSIONS:
                    self._db.execute(
                        f"DELETE FROM {table} WHERE model = ? AND number > ?",
                        (entry.model, entry.to),
                    )
                self._stand_in(entry)
                bounds = bounded(self._bounds(entry.model), entry.lineage, entry.to)
                self._set_bounds(entry.model, bounds)
            case Restoration():
                self._restore(entry)
            case Retention():
                self._change(entry.model, "retain = ?", entry.retain)
            case Pinned():
                pin = (entry.pin, entry.incarnation, entry.model, entry.number, entry.content_id)
                self._db.execute("INSERT OR REPLACE INTO pins VALUES (?,?,?,?,?)", pin)
            case Unpinned():
                self._db.execute("DELETE FROM pins WHERE pin = ?", (entry.pin,))
            case Digested():
                roots = (entry.model, entry.number, entry.content_id, entry.roots)
                self._db.execute("INSERT OR REPLACE INTO digested VALUES (?,?,?,?)", roots)
            case Described():
                layout = id_of(entry.description)
                if (
                    self._db.execute("SELECT 1 FROM layouts WHERE id = ?", (layout,)).fetchone()
                    is None
                ):
                    blobs = enumerate((entry.description, *entry.parts))
                    self._db.executemany(
                        "INSERT INTO layouts VALUES (?,?,?)", [(layout, *blob) for blob in blobs]
                    )
                described = (entry.model, entry.number, entry.content_id, layout)
                self._db.execute("INSERT OR REPLACE INTO described VALUES (?,?,?,?)", described)
            case Forgotten():
                self._db.execute(
                    'DELETE FROM decisions WHERE model = ? AND "group" = ?',
                    (entry.model, entry.group),
                )
            case _:
                assert_never(entry)

    def _publish(self, entry: Publication) -> None:
        content = (entry.model, entry.lineage, entry.number, entry.content_id)
        size = (entry.nbytes, entry.world_size, entry.layout_id)
        values = (*content, *size, *_key(entry.key), entry.manifest_ids)
        self._db.execute("INSERT INTO publications VALUES (?,?,?,?,?,?,?,?,?,?,?)", values)

    def _restore(self, entry: Restoration) -> None:
        model, is_new = entry.model, "SELECT 1 FROM models WHERE model = ? AND mark IS NOT NULL"
        if self._db.execute(is_new, (model,)).fetchone() is None:
            self._change(model, "lineage = ?, mark = ?", entry.lineage, entry.mark)
            self._set_bounds(model, bounded((), entry.lineage, entry.mark))
            origin = (model, entry.origin, entry.mark)
            self._db.execute("INSERT INTO origins VALUES (?,?,?)", origin)
        for each, roots in zip(entry.publications, entry.roots, strict=True):
            place = (model, each.number)
            self._db.execute(
                f"DELETE FROM publications WHERE model = ? AND number = ? "
                f"AND content_id GLOB '{STAND_IN}*'",
                place,
            )
            known = "SELECT 1 FROM publications WHERE model = ? AND number = ?"
            if self._db.execute(known, place).fetchone() is None:
                self._publish(each)
                if roots:
                    self.write(Digested(*place, each.content_id, roots))
        self._prune(model)

    def _bounds(self, model: str) -> tuple[tuple[int, int], ...]:
        found = "SELECT lineage, number FROM bounds WHERE model = ? ORDER BY lineage"
        return tuple(self._db.execute(found, (model,)).fetchall())

    def _set_bounds(self, model: str, bounds: tuple[tuple[int, int], ...]) -> None:
        self._db.execute("DELETE FROM bounds WHERE model = ?", (model,))
        rows = [(model, *each) for each in bounds]
        self._db.executemany("INSERT INTO bounds VALUES (?,?,?)", rows)

    def _prune(self, model: str) -> None:
        """Delete its oldest publications, where there are too many: a coordinator that runs for
        years writes millions.
        """
        newest = (
            "SELECT number FROM publications WHERE model = ?1 ORDER BY lineage DESC, number "
            "DESC LIMIT 1 OFFSET"
        )
        kept = "(SELECT max(?2, retain) FROM models WHERE model = ?1)"
        if (
            self._db.execute(
                f"{newest} {kept} + ?3", (model, PUBLICATIONS_KEPT_MAX, PRUNED_AT)
            ).fetchone()
            is None
        ):
            return
        (up_to,) = self._db.execute(f"{newest} {kept}", (model, PUBLICATIONS_KEPT_MAX)).fetchone()
        old = "model = ? AND number <= ? AND content_id NOT IN (SELECT content_id FROM pins)"
        for table in _OF_VERSIONS:
            self._db.execute(f"DELETE FROM {table} WHERE {old}", (model, up_to))
        self._db.execute("DELETE FROM layouts WHERE id NOT IN (SELECT layout FROM described)")
        # restored versions may be older than those that were deleted before
        self._db.execute(
            "INSERT INTO pruned VALUES (?, ?) ON CONFLICT DO UPDATE SET up_to = max(up_to, "
            "excluded.up_to)",
            (model, up_to),
        )

    def _stand_in(self, rollback: Rollback) -> None:
        """If a rollback's target was pruned, a publication without a holder becomes the newest: an
        older version must not.
        """
        known = "SELECT 1 FROM publications WHERE model = ?1 AND number = ?2"
        content_id = f"{STAND_IN}{secrets.token_hex(12)}"
        self._db.execute(
            "INSERT INTO publications SELECT model, ?3, ?2, ?4, 0, "
            "1, '', '', 0, 0, x'' FROM pruned "
            f"WHERE model = ?1 AND ?2 <= up_to AND NOT EXISTS ({known})",
            (rollback.model, rollback.to, rollback.lineage - 1, content_id),
        )

    def _change(self, model: str, change: str, *values: int | str) -> None:
        self._db.execute("INSERT OR IGNORE INTO models (model) VALUES (?)", (model,))
        self._db.execute(f"UPDATE models SET {change} WHERE model = ?", (*values, model))


def _key(key: OpKey) -> tuple[str, int, int]:
    return key.group, key.epoch, key.sequence
