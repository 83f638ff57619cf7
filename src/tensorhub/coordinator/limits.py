"""How much one worker, and all workers together, can make a coordinator keep (G10).

The limits are far above the needs of any cluster: they bound the cost of a defect, or of an
intruder with the secret. A worker that reaches a limit is refused with an error that names the
limit; docs/limits.md lists the limits that a user can meet. The number of workers is an option:
`Options.sessions_max`.
"""

from __future__ import annotations

REGISTRATIONS_OF_WORKER_MAX = 8192
REGISTRATIONS_MAX = 2**18
# of its registrations together, as counted; one of 10,000 tensors has about 1.5 MB
MANIFEST_BYTES_OF_WORKER_MAX = 2**30
# of all registrations and versions, with the parts of layouts; equal ones count once
MANIFEST_BYTES_MAX = 4 * 2**30
# registrations that wait for a manifest which another rank was asked for
WAIT_FOR_MANIFESTS_MAX = 2**14
# of publishers' lists of digests; 9 for each chunk, 2.4 MB for a TB in chunks of 4 MiB
DIGEST_BYTES_MAX = 2**28
# of published shards, that readers of other layouts need; 64 ranks that read of 64 have 4096
SELECTIONS_MAX = 2**17
# of all read-only workers; each is a fetch, and one step may end all of them
READ_ONLY_REGISTRATIONS_MAX = 1024
READ_ONLY_WATCHES_MAX = 2**18  # of all read-only sessions together; each counts in WATCHED_MAX, too
# ranks whose calls waited and may go on, those with many failed sources counted several times
WOKEN_PER_STEP = 64
NOTICES_PER_STEP = 512  # holders of a model that are told which versions are retained from now on
TIMERS_PER_STEP = 64  # that one step heeds when very many are due at once
# entities that these timers may have changed; after that, the other timers wait
NOTED_PER_STEP = 256
# links of chains of readers that these timers have followed; after that, the other timers wait
FOLLOWED_PER_STEP = 2**14
# that a registration or a call has named; a name that is only watched is no model
MODELS_MAX = 2**16
NEWEST_MODELS_MAX = 64  # of which it is remembered that they have published last
OVERVIEW_MODELS_MAX = 256  # that an overview tells of; it counts the others
OVERVIEW_ROWS_MAX = 4096  # of all models of an overview; then it has counts only
WATCHED_MAX = 2**19  # of all sessions together, each name once for each
IDLE_S = 60.0  # of a read-only session or an observer, without a registration, a watch or a call
RETAINED_MAX = 1024  # versions of one model
# of one model that is restored from an archive, with the versions that are known already
RESTORED_VERSIONS_MAX = 4096
RESTORED_VERSIONS_SHARDS_MAX = 2**16  # of those versions together
PINS_OF_WORKER_MAX = 1024
PENDING_WRITES_OF_SESSION_MAX = 4096  # retain, pin and unpin: calls that are not answered yet
LEAVING_OF_RANK_MAX = 16  # generations that a rank took back without saying that its fence stands
# groups whose newest commit is remembered; those of groups that are there stay in any case
DECISIONS_MAX = 4096
# readers of one holding of which it is remembered when they last got a bad chunk
INQUIRIES_MAX = 64
# models, versions, replicas, shards, leases and workers of one answer; the last model may have more
DESCRIBED_MAX = 256
# workers, shards and leases of one model in one answer; one worker is never cut
DESCRIBED_ROWS_MAX = 1024
SUMMARIZED_MAX = 4096  # groups and shards that are counted for one answer; one model is never cut
# of one model, the newest, are counted; an answer of counts only has no older versions
SUMMARIZED_VERSIONS_MAX = 32
SUMMARIZED_LAYOUTS_MAX = 8  # of one version
SUMMARIZED_SILENT_MAX = 16  # suspect workers of one model that are named
# sources of one reader of which it is remembered how they failed last; three are told
FAULTS_MAX = 4
FAULT_CHARS_MAX = 500  # of that
DISMISSED_CHARS_MAX = 1000  # of the reason that a dismissed worker hears
ERROR_CHARS_MAX = 2000  # of an error that one rank passes on to its group
