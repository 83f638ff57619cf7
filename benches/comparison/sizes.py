"""How large the tensors of a benchmark are."""


def half_tiny(nbytes: int) -> list[int]:
    """300 tensors, half of them tiny (1 to 8 KiB), the others of two sizes: in all `nbytes`, each a
    multiple of 4.
    """
    tiny = [1024 * (1 + number % 8) for number in range(150)]
    left = (nbytes - sum(tiny)) // 300
    share = left // 4096 * 4096 or left // 4 * 4
    if share <= 0:
        raise ValueError("too few bytes for 300 tensors: give at least 1 MiB")
    big = [share if number % 2 else 3 * share for number in range(150)]
    big[-1] += nbytes - sum(tiny) - sum(big)
    return [size for pair in zip(big, tiny, strict=True) for size in pair]
