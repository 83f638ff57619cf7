"""The only loops and threads: what drives the pure machines over real sockets and clocks."""
