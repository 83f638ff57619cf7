"""The flow model: the real coordinator over a network in which bytes flow, for what faults do not
decide: time.

    scenario      what a scenario file says; `built_in` names those that come along
    timetable     drawn by its seed: generations, spot hosts, kills
    topology      where each worker is, and which links a flow crosses
    transfers     memories that fill, and flows between them (in shares of `tensorhub.flows`)
    coordinated   the real coordinator, and thin workers that speak its messages (`thin`)
    workload      a trainer and rollouts, whatever the system; `baselines` are the other systems
    report        what came of it

A chunk is not followed on its way. A flow has a rate, and a reader of memory that still fills is
never ahead of it. Not responsible for guarantees: `tensorhub.testing.sim` searches for broken ones.
"""
