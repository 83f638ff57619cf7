"""Compaction of tiny tensors: many small ones become one packed region.

Responsible for the packed layout (`layout`, pure) and for packing and unpacking on the CPU and on a
GPU (`packing`).

Not responsible for when it happens, nor for digests or chunks: a packed region is a region like any
other.
"""
