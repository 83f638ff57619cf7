"""Fuzzing: every function that takes bytes or text from outside, and the conversations that they
are a part of.

A target is a function of some bytes that raises if a promise is broken. Hypothesis runs each in
`test_fuzz.py`, with the inputs of `corpus/`; `make fuzz` runs the same ones under a coverage-guided
fuzzer (see docs/simulation.md).

    what comes from outside                                                                     target
    a connection's first bytes, frames           protocol.frames check_preface, FrameDecoder    frames
    frames that passed through others' hands     protocol.frames FrameMac, FrameDecoder         relays
    a frame's body, for each kind of peer        protocol.codec.decode (forms)                  bodies, messages
    a handshake, of either side                  protocol.handshake                             handshakes
    another process' error                       messages.ErrorInfo.error                       errors
    a manifest                                   manifest.Manifest.decode, file_target.plan     manifests
    a safetensors file                           memory.safetensors read_from   , parse_header  headers
    a manifest's metadata, a model's index       memory.checkpoint                              checkpoints
    a delta of a chunk                           deltas.apply                                   deltas
    addresses, selectors, names, token files     types, protocol.secret                         texts
    state.sqlite3                                runtime.store.SqliteStore                      stores
    what workers say                             coordinator.Coordinator.step                   liars
    the same, beside honest ones                 coordinator.Coordinator.step                   bystanders
    what a coordinator says                      worker.Member.receive                          ranks
    what an owner answers                        transport.tcp, runtime.data, scheduler.Pull    readers
    where an owner says that its memory is       transport.one_sided, transport.cma             locators
    what a reader asks                           transport.read_server, worker.owner            owners

The two drivers (`protocol.stream`, `protocol.blocking`) add sockets to the first four and are
fuzzed with the data plane. JSON between `tensorhub demo`, `simulate` and the processes that they
start themselves is not from outside.
"""
