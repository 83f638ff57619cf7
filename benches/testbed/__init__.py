"""Workloads of real processes behind links with real limits, on one machine: by TensorHub, and by
what others would pick.
"""
