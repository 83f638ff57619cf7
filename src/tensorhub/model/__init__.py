"""What a version is made of: manifests, dtypes, digests, strips of memory, and the counts that
plans and summaries give.
"""
