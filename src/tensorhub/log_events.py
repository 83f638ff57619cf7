"""Every event that this library logs: its level, its fields and what it means.

A test compares this table with the calls in the code; docs/operating.md gets its tables from it.
Nothing here is used at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Told:
    """One event. `level`: "debug", "info", "warning" or "error"; several: it depends. `fields`: it
    may have these, and besides "times", where it repeats, and "exception", where one caused it.
    `told_by`: in which table of docs/operating.md it is, the coordinator's or the worker's.
    """

    level: str
    fields: str
    meaning: str
    remedy: str = ""
    told_by: str = ""


E = Told
EVENTS: Final[Mapping[str, Told]] = {
    # the coordinator, as docs/operating.md lists it
    "coordinator_outlived": E(
        "error",
        "cluster reason",
        "A worker remembers more than the state does, which was restored from an older copy. It "
        "goes on as the state of a new cluster: each handle raises `LeaseLost` once.",
    ),
    "coordinator_behind": E(
        "warning",
        "busy coordinator reason seconds sessions",
        "The coordinator read nothing for so many seconds. Calls took longer; no worker was lost.",
        "If it *has more to do than it comes to*: a faster core, or larger groups. If it *was "
        "stopped*: give it a core of its own.",
        "coordinator",
    ),
    "worker_lost": E(
        "warning",
        "reason workers",
        "Workers were silent for a lease. Their readers moved to other sources.",
        "If that repeats, look for pauses of the process, or at the network.",
        "coordinator",
    ),
    "session_refused": E(
        "info",
        "reason session",
        "The coordinator has no room for a connection. The worker tries again.",
        "Raise the limit that the event names.",
        "coordinator",
    ),
    "peer_refused": E(
        "warning",
        "kind peer reason",
        "A handshake failed, for the reason given: another token, another release, another "
        "program.",
        told_by="coordinator",
    ),
    "worker_out_of_reach": E(
        "warning",
        "advice reason source",
        "A worker advertises 127.0.0.1, and there are workers on other hosts.",
        "`Options.listen_host`, `Options.advertise`",
        "coordinator",
    ),
    "state_not_written": E(
        "error",
        "reason",
        "The state directory accepts no writes. Calls that need the store fail.",
        "Free space on its disk.",
        "coordinator",
    ),
    "coordinator_stands_by": E(
        "info",
        "address leader",
        "Another coordinator of the cluster leads. This one takes over when that ends.",
    ),
    "leadership_lost": E(
        "error",
        "epoch reason",
        "The coordinator ended its sessions and stands by: its lease ended, another one leads, or "
        "it is unknown whether its last write is durable.",
    ),
    "campaign_failed": E(
        "error",
        "reason",
        "The engine that elects, or the state, cannot be used. The coordinator tries each second; "
        "it logs a reason once.",
    ),
    # a worker, as docs/operating.md lists it
    "coordinator_lost": E(
        "warning",
        "coordinator reason",
        "The session ended, or no connection succeeds. The worker retries at least four times "
        "a second. Reads continue.",
        "Start the coordinator again.",
        "worker",
    ),
    "coordinator_unreachable": E(
        "warning",
        "coordinator reason",
        "The session ended, or no connection succeeds. The worker retries at least four times "
        "a second. Reads continue.",
        "Start the coordinator again.",
        "worker",
    ),
    "worker_dismissed": E(
        "warning",
        "reason",
        "The coordinator declared this worker lost while it was silent. Calls of its group end "
        "with `GroupAborted`.",
        "Repeat retryable calls.",
        "worker",
    ),
    "coordinator_awaited": E(
        "warning",
        "coordinator for_s reason",
        "`connect` waits for a coordinator that does not run yet, up to "
        "`Options.coordinator_wait_s`.",
        "Start it, or correct the address.",
        "worker",
    ),
    "call_waits": E(
        "warning",
        "call hint model up_to_s",
        "A call waits for a version, and nothing is published under that name.",
        "Compare the name with the trainer's.",
        "worker",
    ),
    "fill_failed": E(
        "warning",
        "reason registration",
        "An update or fetch found no source that serves it to the end. The call raises the same "
        "error.",
        "The reason names the source, or what this worker lacks.",
        "worker",
    ),
    "held_memory_changed": E(
        "warning",
        "reason registration",
        "Memory that readers may read was written. The version is taken back here, and the next "
        "call raises `MutabilityViolation`.",
        "Write only inside `mutate`, or after `unpublish`.",
        "worker",
    ),
    "published_memory_written": E(
        "warning",
        "reason registration",
        "Memory that readers may read was written. The version is taken back here, and the next "
        "call raises `MutabilityViolation`.",
        "Write only inside `mutate`, or after `unpublish`.",
        "worker",
    ),
    "copy_refused": E(
        "warning",
        "reason registration",
        "This worker could not take a retained version into its host memory. The coordinator asks "
        "another worker.",
        "Raise `Options.host_memory_bytes`.",
        "worker",
    ),
    "deltas_not_kept": E(
        "warning",
        "reason registration",
        "The host memory has no room for deltas: readers over slow links read whole versions.",
        "Raise `Options.host_memory_bytes`.",
        "worker",
    ),
    "token_file_not_taken": E(
        "warning",
        "instead reason",
        "The token file cannot be used as it is now. Its earlier tokens stay in force.",
        "Correct the file.",
        "worker",
    ),
    "coordinator_lost_its_state": E(
        "error",
        "coordinator",
        "The coordinator came back without its state. Each handle raises `LeaseLost` once.",
        "Publish again; call `retain` again.",
        "worker",
    ),
    # sessions and connections
    "accept_failed": E("warning", "advice reason", "No connection could be accepted."),
    "coordinator_caught_up": E("info", "seconds sessions", "The coordinator is not behind now."),
    "coordinator_embedded": E("info", "address", "This process runs the coordinator, too."),
    "coordinator_found": E("warning", "coordinator", "The lack of a coordinator is over."),
    "coordinator_listens": E("info", "address cluster epoch sessions_max", "It takes workers."),
    "coordinator_too_slow": E("warning", "messages", "Too many messages wait; it connects anew."),
    "frame_not_authentic": E("warning", "address reader reason source", "Bytes were changed."),
    "http_client_refused": E("warning", "advice reason", "A token or TLS was wrong."),
    "http_ended": E("error", "address again_s reason", "The HTTP endpoint ended; it starts anew."),
    "http_listens": E("info", "address", "The HTTP endpoint takes requests."),
    "http_request_failed": E("error", "reason", "A defect ended a request, or a connection."),
    "no_descriptors_for_more_sessions": E("warning", "advice sessions", "`ulimit -n` is too low."),
    "pending_connection_closed": E("warning", "reason", "A peer did not authenticate."),
    "session_closed": E("info", "reason session", "A connection ended."),
    "session_too_slow": E("warning", "reason session", "A peer takes no messages; it is cut off."),
    "lease_unanswered": E(
        "warning",
        "reason",
        "Kubernetes' API server did not answer a coordinator that stands by. It asks again.",
    ),
    "state_dir_writable_by_group": E("warning", "group hint state_dir", "It can be forged."),
    "certificates_not_taken": E("warning", "instead reason", "The last good ones stay in use."),
    "certificates_read": E("info", "path sha256", "New connections use this certificate."),
    "token_file_read": E("info", "path tokens", "The tokens are in force."),
    "worker_welcomed": E(
        "info", "epoch incarnation known release", "The coordinator took this worker."
    ),
    "coordinator_cannot_restart_here": E("error", "reason state_dir", "It ends with its node."),
    "coordinator_has_ended": E("error", "state_dir", "Start one at its state directory."),
    "message_unknown": E("warning", "reason session", "Of another release: not taken."),
    "state_migrated": E(
        "warning", "copy now was", "The state has a newer format now. The copy is as it was before."
    ),
    "out_of_reach": E("warning", "advice reason", "Workers on other hosts cannot read this one."),
    "older_protocol": E("info", "peer version", "The peer is the release before this one."),
    # reads
    "connection_lost": E("info", "left reason", "One of several to a source; the rest go on."),
    "connection_not_added": E("debug", "reason", "One more to a source was not possible."),
    "lane_ended": E("info", "reader reason", "A reader's connection ended."),
    "lane_failed": E("error", "reader", "A defect ended a reader's connection."),
    "rdma_staged": E("info", "reason", "Bytes are copied through memory that is pinned."),
    "rdma_unpaired": E("warning", "reason", "A reader's queue pair could not be made."),
    "read_not_served": E("warning", "reader reason", "A reader was refused, or went away."),
    "reader_refused": E("warning", "reader reason", "A reader's connection was refused."),
    "readers_not_served": E("warning", "reason", "The data listener ended."),
    "source_failed": E("info", "detail lease reason", "A read ended early; others go on."),
    "transport_chosen": E("info", "source transport why", "Reads of that source go this way."),
    "transport_not_encrypted": E(
        "warning", "advice transport", "There is TLS, which does not cover bytes that go this way."
    ),
    "transport_unavailable": E("info warning", "reason transport", "Nothing is read this way."),
    "transport_unusable": E(
        "debug warning", "reason source transport", "That source is read another way."
    ),
    "transport_left": E("warning", "for_s reason source transport", "It failed; another is used."),
    # memory
    "copy_evicted": E("info", "reason registration", "A host copy made room for another."),
    "copy_not_ended": E("info warning", "reason registration", "A host copy must stay for now."),
    "copy_not_released": E("info warning", "reason registration", "A host copy must stay for now."),
    "copy_failed": E("warning", "reason registration", "A copy within this worker ended early."),
    "deltas_on_host": E("warning", "device reason", "The GPU makes no deltas; the CPU does."),
    "digests_not_made_early": E("warning", "reason registration", "Readers wait for digests."),
    "fence_failed": E("warning", "reason registration", "Its own accesses have not ended in time."),
    "fence_repeated": E("debug", "reason registration", "The fence goes on in another try."),
    "memory_not_mapped": E("error", "registration", "Memory is not readable by other processes."),
    "memory_not_pinned": E("warning", "nbytes reason", "Copies to the GPU are slower."),
    "not_as_published": E("warning", "chunks first registration", "Chunks are read once more."),
    "pin_lost": E("warning", "model reason version", "A pinned version is not kept any more."),
    "prefetch_failed": E("warning", "model reason version", "The next update reads all of it."),
    "progress_failed": E("warning", "reason registration", "A listener to progress has raised."),
    "ranks_not_checked": E("error", "registration", "A defect: coverage was not compared."),
    "reading_not_planned": E("error", "registration", "A defect: no plan for that layout."),
    "reading_planned": E("info", "registration seconds *", "The plan for another layout is made."),
    # archives
    "archive_fault": E("warning", "model reason", "The bucket has an object that is none."),
    "archive_memory_short": E("warning", "hint host_memory_bytes needed", "It cannot serve all."),
    "archive_not_read": E("warning error", "reason registration", "A read of the bucket failed."),
    "archive_silent": E(
        "warning",
        "endpoint gives_up_after_s since_s trying url",
        "The bucket has not answered for so long.",
    ),
    "archive_waits": E("warning", "model reason", "The bucket does not answer; it is asked again."),
    "archived_copy_lost": E("info warning", "reason registration version", "It is announced anew."),
    "archiver_ended": E("error", "model reason", "No version is archived any more."),
    "rolled_back_versions_removed": E("info", "versions", "A rollback has ended them."),
    "version_archived": E("info", "base version", "It is in the bucket."),
    "version_damaged": E("warning", "reason version", "Its objects are not what was written."),
    "version_not_announced": E("warning", "reason version", "It is in the bucket, and not served."),
    "version_not_archived": E("warning", "reason version", "It went away before it was read."),
    "versions_not_announced": E("warning", "up_to", "There are too many to serve."),
    # adapters
    "engine_excluded": E("warning", "engine failures", "Updates do not wait for it any more."),
    "engine_history_lost": E(
        "warning", "engine", "The coordinator has lost its state: the engine serves nothing now."
    ),
    "engine_not_flipped": E("error", "reason", "The engine could not put a version in place."),
    "engine_not_listed": E("warning", "engine", "It is gone, or goes on with old weights."),
    "engine_not_updated": E("warning", "engine reason", "The next update tries it again."),
    "engine_orders_ended": E("warning", "reason", "The engine's worker of rank 0 has ended."),
    "engine_returned": E("info", "engine", "Updates wait for it again."),
    "fleet_settled": E("info", "attempt committed seconds", "All engines serve one version."),
    "lease_not_renewed": E("warning", "reason", "Without it the engine soon serves nothing."),
    "no_readers": E("warning", "model version", "Nothing reads what a trainer publishes."),
    "mount_failed_read": E("warning", "path reason", "A program that reads a mount got an error."),
    "object_not_closed_well": E("warning", "object reason version", "An object of Ray's is freed."),
    "receive_buffers": E("info", "device model nbytes tensors", "Memory for a stream was made."),
    "send_buffers": E("info", "device model nbytes tensors", "Memory for a stream was made."),
    "release_untested": E(
        "warning",
        "differs framework installed tested",
        "The adapter was not tested with this release; a probe has passed. differs: what the probe "
        "found, where TENSORHUB_ACCEPT_UNTESTED=1 insists.",
    ),
    "sglang_fleet_not_joined": E(
        "warning", "model unset", "The engine has the model's name, and joins no fleet."
    ),
    "sglang_plan": E("info", "computed in_place loaded model unread", "How tensors are filled."),
    "sglang_update_failed": E("error", "error memory", "The trainer raises the same."),
    "vllm_first_load_unknown": E(
        "warning", "reason", "Each element of each parameter has to be published, therefore."
    ),
    "vllm_started_unpublished": E(
        "warning",
        "model",
        "No version is published under that name: the engine serves the weights of its own load "
        "until one is.",
    ),
    "vllm_started": E("info", "model version", "The engine started with that version."),
    "vllm_plan": E(
        "info", "computed in_place loaded model processed unread", "How tensors are filled."
    ),
    "weights_received": E("info", "model nbytes seconds version", "The engine has that version."),
    "weights_sent": E("info", "model nbytes seconds version", "The engines have that version."),
}
