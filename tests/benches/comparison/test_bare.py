"""The baseline copies every byte, and notices those that it does not."""

import random
import threading

import pytest

from benches.comparison import bare


def memory(sizes: list[int], seed: int | None = None) -> list[memoryview]:
    chance = random.Random(seed)
    return [memoryview(bytearray(size if seed is None else chance.randbytes(size))) for size in sizes]


@pytest.fixture(params=[False, True], ids=["plain", "digests"])
def digests(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_every_receiver_gets_every_byte(digests: bool) -> None:
    sizes = [1, 5 * 2**20 + 3, 4096, *[1024] * 600, 2**20]
    given = memory(sizes, seed=1)
    taken = [memory(sizes) for _ in range(3)]
    with bare.listen() as listener:
        port = listener.getsockname()[1]
        threads = [threading.Thread(target=bare.receive_all, args=(port, views, digests)) for views in taken]
        for thread in threads:
            thread.start()
        bare.send_all(listener, 3, given, digests)
        for thread in threads:
            thread.join()
    assert all(views == given for views in taken)


def test_a_receiver_that_leaves_is_an_error(digests: bool) -> None:
    with bare.listen() as listener:

        def leave() -> None:
            with pytest.raises(ConnectionError):  # it expects more than is sent
                bare.receive_all(listener.getsockname()[1], memory([2**20, 1]), digests)

        thread = threading.Thread(target=leave)
        thread.start()
        connection, _ = listener.accept()
        connection.close()
        thread.join()


def test_pieces_are_the_memory_itself_in_order() -> None:
    views = memory([bare.PIECE_BYTES * 2 + 7, 3, 0], seed=2)
    cut = bare.pieces(views)
    assert [len(piece) for piece in cut] == [bare.PIECE_BYTES, bare.PIECE_BYTES, 7, 3]
    assert b"".join(cut) == b"".join(views)
